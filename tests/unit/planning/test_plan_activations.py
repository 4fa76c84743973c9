"""Activations that are traced from a config, against what torch's allocator gives out while the real model trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.cases import slow
from helpers.planning import build_meta, build_sized, build_trained, measure_peak
from helpers.tiny import make_batch, set_checkpointing
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    Qwen2MoeConfig,
)
from trl.trainer.utils import add_fused_lm_head

from lorashard.errors import ConfigError
from lorashard.model.checkpointing import checkpoint_some
from lorashard.model.micro_batching import split_layers
from lorashard.model.stacks import find_decoder_stack
from lorashard.planning.activations import recompute_some
from lorashard.planning.trace import Microbatch, trace
from lorashard.planning.tracker import Tracker

CPU_BUDGET_S = 60  # each case is planned, and measured with torch's profiler
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


def test_code_without_a_module_is_planned():
    """Catches a KeyError where a model's code was read from a file and never imported under its name."""
    model = build_meta(build_sized("llama", num_hidden_layers=1))
    base = model.get_base_model()
    base.__class__ = type("Remote", (type(base),), {"__module__": "nowhere"})
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
    return AutoModelForCausalLM.from_config(config).to(dtype)


# Family, rows, tokens of each, dropout, whether there is a mask.
PLAIN, MASKED = ("llama", 2, 96, 0.0, False), ("llama", 3, 64, 0.1, True)
LONG, MANY = ("qwen3", 1, 192, 0.1, False), ("mistral", 4, 48, 0.0, True)
CASES = (
    (PLAIN, torch.bfloat16, {}),
    (MASKED, torch.float32, {}),
    (LONG, torch.float32, None),
    (MANY, torch.bfloat16, None),
)
OTHERS = (
    (PLAIN, torch.float32, None),
    (MASKED, torch.bfloat16, None),
    (LONG, torch.bfloat16, {}),
    (MANY, torch.float32, {}),
)


@pytest.mark.parametrize(
    ("case", "dtype", "checkpointing"),
    (*CASES, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)),
    ids=str,
)
def test_predicted_activations_are_what_training_allocates(case, dtype, checkpointing):
    """Catches what a formula forgets: fp32 copies for LoRA, dropout's masks, rotary embeddings, recomputation."""
    family, rows, tokens, dropout, has_mask = case
    microbatch = replace(CPU, num_rows=rows, row_tokens=tokens, checkpointing=checkpointing, has_mask=has_mask)

    def build():
        return build_mistral(dtype) if family == "mistral" else build_sized(family, dtype)

    predicted = trace(build_meta(build(), dropout), microbatch)
    measured_bytes = measure_training(build_trained(build(), microbatch, dropout), microbatch)
    assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.03)


@pytest.mark.parametrize(("loss", "dtype"), (("fused", torch.bfloat16), ("model", torch.float32)), ids=str)
def test_a_large_vocabulary_is_in_the_peak(loss, dtype):
    """Catches logits that are left out, or counted once where training holds them several times."""
    microbatch = replace(CPU, loss=loss, row_tokens=256)

    def build():
        return build_sized("llama", dtype, vocab_size=4096, num_hidden_layers=1)

    predicted = trace(build_meta(build()), microbatch)
    measured_bytes = measure_training(build_trained(build(), microbatch), microbatch)
    assert predicted.logits_bytes > predicted.layer_bytes
    assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.03)


@pytest.mark.slow
def test_a_few_layers_stand_for_all():
    """Catches an extrapolation that counts a layer too often or too seldom, takes the first layers for all where every
    second is checkpointed, or counts boundary activations where transformers sends them to the host."""
    deep = build_sized("llama", num_hidden_layers=10)
    found = {
        name: trace(build_meta(deep), replace(CPU, checkpointing=options))
        for name, options in (
            ("all", {}),
            ("none", None),
            ("half", {"every_n_layers": 2}),
            ("offloaded", {"offload": True}),
        )
    }
    for name, checkpointing in (("all", {}), ("none", None)):
        microbatch = replace(CPU, checkpointing=checkpointing)
        measured_bytes = measure_training(build_trained(build_sized("llama", num_hidden_layers=10), microbatch), CPU)
        assert found[name].peak_bytes == pytest.approx(measured_bytes, rel=0.05)
        assert len(found[name].forward) == len(found[name].backward) == 10
    half_bytes = (found["all"].saved_bytes + found["none"].saved_bytes) / 2
    assert found["half"].saved_bytes == pytest.approx(half_bytes, rel=0.03)
    assert found["offloaded"].saved_bytes < found["all"].saved_bytes / 4


@pytest.mark.parametrize(("family", "dropout"), (("llama", 0.0), pytest.param("gpt2", 0.1, marks=pytest.mark.slow)))
def test_some_layers_recomputed_take_what_is_predicted(family, dropout):
    """Catches a mixture of the two traces that is no mixture of the two memories: `auto` fills memory by it."""
    sizes = dict(n_layer=6, n_embd=128, vocab_size=512, n_head=4, bos_token_id=1, eos_token_id=2)

    def build():
        if family == "gpt2":
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(GPT2Config(**sizes, attn_pdrop=0.0), dtype=torch.bfloat16)
        return build_sized(family, torch.bfloat16, num_hidden_layers=6)

    recomputed, saved = (trace(build_meta(build(), dropout), replace(CPU, checkpointing=kind)) for kind in ({}, None))
    for num_layers in (1, 4):
        model = build_trained(build(), replace(CPU, checkpointing=None), dropout)
        checkpoint_some(model, num_layers)
        set_checkpointing(model, "non-reentrant")
        model.enable_input_require_grads()
        predicted_bytes = recompute_some(recomputed, saved, num_layers).peak_bytes
        assert predicted_bytes == pytest.approx(measure_training(model, CPU), rel=0.1), num_layers


