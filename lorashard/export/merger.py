"""An adapter merged into its base, a unit at a time, and written as a model of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from ..config.quantization_options import Quantization
from ..model.adapters import base_test, inject
from ..model.refusals import check_config
from ..model.saved import count_labels, read_config, restore
from ..model.skeleton import put_placeholders
from ..model.units import find_units
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..weights.safetensors_files import Checkpoint
from .base_plan import copy_stored, find_dropped_keys, find_dtype, find_held, plan_base
from .base_values import BaseTensors, BaseValues, describe
from .companions import write_companions
from .quantized_base import find_quantized
from .requantized import QuantizedLayout, Requantized, find_requantized
from .staging import check_target, publish
from .stored_layout import OriginalLayout
from .targets import find_targets, find_tuner, merge_target, named_base_tensors, to_base_name
from .writing import TensorWriter, plan_files

# How far apart two results of one weight may be for rounding alone, relative to the largest of their values.
_ROUNDING = 1e-2

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeReport:
    """What merging has written.

    Attributes:
        out: the folder.
        dtype: the model's.
        num_tensors: tensors in the files.
        num_changed: tensors of the model that the adapter has changed.
        num_files: files that hold weights.
        num_bytes: bytes of these files.
        is_untied: the embedding and the LM head are two weights where the base's were one.
        num_dequantized: tensors of the model that have the values of the quantized base, not those of its files.
    """

    out: Path
    dtype: torch.dtype
    num_tensors: int
    num_changed: int
    num_files: int
    num_bytes: int
    is_untied: bool
    num_dequantized: int = 0


@dataclass
class _MergeUnit:
    """What one rank merges and writes at a time: tensors of the model by name, and stored keys to copy."""

    names: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)


def merge_checkpoint(
    adapter: Path,
    out: Path,
    base_folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    quantized_dtype: torch.dtype | None = None,
    requantize: Quantization | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Write the base in `base_folder` with a saved adapter merged into it, as a model of its own.

    The values are those of `from_pretrained(base, dtype=dtype)`, PEFT's `from_pretrained` and `merge_and_unload` on the
    same device, bit for bit; the keys are those of the base's files. Of a quantized base, they are those of its
    dequantized weights.

    Args:
        adapter: the folder of a saved adapter.
        out: a folder that does not exist or is empty.
        dtype: what the arithmetic is done in and written; None takes the base's own.
        max_shard_size: of each file, in bytes or such as "5GB".
        device: where the arithmetic is done; the CPU by default.
        quantization: what the base is quantized to before it is dequantized, and merged.
        quantized_dtype: what it has before that and is dequantized to; None takes `dtype`.
        requantize: what the merged weights are quantized to; bitsandbytes' formats alone.
        advance: called with how many units of how many are merged.

    Raises:
        ConfigError: PEFT cannot merge the adapter, or `out` holds something.
        CheckpointError: files are missing, damaged or do not fit each other, or writing failed.

    Ranks: collective over all ranks, which share the work. All see the same files.
    Memory: the adapter, a module of the base, and what PEFT's merge of it takes.
    """
    raise_on_all_ranks(lambda: check_target(out), on_rank=0)
    device = device or torch.device("cpu")
    config = read_config(adapter)
    check_config(config)
    config.inference_mode = False  # its biases, if it trains some, are tensors of the adapter
    cast = dtype
    with Checkpoint.open(base_folder) as checkpoint:
        dtype = dtype or find_dtype(base_folder, checkpoint, trust_remote_code)
        plan = partial(
            plan_base,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            num_labels=count_labels(adapter),
        )
        skeleton, weights = plan(base_folder, checkpoint)
        base = describe(skeleton)
        put_placeholders(skeleton, weights, device)
        quantized = find_quantized(skeleton, weights, quantization, base.ties, {dtype: quantized_dtype or dtype})
        requantized = find_requantized(skeleton, requantize)
        held = find_held(skeleton, base, adapter, config)
        model = inject(skeleton, config)
        find_tuner(model)
        restore(model, adapter)
        in_model = {name: tensor for name, tensor in named_base_tensors(model.base_model.model) if name in base.tensors}
        values = BaseValues(weights, held, in_model, device, quantized)
        merge = _Merge(model.eval(), skeleton, base, values, requantized, find_dropped_keys(config), cast)

        def complete(folder: Path, is_untied: bool) -> None:
            stored_as = requantized.config(dtype) if requantized is not None else None
            write_companions(folder, skeleton, dtype, is_untied, base_folder, adapter, stored_as)
            with Checkpoint.open(folder) as made:  # every tensor finds its place again, or nothing is published
                plan(folder, made)

        return merge.run(out, dtype, max_shard_size, complete, advance)


