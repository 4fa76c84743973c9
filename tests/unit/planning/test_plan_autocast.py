"""What CUDA's autocast computes in another dtype than the CPU's, on which the plan is traced."""

from __future__ import annotations

import pytest
import torch
from helpers.planning import build_meta
from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, GPTNeoXConfig, PhiConfig

from lorashard.planning.trace import Microbatch, trace

LAYER_NORMS = {
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2),
    "neox": GPTNeoXConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
    "falcon": FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "phi": PhiConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64),
}


@pytest.mark.parametrize(
    ("family", "checkpointing"), (("gpt2", {}), ("neox", None), ("falcon", None), ("phi", None)), ids=str
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
    assert peak_bytes["cuda"] >= peak_bytes["cpu"] + 2 * hidden_numel