def test_layers_that_differ_keep_what_each_of_them_keeps():
    """Catches an average over the layers: of a dense one and one with experts the cheap one might be recomputed."""
    config = Qwen2MoeConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        decoder_sparse_step=2,
    )

    def build() -> PeftModel:
        return build_meta(AutoModelForCausalLM.from_config(config).to(torch.bfloat16), target_modules=["q_proj"])

    recomputed, saved = (trace(build(), replace(CPU, checkpointing=kind)) for kind in ({}, None))
    assert len(set(saved.layers_saved)) == 2
    model = build()
    checkpoint_some(model, 1)
    expected = trace(model, replace(CPU, checkpointing={})).saved_bytes
    assert recompute_some(recomputed, saved, 1).saved_bytes == pytest.approx(expected, rel=0.05)


def test_experts_are_traced():
    """Catches a mixture of experts that cannot be planned, since routing reads values."""
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    base = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    lora = {"target_modules": ["q_proj", "v_proj"]}
    predicted = trace(build_meta(base, **lora), CPU)
    measured_bytes = measure_training(build_trained(base, CPU, **lora), CPU)
    assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.03)


def test_work_is_that_of_the_parameters():
    """Catches operations counted twice, or recomputation left out: every time that is predicted rests on them."""
    base = build_sized("llama")
    layer = sum(parameter.numel() for name, parameter in base.named_parameters() if ".0." in name and "proj" in name)
    tokens = CPU.num_tokens
    for checkpointing, passes in (({}, 2), (None, 1)):
        found = trace(build_meta(base, target_modules=["q_proj"]), replace(CPU, checkpointing=checkpointing))
        assert found.forward[2].flops == pytest.approx(2 * layer * tokens, rel=0.15)
        assert found.backward[2].flops == pytest.approx(passes * found.forward[2].flops, rel=0.3)


def test_micro_batches_of_a_layer_need_less_inside_it():
    """Catches a plan that ignores layer_microbatch_size, or forgets that the batch itself stays."""
    base = build_sized("llama", num_hidden_layers=2)
    microbatch = replace(CPU, num_rows=4)
    whole, parts = (trace(build_meta(base), replace(microbatch, layer_rows=rows)) for rows in (None, 1))
    assert parts.saved_bytes == pytest.approx(whole.saved_bytes, rel=0.01)
    assert parts.layer_bytes < whole.layer_bytes / 2
    model = build_trained(base, microbatch)
    split_layers(find_decoder_stack(model)[1], 1)
    assert parts.peak_bytes == pytest.approx(measure_training(model, microbatch), rel=0.03)
    assert parts.forward[0].flops == pytest.approx(whole.forward[0].flops, rel=0.05)


def test_cuda_keeps_a_byte_where_the_cpu_keeps_a_value():
    """Catches dropout's masks planned for a GPU as the CPU makes them."""
    base = build_sized("llama")
    saved = {
        device: trace(build_meta(base, 0.1), replace(CPU, device_type=device, checkpointing=None)).saved_bytes
        for device in ("cpu", "cuda")
    }
    assert saved["cuda"] < saved["cpu"] * 0.95


def test_code_that_reads_values_is_refused():
    """Catches torch's own error, which does not name planning, and a model silently planned without activations."""
    model = build_meta(build_sized("llama", num_hidden_layers=1))
    layer = model.get_base_model().model.layers[0]
    layer.register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)
    with pytest.raises(ConfigError) as error:
        trace(model, replace(CPU, checkpointing=None))
    assert error.value.where == "LlamaForCausalLM" and error.value.fix


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


# Nothing but norms differs between the devices: no dropout, and no gelu of powers, which CUDA widens too. The norm of a
# first layer that keeps its activations keeps nothing for backward, so there are two layers.
SMALL = dict(vocab_size=96, num_hidden_layers=2, hidden_size=32, num_attention_heads=4)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
LAYER_NORMS = {
    "gpt2": GPT2Config(**SMALL, **NO_DROPOUT, activation_function="gelu", bos_token_id=1, eos_token_id=2),
    "neox": GPTNeoXConfig(**SMALL, intermediate_size=64),
    "falcon": FalconConfig(**SMALL),
    "phi": PhiConfig(**SMALL, intermediate_size=64, hidden_act="gelu"),
}


@pytest.mark.parametrize(
    ("family", "checkpointing"), (("gpt2", {}), ("neox", None), slow("falcon", None), slow("phi", None)), ids=str
)
def test_norms_are_planned_in_the_dtype_that_the_devices_autocast_gives_them(family, checkpointing):
    """Catches a plan that fits and a run that does not: on CUDA a layer norm keeps and hands on float32."""
    base = AutoModelForCausalLM.from_config(LAYER_NORMS[family], dtype=torch.bfloat16)
    peak_bytes = {}
    for device, expected in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        model, dtypes = build_meta(base), set()
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.register_forward_hook(lambda module, args, output, found=dtypes: found.add(output.dtype))
        found = trace(model, Microbatch(2, 96, device, checkpointing=checkpointing))
        assert dtypes == {expected}  # in recomputation too
        peak_bytes[device] = found.saved_bytes + found.layer_bytes
    hidden_numel = 2 * 96 * base.config.hidden_size
    assert peak_bytes["cuda"] >= peak_bytes["cpu"] + 4 * hidden_numel  # the input of one, in float32
