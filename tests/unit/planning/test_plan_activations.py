"""Activations that are traced from a config, against what torch's allocator hands out while the real model trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.planning import build_meta, build_sized, build_trained, measure_peak
from helpers.tiny import make_batch
from peft import PeftModel
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM
from trl.trainer.utils import add_fused_lm_head

from lorashard.errors import ConfigError
from lorashard.model.layer_major import split_layers
from lorashard.model.stacks import find_decoder_stack
from lorashard.planning.trace import Microbatch, trace
from lorashard.planning.tracker import Tracker

CPU_BUDGET_S = 100  # each case is planned, and measured with torch's profiler
CPU = Microbatch(num_rows=2, row_tokens=96, device_type="cpu")


def compute_loss(model: PeftModel, microbatch: Microbatch) -> torch.Tensor:
    """Return the loss as TRL's trainer computes it, or the model's own."""
    batch = make_batch(rows=microbatch.num_rows, tokens=microbatch.row_tokens)
    if microbatch.has_mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -1] = 0
    dtype = next(parameter.dtype for parameter in model.parameters() if not parameter.requires_grad)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        if microbatch.loss == "model":
            return model(**batch, use_cache=False).loss
        return -model(**batch, fused_lm_head=True).log_probs.sum()


def measure_training(model: PeftModel, microbatch: Microbatch) -> int:
    """Return the most bytes that training takes at once, over those that rest between microbatches."""
    if microbatch.loss == "fused":
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))
    compute_loss(model, microbatch).backward()  # gradients rest
    return measure_peak(lambda: compute_loss(model, microbatch).backward())


def test_code_without_a_module_is_planned(monkeypatch):
    """Catches a KeyError where a model's code was read from a file and never imported under its name."""
    model = build_meta(build_sized("llama"))
    monkeypatch.setattr(type(model.get_base_model()), "__module__", "nowhere")
    assert trace(model, CPU).peak_bytes > 0


def build_mistral(dtype: torch.dtype):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
    )
    return MistralForCausalLM(config).to(dtype)


@pytest.mark.parametrize("checkpointing", ({}, None), ids=("checkpointing", "saving"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("family", "rows", "tokens", "dropout", "has_mask"),
    (
        ("llama", 2, 96, 0.0, False),
        ("llama", 3, 64, 0.1, True),
        ("qwen3", 1, 192, 0.1, False),
        ("mistral", 4, 48, 0.0, True),
    ),
)
def test_predicted_activations_are_what_training_allocates(
    family, rows, tokens, dropout, has_mask, dtype, checkpointing
):
    """Catches what a formula forgets: fp32 copies for LoRA, dropout's masks, rotary embeddings, recomputation."""
    microbatch = replace(CPU, num_rows=rows, row_tokens=tokens, checkpointing=checkpointing, has_mask=has_mask)

    def build():
        return build_mistral(dtype) if family == "mistral" else build_sized(family, dtype)

    predicted = trace(build_meta(build(), dropout), microbatch)
    measured_bytes = measure_training(build_trained(build(), microbatch, dropout), microbatch)
    assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("loss", ("fused", "model"))
def test_a_large_vocabulary_is_in_the_peak(dtype, loss):
    """Catches logits that are left out, or counted once where training holds them several times."""
    microbatch = replace(CPU, loss=loss, row_tokens=256)

    def build():
        return build_sized("llama", dtype, vocab_size=4096, num_hidden_layers=2)

    predicted = trace(build_meta(build()), microbatch)
    measured_bytes = measure_training(build_trained(build(), microbatch), microbatch)
    assert predicted.logits_bytes > predicted.layer_bytes
    assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.1)


@pytest.mark.parametrize("checkpointing", ({}, None), ids=("checkpointing", "saving"))
def test_a_few_layers_tell_of_all(checkpointing):
    """Catches an extrapolation that counts a layer too often or too seldom: the error grows with depth."""
    microbatch = replace(CPU, checkpointing=checkpointing)
    deep = build_sized("llama", num_hidden_layers=24)
    predicted = trace(build_meta(deep), microbatch)
    measured_bytes = measure_training(build_trained(deep, microbatch), microbatch)
    assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.05)
    assert len(predicted.forward) == len(predicted.backward) == 24


