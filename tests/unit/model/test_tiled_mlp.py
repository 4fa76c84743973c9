"""MLPs that compute their tokens in tiles give the same as in one, and keep less; others are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.planning import build_meta
from helpers.tiny import add_lora, build_base, build_model, make_batch, take_gradients
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import lorashard
from lorashard.errors import ConfigError
from lorashard.model.stacks import find_layers
from lorashard.model.tiled_mlp import tile_mlps
from lorashard.planning.trace import Microbatch, trace

RELATIVE = 1e-6  # of a gradient's norm: an adapter's is a sum over tiles


def differentiate(model: nn.Module) -> dict[str, torch.Tensor]:
    model(**make_batch(rows=2, tokens=13), use_cache=False).loss.backward()
    return take_gradients(model)


@pytest.mark.parametrize("checkpointing", ["off", "non-reentrant", "reentrant"])
def test_every_gradient_is_that_of_whole_mlps(checkpointing):
    """Catches tokens that are left out or in another order, and weights that are gone when a tile is recomputed."""
    expected = differentiate(build_model())
    tiled = lorashard.shard(build_model(checkpointing=checkpointing), "host", mlp_tile_tokens=5)
    sizes: list[int] = []
    find_layers(tiled)[0].mlp.gate_proj.register_forward_hook(
        lambda module, args, output: sizes.append(args[0].shape[1])
    )
    found = differentiate(tiled)
    assert max(sizes) == 5
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= RELATIVE * gradient.norm(), name


def test_dropout_falls_on_the_same_values_again():
    """Catches a recomputation that draws other numbers than the forward: its gradient is of another function."""
    model = build_model(dropout=0.5)
    tile_mlps(find_layers(model), 5)
    base, step = model.get_base_model().model.layers[0].mlp.gate_proj.lora_A["default"].weight, 1e-2

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return model.double()(**make_batch(), use_cache=False).loss

    loss().backward()
    slope, direction = base.grad.clone(), torch.ones_like(base)
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            base.add_(sign * step * direction)
            values.append(loss().item())
            base.sub_(sign * step * direction)
    assert slope.sum().item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-2)


def test_a_tile_is_all_that_is_kept():
    """Catches tiles whose insides are kept until the whole MLP is differentiated; the plan sees what the model does."""
    microbatch = Microbatch(1, 4096, "cpu", is_autocast=False)
    base = lambda: build_base(num_hidden_layers=3, intermediate_size=1024)  # noqa: E731
    whole, tiled = (trace(build_meta(base()), one) for one in (microbatch, replace(microbatch, tile_tokens=256)))
    widened_bytes = 4096 * 1024 * 4  # one of the MLP's wide tensors
    assert tiled.saved_bytes == whole.saved_bytes
    assert tiled.layer_bytes < whole.layer_bytes - 2 * widened_bytes


def test_experts_may_be_tiled():
    """Catches tokens that a router sees as rows of their own."""
    config = MixtralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    base = MixtralForCausalLM(config)
    plain = add_lora(base, target_modules=["q_proj", "v_proj"])
    expected = differentiate(plain)
    tile_mlps(find_layers(plain), 5)
    found = differentiate(plain)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= RELATIVE * gradient.norm(), name


def test_what_cannot_be_tiled_is_refused():
    """Catches an option that does nothing, in a model that calls its MLP otherwise, or beside what replaces it."""
    model = build_model()
    tile_mlps(find_layers(model), 5)
    with pytest.raises(ConfigError, match="mlp_tile_tokens: .* found a LlamaDecoderLayer whose forward is replaced"):
        tile_mlps(find_layers(model), 5)
    with pytest.raises(ConfigError, match="mlp_tile_tokens: .* that has none"):
        tile_mlps([nn.Linear(2, 2)], 5)
