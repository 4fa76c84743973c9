"""Attention over whole rows whose tokens lie on several ranks: heads are exchanged for tokens, and back (Ulysses).

Note [Heads for tokens]
    Outside of attention a layer treats each token by itself, so a rank computes its slice of every row alone. In
    attention each rank gives every other that rank's share of the heads, for its own tokens, and gets its own share of
    the heads for all tokens. Then whichever implementation was chosen computes whole rows, with the masks that
    transformers makes for whole rows: sliding windows, padding and packed sequences mean what they mean without us.
    The idea is that of DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509).

Note [What a layer is told]
    The `SlicedRows` of a pass go to the layers as a keyword argument, as every argument does that transformers' models
    do not know; activation checkpointing keeps it, so that a recomputation finds the same. A pass without it, such as
    those of `generate`, computes what it is given, as if ranks shared nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..errors import ConfigError
from ..runtime.dist import SequenceGroup
from .sequence_collectives import exchange

ROWS_ARGUMENT = "lorashard_rows"
_PREFIX = "lorashard_sequences_"
_SHARED_LAYERS = {"full_attention", "sliding_attention"}  # of what a config calls `layer_types`


@dataclass
class SlicedRows:
    """The rows of one pass, of which this rank has a slice of tokens.

    Attributes:
        attention_mask: [rows, tokens] of whole rows; None where every token counts.
        position_ids: [rows or 1, tokens] of whole rows.
        num_tokens: of whole rows, without those added to make the slices equal.
        has_last: whether the last token has a label: the caller has shifted them.
        arguments: the names of what the model was called with, which transformers hands on to attention.
        attended: the modules whose attention has gone through the exchange in this pass.
    """

    group: SequenceGroup
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor
    num_tokens: int
    has_last: bool
    arguments: frozenset[str]
    attended: set[nn.Module] = field(default_factory=set)
    _masks: dict[bool, Any] = field(default_factory=dict)

    def find_mask(self, config: Any, query: torch.Tensor, is_sliding: bool) -> Any:
        """Return what transformers makes of the rows for the attention that `config` names, once a pass.

        Args:
            query: [rows, heads, tokens, size], whole rows.
        """
        if is_sliding not in self._masks:
            make = create_sliding_window_causal_mask if is_sliding else create_causal_mask
            rows, _, tokens, _ = query.shape
            self._masks[is_sliding] = make(
                config=config,
                inputs_embeds=query.new_empty(1).expand(rows, tokens, 1),  # for its shape, dtype and device
                attention_mask=self.attention_mask,
                past_key_values=None,
                position_ids=self.position_ids,
            )
        return self._masks[is_sliding]

    def split(self, sizes: Sequence[int]) -> list[SlicedRows]:
        """Return the same for consecutive parts of the rows, each of as many as `sizes` says."""
        masks: Sequence[torch.Tensor | None] = [None] * len(sizes)
        if self.attention_mask is not None:
            masks = self.attention_mask.split(list(sizes))
        is_shared = len(self.position_ids) == 1
        positions = [self.position_ids] * len(sizes) if is_shared else self.position_ids.split(list(sizes))
        return [
            replace(self, attention_mask=mask, position_ids=each, _masks={})
            for mask, each in zip(masks, positions, strict=True)
        ]


class _Chosen:
    """A config as the implementation that was chosen expects it: under its own name."""

    def __init__(self, config: PretrainedConfig, implementation: str) -> None:
        self._config = config
        self._implementation = implementation

    def __getattr__(self, name: str) -> Any:
        return self._implementation if name == "_attn_implementation" else getattr(self._config, name)


class LocalHeads:
    """An attention module as an implementation sees it that computes some of its heads.

    Attributes:
        num_key_value_groups: query heads for each key-value head, which may be repeated.
        sinks: [heads], of these; only where the module has some.
    """

    def __init__(
        self, module: nn.Module, config: Any, num_key_value_groups: int, sinks: torch.Tensor | None = None
    ) -> None:
        self.module = module
        self.config = config
        self.num_key_value_groups = num_key_value_groups
        if sinks is not None:
            self.sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def count_shared_heads(model: PreTrainedModel) -> int:
    """Return the attention heads of a model whose ranks may share each row: as many ranks as divide them.

    Raises:
        ConfigError: its layers pass on something along the tokens that is no attention, or in a way of their own.
    """
    config = model.config.get_text_config()
    found = sorted(set(getattr(config, "layer_types", None) or ()) - _SHARED_LAYERS)
    found += ["attention in chunks"] if getattr(config, "attention_chunk_size", None) else []
    found += [] if attends_by_name(model) else ["attention that goes not through transformers' AttentionInterface"]
    if found:
        raise ConfigError(
            f"ranks cannot share a row among the heads of {type(model).__name__}",
            option="sequence_parallel_size",
            expected="layers of full or sliding attention",
            found=", ".join(found),
            fix="leave it out for this model",
        )
    return config.num_attention_heads


def attends_by_name(model: nn.Module) -> bool:
    """Tell whether attention is asked for by name. Falcon's code knows only its own kinds, any other name is eager."""
    return any(
        "ALL_ATTENTION_FUNCTIONS" in getattr(sys.modules.get(type(m).__module__), "__dict__", {})
        for m in model.modules()
    )


