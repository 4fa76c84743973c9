"""From a checkpoint to a sharded PeftModel, without an unsharded model on any rank."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, TaskType
from transformers import set_seed

from ..config.placement import ResolvedPlacement
from ..config.quantization_options import Quantization
from ..errors import CheckpointError
from ..runtime import dist
from ..runtime.progress import Progress, told_progress
from ..weights.derived_from import read_origin
from ..weights.fingerprint import BaseIdentity
from ..weights.hub import resolve_folder
from ..weights.safetensors_files import Checkpoint
from ..weights.stored_formats import settle_quantization
from ..weights.weights import BaseWeights
from .adapters import base_test, check_coverage, inject
from .embeddings import put_saved_embeddings
from .homes import choose_homes, choose_resident
from .loftq import check_loftq, initialize_loftq, is_loftq
from .quantizing import choose_quantizers, is_stored_quantized
from .refusals import check_config, check_frozen, refuse_merging
from .saved import count_labels, restore
from .sequence_rows import check_sequences
from .sharding import LoadedBase, remember_base, shard_structure
from .skeleton import build_skeleton, plan_weights, put_placeholders
from .sources import read_as_quantized
from .stacks import name_units
from .units import Structure, find_structure

_logger = logging.getLogger(__name__)


def load_sharded(
    model_name_or_path: str,
    lora: PeftConfig,
    placement: ResolvedPlacement,
    device: torch.device,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    adapter: Path | None = None,
    allow_base_mismatch: bool = False,
    quantization: Quantization | None = None,
    cache_quantized: bool = False,
    is_identified: bool = True,
    allow_unexpected: Sequence[str] = (),
    num_labels: int | None = None,
    may_link: bool = False,
    progress: Progress | None = None,
    others: Sequence[PeftConfig] = (),
    seeds: Sequence[int] | None = None,
) -> list[PeftModel]:
    """Return sharded PeftModels, one for each adapter, on one base; each rank reads only its own bytes of each unit.

    Args:
        others: further new adapters, each of which gets a model of its own.
        seeds: that each adapter is drawn from; None: all from the random numbers as they are.
        adapter: the folder of a saved adapter, whose config is `lora`; without it a new adapter is made.
        quantization: what the base is quantized to while it is read.
        cache_quantized: keep the quantized base in files, and read those the next time.
        is_identified: hash the files, once, so that saved adapters record their base.
        allow_unexpected: prefixes of stored keys that the model may have no place for.
        num_labels: of a new classifier; a saved adapter's head decides its own.
        may_link: as for `resolve_folder`.
        progress: as for `resolve_folder`; then called with how many "bytes hashed" there are, "units converted", and
            "units", of how many. By default what takes longer than two seconds is shown on stderr.

    Raises:
        CheckpointError: files are missing, damaged or do not fit the model or each other.
        ConfigError: the adapter cannot be made on a sharded base, or was trained on another one.

    Ranks: collective over all ranks, once the checkpoint has been checked.
    Memory: the shards, the slots, and never more than one unit beside them.
    """
    for config in (lora, *others):
        check_config(config, quantization=quantization if adapter is None else None)
    task_type = TaskType(lora.task_type) if lora.task_type else None
    folder = resolve_folder(model_name_or_path, revision, may_link=may_link, progress=progress)
    num_labels = num_labels if adapter is None else count_labels(adapter)
    with Checkpoint.open(folder) as checkpoint:

        def build(config: PeftConfig) -> _Built:
            # The model without weights: placeholders, which can read them.
            skeleton = build_skeleton(
                model_name_or_path, folder, task_type, dtype, trust_remote_code, attn_implementation, num_labels
            )
            weights = plan_weights(skeleton, checkpoint, task_type, dtype, allow_unexpected)
            put_placeholders(skeleton, weights, device)
            own = put_saved_embeddings(skeleton, adapter, device) if adapter is not None else {}
            name_units(skeleton, placement.unit_paths)

            # What is quantized, chosen by name before PEFT changes the modules.
            settled = settle_quantization(weights.stored_format, quantization, str(folder))
            check_loftq(config, is_stored_quantized(weights))
            quantizers = choose_quantizers(skeleton, weights, settled, own)
            read_as_quantized(skeleton, quantizers, weights, device)

            # The adapter.
            asked = copy.copy(config)  # PEFT writes into a config what it makes of it
            model = inject(skeleton, config, revision=revision)
            check_frozen(model)
            if adapter is None:
                check_coverage(model, asked)
                if is_loftq(asked):
                    initialize_loftq(model, weights, quantizers.keys(), device)
            if placement.sequence_parallel_size > 1:
                check_sequences(model, placement.sequence_parallel_size)
            structure = find_structure(model, base_test(model))
            for weight in (weight for unit in structure.units for weight in unit.weights):
                weight.quantizer = quantizers.get(weight.name)
            return _Built(model, structure, weights, settled, bool(own))

        built = []
        for index, config in enumerate((lora, *others)):
            draws_alike = seeds is None and index < len(others)
            with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=draws_alike):
                if seeds is not None:
                    set_seed(seeds[index])
                built.append(build(config))
        first = built[0]
        line = first.weights.describe_stored()
        if line is not None and dist.get_rank() == 0:
            _logger.warning(line)
        resident = choose_resident(first.structure, placement.resident_layers)

        # From here on ranks wait for each other: nothing can be wrong on one rank alone.
        _check_commit(folder)
        identity = BaseIdentity.of(first.weights.files, progress) if is_identified else None
        if adapter is not None:
            if identity is not None:
                identity.check(adapter, model_name_or_path, allow_base_mismatch)
            restore(first.model, adapter)
        group = dist.ShardGroup.of_size(placement.group_size, placement.wait_warning_s)
        make_home = choose_homes(
            first.structure,
            first.weights,
            placement,
            resident,
            group,
            device,
            identity,
            cache_quantized=cache_quantized,
            progress=progress,
        )
        with told_progress("loading the base", dist.get_rank() == 0, progress) as report:
            shard_structure(
                first.model,
                first.structure,
                make_home,
                group,
                device,
                placement.prefetch,
                first.has_own_embeddings,
                report,
                {other.model: other.structure for other in built[1:]},
            )
    for model in (each.model for each in built):
        if placement.placement == "file":
            refuse_merging(model)
        if identity is not None:
            remember_base(model, LoadedBase(folder, identity, first.quantization, read_origin(folder)))
        model.to(device)
    return [each.model for each in built]


@dataclass(frozen=True)
class _Built:
    """A model that has an adapter and no weights yet."""

    model: PeftModel
    structure: Structure
    weights: BaseWeights
    quantization: Quantization | None
    has_own_embeddings: bool


def _check_commit(folder: Path) -> None:
    """Refuse a hub model whose branch has moved between one rank's look and another's."""
    commits = set(dist.gather_objects(folder.name if folder.parent.name == "snapshots" else ""))
    if len(commits) > 1:
        raise CheckpointError(
            "the branch moved, or the ranks' caches differ",
            option="model_revision",
            expected="one commit of the model on all ranks",
            found=" and ".join(sorted(commits)),
            fix="start again with --model_revision and the commit",
        )
