"""How a model's tensors are spelled in a checkpoint: keys, and which elements of which stored tensor each one fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..weights.conversion import Group, Skeleton, is_converted, revert
from ..weights.model_folder import shorten
from ..weights.weights import BaseWeights

# A stored tensor's key, the first element, and the elements from there on.
Piece = tuple[str, int, torch.Tensor]


class Spelling(Protocol):
    """The stored tensors of a checkpoint, and how they are made of a model's tensors.

    Attributes:
        tensors: every stored tensor, on the meta device, by key and in order.
        copied: keys of those that are taken over from another checkpoint as they are.
    """

    tensors: dict[str, torch.Tensor]
    copied: list[str]

    def key_of(self, name: str) -> str | None:
        """Return the key of the stored tensor that a model tensor is, whole and by itself; None if there is none."""
        ...

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        """Return the model tensors among `names` that are stored, in groups that must be spelled together."""
        ...

    def spell(self, values: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
        """Yield what the values of one batch fill."""
        ...


class OriginalSpelling:
    """As the base's own files have it: the same keys and tensors, whatever transformers makes of them.

    What is quantized there has the keys and tensors that it had before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: BaseWeights,
        changed: Iterable[str],
        added: Mapping[str, torch.Tensor],
        dropped: Sequence[str] = (),
        cast: torch.dtype | None = None,
    ) -> None:
        """Plan the stored tensors.

        Args:
            model: the base's skeleton.
            weights: what the files give to it.
            changed: names of tensors that get other values than the files'.
            added: tensors on the meta device, by name, that the files do not have and that are to be stored too.
            dropped: beginnings of keys to leave out where the model has no place for them.
            cast: what stored numbers become that the model does not read.

        Raises:
            ConfigError: a changed tensor is made by a conversion that transformers cannot undo.
        """
        self._model, self._skeleton = model, Skeleton(model)
        self._sources = {name: source for name in weights.names if (source := weights.stored_as(name)) is not None}
        self._added: dict[str, str] = {}
        changed = set(changed)
        self._rewritten = {
            id(source): source
            for name, source in self._sources.items()
            if isinstance(source, Group) and name in changed
        }
        dtypes: dict[str, torch.dtype] = {}
        is_covered = set()
        for name, source in self._sources.items():
            for stored in _stored_in(source):
                dtypes[stored.key] = torch.promote_types(
                    dtypes.get(stored.key, weights.target_dtype(name)), weights.target_dtype(name)
                )
                if not isinstance(source, Group) or id(source) in self._rewritten:
                    is_covered.add(stored.key)
        self.tensors, self.copied = {}, []
        for stored in sorted(weights.stored.values(), key=lambda stored: (stored.file, stored.begin_byte)):
            if stored.key not in dtypes:
                if stored.key.startswith(tuple(dropped)):
                    continue
                dtypes[stored.key] = cast if cast is not None and stored.dtype.is_floating_point else stored.dtype
            self.tensors[stored.key] = _on_meta(stored.shape, dtypes[stored.key])
            if stored.key not in is_covered:
                self.copied.append(stored.key)
        for name, meta in added.items():
            (key,) = revert(model, {name: meta})
            self._added[name] = key
            self.tensors[key] = meta
        for group in self._rewritten.values():
            self._check_reversible(group, weights)

    def key_of(self, name: str) -> str | None:
        source = self._sources.get(name)
        if source is None or isinstance(source, Group) or len(source.segments) != 1:
            return self._added.get(name)
        stored = source.segments[0].stored
        return stored.key if tuple(stored.shape) == source.shape else None

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        grouped: dict[object, list[str]] = {}
        for name in names:
            source = self._sources.get(name)
            if name in self._added or (source is not None and not isinstance(source, Group)):
                grouped[name] = [name]
            elif source is not None and id(source) in self._rewritten:
                grouped.setdefault(id(source), []).append(name)
        return list(grouped.values())

    def spell(self, values: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
        for name, value in values.items():
            if name in self._added:
                yield self._added[name], 0, value
                continue
            source = self._sources[name]
            if isinstance(source, Group):
                yield from self._take_apart(source, values)
                return
            flat, position = value.reshape(-1), 0
            for segment in source.segments:
                yield segment.stored.key, segment.begin, flat[position : position + segment.numel]
                position += segment.numel

    def _take_apart(self, group: Group, values: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
        made = revert(self._model, values)
        # What a loader would make of it: a shape alone does not tell that an order is right.
        back = group.convert(self._skeleton, lambda stored: made[stored.key])
        if any(not torch.equal(back[name], value) for name, value in values.items()):
            raise self._refusal(group, "it comes back with other numbers")
        for key, tensor in made.items():
            yield key, 0, tensor

    def _check_reversible(self, group: Group, weights: BaseWeights) -> None:
        names = [name for name, source in self._sources.items() if source is group]
        expected = {stored.key: tuple(stored.shape) for stored in _stored_in(group)}
        metas = {name: _on_meta(weights.shape(name), weights.target_dtype(name)) for name in names}
        try:
            found = {key: tuple(tensor.shape) for key, tensor in revert(self._model, metas).items()}
        except Exception as error:  # transformers' operations raise whatever torch does
            raise self._refusal(group, " ".join(str(error).split())) from error
        if found != expected:
            raise self._refusal(group, f"it gives {shorten(sorted(found))}, not {shorten(sorted(expected))}")

    def _refusal(self, group: Group, reason: str) -> ConfigError:
        return ConfigError(
            f"the adapter changes '{group.name}', which transformers makes from other stored tensors and cannot take "
            f"apart again ({reason}): load the base with PEFT and use merge_and_unload instead"
        )


class ModelSpelling:
    """As transformers' `save_pretrained` would write the model."""

    def __init__(
        self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], units: Sequence[Sequence[str]]
    ) -> None:
        """Plan the stored tensors.

        Args:
            model: the model without adapters; its weights are not looked at.
            tensors: what is to be stored, on the meta device, by the names in the model.
            units: the names that are known at one time.

        Raises:
            ConfigError: a conversion needs tensors of several units at once.
        """
        self._model = model
        self._metas = dict(tensors)
        self.copied: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._is_renaming = not is_converted(model)
        for names in units:
            known = {name: tensors[name] for name in names if name in tensors}
            self.tensors |= revert(model, known)
        whole = {key: tuple(tensor.shape) for key, tensor in revert(model, tensors).items()}
        if whole != {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}:
            raise ConfigError(
                f"{type(model).__name__} is saved by a conversion that needs several layers at once, which merging a "
                "unit at a time cannot do: save the adapter and merge it with PEFT's merge_and_unload"
            )

    def key_of(self, name: str) -> str | None:
        if name not in self._metas:
            return None
        made = revert(self._model, {name: self._metas[name]})
        same = [key for key, tensor in made.items() if tensor.shape == self._metas[name].shape]
        return same[0] if len(made) == 1 and same else None

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        known = [name for name in names if name in self._metas]
        return [[name] for name in known] if self._is_renaming else [known] if known else []

    def spell(self, values: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
        for key, tensor in revert(self._model, values).items():
            yield key, 0, tensor


def _stored_in(source: Any) -> Iterator[Any]:
    if isinstance(source, Group):
        for stored in source.sources.values():
            yield from stored
    else:
        seen = {}
        for segment in source.segments:
            seen[segment.stored.key] = segment.stored
        yield from seen.values()


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
