"""From a model's name to a plan: for given machines, or collectively on the ranks that are running."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import psutil
import torch
from peft import LoraConfig, PeftModel
from torch.overrides import TorchFunctionMode

from ..config.placement import (
    PlacementOptions,
    ResolvedPlacement,
    check_sequence_parallel_size,
    resolve_placement,
)
from ..config.quantization_options import Quantization
from ..errors import ConfigError
from ..model.sequence_attention import count_shared_heads
from ..model.stacks import find_layers, name_units
from ..runtime import dist
from ..runtime.dtypes import name_of
from ..runtime.progress import told_work
from ..weights.model_folder import CONFIG_NAME
from ..weights.stored_formats import StoredFormat, settle_quantization
from .activations import Activations
from .cautions import find_cautions
from .choose import Plan, agree_on_plan, make_plan, name_placement
from .costs import Workload
from .fusing import describe_gain, fuse_workload
from .hardware import Cluster
from .probe import measure_free_bytes, probe, recall_hardware
from .size import (
    ModelSize,
    build_meta_model,
    compare_with_headers,
    find_config,
    find_max_positions,
    find_stored,
    measure_model,
)
from .sweep import JobCosts, cost_sweep, count_kinds, join_jobs
from .trace import Microbatch, trace


@dataclass(frozen=True)
class BaseModel:
    """What is loaded, as in `lorashard.load`.

    Attributes:
        stored: the format of files whose quantized bytes are kept as they are; `settle` finds it.
    """

    model_name_or_path: str
    lora: LoraConfig
    dtype: torch.dtype = torch.bfloat16
    revision: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    quantization: Quantization | None = None
    stored: StoredFormat | None = None

    def build(self, unit_paths: Sequence[str] | None = None) -> PeftModel:
        """Return the model with its adapter on the meta device, from its config alone."""
        model = build_meta_model(
            self.model_name_or_path,
            self.lora,
            self.dtype,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=self.attn_implementation,
        )
        name_units(model, unit_paths)
        return model

    def settle(self) -> tuple[BaseModel, str | None]:
        """Return this with the quantization of files that are quantized already, and a note on these.

        Raises:
            CheckpointError: the config cannot be found, or the files are in a format that cannot be read.
            ConfigError: the files are quantized already, to another format than is asked for.
        """
        stored = find_stored(self.model_name_or_path, self.revision)
        if stored is None:
            return self, None
        quantization = settle_quantization(stored, self.quantization, self.model_name_or_path)
        kept = stored if stored.quantization is not None else None
        if kept is None:
            outcome = f"dequantized to {name_of(self.dtype)} while it is read"
        else:
            exceptions = " but the modules that its config names" if kept.skipped else ""
            outcome = f"assumed to hold all linear weights of decoder layers{exceptions} in it, which are kept so"
        note = f"{self.model_name_or_path} is stored in {stored.description}: {outcome}"
        return replace(self, quantization=quantization, stored=kept), note


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        optimizer: transformers' name of it.
        dataset_tokens: of all epochs, if known.
        longest_tokens: of the examples, as they are before any are joined, if known.
        is_fused: whether decoder layers are compiled, or what `numerics: fused` makes of them.
        others: the adapters of a sweep's other jobs, and how each trains.
        may_share: whether more than one rank may be chosen to share each sequence.
        is_batch_global: whether `accumulation_steps` follow from a `global_batch_size`, so from that choice too.
    """

    microbatch: Microbatch
    accumulation_steps: int = 1
    optimizer: str = "adamw_torch_fused"
    dataset_tokens: int | None = None
    is_fused: bool = False
    longest_tokens: int | None = None
    others: tuple[tuple[LoraConfig, Training], ...] = ()
    may_share: bool = False
    is_batch_global: bool = False

    def share(self, num_ranks: int) -> Training:
        """Return it where so many ranks share each sequence."""
        return replace(self, microbatch=replace(self.microbatch, sequence_parallel_size=num_ranks))


