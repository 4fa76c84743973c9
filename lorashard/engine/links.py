"""How the graphs of several jobs are ordered: one backward visits each unit once for all of them.

Note [Links]
    Autograd runs what is ready in the order of numbers that each thread counts for itself, and jobs are threads. So the
    order is made part of the graph: what a job gives to a unit and what it gets from it pass through a link, an
    identity that also takes a token from the link before it, whichever job's that was, and gives one to the next. A
    link's backward waits for the token, so that the links run in the reverse order of the forward, and what lies
    between them too: one job's backward of a unit, and then the other's. Nothing else of a job depends on another's.
    Where a job's backward ends in a unit, no link tells of it; so links come last among what is ready (number 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Link(torch.autograd.Function):
    """Returns a tensor and a token, and calls `then` in backward once the gradients of both are known."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], tensor: torch.Tensor, token: torch.Tensor) -> Any:
        ctx.then = then
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor), token.view_as(token)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.then()
        return None, grads[0], None


class Links:
    """The links of one graph, in the order of the forward. See [Links]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._token: torch.Tensor | None = None

    def reset(self) -> None:
        """Begin a new graph."""
        self._token = None

    def link(self, values: Any, then: Callable[[], None]) -> Any | None:
        """Return nested tuples, lists and dicts with their first differentiable tensor linked; None if there is none.

        Args:
            values: are not changed.
            then: called in backward when what comes after the link is over.
        """
        token = self._token
        if token is None:
            token = torch.empty(0, device=self._device, requires_grad=True)
        linked = _replace_first(values, token, then)
        if linked is None:
            return None
        self._token = linked[1]
        return linked[0]


def _replace_first(values: Any, token: torch.Tensor, then: Callable[[], None]) -> tuple[Any, torch.Tensor] | None:
    """Return `values` with a link, and the next token."""
    if isinstance(values, torch.Tensor):
        if not values.requires_grad:
            return None
        tensor, token = _Link.apply(then, values, token)
        tensor.grad_fn._set_sequence_nr(0)
        return tensor, token
    if isinstance(values, dict):
        for key, value in values.items():
            linked = _replace_first(value, token, then)
            if linked is not None:
                copy = values.copy()
                copy[key] = linked[0]
                return copy, linked[1]
    elif isinstance(values, (tuple, list)):
        for index, value in enumerate(values):
            linked = _replace_first(value, token, then)
            if linked is not None:
                items = [*values[:index], linked[0], *values[index + 1 :]]
                return type(values)(items) if type(values) in (tuple, list) else type(values)(*items), linked[1]
    return None
