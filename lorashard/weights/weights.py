"""The tensors of a base model: where the files hold them, and any byte range of them in the model's dtype."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..quantization.format import Quantizer
from ..runtime.dtypes import name_of
from .computed_tensors import ComputedTensor, Constant
from .conversion import Group, Skeleton, drop_ignored, map_keys
from .model_folder import read_config_json, shorten
from .quantized_parts import QuantizedParts, find_quantized_parts
from .safetensors_files import Checkpoint, StoredTensor
from .segments import Segment, SegmentedTensor
from .stored_finding import find_weights
from .stored_formats import StoredFormat, find_stored_format

# How much of a stored tensor is cast at a time, or of the float32 values of a computed one.
PIECE_BYTES = 16 * 2**20

_logger = logging.getLogger(__name__)


class BaseWeights:
    """The values of a base model's parameters and persistent buffers, read from a checkpoint on demand.

    Tensors are named as in the model before adapters are injected; names that are tied read the same bytes. Values are
    those that `from_pretrained` would give, bit for bit. Bytes are counted by the checkpoint.

    Quantized tensors of a checkpoint are dequantized while they are read, by name and range of the dequantized values.
    If a base can be kept in their format, they can also be read as the parts of that format.

    Attributes:
        stored_format: How the checkpoint is quantized; None if it is not.
        stored: The tensors of the files by key, under the keys and shapes of unquantized weights.
        missing: Names in the model that the checkpoint has no values for and may lack (`allow_missing`, or the model's
            class ignores them): the caller must initialize them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        skeleton: Skeleton,
        tensors: dict[str, torch.Tensor],
        sources: dict[str, SegmentedTensor | Group],
        missing: Iterable[str],
        stored: Mapping[str, StoredTensor],
        stored_format: StoredFormat | None,
    ) -> None:
        self.stored = stored
        self.stored_format = stored_format
        self.missing = tuple(sorted(missing))
        self._checkpoint = checkpoint
        self._skeleton = skeleton
        self._tensors = tensors
        self._sources = sources
        self._own_sources = dict(sources)  # before names that are tied share one
        self._unit_names: frozenset[str] = frozenset()
        self._converted: dict[str, torch.Tensor] = {}
        self._parts: dict[str, QuantizedParts | None] = {}

    @classmethod
    def plan(
        cls,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
    ) -> BaseWeights:
        """Find the source of every parameter and persistent buffer; read only tied tensors that are stored twice.

        Args:
            model: Skeleton built in `dtype`, weights tied, no adapter injected. Its values are never read.
            dtype: Compute dtype. What the model keeps in another one (`_keep_in_fp32_modules`, integers) stays so.
            allow_missing: Prefixes of model names that the checkpoint may lack, such as a new head's `score.`.
            allow_unexpected: Prefixes of stored keys that the model may lack, such as `lm_head.`.

        Raises:
            CheckpointError: Tensors are missing, unexpected or of another shape, the weights are quantized in a way
                that cannot be read, or tied tensors are stored twice with different values.
        """
        _check_dtype(model, dtype)
        stored_format = find_stored_format(read_config_json(checkpoint.folder), str(checkpoint.folder))
        stored: Mapping[str, StoredTensor] = checkpoint.tensors
        if stored_format is not None:
            stored = find_weights(stored_format, checkpoint.tensors, dtype, partial(_read_elements, checkpoint))
        expected: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        groups, unexpected = map_keys(model, stored, dtype)
        skeleton = Skeleton(model)
        tensors: dict[str, torch.Tensor] = {}
        sources: dict[str, SegmentedTensor | Group] = {}
        faults: dict[str, list[str]] = {"missing": [], "unexpected": [], "of another shape": [], "not convertible": []}
        failed = set()
        for group in groups:
            try:
                converted = group.convert(skeleton, partial(_on_meta, dtype=group.dtype))
            except Exception as error:  # transformers' operations raise whatever torch does
                faults["not convertible"].append(f"{group.name} ({error})")
                failed.add(group.name)
                continue
            segmented = group.find_segments(converted)
            for name, tensor in converted.items():
                if name not in expected:
                    unexpected[name] = next(iter(group.sources.values()))[0].key
                    continue
                if tensor.shape != expected[name].shape:
                    shapes = f"{list(expected[name].shape)} in the model, {list(tensor.shape)} in the checkpoint"
                    faults["of another shape"].append(f"{name} ({shapes})")
                if name in sources:
                    raise CheckpointError(
                        f"{name} is stored twice, converted and unconverted", where=checkpoint.folder, fix="remove one"
                    )
                tensors[name] = tensor
                sources[name] = group if segmented is None else segmented[name]

        tied = _find_tied(expected)
        absent = {name for names in tied if not any(name in sources for name in names) for name in names}
        lost, surplus = drop_ignored(model, absent - failed, unexpected)
        faults["missing"] = sorted(name for name in lost if not name.startswith(tuple(allow_missing)))
        surplus_keys = {unexpected[name] for name in surplus}
        faults["unexpected"] = sorted(key for key in surplus_keys if not key.startswith(tuple(allow_unexpected)))
        if any(faults.values()):
            found = "; ".join(f"{len(names)} {fault}: {shorten(names)}" for fault, names in faults.items() if names)
            raise CheckpointError(
                f"the weights do not fit {type(model).__name__} as its config describes it",
                where=checkpoint.folder,
                found=found,
                fix="use weights, config.json and a model class that belong together",
            )
        weights = cls(checkpoint, skeleton, tensors, sources, absent, stored, stored_format)
        weights._tie(tied)
        return weights

    @property
    def names(self) -> KeysView[str]:
        """Every parameter and persistent buffer that has a value here."""
        return self._sources.keys()

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        return self._tensors[name].shape

    def target_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor has in the model."""
        return self._tensors[name].dtype

    def num_bytes(self, name: str) -> int:
        """Return the bytes that a tensor takes in the model."""
        return self._tensors[name].numel() * self._tensors[name].itemsize

    @property
    def files(self) -> list[Path]:
        """The files that hold the checkpoint's tensors."""
        return self._checkpoint.files

    def stored_as(self, name: str) -> SegmentedTensor | Group | None:
        """Return how the files hold a tensor under its own name; None if it is missing, or stored under a tied name."""
        return self._own_sources.get(name)

    def find_stretches(self, name: str) -> list[tuple[Path, int, int]] | None:
        """Return the byte ranges (file, first byte, number of bytes) that hold a tensor exactly as it is in the model.

        None means that there are none: it has another dtype in the files, or is computed from others.
        """
        source = self._sources[name]
        return None if isinstance(source, Group) else _find_stretches(source, self.target_dtype(name))

    def stored_quantizer(self, name: str) -> Quantizer | None:
        """Return the format in which the files hold a weight, if a base can be kept in it; else None."""
        parts = self._find_parts(name)
        return parts.quantizer if parts else None

    def stored_quantizers(self) -> dict[str, Quantizer]:
        """Return the `stored_quantizer` of each weight that has one."""
        found = {name: self.stored_quantizer(name) for name in self.names}
        return {name: quantizer for name, quantizer in found.items() if quantizer is not None}

    def describe_stored(self) -> str | None:
        """Return in one line how a quantized checkpoint is read; None for one that is not quantized."""
        if self.stored_format is None:
            return None
        where = f"{self._checkpoint.folder} is stored in {self.stored_format.description}"
        quantized = [name for name in self.names if self.is_made(name)]
        rest = [name for name in quantized if self.stored_quantizer(name) is None]
        dtypes = " and ".join(sorted({name_of(self.target_dtype(name)) for name in rest}))
        if not rest:
            return f"{where}: its bytes are kept as they are"
        if len(rest) == len(quantized):
            return f"{where}: dequantized to {dtypes} while it is read"
        return f"{where}: its bytes are kept as they are, except {shorten(rest)}, which is dequantized to {dtypes}"

    def is_made(self, name: str) -> bool:
        """Tell whether the files hold a weight, or what it is computed from, quantized."""
        source = self._sources[name]
        if isinstance(source, Group):
            return any(isinstance(stored, ComputedTensor) for each in source.sources.values() for stored in each)
        return any(isinstance(segment.stored, ComputedTensor) for segment in source.segments)

    def read_elements(self, stored: StoredTensor, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of one of `stored`, flat and in its own dtype."""
        return _read_elements(self._checkpoint, stored, begin, end)

    def find_part_stretches(self, name: str, part: int) -> list[tuple[Path, int, int]] | torch.Tensor | None:
        """Return where the files hold a part of a weight's `stored_quantizer`, as `find_stretches` does.

        A constant, which no file holds as such, is returned itself, as bytes.
        """
        found = self._find_part(name, part)
        dtype = found.segments[0].stored.dtype
        if not all(isinstance(segment.stored, Constant) for segment in found.segments):
            return _find_stretches(found, dtype)
        out = torch.empty(found.numel * dtype.itemsize, dtype=torch.uint8)
        self._read_segments(found, dtype, 0, len(out), out)
        return out

    def read_part_range(self, name: str, part: int, begin: int, end: int, out: torch.Tensor) -> None:
        """Read bytes [begin, end) of a part of a weight's `stored_quantizer`, as the files hold it, into `out`."""
        found = self._find_part(name, part)
        self._read_segments(found, found.segments[0].stored.dtype, begin, end, out)

    def _find_part(self, name: str, part: int) -> SegmentedTensor:
        found = self._find_parts(name)
        if found is None:
            raise ValueError(f"{name} is not stored in parts")
        return found.parts[part]

    def _find_parts(self, name: str) -> QuantizedParts | None:
        if name not in self._parts:
            source = self._sources.get(name)
            self._parts[name] = find_quantized_parts(source) if isinstance(source, SegmentedTensor) else None
        return self._parts[name]

    def read_range(self, name: str, begin: int, end: int, out: torch.Tensor) -> None:
        """Read bytes [begin, end) of a tensor, as it will be in the model, into `out`.

        Reads only what those bytes need. Values that must be cast pass through a buffer of 16 MiB. A tensor that
        transformers computes from others is computed completely, for this call or once for the surrounding `unit`.

        Args:
            out: uint8 CPU tensor of `end - begin` consecutive bytes.
        """
        if not 0 <= begin <= end <= self.num_bytes(name) or out.numel() != end - begin:
            raise ValueError(f"bytes [{begin}, {end}) of {name} ({self.num_bytes(name)}) into {out.numel()} bytes")
        source = self._sources[name]
        if isinstance(source, Group):
            out.copy_(_as_bytes(self._convert(name, source))[begin:end])
            return
        self._read_segments(source, self.target_dtype(name), begin, end, out)

    def _read_segments(
        self, source: SegmentedTensor, dtype: torch.dtype, begin: int, end: int, out: torch.Tensor
    ) -> None:
        position = begin // dtype.itemsize * dtype.itemsize
        for segment in source.slice(begin // dtype.itemsize, math.ceil(end / dtype.itemsize)):
            next_position = position + segment.numel * dtype.itemsize
            first, last = max(position, begin), min(next_position, end)
            self._read_segment(segment, dtype, first - position, last - position, out[first - begin : last - begin])
            position = next_position

    def read(self, name: str) -> torch.Tensor:
        """Return a complete tensor in newly allocated memory."""
        out = torch.empty(self.shape(name), dtype=self.target_dtype(name))
        self.read_range(name, 0, self.num_bytes(name), _as_bytes(out))
        return out

    @contextmanager
    def unit(self, names: Iterable[str]) -> Iterator[None]:
        """Keep the computed tensors among `names` until the block ends, so that reading ranges computes each once.

        Memory: the computed tensors among `names`, and while one is computed, its inputs. Nothing for the others.
        """
        if self._unit_names:
            raise RuntimeError("a unit is open already: the tensors of one unit at a time are kept in memory")
        self._unit_names = frozenset(names)
        try:
            yield
        finally:
            self._unit_names = frozenset()
            self._converted.clear()

    def _convert(self, name: str, group: Group) -> torch.Tensor:
        if name in self._converted:
            return self._converted[name]
        with torch.no_grad():
            converted = group.convert(self._skeleton, lambda stored: self._read_stored(stored, group.dtype))
        self._converted.update({key: value for key, value in converted.items() if key in self._unit_names})
        return converted[name]

    def _read_stored(self, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(stored.shape, dtype=dtype)
        self._read_segment(Segment(stored, 0, out.numel()), dtype, 0, out.numel() * out.itemsize, _as_bytes(out))
        return out

    def _read_segment(self, segment: Segment, dtype: torch.dtype, begin: int, end: int, out: torch.Tensor) -> None:
        """Read bytes [begin, end) of a segment in `dtype`."""
        stored = segment.stored
        is_computed = isinstance(stored, ComputedTensor)
        if stored.dtype == dtype and not is_computed:
            offset = segment.begin * dtype.itemsize
            self._checkpoint.read_bytes(stored, offset + begin, offset + end, out)
            return
        step = max(1, PIECE_BYTES // (4 if is_computed else stored.dtype.itemsize))
        last = math.ceil(end / dtype.itemsize)
        for first in range(begin // dtype.itemsize, last, step):
            numel = min(step, last - first)
            offset = segment.begin + first
            values = _as_bytes(_read_elements(self._checkpoint, stored, offset, offset + numel, dtype))
            piece = first * dtype.itemsize
            low, high = max(begin, piece), min(end, piece + len(values))
            out[low - begin : high - begin] = values[low - piece : high - piece]

    def _tie(self, tied: list[list[str]]) -> None:
        """Let tied names share one source; where several are stored, transformers ties them only if they are equal."""
        for names in tied:
            stored = [name for name in names if name in self._sources]
            for name in stored[1:]:
                if not self._is_equal(stored[0], name):
                    raise CheckpointError(
                        f"the config ties {stored[0]} and {name}, but the weights hold different values for them",
                        where=self._checkpoint.folder,
                        fix="set tie_word_embeddings to false in config.json, or remove one",
                    )
            for name in names if stored else ():
                self._sources[name], self._tensors[name] = self._sources[stored[0]], self._tensors[stored[0]]

    def _is_equal(self, name: str, other: str) -> bool:
        if self.shape(name) != self.shape(other) or self.target_dtype(name) != self.target_dtype(other):
            return False
        for begin in range(0, self.num_bytes(name), PIECE_BYTES):
            end = min(begin + PIECE_BYTES, self.num_bytes(name))
            pieces = torch.empty(2, end - begin, dtype=torch.uint8)
            self.read_range(name, begin, end, pieces[0])
            self.read_range(other, begin, end, pieces[1])
            if not torch.equal(*pieces.view(self.target_dtype(name))):
                return False
        return True


def _on_meta(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=dtype, device="meta")


def _read_elements(
    checkpoint: Checkpoint, stored: StoredTensor, begin: int, end: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return elements [begin, end) of a stored tensor, flat, in `dtype` or its own."""
    if isinstance(stored, ComputedTensor):
        return stored.compute(begin, end, dtype or stored.dtype, partial(_read_elements, checkpoint))
    raw = torch.empty((end - begin) * stored.dtype.itemsize, dtype=torch.uint8)
    checkpoint.read_bytes(stored, begin * stored.dtype.itemsize, end * stored.dtype.itemsize, raw)
    return raw.view(stored.dtype).to(dtype or stored.dtype)


def _find_stretches(source: SegmentedTensor, dtype: torch.dtype) -> list[tuple[Path, int, int]] | None:
    if any(isinstance(segment.stored, ComputedTensor) or segment.stored.dtype != dtype for segment in source.segments):
        return None
    return [
        (part.stored.file, part.stored.begin_byte + part.begin * dtype.itemsize, part.numel * dtype.itemsize)
        for part in source.segments
    ]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes: a view if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _find_tied(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each tensor; most tensors have one."""
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    return list(tied.values())


def _check_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    # transformers' loader keeps the dtypes of the skeleton.
    if found and dtype not in found:
        raise ValueError(f"expected a skeleton in {dtype}, found {found}: build it with from_config(config, dtype=...)")