def plan_training(
    base: BaseModel,
    training: Training,
    cluster: Cluster,
    options: PlacementOptions | None = None,
    notes: Sequence[str] = (),
    given: ResolvedPlacement | None = None,
) -> Plan:
    """Return what each placement would cost, and the one to take among those that `options` leave open.

    Reads only the model's config and headers.

    Args:
        given: the placement to take, whatever it costs.

    Raises:
        UserError: the model cannot be found or planned.
    """
    options = options or PlacementOptions()
    base, stored = base.settle()
    made = _plan_shared(base, training, cluster, options, given)
    plan, kinds, training, options = made.plan, made.kinds, made.training, made.options
    # A run whose placement is given reads the files next, so the hub is not asked for their headers. Those of quantized
    # files do not have the numbers of parameters.
    difference = compare_with_headers(kinds[0][0][0], base.revision) if given is None and stored is None else None
    plan = replace(plan, notes=(*notes, *(note for note in (stored, difference) if note)))
    if training.others:
        plan = replace(plan, sweep=cost_sweep(kinds, plan, cluster, options, given))
    largest = max((alone for (alone, _), _ in kinds), key=lambda alone: alone.adapter_parameters)
    max_positions = find_max_positions(base.model_name_or_path, base.revision)
    plan = replace(plan, warnings=find_cautions(largest, cluster, training.longest_tokens, max_positions))
    if plan.chosen is not None:
        is_fused = _is_fused(base, training)
        gain = describe_gain(*join_jobs(made.exact), cluster, plan.choice.placement, is_fused)
        plan = replace(plan, notes=(*plan.notes, gain))
    # Files that are quantized already are kept in their format.
    is_open = base.quantization is None or (stored is None and base.quantization.format != "nf4")
    if plan.chosen is None and plan.sweep is not None and plan.sweep.most_jobs:
        return replace(plan, reason=f"{plan.reason}; {plan.sweep.most_jobs:,} jobs like the largest fit")
    if plan.chosen is None and is_open:
        return replace(plan, reason=f"{plan.reason}; {_describe_quantized(base, training, cluster, options)}")
    return plan


class _Made(NamedTuple):
    """A plan, and what it was made from.

    Attributes:
        exact: the kinds of jobs before their layers are fused.
        training, options: with the ranks that share each sequence.
    """

    plan: Plan
    kinds: list[tuple[JobCosts, int]]
    exact: list[tuple[JobCosts, int]]
    training: Training
    options: PlacementOptions


def _plan_shared(
    base: BaseModel,
    training: Training,
    cluster: Cluster,
    options: PlacementOptions,
    given: ResolvedPlacement | None,
) -> _Made:
    """Return the plan with as many ranks to share each sequence as are asked for, or else as few as fit.

    Raises:
        ConfigError: ranks or attention heads are not divided by what is asked for, or heads cannot be shared; or more
            than one are chosen, and `global_batch_size` has decided the steps of accumulation for one.
    """

    def make(num_sharing: int) -> _Made:
        shared = training.share(num_sharing)
        settled = options.model_copy(update={"sequence_parallel_size": num_sharing})
        with told_work("computing what a step of the model takes", dist.get_rank() == 0):
            exact = _measure_jobs(base, shared, settled)
        kinds = exact
        if _is_fused(base, training):
            kinds = [((size, fuse_workload(workload)), count) for (size, workload), count in exact]
        return _Made(make_plan(*join_jobs(kinds), cluster, settled, (), given), kinds, exact, shared, settled)

    asked = options.num_sequence_ranks if given is None else given.sequence_parallel_size
    if asked != "auto" and asked > 1:
        check_sequence_parallel_size(asked, cluster.num_ranks, _count_heads(base, options))
        return make(asked)
    made = make(1)
    is_open = asked == "auto" and training.may_share and made.plan.chosen is None
    if not (is_open and any(row.fixed_bytes < cluster.free_bytes for row in made.plan.rows)):
        return made
    try:
        most = math.gcd(cluster.num_ranks, _count_heads(base, options))
    except ConfigError:  # it cannot be shared
        return made
    # Nothing fits fewer if not the most, and each takes seconds to trace.
    made = make(most) if most > 1 else made
    if made.plan.chosen is None:
        return made
    fewer = (make(number) for number in range(2, most) if most % number == 0)
    made = next((one for one in fewer if one.plan.chosen is not None), made)
    num_sharing = made.training.microbatch.sequence_parallel_size
    if training.is_batch_global:
        raise ConfigError(
            f"auto would be {num_sharing}, and the steps that global_batch_size accumulates depend on it",
            option="sequence_parallel_size",
            fix=f"give sequence_parallel_size: {num_sharing}",
        )
    reason = f"{made.plan.reason}; {_explain_sharing(training.microbatch, num_sharing)}"
    return made._replace(plan=replace(made.plan, reason=reason))


