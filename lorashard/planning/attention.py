"""Attention while a microbatch is traced: what it is on the device, also where ranks share each sequence.

There each rank has as many tokens of a sequence, and in attention it exchanges them for its part of the heads over all
tokens, and the result back (DeepSpeed-Ulysses, Jacobs et al., 2023).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.sequence_attention import LocalHeads, attends_by_name
from .tracker import Tracker, Work

_ATTENTION_NAME = "lorashard_trace"
_Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@contextmanager
def planned_attention(
    model: PreTrainedModel, tracker: Tracker, has_mask: bool, sequence_parallel_size: int = 1
) -> Iterator[None]:
    """While the body runs, attend as on the device that is planned for.

    Args:
        tracker: that is told of exchanges between ranks.
        has_mask: whether attention needs a mask.
        sequence_parallel_size: ranks that share each sequence; above 1 `count_shared_heads` has counted heads.
    """
    config, implementation = model.config, model.config._attn_implementation
    attend: _Attend | None = None
    if implementation == "sdpa" and attends_by_name(model):
        attend = _attend_by_sdpa(has_mask)
    elif sequence_parallel_size > 1:
        attend = _attend_eagerly
    if attend is None:
        yield
        return
    if sequence_parallel_size > 1:
        attend = _exchange_around(attend, tracker, sequence_parallel_size)
    # transformers cannot see in fake tensors that no sequence is padded, and would make masks.
    ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME] = attend
    config._attn_implementation = _ATTENTION_NAME
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME]
        config._attn_implementation = implementation


def _attend_by_sdpa(has_mask: bool) -> _Attend:
    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        rows, _, tokens, _ = query.shape
        window = options.get("sliding_window")
        is_masked = has_mask or (window is not None and tokens > window)
        mask = torch.empty(rows, 1, tokens, tokens, dtype=torch.bool) if is_masked else None
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    return attend


def _attend_eagerly(
    heads: LocalHeads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> Any:
    rows, _, tokens, _ = query.shape
    mask = torch.empty(rows, 1, tokens, tokens, dtype=query.dtype)
    attend = vars(sys.modules[type(heads.module).__module__])["eager_attention_forward"]
    return attend(heads, query, key, value, mask, **options)


def _exchange_around(attend: _Attend, tracker: Tracker, num_ranks: int) -> _Attend:
    """Return `attend` on a rank's part of the heads and all tokens, for all heads of a rank's tokens."""

    def attend_to_all(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        key, value = (_repeat(tensor, query.shape[1], num_ranks) for tensor in (key, value))
        # [rows, heads, tokens / ranks, width] -> [rows, heads / ranks, tokens, width]
        query, key, value = _Exchange.apply(tracker, num_ranks, 1, 2, query, key, value)
        sinks = options.get("s_aux")
        if sinks is not None:  # a value for each head
            sinks = options["s_aux"] = sinks[: query.shape[1]]
        heads = LocalHeads(module, module.config, query.shape[1] // key.shape[1], sinks)
        output, weights = attend(heads, query, key, value, mask, **options)
        (output,) = _Exchange.apply(tracker, num_ranks, 1, 2, output)  # tokens come before heads here
        return output, weights

    return attend_to_all


def _repeat(tensor: torch.Tensor, num_heads: int, num_ranks: int) -> torch.Tensor:
    """Return keys or values [rows, heads, tokens, width] with as many heads as ranks can share evenly."""
    count = tensor.shape[1]
    if count % num_ranks == 0:
        return tensor
    wanted = num_ranks if num_ranks % count == 0 else num_heads
    return repeat_kv(tensor, wanted // count)


class _Exchange(torch.autograd.Function):
    """An all-to-all of tensors without values, whose buffers hold all of them at once."""

    @staticmethod
    def forward(ctx, tracker, num_ranks, split_dim, joined_dim, *tensors):
        ctx.tracker, ctx.num_ranks, ctx.split_dim, ctx.joined_dim = tracker, num_ranks, joined_dim, split_dim
        return _exchange(tracker, num_ranks, split_dim, joined_dim, tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, None, None, *_exchange(ctx.tracker, ctx.num_ranks, ctx.split_dim, ctx.joined_dim, gradients)


def _exchange(
    tracker: Tracker, num_ranks: int, split_dim: int, joined_dim: int, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    sent = torch.empty(num_bytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    tracker.work += Work(exchanged_bytes=num_bytes, num_exchanges=1)
    del sent
    results = []
    for tensor in tensors:
        shape = list(tensor.shape)
        shape[split_dim] //= num_ranks
        shape[joined_dim] *= num_ranks
        results.append(torch.empty(shape, dtype=tensor.dtype))
    del received
    return tuple(results)
