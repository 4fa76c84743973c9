"""Memory and work of one training microbatch, without the base and the adapter."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.units import spread
from .tracker import Work


@dataclass(frozen=True)
class Activations:
    """Memory and work of a microbatch on one rank, without the base, the adapter and its gradients.

    Attributes:
        saved_bytes: what is kept for backward when the last decoder layer has run.
        layer_bytes: the most on top of it while layers run forward and backward.
        logits_bytes: the most on top of it while the head and the loss run; never at the same time.
        hidden_bytes: of the hidden states between two decoder layers.
        forward: work of the forward of each decoder layer.
        backward: work of the backward of each, with its recomputation if there is any.
        rest: work of everything else: embedding, head, loss.
        workspace_bytes: of the buffer that quantized weights are unpacked into.
    """

    saved_bytes: int
    layer_bytes: int
    logits_bytes: int
    hidden_bytes: int
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    rest: Work
    workspace_bytes: int = 0

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
    share = len(chosen) / count
    return Activations(
        saved_bytes=round(share * recomputed.saved_bytes + (1 - share) * saved.saved_bytes),
        layer_bytes=max(recomputed.layer_bytes if chosen else 0, saved.layer_bytes),
        logits_bytes=max(recomputed.logits_bytes, saved.logits_bytes),
        hidden_bytes=saved.hidden_bytes,
        forward=saved.forward,
        backward=tuple((recomputed if i in chosen else saved).backward[i] for i in range(count)),
        rest=saved.rest,
        workspace_bytes=max(recomputed.workspace_bytes, saved.workspace_bytes),
    )
