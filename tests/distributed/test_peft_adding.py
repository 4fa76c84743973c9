"""Several adapters on one sharded base: added, loaded, switched, mixed, weighed, switched off and deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from support import run_ranks
from tiny import add_lora, build_base, find_differences, make_batch

import lorashard
from lorashard.errors import ConfigError

Results = dict[str, torch.Tensor]
WORLD_SIZE = 2


def lora(**options) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options)


def disturb(model: PeftModel, name: str) -> None:
    """Make every tensor of an adapter count: lora_B is zero when it is made."""
    generator = torch.Generator().manual_seed(5)
    for key, parameter in model.named_parameters():
        if f".{name}." in f"{key}.":
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def add(model: PeftModel, name: str, config) -> None:
    torch.manual_seed(9)
    model.add_adapter(name, config)
    disturb(model, name)


def step(model: PeftModel, name: str) -> Results:
    model.set_adapter(name)
    loss = model(**make_batch()).loss
    loss.backward()
    # PEFT goes on training the whole modules of an adapter that is not active, which get no gradient.
    found = {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    assert found and all(name in key for key in found)
    model.zero_grad()
    return {f"{name} {key}": value for key, value in (found | {"loss": loss.detach()}).items()}


def logits(model: PeftModel, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=make_batch()["input_ids"], **options).logits


def switching(model: PeftModel, folder: str) -> Results:
    add(model, "other", lora(r=2, use_rslora=True, layers_to_transform=[3, 4]))
    return step(model, "default") | step(model, "other") | step(model, "default")


def other_modules(model: PeftModel, folder: str) -> Results:
    """What the first adapter does not touch: its names change, and DDP must go on ignoring the base's."""
    add(model, "other", lora(target_modules=["k_proj", "lm_head", "embed_tokens"]))
    if hasattr(model, "_lorashard_engine"):
        names = {n for n, p in model.named_parameters() if "default" not in n and "other" not in n}
        assert names <= set(model._ddp_params_and_buffers_to_ignore)
    return step(model, "other") | step(model, "default")


def reading_the_base(model: PeftModel, folder: str) -> Results:
    add(model, "dora", lora(use_dora=True))
    add(model, "saved", lora(modules_to_save=["lm_head", "input_layernorm"]))
    return step(model, "dora") | step(model, "saved") | {"default": logits(model)}


def switched_off(model: PeftModel, folder: str) -> Results:
    add(model, "other", lora())
    with model.disable_adapter():
        off = logits(model)
    return {"off": off, "on": logits(model)} | step(model, "other")


def mixed_batch(model: PeftModel, folder: str) -> Results:
    add(model, "other", lora())
    model.eval()
    mixed = logits(model, adapter_names=["other", "__base__"])
    model.train()
    return {"mixed": mixed}


def weighted(model: PeftModel, folder: str) -> Results:
    add(model, "other", lora())
    for kind in ("linear", "cat", "svd"):
        model.add_weighted_adapter(["default", "other"], [0.7, 0.3], kind, combination_type=kind)
    found = step(model, "linear") | step(model, "cat")
    model.set_adapter("svd")
    return found | {"svd": logits(model)}


def deleted(model: PeftModel, folder: str) -> Results:
    add(model, "other", lora())
    model.set_adapter("other")
    model.delete_adapter("default")
    return step(model, "other")


def loaded(model: PeftModel, folder: str) -> Results:
    for name in ("plain", "dora", "saved"):
        model.load_adapter(str(Path(folder) / name), name, is_trainable=True)
    return step(model, "plain") | step(model, "dora") | step(model, "saved") | step(model, "default")


SCENARIOS: tuple[Callable[[PeftModel, str], Results], ...] = (
    switching,
    other_modules,
    reading_the_base,
    switched_off,
    mixed_batch,
    weighted,
    deleted,
    loaded,
)


def make_model() -> PeftModel:
    return add_lora(build_base("llama"), target_modules=["q_proj", "down_proj"]).train()


def save_adapters(folder: Path) -> None:
    kinds = {"plain": {}, "dora": {"use_dora": True}, "saved": {"modules_to_save": ["lm_head"]}}
    for name, options in kinds.items():
        model = get_peft_model(build_base("llama"), lora(**options))
        disturb(model, "default")
        model.save_pretrained(str(folder / name))


def compare(rank: int, placement: str, folder: str, expected: dict[str, Results]) -> list[str]:
    wrong = []
    for scenario in SCENARIOS:
        found = scenario(lorashard.shard(make_model(), placement), folder)
        wrong += [f"{scenario.__name__}: {name}" for name in find_differences(found, expected[scenario.__name__])]
    return wrong


@pytest.mark.parametrize("placement", ("shard", pytest.param("host", marks=pytest.mark.slow)))
def test_several_adapters_equal_plain_peft(tmp_path, placement):
    """An adapter added later that finds placeholders, zeros or another unit's bytes where the base should be."""
    save_adapters(tmp_path)
    expected = {scenario.__name__: scenario(make_model(), str(tmp_path)) for scenario in SCENARIOS}
    assert run_ranks(compare, WORLD_SIZE, placement, str(tmp_path), expected) == [[]] * WORLD_SIZE


def check_random_numbers(rank: int) -> list[float]:
    model = lorashard.shard(make_model(), "shard")
    torch.manual_seed(rank)
    model.add_adapter("other", lora())
    return [float(p.abs().sum()) for n, p in model.named_parameters() if "other" in n]


def test_an_added_adapter_is_rank_0s():
    """Each rank draws its own random numbers: DDP would then train a different adapter on each, in silence."""
    first, second = run_ranks(check_random_numbers, WORLD_SIZE)
    assert first == second and any(first)


def check_refusals(rank: int) -> list[str]:
    model = lorashard.shard(make_model(), "shard")
    messages = []
    for config in (lora(init_lora_weights="pissa"), lora(init_lora_weights="olora")):
        with pytest.raises(ConfigError) as caught:
            model.add_adapter("other", config)
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="Cannot combine"):  # PEFT's own
        model.add_adapter("other", IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    assert list(model.peft_config) == ["default"]
    return messages


def test_an_added_adapter_that_rewrites_the_base_is_refused():
    """PiSSA on a base that another adapter trains on would change what that one was trained with."""
    for messages in run_ranks(check_refusals, WORLD_SIZE):
        assert all("rewrites the base" in message for message in messages) and len(messages) == 2


def test_the_optimizer_of_an_adapter_that_came_later_is_known():
    """PEFT adds it frozen; the ranks would not be compared at its steps."""
    model = lorashard.shard(add_lora(build_base()))
    model.add_adapter("later", LoraConfig(r=2, target_modules=["up_proj"]))
    model.set_adapter("later")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = lorashard.api.engine_of(model)
    assert engine.is_trained_by(torch.optim.SGD(trained, lr=0.1))
    assert not engine.is_trained_by(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
