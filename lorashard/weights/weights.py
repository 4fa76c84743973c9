"""Where a base model's tensors come from, and any byte range of them read in the dtype that the model computes in."""

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
from .conversion import Group, Skeleton, drop_ignored, map_keys
from .model_folder import read_config_json, shorten
from .safetensors_files import Checkpoint, StoredTensor
from .segments import Run, Runs
from .stored_finding import find_weights
from .stored_formats import StoredFormat, find_stored_format
from .stored_parts import StoredParts, find_parts
from .stored_tensors import Constant, MadeTensor

# What a cast holds of the file at a time.
PIECE_BYTES = 16 * 2**20
# Numbers that are dequantized at a time.
_PIECE_NUMEL = 4 * 2**20

_logger = logging.getLogger(__name__)


class BaseWeights:
    """The values of a base model's parameters and persistent buffers, read from a checkpoint on demand.

    Tensors are named as in the model before adapters are injected; names that are tied read the same bytes. Values are
    those that `from_pretrained` would give, bit for bit. Bytes are counted by the checkpoint.

    What a checkpoint holds quantized is read here dequantized, by names and ranges of the plain numbers; where its
    stored bytes are of a format that a base can be kept in, they can be read as parts of that format too.

    Attributes:
        stored_format: How the checkpoint is quantized; None if it is not.
        stored: What the files hold, by key, as if it had never been quantized.
        missing: Names in the model for which the checkpoint has no value and needs none (`allow_missing`, or the
            model's class says so): whoever builds the model must initialize them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        skeleton: Skeleton,
        tensors: dict[str, torch.Tensor],
        sources: dict[str, Runs | Group],
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
        self._parts: dict[str, StoredParts | None] = {}

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
        """Find the source of every parameter and persistent buffer; nothing is read, save tied tensors stored twice.

        Args:
            model: Skeleton built in `dtype`, weights tied, no adapter injected. Its values are never looked at.
            dtype: Compute dtype. What the model keeps in another one (`_keep_in_fp32_modules`, integers) stays so.
            allow_missing: Prefixes of model names that the checkpoint may lack, such as a new head's `score.`.
            allow_unexpected: Prefixes of stored keys that the model may have no place for, such as `lm_head.`.

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
        sources: dict[str, Runs | Group] = {}
        faults: dict[str, list[str]] = {"missing": [], "unexpected": [], "of another shape": [], "not convertible": []}
        failed = set()
        for group in groups:
            try:
                made = group.convert(skeleton, partial(_describe, dtype=group.dtype))
            except Exception as error:  # transformers' operations raise whatever torch does
                faults["not convertible"].append(f"{group.name} ({error})")
                failed.add(group.name)
                continue
            runs = group.concatenate(made)
            for name, tensor in made.items():
                if name not in expected:
                    unexpected[name] = next(iter(group.sources.values()))[0].key
                    continue
                if tensor.shape != expected[name].shape:
                    shapes = f"{list(expected[name].shape)} in the model, {list(tensor.shape)} in the checkpoint"
                    faults["of another shape"].append(f"{name} ({shapes})")
                if name in sources:
                    raise CheckpointError(
                        f"The weights in {checkpoint.folder} give {name} twice. Remove one of the two."
                    )
                tensors[name] = tensor
                sources[name] = group if runs is None else runs[name]

        tied = _find_tied(expected)
        absent = {name for names in tied if not any(name in sources for name in names) for name in names}
        lost, strays = drop_ignored(model, absent - failed, unexpected)
        faults["missing"] = sorted(name for name in lost if not name.startswith(tuple(allow_missing)))
        stray_keys = {unexpected[name] for name in strays}
        faults["unexpected"] = sorted(key for key in stray_keys if not key.startswith(tuple(allow_unexpected)))
        if any(faults.values()):
            found = "; ".join(f"{len(names)} {fault}: {shorten(names)}" for fault, names in faults.items() if names)
            raise CheckpointError(
                f"The weights in {checkpoint.folder} do not fit {type(model).__name__} as its config describes it: "
                f"{found}. Use the weights, config.json and model class that belong together."
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

    def stored_as(self, name: str) -> Runs | Group | None:
        """Return how the files hold a tensor under its own name; None if it is missing, or stored for a tied name."""
        return self._own_sources.get(name)

    def find_stretches(self, name: str) -> list[tuple[Path, int, int]] | None:
        """Return the stretches (file, first byte, number of bytes) that are a tensor as the model has it.

        None means that no file holds it so: it has another dtype there, or is computed from others.
        """
        source = self._sources[name]
        return None if isinstance(source, Group) else _find_stretches(source, self.target_dtype(name))

    def stored_quantizer(self, name: str) -> Quantizer | None:
        """Return the format that the files hold a weight in, if a base can be kept in it as it is; else None."""
        parts = self._find_parts(name)
        return parts.quantizer if parts else None

    def stored_quantizers(self) -> dict[str, Quantizer]:
        """Return the `stored_quantizer` of each weight that has one."""
        found = {name: self.stored_quantizer(name) for name in self.names}
        return {name: quantizer for name, quantizer in found.items() if quantizer is not None}

    def describe_stored(self) -> str | None:
        """Return in a line how a quantized checkpoint is read; None for one that is not quantized."""
        if self.stored_format is None:
            return None
        where = f"{self._checkpoint.folder} is stored in {self.stored_format.description}"
        made = [name for name in self.names if self.is_made(name)]
        rest = [name for name in made if self.stored_quantizer(name) is None]
        dtypes = " and ".join(sorted({name_of(self.target_dtype(name)) for name in rest}))
        if not rest:
            return f"{where}: its bytes are kept as they are"
        if len(rest) == len(made):
            return f"{where}: dequantized to {dtypes} while it is read"
        return f"{where}: its bytes are kept as they are, but {shorten(rest)} dequantized to {dtypes} while it is read"

    def is_made(self, name: str) -> bool:
        """Tell whether the files hold a weight, or what it is computed from, quantized."""
        source = self._sources[name]
        if isinstance(source, Group):
            return any(isinstance(stored, MadeTensor) for each in source.sources.values() for stored in each)
        return any(isinstance(run.stored, MadeTensor) for run in source.runs)

    def read_elements(self, stored: StoredTensor, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end) of one of `stored`, flat and in its own dtype."""
        return _read_elements(self._checkpoint, stored, begin, end)

    def find_part_stretches(self, name: str, part: int) -> list[tuple[Path, int, int]] | torch.Tensor | None:
        """Return where the files hold a part of a weight's `stored_quantizer`, as `find_stretches` does.

        A few numbers that no file holds as such are returned themselves, as bytes.
        """
        runs = self._part_runs(name, part)
        dtype = runs.runs[0].stored.dtype
        if not all(isinstance(run.stored, Constant) for run in runs.runs):
            return _find_stretches(runs, dtype)
        out = torch.empty(runs.numel * dtype.itemsize, dtype=torch.uint8)
        self._read_runs(runs, dtype, 0, len(out), out)
        return out

    def read_part_range(self, name: str, part: int, begin: int, end: int, out: torch.Tensor) -> None:
        """Read bytes [begin, end) of a part of a weight's `stored_quantizer`, as the files hold it, into `out`."""
        runs = self._part_runs(name, part)
        self._read_runs(runs, runs.runs[0].stored.dtype, begin, end, out)

    def _part_runs(self, name: str, part: int) -> Runs:
        found = self._find_parts(name)
        if found is None:
            raise ValueError(f"{name} is not stored in parts")
        return found.runs[part]

    def _find_parts(self, name: str) -> StoredParts | None:
        if name not in self._parts:
            source = self._sources.get(name)
            self._parts[name] = find_parts(source) if isinstance(source, Runs) else None
        return self._parts[name]

    def read_range(self, name: str, begin: int, end: int, out: torch.Tensor) -> None:
        """Read bytes [begin, end) of a tensor, as it will be in the model, into `out`.

        Reads only what those bytes need. What must be cast passes through a buffer of 16 MiB. A tensor that
        transformers computes from others is computed whole, for this call or once for the surrounding `unit`.

        Args:
            out: uint8 CPU tensor of `end - begin` consecutive bytes.
        """
        if not 0 <= begin <= end <= self.num_bytes(name) or out.numel() != end - begin:
            raise ValueError(f"bytes [{begin}, {end}) of {name} ({self.num_bytes(name)}) into {out.numel()} bytes")
        source = self._sources[name]
        if isinstance(source, Group):
            out.copy_(_as_bytes(self._convert(name, source))[begin:end])
            return
        self._read_runs(source, self.target_dtype(name), begin, end, out)

    def _read_runs(self, source: Runs, dtype: torch.dtype, begin: int, end: int, out: torch.Tensor) -> None:
        position = begin // dtype.itemsize * dtype.itemsize
        for run in source.cut(begin // dtype.itemsize, math.ceil(end / dtype.itemsize)):
            run_end = position + run.numel * dtype.itemsize
            run_begin, first, last = position, max(position, begin), min(run_end, end)
            self._read_run(run, dtype, first - run_begin, last - run_begin, out[first - begin : last - begin])
            position = run_end

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor, in memory of its own."""
        out = torch.empty(self.shape(name), dtype=self.target_dtype(name))
        self.read_range(name, 0, self.num_bytes(name), _as_bytes(out))
        return out

    @contextmanager
    def unit(self, names: Iterable[str]) -> Iterator[None]:
        """Keep what is computed for `names` until the block ends, so that many ranges of them are computed once.

        Memory: the computed tensors among `names`, and while one is made, what it is made of. Nothing for the others.
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
            made = group.convert(self._skeleton, lambda stored: self._read_stored(stored, group.dtype))
        self._converted.update({key: value for key, value in made.items() if key in self._unit_names})
        return made[name]

    def _read_stored(self, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(stored.shape, dtype=dtype)
        run = Run(stored, 0, out.numel())
        self._read_run(run, dtype, 0, out.numel() * out.itemsize, _as_bytes(out))
        return out

    def _read_run(self, run: Run, dtype: torch.dtype, begin: int, end: int, out: torch.Tensor) -> None:
        """Read bytes [begin, end) of a run in `dtype`."""
        stored = run.stored
        if isinstance(stored, MadeTensor):
            self._read_made(run, stored, dtype, begin, end, out)
            return
        if stored.dtype == dtype:
            offset = run.begin * dtype.itemsize
            self._checkpoint.read_bytes(stored, offset + begin, offset + end, out)
            return
        step = max(1, PIECE_BYTES // stored.dtype.itemsize)
        last = math.ceil(end / dtype.itemsize)
        for first in range(begin // dtype.itemsize, last, step):
            numel = min(step, last - first)
            raw = torch.empty(numel * stored.dtype.itemsize, dtype=torch.uint8)
            offset = (run.begin + first) * stored.dtype.itemsize
            self._checkpoint.read_bytes(stored, offset, offset + len(raw), raw)
            cast = _as_bytes(raw.view(stored.dtype).to(dtype))
            piece = first * dtype.itemsize
            low, high = max(begin, piece), min(end, piece + len(cast))
            out[low - begin : high - begin] = cast[low - piece : high - piece]

    def _read_made(
        self, run: Run, stored: MadeTensor, dtype: torch.dtype, begin: int, end: int, out: torch.Tensor
    ) -> None:
        read = partial(_read_elements, self._checkpoint)
        last = math.ceil(end / dtype.itemsize)
        for first in range(begin // dtype.itemsize, last, _PIECE_NUMEL):
            numel = min(_PIECE_NUMEL, last - first)
            made = _as_bytes(stored.make(run.begin + first, run.begin + first + numel, dtype, read))
            piece = first * dtype.itemsize
            low, high = max(begin, piece), min(end, piece + len(made))
            out[low - begin : high - begin] = made[low - piece : high - piece]

    def _tie(self, tied: list[list[str]]) -> None:
        """Let tied names share one source; where several are stored, transformers ties them only if they are equal."""
        for names in tied:
            stored = [name for name in names if name in self._sources]
            for name in stored[1:]:
                if not self._is_equal(stored[0], name):
                    raise CheckpointError(
                        f"The config in {self._checkpoint.folder} ties {stored[0]} and {name}, but the weights hold "
                        "different values for them. Set tie_word_embeddings to false in config.json, or remove one."
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


def _describe(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=dtype, device="meta")


def _read_elements(checkpoint: Checkpoint, stored: StoredTensor, begin: int, end: int) -> torch.Tensor:
    """Return elements [begin, end) of a stored tensor, flat, in its own dtype."""
    if isinstance(stored, MadeTensor):
        return stored.make(begin, end, stored.dtype, partial(_read_elements, checkpoint))
    raw = torch.empty((end - begin) * stored.dtype.itemsize, dtype=torch.uint8)
    checkpoint.read_bytes(stored, begin * stored.dtype.itemsize, end * stored.dtype.itemsize, raw)
    return raw.view(stored.dtype)


def _find_stretches(source: Runs, dtype: torch.dtype) -> list[tuple[Path, int, int]] | None:
    if any(isinstance(run.stored, MadeTensor) or run.stored.dtype != dtype for run in source.runs):
        return None
    return [
        (run.stored.file, run.stored.begin_byte + run.begin * dtype.itemsize, run.numel * dtype.itemsize)
        for run in source.runs
    ]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes; they are its own memory where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _find_tied(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names that stand for one tensor, together; most names stand alone."""
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    return list(tied.values())


def _check_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    # transformers' loader takes a skeleton's own dtypes for the model's wish.
    if found and dtype not in found:
        raise ValueError(
            f"the skeleton is built in {found}, not in {dtype}: build it with from_config(config, dtype=...)"
        )
