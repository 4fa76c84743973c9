"""Collectives of a sequence group that autograd can go through, each with its true adjoint.

Note [Adjoints]
    The ranks of a sequence group compute one function together: each holds a slice of every row, and the losses that
    they come to are copies of one. The gradient of the sum of these copies is then what each collective's adjoint
    gives, and what DDP averages over all ranks: with W ranks in groups of N a row's gradient is counted N times among
    W, which is once among the W / N groups. No factor is put in anywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.dist import SequenceGroup


class _Exchange(torch.autograd.Function):
    """An all-to-all; its adjoint is itself."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return group.exchange(blocks.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.group.exchange(grads[0].contiguous()), None


class _Sum(torch.autograd.Function):
    """A sum over the group, which every rank gets; its adjoint is itself."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return group.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.group.sum(grads[0]), None


class _Join(torch.autograd.Function):
    """The slices of all ranks, joined along dimension 1; its adjoint is the sum of this slice's gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group, ctx.num_tokens = group, tensor.shape[1]
        return torch.cat(group.gather(tensor), 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.group.sum(grads[0]).narrow(1, ctx.group.rank * ctx.num_tokens, ctx.num_tokens), None


def exchange(blocks: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return every rank's block for this rank, by rank.

    Args:
        blocks: [ranks, ...], one for each rank.

    Ranks: collective over the group, in forward and in backward.
    Memory: as much as `blocks`.
    """
    return _Exchange.apply(blocks, group)


def sum_over(tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return the sum of all ranks' `tensor`.

    Ranks: collective over the group, in forward and in backward.
    """
    return _Sum.apply(tensor, group)


def join(tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return whole rows from all ranks' slices.

    Args:
        tensor: [rows, tokens of a slice, ...], of any dtype.

    Ranks: collective over the group, in forward and in backward.
    Memory: the whole rows, twice.
    """
    return _Join.apply(tensor, group)