def _explain_sharing(microbatch: Microbatch, num_sharing: int) -> str:
    tokens = f"{microbatch.row_tokens:,} tokens"
    what = f"a sequence of {tokens} does" if microbatch.num_rows == 1 else f"{microbatch.num_rows} of {tokens} do"
    return f"sequence_parallel_size: {num_sharing}, since {what} not fit a rank with fewer"


def _count_heads(base: BaseModel, options: PlacementOptions) -> int:
    """Return the attention heads that ranks may share.

    Raises:
        ConfigError: they cannot.
    """
    return count_shared_heads(base.build(options.unit_paths).get_base_model())


def _is_fused(base: BaseModel, training: Training) -> bool:
    return training.is_fused and base.quantization is None


def _measure_jobs(base: BaseModel, training: Training, options: PlacementOptions) -> list[tuple[JobCosts, int]]:
    """Return what each kind of job costs alone, and how many there are of it; a run without a sweep is one job."""
    jobs = [(base.lora, training), *training.others]
    return count_kinds([_measure(replace(base, lora=lora), job, options) for lora, job in jobs])


def _measure(base: BaseModel, training: Training, options: PlacementOptions) -> tuple[ModelSize, Workload]:
    """Return how large a model is, and what a step of its training takes under any placement."""
    unit_paths = None if options.unit_paths is None else tuple(options.unit_paths)
    # Code that came with a model may look at anything: it runs each time.
    answer = _trace if base.trust_remote_code else _recall_trace
    microbatch = training.microbatch
    traced = answer(_Question.ask(base, microbatch, unit_paths))
    saved = None
    if options.num_recomputed != "all" and traced.may_recompute_some:
        saved = answer(_Question.ask(base, replace(microbatch, checkpointing=None), unit_paths)).activations
    return traced.size, Workload(
        activations=traced.activations,
        microbatch_tokens=microbatch.num_tokens,
        saved_activations=saved,
        accumulation_steps=training.accumulation_steps,
        optimizer=training.optimizer,
        dataset_tokens=training.dataset_tokens,
    )


@dataclass(frozen=True)
class _Question:
    """All that a model's sizes and activations depend on.

    Attributes:
        key: tells two questions apart: every value, and which config.json was read.
    """

    key: str
    base: BaseModel = field(compare=False)
    microbatch: Microbatch = field(compare=False)
    unit_paths: tuple[str, ...] | None = field(compare=False)

    @classmethod
    def ask(cls, base: BaseModel, microbatch: Microbatch, unit_paths: tuple[str, ...] | None) -> _Question:
        file = (find_config(base.model_name_or_path, base.revision) / CONFIG_NAME).resolve()
        stamp = file, file.stat().st_mtime_ns, file.stat().st_size
        base = replace(base, lora=deepcopy(base.lora))
        base.lora.lora_alpha = base.lora.r  # a scale takes neither memory nor time, and a sweep may have many
        return cls(repr((stamp, base, microbatch, unit_paths)), base, microbatch, unit_paths)


@dataclass(frozen=True)
class _Traced:
    size: ModelSize
    activations: Activations
    may_recompute_some: bool