class _Merge:
    """One merge: what is known of it before anything is read, and its running."""

    def __init__(
        self,
        model: PeftModel,
        skeleton: PreTrainedModel,
        base: BaseTensors,
        values: BaseValues,
        requantized: Requantized | None,
        dropped_keys: Sequence[str],
        cast: torch.dtype | None,
    ) -> None:
        self._model, self._skeleton, self._base, self._values = model, skeleton, base, values
        self._weights, self._requantized = values.weights, requantized
        self._dropped_keys, self._cast = dropped_keys, cast
        self._targets = find_targets(model, base.tensors)
        self._target_of = {name: target for target in self._targets for name in target.made}
        self._changed = values.held | self._target_of.keys()
        stored_quantized = {name for name in self._weights.names if self._weights.is_made(name)}
        self._dequantized = values.quantized.quantizers.keys() | stored_quantized
        self._same: dict[str, str] = {}  # whose value a tied name has
        self._units = self._plan_units()

    def run(
        self,
        out: Path,
        dtype: torch.dtype,
        max_shard_size: int | str,
        complete: Callable[[Path, bool], None],
        advance: Callable[[int, int], None] | None = None,
    ) -> MergeReport:
        """Merge, write, and publish the folder.

        Args:
            complete: writes what else the folder holds, and checks it; called with whether tied weights are two now.
        """
        untied = self._settle_ties()
        layout = self._plan_layout(untied)
        plan = plan_files(layout.tensors, max_shard_size)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        units = [unit for unit in self._units if layout.batches(unit.names)]
        copied = [layout.copied[number::num_ranks] for number in range(num_ranks)]
        units += [_MergeUnit(copied=keys) for keys in copied if keys]
        if rank == 0:
            self._warn(untied)
        with publish(out, plan.total_bytes) as folder:
            writer = TensorWriter(folder, plan)
            raise_on_all_ranks(writer.create, on_rank=0)
            for begin in range(0, len(units), num_ranks):
                own = units[begin : begin + num_ranks][rank : rank + 1]
                raise_on_all_ranks(lambda: self._write(own, layout, writer))  # noqa: B023
                if advance is not None:
                    advance(min(begin + num_ranks, len(units)), len(units))
            raise_on_all_ranks(writer.flush)
            raise_on_all_ranks(lambda: complete(folder, bool(untied)), on_rank=0)
        return MergeReport(
            out,
            dtype,
            len(layout.tensors),
            len(self._changed),
            len(plan.headers),
            plan.total_bytes,
            bool(untied),
            len(self._dequantized),
        )

    def _warn(self, untied: Sequence[str]) -> None:
        if untied:
            _logger.warning(
                "the adapter changes %s apart, which are one weight in the base: the merged model has both, and "
                "tie_word_embeddings: false",
                " and ".join(untied),
            )
        if self._dequantized:
            formats = {quantizer.name for quantizer in self._values.quantized.quantizers.values()}
            original = "; quantization: none merges into the original weights"
            _logger.warning(
                "merging into the dequantized base: %d weights, with an adapter or not, are written as their "
                "dequantized values%s",
                len(self._dequantized),
                f", quantized to {' and '.join(formats)}{original}" if formats else "",
            )

    def _plan_units(self) -> list[_MergeUnit]:
        paths = {id(module): path for path, module in self._model.named_modules()}
        units: dict[int, _MergeUnit] = {}
        unit_of: dict[str, int] = {}
        for index, found in enumerate(find_units(self._model, base_test(self._model))):
            for weight in found.weights:
                for owner in weight.owners:
                    unit_of[to_base_name(f"{paths[id(owner.module)]}.{owner.attribute}")] = index
        for target in self._targets:  # a target is merged once, so its tensors stay together
            found_in = [unit_of[name] for name in target.base if name in unit_of]
            unit_of |= dict.fromkeys(target.made, found_in[0] if found_in else -1)
        for tied in self._base.ties:
            unit_of |= dict.fromkeys(tied, unit_of.get(tied[0], -1))
        ordered = [name for target in self._targets for name in target.made]
        ordered += [name for name in self._base.tensors if name not in self._target_of]
        for name in ordered:
            units.setdefault(unit_of.get(name, -1), _MergeUnit()).names.append(name)
        return [units[index] for index in sorted(units)]

    def _settle_ties(self) -> list[str]:
        """Find whose value tied names have; return the names that are one weight no longer.

        Ranks: collective over all ranks.
        """
        untied: list[str] = []
        for names in self._base.ties:
            if not self._changed.intersection(names):
                continue
            stored = [name for name in names if self._weights.stored_as(name) is not None] or names
            is_same = raise_on_all_ranks(lambda: self._are_same(stored[0], names), on_rank=0)  # noqa: B023
            if dist.broadcast_object(is_same):
                self._same |= dict.fromkeys(names, stored[0])
                self._changed.update(names)
            else:
                untied += names
        return untied

    def _are_same(self, kept: str, names: Sequence[str]) -> bool:
        is_meant = getattr(self._model.active_peft_config, "ensure_weight_tying", False)
        is_meant = is_meant and self._changed.issuperset(names)
        unit = next(unit for unit in self._units if kept in unit.names)
        with self._weights.unit(unit.names):
            first = self._value(kept, {})
            for name in names:
                value = first if name == kept else self._value(name, {})
                if torch.equal(first, value):
                    continue
                # The embedding's and the head's product are one and the same, but added up in another order.
                if not is_meant or (first - value).abs().max() > _ROUNDING * first.abs().max():
                    return False
        return True

    def _plan_layout(self, untied: Iterable[str]) -> OriginalLayout | QuantizedLayout:
        weights = self._weights
        added = [name for name in self._base.tensors if name not in weights.names and name in self._changed]
        added += [name for name in untied if weights.stored_as(name) is None]
        requantized = self._requantized.quantizers.keys() if self._requantized is not None else set()
        layout = OriginalLayout(
            self._skeleton,
            weights,
            self._changed | self._dequantized | requantized,
            {name: self._base.tensors[name] for name in added},
            self._dropped_keys,
            self._cast,
        )
        if self._requantized is None:
            return layout
        return QuantizedLayout(layout, self._requantized, self._base.tensors)

    def _write(
        self, units: Sequence[_MergeUnit], layout: OriginalLayout | QuantizedLayout, writer: TensorWriter
    ) -> None:
        for unit in units:
            merged: dict[str, torch.Tensor] = {}
            with self._weights.unit(unit.names):
                for batch in layout.batches(unit.names):
                    values = {name: self._value(self._same.get(name, name), merged) for name in batch}
                    for key, begin, value in layout.store(values):
                        writer.write(key, begin, value)
            for key in unit.copied:
                copy_stored(self._weights, self._weights.stored[key], writer)

    def _value(self, name: str, merged: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor as it will be in the merged model; what comes with it is kept in `merged`."""
        if name in self._target_of and name not in merged:
            merged |= merge_target(self._model, self._target_of[name], self._values.read)
        return merged.pop(name) if name in merged else self._values.read(name)
