"""Layer-major accumulation: a decoder layer works through its batch a few rows at a time, within one visit.

A large batch then gathers each unit once, while what is alive inside of a layer stays that of a few rows: activation
checkpointing recomputes one piece of the batch after the other.

Note [One visit]
    The layer's `forward` is replaced on the instance: hooks around its call (the engine's, transformers') still see
    one call with the whole batch. The class's `forward`, which transformers checkpoints, runs once a piece. Hooks on
    modules inside of the layer run once a piece; what transformers records there is put together again.
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
from .cuts import RowCut, SequenceCut, Starts, find_mask_starts, find_position_starts

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def split_layers(layers: Sequence[nn.Module], rows: int) -> None:
    """Make each of `layers` process its batch `rows` rows at a time, or `rows` sequences of a packed row.

    With a key-value cache in use the batch stays whole.

    Args:
        layers: the decoder layers of one stack, which get the same masks and positions in one pass.

    Raises:
        ConfigError: `rows` is not positive, or a layer's forward has been replaced already. Later, out of the forward:
            an argument or output that cannot be cut, or activation checkpointing around the whole layer.

    Memory: what is alive inside of a layer while it is recomputed and differentiated is that of one piece. Without
        activation checkpointing autograd keeps every piece, as it would keep the whole.
    """
    if rows < 1:
        raise ConfigError(f"layer_microbatch_size: expected a positive number of rows, found {rows}")
    starts = Starts()
    restored = {cls: _restore_call(cls) for cls in {type(layer) for layer in layers} if _checkpoints_call(cls)}
    for layer in layers:
        if "forward" in vars(layer):
            raise ConfigError(
                f"layer_microbatch_size: expected a {type(layer).__name__} with its class's forward, found one that is "
                "replaced already: leave layer_microbatch_size out, or whatever else wraps the layers"
            )
        checkpoints = type(layer) in restored
        if checkpoints:
            layer.__class__ = restored[type(layer)]
        layer.forward = _SplitForward(layer, rows, starts, checkpoints)


def _checkpoints_call(layer_class: type[nn.Module]) -> bool:
    """Tell whether transformers checkpoints a layer's whole call, hooks included, as it did before 5.20."""
    own_call = GradientCheckpointingLayer.__call__
    return layer_class.__call__ is own_call and own_call is not nn.Module.__call__


def _restore_call(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with torch's plain `__call__` that is otherwise the same class."""
    namespace = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), namespace | {"__call__": nn.Module.__call__})


