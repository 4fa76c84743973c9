"""How a model's tensors are stored in a checkpoint: keys, and which elements of which stored tensor each one fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..weights.conversion import Group, Skeleton, revert
from ..weights.model_folder import shorten
from ..weights.weights import BaseWeights

# A stored tensor's key, its first element that is filled, and the values from there on.
StoredValues = tuple[str, int, torch.Tensor]


class OriginalLayout:
    """The layout of the base's own files: the same keys and tensors, whatever transformers makes of them.

    What is quantized there has the keys and tensors that it had before.

    Attributes:
        tensors: every stored tensor, on the meta device, by key and in order.
        copied: keys of those that are copied from the base's files as they are.
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
            cast: the dtype of stored floats that the model does not read; None leaves them as they are.

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
        """Return the key of the stored tensor that holds a model tensor and nothing else; None if there is none."""
        source = self._sources.get(name)
        if source is None or isinstance(source, Group) or len(source.segments) != 1:
            return self._added.get(name)
        stored = source.segments[0].stored
        return stored.key if tuple(stored.shape) == source.shape else None

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        """Return the model tensors among `names` that are stored, in groups that `store` needs at once."""
        grouped: dict[object, list[str]] = {}
        for name in names:
            source = self._sources.get(name)
            if name in self._added or (source is not None and not isinstance(source, Group)):
                grouped[name] = [name]
            elif source is not None and id(source) in self._rewritten:
                grouped.setdefault(id(source), []).append(name)
        return list(grouped.values())

    def store(self, values: Mapping[str, torch.Tensor]) -> Iterator[StoredValues]:
        """Yield what the values of one batch fill."""
        for name, value in values.items():
            if name in self._added:
                yield self._added[name], 0, value
                continue
            source = self._sources[name]
            if isinstance(source, Group):
                yield from self._revert(source, values)
                return
            flat, position = value.reshape(-1), 0
            for segment in source.segments:
                yield segment.stored.key, segment.begin, flat[position : position + segment.numel]
                position += segment.numel

    def _revert(self, group: Group, values: Mapping[str, torch.Tensor]) -> Iterator[StoredValues]:
        made = revert(self._model, values)
        # What a loader would make of it: right shapes alone do not mean that the order is right.
        back = group.convert(self._skeleton, lambda stored: made[stored.key])
        if any(not torch.equal(back[name], value) for name, value in values.items()):
            raise self._refusal(group, "loading it again gives other values")
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
            f"the adapter changes '{group.name}', which transformers makes from other stored tensors and cannot "
            f"convert back ({reason})",
            fix="load the base with PEFT and use merge_and_unload instead",
        )


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
