"""Tiled MLP: the MLP of a decoder layer computes its tokens a tile at a time, and recomputes each tile in backward.

An MLP widens each token several times. With long sequences, and a layer that activation checkpointing recomputes, what
it keeps for its backward is most of what a step needs beside the layers' inputs; of tiles, one tile's is there at a
time. Each tile is computed once more. The idea is that of ALST's TiledMLP (Bekman et al., 2025, arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError

_OPTION = "mlp_tile_tokens"
_NAMES = ("mlp", "feed_forward")


def tile_mlps(layers: Sequence[nn.Module], num_tokens: int) -> None:
    """Make the MLP of each of `layers` process `num_tokens` tokens at a time.

    Raises:
        ConfigError: a layer has no MLP that treats each token by itself, or its forward has been replaced already.
            Later, from the forward: it returns more than a tensor.

    Memory: within an MLP, while it is differentiated, that of one tile; its input and output are whole.
    """
    for layer in layers:
        found = [getattr(layer, name) for name in _NAMES if isinstance(getattr(layer, name, None), nn.Module)]
        if len(found) != 1 or "forward" in vars(found[0]):
            raise ConfigError(
                option=_OPTION,
                expected=f"decoder layers with an {' or a '.join(_NAMES)} whose forward is its class's",
                found=f"a {type(layer).__name__} " + ("that has none" if not found else "whose forward is replaced"),
                fix=f"leave {_OPTION} out, or what else replaces the MLP (Liger's kernels)",
            )
        found[0].forward = _TiledForward(found[0], num_tokens)


class _TiledForward:
    """Replaces an MLP's `forward`: an object rather than a closure, so that a deep copy runs the copied MLP."""

    def __init__(self, mlp: nn.Module, num_tokens: int) -> None:
        self._mlp = mlp
        self._num_tokens = num_tokens

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the MLP's output.

        Args:
            hidden: [rows, tokens, size].
        """
        forward = partial(type(self._mlp).forward, self._mlp)
        if hidden.ndim != 3 or hidden.shape[:2].numel() <= self._num_tokens:
            return forward(hidden, *args, **kwargs)
        tiles = hidden.reshape(1, -1, hidden.shape[-1]).split(self._num_tokens, 1)
        run = partial(checkpoint, forward, use_reentrant=False) if torch.is_grad_enabled() else forward
        outputs = [run(tile, *args, **kwargs) for tile in tiles]
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise ConfigError(
                f"{type(self._mlp).__name__} returns more than a tensor", option=_OPTION, fix="leave it out"
            )
        return torch.cat(outputs, 1).view_as(hidden)