def _trace(question: _Question) -> _Traced:
    base, microbatch = question.base, question.microbatch
    model = base.build(question.unit_paths)
    size = measure_model(model, base.quantization, base.stored)
    may_recompute_some = _can_recompute_some(model, microbatch)
    return _Traced(size, trace(model, microbatch, base.quantization), may_recompute_some)


# Most edits of a form change neither the model nor its microbatch, and a trace takes seconds.
_recall_trace = lru_cache(maxsize=16)(_trace)


def _can_recompute_some(model: PeftModel, microbatch: Microbatch) -> bool:
    """Tell whether layers may keep their activations, and on the device: not where they are sent to host memory."""
    checkpointing = microbatch.checkpointing
    if checkpointing is None or microbatch.is_offloading or checkpointing.get("every_n_layers", 1) != 1:
        return False
    return all(hasattr(layer, "gradient_checkpointing") for layer in find_layers(model))


def _describe_quantized(base: BaseModel, training: Training, cluster: Cluster, options: PlacementOptions) -> str:
    """Return what would fit with nf4, where nothing fits without."""
    kinds = _measure_jobs(replace(base, quantization=Quantization("nf4")), training, options)
    plan = make_plan(*join_jobs(kinds), cluster, options)
    if plan.chosen is None:
        return "nor does anything with quantization: nf4"
    row = plan.choice
    room = f"{row.peak_bytes / 2**30:.1f} of {cluster.free_bytes / 2**30:.1f} GiB"
    return f"with quantization: nf4, {name_placement(row.placement, cluster.num_ranks)} fits ({room})"


def plan_given(
    base: BaseModel,
    training: Training,
    device: torch.device,
    options: PlacementOptions,
    world_size: int,
    node_size: int | None,
    longest_s: float = 60.0,
) -> Plan:
    """Return what the placement that `options` give costs, beside the others, without asking other ranks.

    Measures nothing: the speeds were measured here before, or are those of a known device.

    Args:
        node_size: ranks on this node, where that is known.
        longest_s: seconds after which it gives up, since the other ranks wait.

    Raises:
        Exception: the model or the placement cannot be planned: see `explained_planning`.

    Ranks: local.
    """
    placement = resolve_placement(options, world_size, node_size)
    ranks_per_node = node_size or world_size
    hardware, note = recall_hardware(device, base.dtype)
    free_bytes = measure_free_bytes(device, ranks_per_node)
    host_bytes = psutil.virtual_memory().available
    cluster = Cluster(hardware, ranks_per_node, max(1, world_size // ranks_per_node), free_bytes, host_bytes)
    with _Deadline(longest_s):
        return plan_training(base, training, cluster, options, [note] if note else (), placement)


class _Deadline(TorchFunctionMode):
    """Stops planning that takes too long: a model whose code loops over the tokens of a sequence takes minutes."""

    def __init__(self, longest_s: float) -> None:
        super().__init__()
        self._longest_s = longest_s
        self._end_s = time.monotonic() + longest_s

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"it takes longer than {self._longest_s:.0f} s")
        return func(*args, **(kwargs or {}))


def plan_here(base: BaseModel, training: Training, device: torch.device, options: PlacementOptions) -> Plan:
    """Return one plan on all ranks, for the memory that is free and the speeds that are measured on them.

    Raises:
        UserError: the model cannot be found or planned, on all ranks alike.

    Ranks: collective over all ranks.
    """
    ranks_per_node = dist.find_node_size() or dist.get_world_size()
    num_nodes = dist.get_world_size() // ranks_per_node
    host_bytes = min(dist.gather_objects(psutil.virtual_memory().available))
    cluster = Cluster(probe(device, base.dtype), ranks_per_node, num_nodes, 0, host_bytes)
    return agree_on_plan(
        measure_free_bytes(device, ranks_per_node),
        lambda free_bytes: plan_training(base, training, replace(cluster, free_bytes=free_bytes), options),
    )
