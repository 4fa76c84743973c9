"""An adapter merged into its base, a unit at a time, and written as a model of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from peft import PeftModel, get_peft_model_state_dict
from transformers import PreTrainedModel

from ..config.quantization_options import Quantization
from ..engine import Engine
from ..errors import ConfigError
from ..model.adapters import base_test, inject
from ..model.refusals import check_config
from ..model.saved import count_labels, read_config, restore
from ..model.sharding import BASE_ATTRIBUTE, ENGINE_ATTRIBUTE, LoadedBase
from ..model.skeleton import put_placeholders
from ..model.units import find_units
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..weights.safetensors_files import Checkpoint
from ..weights.stored_formats import settle_quantization
from ..weights.weights import BaseWeights
from .base_plan import copy_stored, find_dropped_keys, find_dtype, find_held, find_held_names, plan_base
from .base_values import BaseTensors, EngineValues, FileValues, MergeUnit, Read, Values, describe, own_unit
from .companions import write_companions
from .quantized_base import QuantizedBase, find_tied_quantizers
from .requantized import QuantizedSpelling, Requantized, find_requantized
from .spelling import ModelSpelling, OriginalSpelling, Spelling
from .staging import check_target, publish
from .targets import find_targets, find_tuner, merge_target, named_base_tensors, to_base_name
from .writing import TensorWriter, plan_files

# How far apart two results of one weight may be for rounding alone, relative to the largest of their numbers.
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
        num_dequantized: tensors of the model that have the numbers of the quantized base, not those of its files.
    """

    out: Path
    dtype: torch.dtype
    num_tensors: int
    num_changed: int
    num_files: int
    num_bytes: int
    is_untied: bool
    num_dequantized: int = 0


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
        advance: told how many units of how many are merged, now and then.

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
    dtype_is_given = dtype is not None
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
        quantized = _find_quantized(skeleton, weights, quantization, base, {dtype: quantized_dtype or dtype})
        requantized = find_requantized(skeleton, requantize)
        held = find_held(skeleton, base, adapter, config)
        model = inject(skeleton, config)
        find_tuner(model)
        restore(model, adapter)
        cast = dtype if dtype_is_given else None
        files = _Files(base_folder, weights, cast, find_dropped_keys(config), plan)
        merge = _Merge(model.eval(), skeleton, base, dtype, device, held, files, quantized, requantized)
        return merge.run(out, max_shard_size, adapter, advance)


def merge_live(
    model: PeftModel,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    trust_remote_code: bool = False,
    is_dequantized: bool = True,
    requantize: Quantization | None = None,
) -> MergeReport:
    """Write a sharded model's base with its active adapter merged into it; the model itself stays as it is.

    Args:
        model: from `lorashard.load` or `load_adapter`, whose base is read from its files again, or from
            `lorashard.shard`, whose units are gathered one after another.
        dtype: None takes the model's.
        is_dequantized: of a quantized base, merge into its dequantized weights and not into those of its files.
        requantize: as for `merge_checkpoint`.

    Raises:
        ConfigError: PEFT cannot merge the adapter, `out` holds something, `model` is not sharded, or its original
            weights are asked for and in no file.
        CheckpointError: files are missing or damaged, or writing failed.

    Ranks: collective over all ranks, which share the work.
    Memory: as for `merge_checkpoint`; after `lorashard.shard` a whole unit and what PEFT's merge of a module takes.
    """
    if ENGINE_ATTRIBUTE not in model.__dict__:
        raise ConfigError(
            f"expected a {type(model).__name__} from lorashard.load, load_adapter or shard, found another: PEFT's own "
            "merge_and_unload merges a model that is whole in memory"
        )
    raise_on_all_ranks(lambda: check_target(out), on_rank=0)
    config = model.active_peft_config
    live = model.get_base_model()
    engine: Engine = model.__dict__[ENGINE_ATTRIBUTE]
    loaded: LoadedBase | None = model.__dict__.get(BASE_ATTRIBUTE)
    device = live.device
    dtype = dtype or live.dtype
    keys = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    quantization = loaded.quantization if loaded is not None and is_dequantized else None
    if loaded is None:
        if not is_dequantized and any(w.format is not None for unit in engine.units for w in unit.weights):
            raise ConfigError(
                "quantization: none: this base was quantized in memory by lorashard.shard, and its original weights "
                "are gone; leave quantization out, to merge into the dequantized weights"
            )
        with init_empty_weights(include_buffers=False):
            skeleton = type(live)._from_config(live.config, dtype=dtype)
        skeleton.tie_weights()
        conversions = getattr(live, "_weight_conversions", None)
        if conversions is not None:
            skeleton._weight_conversions = conversions
        if live.can_generate():
            skeleton.generation_config = live.generation_config
        base = describe(skeleton)
        held = find_held_names(keys, base, config)
        quantized, requantized = QuantizedBase(), find_requantized(skeleton, requantize)
        merge = _Merge(model, skeleton, base, dtype, device, held, None, quantized, requantized, engine)
        return merge.run(out, max_shard_size, None)
    with Checkpoint.open(loaded.folder) as checkpoint:
        plan = partial(plan_base, config=config, dtype=dtype, trust_remote_code=trust_remote_code)
        skeleton, weights = plan(loaded.folder, checkpoint)
        base = describe(skeleton)
        files = _Files(loaded.folder, weights, None, find_dropped_keys(config), plan)
        held = find_held_names(keys, base, config)
        quantized = _find_quantized(skeleton, weights, quantization, base, {dtype: live.dtype})
        requantized = find_requantized(skeleton, requantize)
        merge = _Merge(model, skeleton, base, dtype, device, held, files, quantized, requantized, engine)
        return merge.run(out, max_shard_size, None)


