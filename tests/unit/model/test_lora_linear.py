"""LoRA layers that spare a cast and move the scale: PEFT's bits, and fewer bytes kept for backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.tiny import add_lora, build_base, disturb, make_batch, set_checkpointing
from peft import PeftModel
from peft.tuners import lora

from lorashard.model.lora_linear import spare_lora_steps

BF16, FP16 = torch.bfloat16, torch.float16
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"checkpointing": "non-reentrant"},
    "recomputed reentrantly": {"checkpointing": "reentrant"},
    "dropout": {"dropout": 0.1},
    "rslora": {"use_rslora": True, "lora_alpha": 8, "r": 2},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True, "target_modules": ["q_proj", "o_proj"]},
    "two adapters": {"has_second": True},
    "disabled": {"is_disabled": True},
    "float16": {"dtype": FP16, "autocast": FP16},
    "float32 base": {"dtype": torch.float32},
    "float32": {"dtype": torch.float32, "autocast": None},
    "bfloat16 adapter": {"autocast": None},
}


def build(
    dtype: torch.dtype = BF16,
    checkpointing: str = "off",
    has_second: bool = False,
    autocast: Any = BF16,
    **options: Any,
) -> PeftModel:
    sizes = {"attention_bias": True} if options.get("lora_bias") else {}
    model = add_lora(build_base(dtype=dtype, num_hidden_layers=2, **sizes), **options)
    if has_second:
        model.add_adapter("second", model.peft_config["default"])
        model.base_model.set_adapter(["default", "second"])
    if autocast is None:
        model.to(dtype)
    set_checkpointing(model, checkpointing)
    disturb(model)
    return model.train()


def run(model: PeftModel, autocast: torch.dtype | None = BF16, is_disabled: bool = False) -> tuple[Any, int]:
    """Return the logits and all gradients of a step, and how many bytes autograd kept for it."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(4)
    embeds = model.get_input_embeddings()(make_batch()["input_ids"]).detach().requires_grad_()
    with (
        torch.autocast("cpu", dtype=autocast or BF16, enabled=autocast is not None),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        if is_disabled:
            with model.disable_adapter():
                logits = model(inputs_embeds=embeds, use_cache=False).logits
        else:
            logits = model(inputs_embeds=embeds, use_cache=False).logits
    logits.float().pow(2).mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "embeds": embeds.grad, **gradients}, sum(kept.values())


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_peft(case):
    """A scale that is no power of two, or a cast that rounds, on the other side of a product changes gradients only
    slightly: no loss curve shows it."""
    options = dict(CASES[case])
    is_disabled = options.pop("is_disabled", False)
    autocast = options.get("autocast", BF16)
    for alpha in (8, 6):  # with r 4, a scale of 2 and of 1.5
        plain = build(**{"lora_alpha": alpha} | options)
        spared = copy.deepcopy(plain)
        spare_lora_steps(spared)
        (expected, _), (found, _) = (run(model, autocast, is_disabled) for model in (plain, spared))
        assert expected.keys() == found.keys()
        assert is_disabled or len(expected) > 2
        for name, value in expected.items():
            assert torch.equal(value.view(torch.uint8), found[name].view(torch.uint8)), name


def test_batches_of_several_adapters_and_merged_ones_are_those_of_peft():
    """PEFT passes `adapter_names` to each layer; one that ignored it would answer with the active adapter."""
    plain = build(has_second=True).eval()
    spared = copy.deepcopy(plain)
    spare_lora_steps(spared)
    batch = {"input_ids": make_batch()["input_ids"]}
    for model in (plain, spared):
        model.base_model.set_adapter("default")
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        names = ["second", "__base__"]
        assert torch.equal(plain(**batch, adapter_names=names).logits, spared(**batch, adapter_names=names).logits)
        for model in (plain, spared):
            model.merge_adapter()
        assert torch.equal(plain(**batch).logits, spared(**batch).logits)


def test_layers_of_one_input_keep_it_once_for_backward():
    """Under autocast PEFT keeps a copy of its input in each layer: no gradient shows that they are back."""
    plain = build()
    spared = copy.deepcopy(plain)
    spare_lora_steps(spared)
    (_, before), (_, after) = run(plain), run(spared)
    tokens, hidden, layers = 2 * 12, 32, 2
    # q, k and v keep one instead of three, gate and up one instead of two, and o what attention keeps anyway.
    assert before - after == layers * 4 * tokens * hidden * BF16.itemsize


def test_modules_stay_lora_layers():
    """Scripts and PEFT look for `lora.Linear`, and files for its keys."""
    model = build()
    before = list(model.state_dict())
    spare_lora_steps(model)
    spare_lora_steps(model)
    found = [module for module in model.modules() if isinstance(module, lora.Linear)]
    assert len(found) == 14 and {type(module).__mro__[1] for module in found} == {lora.Linear}
    assert list(model.state_dict()) == before
    assert not any(isinstance(module, lora.Linear) for module in model.merge_and_unload().modules())