def test_layers_of_other_kinds_are_told_apart():
    """Catches the first layers taken for all where every second is checkpointed."""
    microbatch = replace(CPU, checkpointing={"every_n_layers": 2})
    base = build_sized("llama", num_hidden_layers=8)
    saved_bytes = {
        name: trace(build_meta(base), replace(CPU, checkpointing=options)).saved_bytes
        for name, options in (("all", {}), ("none", None), ("half", microbatch.checkpointing))
    }
    assert saved_bytes["half"] == pytest.approx((saved_bytes["all"] + saved_bytes["none"]) / 2, rel=0.1)


def test_experts_are_traced():
    """Catches a mixture of experts that cannot be planned, since routing looks at numbers."""
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    base = MixtralForCausalLM(config).to(torch.bfloat16)
    lora = {"target_modules": ["q_proj", "v_proj"]}
    predicted = trace(build_meta(base, **lora), CPU)
    measured_bytes = measure_training(build_trained(base, CPU, **lora), CPU)
    assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.1)


def test_work_is_that_of_the_parameters():
    """Catches operations counted twice, or recomputation left out: every time that is predicted rests on them."""
    base = build_sized("llama")
    layer = sum(parameter.numel() for name, parameter in base.named_parameters() if ".0." in name and "proj" in name)
    tokens = CPU.num_tokens
    for checkpointing, passes in (({}, 2), (None, 1)):
        found = trace(build_meta(base, target_modules=["q_proj"]), replace(CPU, checkpointing=checkpointing))
        assert found.forward[2].flops == pytest.approx(2 * layer * tokens, rel=0.15)
        assert found.backward[2].flops == pytest.approx(passes * found.forward[2].flops, rel=0.3)


def test_rows_that_take_turns_need_less_inside_a_layer():
    """Catches a plan that ignores layer_microbatch_size, or forgets that the batch itself stays."""
    base = build_sized("llama", dtype=torch.bfloat16)
    microbatch = replace(CPU, num_rows=8)
    whole, parts = (trace(build_meta(base), replace(microbatch, layer_rows=rows)) for rows in (None, 2))
    assert parts.saved_bytes == pytest.approx(whole.saved_bytes, rel=0.01)
    assert parts.layer_bytes < whole.layer_bytes / 2
    model = build_trained(base, microbatch)
    split_layers(find_decoder_stack(model)[1], 2)
    assert parts.peak_bytes == pytest.approx(measure_training(model, microbatch), rel=0.1)
    assert parts.forward[0].flops == pytest.approx(whole.forward[0].flops, rel=0.05)


def test_offloaded_activations_leave_the_device():
    """Catches boundary activations counted where transformers sends them to the host."""
    base = build_sized("llama", num_hidden_layers=12)
    kept = trace(build_meta(base), CPU).saved_bytes
    offloaded = trace(build_meta(base), replace(CPU, checkpointing={"offload": True})).saved_bytes
    assert offloaded < kept / 4


def test_cuda_keeps_a_byte_where_the_cpu_keeps_a_number():
    """Catches dropout's masks planned for a GPU as the CPU makes them."""
    base = build_sized("llama")
    saved = {
        device: trace(build_meta(base, 0.1), replace(CPU, device_type=device, checkpointing=None)).saved_bytes
        for device in ("cpu", "cuda")
    }
    assert saved["cuda"] < saved["cpu"] * 0.95


def test_code_that_looks_at_numbers_is_a_sentence(monkeypatch):
    """Catches torch's own error, which says nothing of planning, and a model silently planned without activations."""
    base = build_sized("llama")
    model = build_meta(base)
    layer = model.get_base_model().model.layers[0]
    original = layer.forward
    monkeypatch.setattr(layer, "forward", lambda hidden, **options: original(hidden * hidden.sum().item(), **options))
    with pytest.raises(ConfigError, match="cannot be planned: its forward does not run without numbers"):
        trace(model, replace(CPU, checkpointing=None))


def test_the_tracker_forgets_what_is_freed():
    """Catches a counter that only grows."""
    with Tracker() as tracker:
        first = torch.ones(1000)
        assert tracker.live_bytes == 4000
        del first
        second = torch.ones(10)
        view = second[:5]
    assert (tracker.live_bytes, tracker.take_peak(), len(view)) == (40, 4000, 5)
    assert tracker.take_peak() == 40