@dataclass
class _Files:
    """The files of a base, and what becomes of tensors in them that the model does not read."""

    folder: Path
    weights: BaseWeights
    cast: torch.dtype | None
    dropped: Sequence[str]
    plan: Callable[[Path, Checkpoint], object]


class _Merge:
    """One merge: what is known of it before anything is read, and its running."""

    def __init__(
        self,
        model: PeftModel,
        skeleton: PreTrainedModel,
        base: BaseTensors,
        dtype: torch.dtype,
        device: torch.device,
        held: set[str],
        files: _Files | None,
        quantized: QuantizedBase,
        requantized: Requantized | None,
        engine: Engine | None = None,
    ) -> None:
        self._quantized, self._requantized = quantized, requantized
        self._model, self._skeleton, self._base, self._dtype, self._files = model, skeleton, base, dtype, files
        self._targets = find_targets(model, base.tensors)
        self._target_of = {name: target for target in self._targets for name in target.made}
        self._changed = held | self._target_of.keys()
        in_model = {name: tensor for name, tensor in named_base_tensors(model.base_model.model) if name in base.tensors}
        self._values: Values
        if files is not None:
            self._values = FileValues(files.weights, held, in_model, device, quantized)
        else:
            assert engine is not None
            self._values = EngineValues(engine, in_model, base, device)
        self._dequantized = quantized.quantizers.keys() | (
            set(filter(files.weights.is_made, files.weights.names)) if files else set()
        )
        self._units = self._plan_units()

    def run(
        self,
        out: Path,
        max_shard_size: int | str,
        tokenizer_folder: Path | None,
        advance: Callable[[int, int], None] | None = None,
    ) -> MergeReport:
        """Merge, write, and publish the folder."""
        same, untied = self._settle_ties()
        spelling = self._spell(untied)
        plan = plan_files(spelling.tensors, max_shard_size)
        units = [unit for unit in self._units if spelling.batches(unit.names)]
        units += [MergeUnit(copied=part) for part in _deal(spelling.copied) if part]
        if untied and dist.get_rank() == 0:
            _logger.warning(
                "the adapter changes %s apart, which are one weight in the base: the merged model has both, and "
                "tie_word_embeddings: false",
                " and ".join(untied),
            )
        if self._dequantized and dist.get_rank() == 0:
            formats = {quantizer.name for quantizer in self._quantized.quantizers.values()}
            original = "; quantization: none merges into the original weights"
            _logger.warning(
                "merging into the dequantized base: %d weights, with an adapter or not, are written as the "
                "numbers that their quantized form stands for%s",
                len(self._dequantized),
                f", quantized to {' and '.join(formats)}{original}" if formats else "",
            )
        with publish(out, plan.total_bytes) as folder, TensorWriter(folder, plan) as writer:
            raise_on_all_ranks(lambda: writer.create(), on_rank=0)
            num_ranks = dist.get_world_size()
            for begin in range(0, len(units), num_ranks):
                batch = units[begin : begin + num_ranks]
                with self._values.open(batch) as read:
                    raise_on_all_ranks(lambda: self._write(own_unit(batch), read, spelling, writer, same))  # noqa: B023
                if advance is not None:
                    advance(begin + len(batch), len(units))
            raise_on_all_ranks(writer.flush)
            raise_on_all_ranks(lambda: self._complete(folder, bool(untied), tokenizer_folder), on_rank=0)
        return MergeReport(
            out,
            self._dtype,
            len(spelling.tensors),
            len(self._changed),
            len(plan.headers),
            plan.total_bytes,
            bool(untied),
            len(self._dequantized),
        )

    def _complete(self, folder: Path, is_untied: bool, tokenizer_folder: Path | None) -> None:
        base_folder = self._files.folder if self._files else None
        quantization_config = self._requantized.config(self._dtype) if self._requantized is not None else None
        write_companions(
            folder, self._skeleton, self._dtype, is_untied, base_folder, tokenizer_folder, quantization_config
        )
        if self._files is not None:
            with Checkpoint.open(folder) as made:  # every tensor finds its place again, or nothing is published
                self._files.plan(folder, made)

    def _plan_units(self) -> list[MergeUnit]:
        paths = {id(module): path for path, module in self._model.named_modules()}
        units: dict[int, MergeUnit] = {}
        unit_of: dict[str, int] = {}
        for number, found in enumerate(find_units(self._model, base_test(self._model))):
            for weight in found.weights:
                for owner in weight.owners:
                    unit_of[to_base_name(f"{paths[id(owner.module)]}.{owner.attribute}")] = number
        for target in self._targets:  # a target is merged once, so its tensors stay together
            numbers = [unit_of[name] for name in target.base if name in unit_of]
            unit_of |= dict.fromkeys(target.made, numbers[0] if numbers else -1)
        for tied in self._base.ties:
            unit_of |= dict.fromkeys(tied, unit_of.get(tied[0], -1))
        ordered = [name for target in self._targets for name in target.made]
        ordered += [name for name in self._base.tensors if name not in self._target_of]
        for name in ordered:
            units.setdefault(unit_of.get(name, -1), MergeUnit()).names.append(name)
        return [units[number] for number in sorted(units)]

    def _settle_ties(self) -> tuple[dict[str, str], list[str]]:
        """Return which name's value stands for a tied name, and the names that are one weight no longer.

        Ranks: collective over all ranks.
        """
        same: dict[str, str] = {}
        untied: list[str] = []
        for names in self._base.ties:
            if not self._changed.intersection(names):
                continue
            stored = [name for name in names if self._is_stored(name)] or names
            unit = next(unit for unit in self._units if names[0] in unit.names)
            with self._values.open([unit]) as read:
                is_same = raise_on_all_ranks(lambda: self._are_same(stored[0], names, read), on_rank=0)  # noqa: B023
            if dist.broadcast_object(is_same):
                same |= dict.fromkeys(names, stored[0])
                self._changed.update(names)
            else:
                untied += names
        return same, untied

    def _is_stored(self, name: str) -> bool:
        if self._files is not None:
            return self._files.weights.stored_as(name) is not None
        return name not in getattr(self._skeleton, "all_tied_weights_keys", {})

    def _are_same(self, kept: str, names: Sequence[str], read: Read) -> bool:
        is_meant = getattr(self._model.active_peft_config, "ensure_weight_tying", False)
        is_meant = is_meant and self._changed.issuperset(names)
        first = self._value(kept, read, {})
        for name in names:
            value = first if name == kept else self._value(name, read, {})
            if torch.equal(first, value):
                continue
            # The embedding's and the head's product are one and the same, but added up in another order.
            if not is_meant or (first - value).abs().max() > _ROUNDING * first.abs().max():
                return False
        return True

    def _spell(self, untied: Sequence[str]) -> Spelling:
        if self._requantized is None:
            return self._spell_plain(untied, set())
        spelling = self._spell_plain(untied, self._requantized.quantizers.keys())
        return QuantizedSpelling(spelling, self._requantized, self._base.tensors)

    def _spell_plain(self, untied: Sequence[str], requantized: Set[str]) -> Spelling:
        if self._files is None:
            is_tied = {name for names in self._base.ties for name in names} - set(untied)
            ignored = set(self._skeleton._keys_to_ignore_on_save or ())
            stored = {
                name: tensor
                for name, tensor in self._base.tensors.items()
                if name not in ignored and (name not in is_tied or self._is_stored(name))
            }
            return ModelSpelling(self._skeleton, stored, [unit.names for unit in self._units])
        weights = self._files.weights
        added = [name for name in self._base.tensors if name not in weights.names]
        added = [name for name in added if name in self._changed]
        added += [name for name in untied if weights.stored_as(name) is None]
        return OriginalSpelling(
            self._skeleton,
            weights,
            self._changed | self._dequantized | requantized,
            {name: self._base.tensors[name] for name in added},
            self._files.dropped,
            self._files.cast,
        )

    def _write(
        self,
        unit: MergeUnit | None,
        read: Read,
        spelling: Spelling,
        writer: TensorWriter,
        same: Mapping[str, str],
    ) -> None:
        if unit is None:
            return
        merged: dict[str, torch.Tensor] = {}
        for batch in spelling.batches(unit.names):
            values = {name: self._value(same.get(name, name), read, merged) for name in batch}
            for key, begin, value in spelling.spell(values):
                writer.write(key, begin, value)
        for key in unit.copied:
            assert self._files is not None
            copy_stored(self._files.weights, self._files.weights.stored[key], writer)

    def _value(self, name: str, read: Read, merged: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor as it will be in the merged model; what comes with it is kept in `merged`."""
        if name in self._target_of and name not in merged:
            merged |= merge_target(self._model, self._target_of[name], read)
        return merged.pop(name) if name in merged else read(name)


def _find_quantized(
    skeleton: PreTrainedModel,
    weights: BaseWeights,
    quantization: Quantization | None,
    base: BaseTensors,
    dtypes: Mapping[torch.dtype, torch.dtype],
) -> QuantizedBase:
    stored = weights.stored_format
    settled = settle_quantization(stored, quantization, skeleton.config.name_or_path)
    if stored is not None and stored.quantization is not None:
        return QuantizedBase()  # its files are quantized, and read dequantized
    return QuantizedBase(find_tied_quantizers(skeleton, settled, base.ties), dtypes)


def _deal(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[rank :: dist.get_world_size()]) for rank in range(dist.get_world_size())]
