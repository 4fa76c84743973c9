"""The memory and work of a fused LM head, as in TRL's trainers: logits exist one tile at a time."""

from __future__ import annotations

import torch

# TRL's (`trl/kernels/chunked_logprob.py`).
_TILE_TOKENS = 4096
_TILE_VOCABULARY = 32768
# Without Triton, tiles of float32 that its torch operations hold at once.
_TORCH_FORWARD_TILES = 3.25
_TORCH_BACKWARD_TILES = 7.25


def fused_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, device_type: str) -> torch.Tensor:
    """Return a loss of `hidden` [batch, tokens, hidden] that allocates what TRL's does; its value is meaningless."""
    flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    if device_type == "cuda":
        flat = flat.clone()  # TRL selects the supervised tokens, which may be all
    return _FusedHead.apply(flat, weight, labels[:, 1:].reshape(-1).clone(), device_type).sum()


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, device_type):
        statistics = torch.empty(9, len(hidden))  # running maximum, sums, log-probabilities, ...
        dtype = _compute_dtype(hidden)
        tile = _make_tile(hidden, dtype)
        for rows, columns in _tiles(hidden, weight):
            part = _part(tile, rows, columns)
            torch.mm(hidden[rows].to(dtype), weight[columns].to(dtype).t(), out=part)
            if device_type != "cuda":
                torch.empty(round(_TORCH_FORWARD_TILES * part.numel()))
        ctx.save_for_backward(hidden, weight, labels, statistics[:2].clone())
        ctx.dtype, ctx.device_type = dtype, device_type
        return statistics[0].clone()

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, _, _ = ctx.saved_tensors
        dtype = ctx.dtype  # the forward's: autocast is off by now
        result = torch.zeros(hidden.shape)
        tile = _make_tile(hidden, dtype)
        for rows, columns in _tiles(hidden, weight):
            part, cut = _part(tile, rows, columns), weight[columns].to(dtype)
            torch.mm(hidden[rows].to(dtype), cut.t(), out=part)
            if ctx.device_type == "cuda":
                torch.mm(part, cut)
            else:
                torch.empty(round(_TORCH_BACKWARD_TILES * part.numel()))
                result[rows].addmm_(part.float(), cut.float())
        return result.to(hidden.dtype), None, None, None


def _compute_dtype(hidden):
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype


def _make_tile(hidden, dtype):
    return torch.empty(min(len(hidden), _TILE_TOKENS), _TILE_VOCABULARY, dtype=dtype)


def _part(tile, rows, columns):
    return tile[: rows.stop - rows.start, : columns.stop - columns.start]


def _tiles(hidden, weight):
    for row in range(0, len(hidden), _TILE_TOKENS):
        for column in range(0, len(weight), _TILE_VOCABULARY):
            yield (
                slice(row, min(row + _TILE_TOKENS, len(hidden))),
                slice(column, min(column + _TILE_VOCABULARY, len(weight))),
            )
