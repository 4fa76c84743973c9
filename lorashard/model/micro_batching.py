"""Per-layer micro-batching: a decoder layer computes its batch a few sequences at a time, in one call.

A large batch then gathers each unit once, while a layer's activations are those of a few sequences: activation
checkpointing recomputes one piece of the batch after the other.

Note [One call]
    The layer's `forward` is replaced on the instance: hooks around its call (the engine's, transformers') still see
    one call with the full batch. The class's `forward`, which transformers checkpoints, runs once per piece. Hooks on
    modules inside the layer run once per piece; what transformers records there is joined again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing
from transformers.utils.generic import is_flash_attention_requested

from ..engine.autograd import is_in_backward
from ..errors import ConfigError
from .batch_split import BatchSplit, PackedSplit, Starts, find_mask_starts, find_position_starts
from .patches import extend_classes
from .sequence_attention import SlicedRows

_OPTION = "layer_microbatch_size"
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def split_layers(layers: Sequence[nn.Module], size: int) -> None:
    """Make each of `layers` process its batch `size` sequences at a time.

    With a key-value cache in use the batch is not split.

    Args:
        layers: the decoder layers of one stack, which get the same masks and positions in one pass.

    Raises:
        ConfigError: `size` is not positive, or a layer's forward has been replaced already. Later, from the forward:
            an argument or output that cannot be split, or activation checkpointing around the layer's call.

    Memory: a layer's activations, while it is recomputed and differentiated, are those of one piece. Without
        activation checkpointing autograd keeps those of all pieces.
    """
    if size < 1:
        raise ConfigError(option=_OPTION, expected="a positive number of sequences", found=size)
    starts = Starts()
    checkpointing_calls = [layer for layer in layers if _checkpoints_call(type(layer))]
    for layer in layers:
        if "forward" in vars(layer):
            raise ConfigError(
                option=_OPTION,
                expected=f"a {type(layer).__name__} with its class's forward",
                found="one that is replaced already",
                fix=f"leave {_OPTION} out, or whatever else wraps the layers",
            )
    extend_classes(checkpointing_calls, lambda _: {"__call__": nn.Module.__call__})
    for layer in layers:
        layer.forward = _SplitForward(layer, size, starts, layer in checkpointing_calls)


def _checkpoints_call(layer_class: type[nn.Module]) -> bool:
    """Return whether transformers checkpoints a layer's call, hooks included, as it did before 5.20."""
    own_call = GradientCheckpointingLayer.__call__
    return layer_class.__call__ is own_call and own_call is not nn.Module.__call__