def exchange_heads(config: PretrainedConfig) -> Callable[[], None]:
    """Let the attention of the modules that read `config` compute whole rows where a pass has slices of them.

    Returns:
        What undoes it.

    Ranks: local, but every rank must do the same.
    """
    chosen = config._attn_implementation or "eager"
    name = _PREFIX + chosen
    AttentionInterface.register(name, partial(_attend, chosen))
    if chosen in AttentionMaskInterface():
        AttentionMaskInterface.register(name, AttentionMaskInterface()[chosen])
    config._attn_implementation_internal = name  # the public setter asks subconfigs for it too

    def undo() -> None:
        config._attn_implementation_internal = chosen

    return undo


# A collective inside of a compiled graph would be traced as one of this process alone.
@torch.compiler.disable
def _attend(
    chosen: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute attention as transformers asks for it.

    Args:
        chosen: the name of the implementation.
        query, key, value: [rows, heads, tokens, size], of a slice if the options have `SlicedRows`.

    Returns:
        [rows, tokens, heads, size], and the weights, if the implementation has them; None for slices.
    """
    config = _Chosen(module.config, chosen)
    implementation = _find_implementation(module, chosen)
    rows: SlicedRows | None = options.pop(ROWS_ARGUMENT, None)
    if rows is None:
        local = LocalHeads(module, config, query.shape[1] // key.shape[1])
        return implementation(local, query, key, value, attention_mask, **options)
    sinks = options.get("s_aux")
    if sinks is not None:  # a value for each head
        sinks = options["s_aux"] = sinks.chunk(rows.group.size)[rows.group.rank]
    known = rows.arguments | {"s_aux"}
    unknown = [name for name, option in options.items() if torch.is_tensor(option) and name not in known]
    if unknown:
        raise ConfigError(
            f"the attention of {type(module).__name__} takes {', '.join(unknown)}, which may belong to heads or tokens",
            option="sequence_parallel_size",
            fix="leave it out for this model",
        )
    rows.attended.add(module)
    if "position_ids" in options:
        options["position_ids"] = rows.position_ids
    query, key, value = _give_tokens(query, key, value, rows.group)
    mask = rows.find_mask(config, query, options.get("sliding_window") is not None)
    local = LocalHeads(module, config, query.shape[1] // key.shape[1], sinks)
    output, _ = implementation(local, query, key, value, mask, **options)
    return _give_heads(output, rows.group), None


def _find_implementation(module: nn.Module, chosen: str) -> Callable[..., Any]:
    """Return the function of an implementation; that of `eager` is in the model's own file."""
    if chosen == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface()[chosen]


def _give_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: SequenceGroup
) -> tuple[torch.Tensor, ...]:
    """Return this rank's heads of whole rows.

    Args:
        query: [rows, heads, tokens of a slice, size]; key and value with as many heads or fewer.

    Returns:
        [rows, heads / ranks, tokens, size] of each; key and value heads that several ranks need are repeated.
    """
    num_heads, num_keys, size = query.shape[1], key.shape[1], group.size
    if num_keys % size:
        repeats = size // num_keys if size % num_keys == 0 else num_heads // num_keys
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    parts = [tensor.unflatten(1, (size, -1)) for tensor in (query, key, value)]
    if len({(tensor.shape[-1], tensor.dtype) for tensor in (query, key, value)}) == 1:
        joined = _join_tokens(torch.cat(parts, 2), group)
        return joined.split([part.shape[2] for part in parts], 1)
    return tuple(_join_tokens(part, group) for part in parts)


def _join_tokens(blocks: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Exchange [rows, ranks, heads, tokens of a slice, size]; return [rows, heads, tokens, size]."""
    received = exchange(blocks.movedim(1, 0), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _give_heads(output: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return all heads of this rank's slice.

    Args:
        output: [rows, tokens, heads / ranks, size].

    Returns:
        [rows, tokens of a slice, heads, size].
    """
    received = exchange(output.unflatten(1, (group.size, -1)).movedim(1, 0), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
