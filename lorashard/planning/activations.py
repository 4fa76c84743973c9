"""Memory and work of one training microbatch, without the base and the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from ..model.units import spread
from .tracker import Work


@dataclass(frozen=True)
class Activations:
    """Memory and work of a microbatch on one rank, without the base, the adapter and its gradients.

    Attributes:
        saved_bytes: what is kept for backward when the last decoder layer has run.
        layer_bytes: the most on top of it while layers run forward and backward.
        logits_bytes: the most on top of it while the head and the loss run; never at the same time.
        layers_saved: of `saved_bytes`, the bytes of each decoder layer.
        forward: work of the forward of each decoder layer.
        backward: work of the backward of each, with its recomputation if there is any.
        rest: work of everything else: embedding, head, loss.
        workspace_bytes: of the buffer that quantized weights are unpacked into.
        hidden_bytes: of the gradient that one decoder layer's backward hands to the next; `layer_bytes` counts it.
    """

    saved_bytes: int
    layer_bytes: int
    logits_bytes: int
    layers_saved: tuple[int, ...]
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    rest: Work
    workspace_bytes: int = 0
    hidden_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.saved_bytes + max(self.layer_bytes, self.logits_bytes)


def recompute_some(recomputed: Activations, saved: Activations, num_layers: int) -> Activations:
    """Return the activations where `num_layers` decoder layers, spread evenly, are recomputed.

    Args:
        recomputed: the activations where all layers are.
        saved: those where none is.
    """
    count = len(saved.forward)
    chosen = set(spread(range(count), num_layers))
    layers_saved = tuple((recomputed if i in chosen else saved).layers_saved[i] for i in range(count))
    return Activations(
        saved_bytes=saved.saved_bytes - sum(saved.layers_saved) + sum(layers_saved),
        layer_bytes=max(recomputed.layer_bytes if chosen else 0, saved.layer_bytes),
        logits_bytes=max(recomputed.logits_bytes, saved.logits_bytes),
        layers_saved=layers_saved,
        forward=saved.forward,
        backward=tuple((recomputed if i in chosen else saved).backward[i] for i in range(count)),
        rest=saved.rest,
        workspace_bytes=max(recomputed.workspace_bytes, saved.workspace_bytes),
        hidden_bytes=saved.hidden_bytes,
    )


def join_activations(jobs: Sequence[tuple[Activations, int]]) -> Activations:
    """Return the activations of a sweep's jobs, whose microbatches pass each decoder layer in turn.

    All keep what they save, and all their logits, until the one backward of all. Only one runs at a time, so a layer's
    own memory is there once, while each of the others waits with the gradient that it has come with.

    Args:
        jobs: the activations of each kind of job, and how many are of that kind.
    """
    hidden_bytes = sum(one.hidden_bytes * count for one, count in jobs)

    def add_layers(name: str) -> tuple[Any, ...]:
        layers = zip(*([value * count for value in getattr(one, name)] for one, count in jobs), strict=True)
        return tuple(reduce(add, values) for values in layers)

    return Activations(
        saved_bytes=sum(one.saved_bytes * count for one, count in jobs),
        layer_bytes=max(one.layer_bytes - one.hidden_bytes for one, _ in jobs) + hidden_bytes,
        logits_bytes=sum(one.logits_bytes * count for one, count in jobs),
        layers_saved=add_layers("layers_saved"),
        forward=add_layers("forward"),
        backward=add_layers("backward"),
        rest=reduce(add, (one.rest * count for one, count in jobs)),
        workspace_bytes=max(one.workspace_bytes for one, _ in jobs),
        hidden_bytes=hidden_bytes,
    )