class _SplitForward:
    """Replaces a layer's `forward`. See [One call].

    An object rather than a closure: a deep copy of the model gets its own, which runs the copied layer.
    """

    def __init__(self, layer: nn.Module, size: int, starts: Starts, checkpoints: bool) -> None:
        self._layer = layer
        self._size = size
        self._starts = starts
        self._checkpoints = checkpoints
        self._names = list(inspect.signature(type(layer).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_checkpointed = self._layer.training and getattr(self._layer, "gradient_checkpointing", False)
        if is_in_backward() and torch.is_grad_enabled() and not is_checkpointed:
            raise self._refusal(
                "activation checkpointing surrounds the layer's call and recomputes all sequences at once",
                "train without it",
            )
        if is_checkpointed and not getattr(self._layer, "_can_checkpoint_with_cache", False):
            # transformers does it on the way into its checkpoint: a recomputation would fill the cache twice.
            dropped = {"past_key_values": None, "layer_past": None, "use_cache": False}
            kwargs = {name: dropped.get(name, value) for name, value in kwargs.items()}
        split = self._plan_split(dict(zip(self._names, args, strict=False)) | kwargs)
        if split is None:
            return self._run(args, kwargs, is_checkpointed)
        names = [*self._names, *(f"argument {i}" for i in range(len(self._names), len(args)))]
        split_args = [self._split(split, name, value) for name, value in zip(names, args, strict=False)]
        split_kwargs = {name: self._split(split, name, value) for name, value in kwargs.items()}
        outputs = []
        with self._joined_records(split):
            for i in range(len(split.sizes)):
                piece_args = [pieces[i] for pieces in split_args]
                piece_kwargs = {name: pieces[i] for name, pieces in split_kwargs.items()}
                outputs.append(self._run(piece_args, piece_kwargs, is_checkpointed))
        return self._join(split, "its output", outputs)

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any], is_checkpointed: bool) -> Any:
        forward = partial(type(self._layer).forward, self._layer, **kwargs)
        if is_checkpointed and self._checkpoints:
            return self._layer._gradient_checkpointing_func(forward, *args)  # type: ignore[operator]
        return forward(*args)

    def _plan_split(self, named: dict[str, Any]) -> BatchSplit | PackedSplit | None:
        """Return how to split the batch of a call, or None where it is not split."""
        if any(isinstance(value, Cache) or (name in _CACHES and value is not None) for name, value in named.items()):
            return None
        hidden_name = self._names[0]
        hidden = named.get(hidden_name)
        if not isinstance(hidden, torch.Tensor) or hidden.ndim < 3:
            raise self._refusal(f"'{hidden_name}' is not [batch, tokens, hidden] but {_describe(hidden)}")
        num_sequences, num_tokens = hidden.shape[:2]
        if num_sequences > self._size:
            sizes = [min(self._size, num_sequences - begin) for begin in range(0, num_sequences, self._size)]
            return BatchSplit(hidden_name, num_sequences, num_tokens, sizes)
        has_row = num_sequences == 1 and not any(isinstance(value, SlicedRows) for value in named.values())
        starts = self._find_sequences(named, num_tokens) if has_row else []  # a slice may begin inside of a sequence
        return PackedSplit(hidden_name, num_tokens, starts, self._size) if len(starts) > self._size else None

    def _find_sequences(self, named: dict[str, Any], num_tokens: int) -> list[int]:
        """Return where the packed sequences begin that the layer keeps apart."""
        claimed = [0]
        lengths, positions = named.get("cu_seq_lens_q"), named.get("position_ids")
        if isinstance(lengths, torch.Tensor):
            bounds = self._starts.of(lengths, torch.Tensor.tolist)
            if bounds != sorted({0, *bounds, num_tokens}):
                raise self._refusal(f"cu_seq_lens_q does not rise from 0 to {num_tokens} tokens: {bounds}")
            claimed = bounds[:-1]
        elif isinstance(positions, torch.Tensor) and positions.numel() == num_tokens:
            claimed = self._starts.of(positions, find_position_starts)
        masks = [value for name, value in named.items() if name.endswith("mask") and value is not None]
        if not all(isinstance(mask, torch.Tensor) for mask in masks):
            return claimed
        square = [mask for mask in masks if mask.ndim > 2 and mask.shape[-2:] == (num_tokens, num_tokens)]
        if not masks:
            if len(claimed) > self._size and not self._is_flash():
                raise self._refusal(
                    f"its batch packs {len(claimed)} sequences and no mask keeps them apart",
                    "pass use_cache=False (with a cache no such mask is made), or set "
                    "attn_implementation='flash_attention_2'",
                )
            return claimed
        if not square:
            return [0]  # padding alone: one sequence
        apart = set.intersection(*(set(self._starts.of(mask, find_mask_starts)) for mask in square))
        if not isinstance(lengths, torch.Tensor):
            return sorted(apart)
        if not apart.issuperset(claimed[:: self._size]):
            raise self._refusal("its mask lets tokens see sequences of cu_seq_lens_q that are not their own")
        return claimed

    def _is_flash(self) -> bool:
        configs = [getattr(module, "config", None) for module in self._layer.modules()]
        names = {getattr(config, "_attn_implementation", None) for config in configs} - {None}
        return bool(names) and all(is_flash_attention_requested(requested_attention_implementation=n) for n in names)

    def _split(self, split: BatchSplit | PackedSplit, name: str, value: Any) -> list[Any]:
        """Return each piece's part of an argument."""
        num_pieces = len(split.sizes)
        if isinstance(value, tuple):
            parts = [self._split(split, name, part) for part in value]
            return [tuple(part[i] for part in parts) for i in range(num_pieces)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return [value] * num_pieces
        if isinstance(value, SlicedRows):
            return list(value.split(split.sizes))
        pieces = split.split(name, value) if isinstance(value, torch.Tensor) else None
        if pieces is None:
            hint = "set attn_implementation='sdpa'" if type(value).__name__ == "BlockMask" else ""
            raise self._refusal(f"the batch dimension of '{name}' ({_describe(value)}) is unknown", hint)
        return pieces

    def _join(self, split: BatchSplit | PackedSplit, name: str, values: Sequence[Any]) -> Any:
        """Join the pieces' outputs, in the order of the batch."""
        first = values[0]
        if isinstance(first, tuple):
            return tuple(self._join(split, name, parts) for parts in zip(*values, strict=True))
        if all(value is first for value in values):
            return first
        dim = split.joint_dim(values) if all(isinstance(value, torch.Tensor) for value in values) else None
        if dim is None:
            raise self._refusal(f"{name} ({_describe(first)}) cannot be joined from pieces")
        return torch.cat(list(values), dim)

    @contextmanager
    def _joined_records(self, split: BatchSplit | PackedSplit) -> Iterator[None]:
        """While the body runs the pieces, collect what transformers' hooks record (router logits, attentions) of each.

        A model expects one record per layer.
        """
        records = output_capturing._active_collector.get() or {}
        begins = {key: len(values) for key, values in records.items() if isinstance(values, list)}
        yield
        for key, begin in begins.items():
            added = records[key][begin:]
            num_each = len(added) // len(split.sizes)
            records[key][begin:] = [
                self._join(split, f"what it records as {key}", added[i::num_each]) for i in range(num_each)
            ]

    def _refusal(self, problem: str, fix: str = "") -> ConfigError:
        return ConfigError(
            f"{self._size} does not work with this {type(self._layer).__name__}: {problem}",
            option=_OPTION,
            fix=f"{fix}, or leave {_OPTION} out".removeprefix(", or "),
        )


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