class _SplitForward:
    """Stands for a layer's `forward`. See [One visit].

    An object rather than a closure: a deep copy of the model gets its own, which runs the copied layer.
    """

    def __init__(self, layer: nn.Module, rows: int, starts: Starts, checkpoints: bool) -> None:
        self._layer = layer
        self._rows = rows
        self._starts = starts
        self._checkpoints = checkpoints
        self._names = list(inspect.signature(type(layer).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_checkpointed = self._layer.training and getattr(self._layer, "gradient_checkpointing", False)
        if is_in_backward() and torch.is_grad_enabled() and not is_checkpointed:
            raise self._refusal(
                "activation checkpointing surrounds the whole layer and recomputes all of its rows at once; train "
                "without it"
            )
        if is_checkpointed and not getattr(self._layer, "_can_checkpoint_with_cache", False):
            # transformers does it on the way into its checkpoint: a recomputation would fill the cache twice.
            dropped = {"past_key_values": None, "layer_past": None, "use_cache": False}
            kwargs = {name: dropped.get(name, value) for name, value in kwargs.items()}
        cut = self._plan_cut(dict(zip(self._names, args, strict=False)) | kwargs)
        if cut is None:
            return self._run(args, kwargs, is_checkpointed)
        names = [*self._names, *(f"argument {i}" for i in range(len(self._names), len(args)))]
        cut_args = [self._cut(cut, name, value) for name, value in zip(names, args, strict=False)]
        cut_kwargs = {name: self._cut(cut, name, value) for name, value in kwargs.items()}
        outputs = []
        with self._joined_records(cut):
            for i in range(len(cut.sizes)):
                piece_args = [pieces[i] for pieces in cut_args]
                piece_kwargs = {name: pieces[i] for name, pieces in cut_kwargs.items()}
                outputs.append(self._run(piece_args, piece_kwargs, is_checkpointed))
        return self._join(cut, "its output", outputs)

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any], is_checkpointed: bool) -> Any:
        forward = partial(type(self._layer).forward, self._layer, **kwargs)
        if is_checkpointed and self._checkpoints:
            return self._layer._gradient_checkpointing_func(forward, *args)  # type: ignore[operator]
        return forward(*args)

    def _plan_cut(self, named: dict[str, Any]) -> RowCut | SequenceCut | None:
        """Return how to cut the batch of a call, or None where it stays whole."""
        if any(isinstance(value, Cache) or (name in _CACHES and value is not None) for name, value in named.items()):
            return None
        hidden_name = self._names[0]
        hidden = named.get(hidden_name)
        if not isinstance(hidden, torch.Tensor) or hidden.ndim < 3:
            raise self._refusal(f"expected '{hidden_name}' as [batch, tokens, hidden], found {_describe(hidden)}")
        num_rows, num_tokens = hidden.shape[:2]
        if num_rows > self._rows:
            sizes = [min(self._rows, num_rows - begin) for begin in range(0, num_rows, self._rows)]
            return RowCut(hidden_name, num_rows, num_tokens, sizes)
        starts = self._find_sequences(named, num_tokens) if num_rows == 1 else []
        return SequenceCut(hidden_name, num_tokens, starts, self._rows) if len(starts) > self._rows else None

    def _find_sequences(self, named: dict[str, Any], num_tokens: int) -> list[int]:
        """Return where the sequences of a single row begin that the layer keeps apart."""
        claimed = [0]
        lengths, positions = named.get("cu_seq_lens_q"), named.get("position_ids")
        if isinstance(lengths, torch.Tensor):
            bounds = self._starts.of(lengths, torch.Tensor.tolist)
            if bounds != sorted({0, *bounds, num_tokens}):
                raise self._refusal(f"cu_seq_lens_q: expected to rise from 0 to {num_tokens} tokens, found {bounds}")
            claimed = bounds[:-1]
        elif isinstance(positions, torch.Tensor) and positions.numel() == num_tokens:
            claimed = self._starts.of(positions, find_position_starts)
        masks = [value for name, value in named.items() if name.endswith("mask") and value is not None]
        if not all(isinstance(mask, torch.Tensor) for mask in masks):
            return claimed
        square = [mask for mask in masks if mask.ndim > 2 and mask.shape[-2:] == (num_tokens, num_tokens)]
        if not masks:
            if len(claimed) > self._rows and not self._is_flash():
                raise self._refusal(
                    f"its row packs {len(claimed)} sequences and no mask keeps them apart; pass use_cache=False (with "
                    "a cache no such mask is made), or set attn_implementation='flash_attention_2'"
                )
            return claimed
        if not square:
            return [0]  # padding alone: one sequence
        apart = set.intersection(*(set(self._starts.of(mask, find_mask_starts)) for mask in square))
        if not isinstance(lengths, torch.Tensor):
            return sorted(apart)
        if not apart.issuperset(claimed[:: self._rows]):
            raise self._refusal("its mask lets tokens see sequences of cu_seq_lens_q that are not their own")
        return claimed

    def _is_flash(self) -> bool:
        configs = [getattr(module, "config", None) for module in self._layer.modules()]
        names = {getattr(config, "_attn_implementation", None) for config in configs} - {None}
        return bool(names) and all(is_flash_attention_requested(requested_attention_implementation=n) for n in names)

    def _cut(self, cut: RowCut | SequenceCut, name: str, value: Any) -> list[Any]:
        """Return what each piece gets of an argument."""
        num_pieces = len(cut.sizes)
        if isinstance(value, tuple):
            parts = [self._cut(cut, name, part) for part in value]
            return [tuple(part[i] for part in parts) for i in range(num_pieces)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return [value] * num_pieces
        pieces = cut.cut(name, value) if isinstance(value, torch.Tensor) else None
        if pieces is None:
            hint = "; set attn_implementation='sdpa'" if type(value).__name__ == "BlockMask" else ""
            raise self._refusal(f"it cannot be told which rows '{name}' ({_describe(value)}) belongs to{hint}")
        return pieces

    def _join(self, cut: RowCut | SequenceCut, name: str, values: Sequence[Any]) -> Any:
        """Put together what the pieces gave, in the order of the batch."""
        first = values[0]
        if isinstance(first, tuple):
            return tuple(self._join(cut, name, parts) for parts in zip(*values, strict=True))
        if all(value is first for value in values):
            return first
        dim = cut.joint_dim(values) if all(isinstance(value, torch.Tensor) for value in values) else None
        if dim is None:
            raise self._refusal(f"{name} ({_describe(first)}) cannot be put together from pieces")
        return torch.cat(list(values), dim)

    @contextmanager
    def _joined_records(self, cut: RowCut | SequenceCut) -> Iterator[None]:
        """While the body runs the pieces, collect what transformers' hooks record (router logits, attentions) of each.

        A model takes one record a layer for granted.
        """
        records = output_capturing._active_collector.get() or {}
        begins = {key: len(values) for key, values in records.items() if isinstance(values, list)}
        yield
        for key, begin in begins.items():
            added = records[key][begin:]
            num_each = len(added) // len(cut.sizes)
            records[key][begin:] = [
                self._join(cut, f"what it records as {key}", added[i::num_each]) for i in range(num_each)
            ]

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"layer_microbatch_size: {self._rows} does not work with this {type(self._layer).__name__}: {what}; or "
            "leave layer_microbatch_size out"
        )


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
