"""The engine: hooks that keep each unit unsharded exactly while it is needed."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..errors import ShardError
from ..runtime.dist import ShardGroup
from .agreement import check_ranks_agree
from .autograd import Handle, WeightHandle, first_differentiable, is_in_backward, saved_handles
from .reader import BaseReader
from .root import make_root
from .schedule import Direction, ScheduleEntry, choose_slot, find_next_of_class
from .slots import Slot, SlotPool, plan_slots
from .stats import Stats
from .streams import SideStream
from .turns import Turns
from .unit import State, Unit


class Engine:
    """Runs a model whose frozen base is sharded.

    Correct from waiting on demand alone: any order of forwards and backwards is right. Prefetch and what stays in the
    slots are hints that save time.

    Ranks: every rank must run the same passes in the same order; each pass and each optimizer step compares a rolling
        hash of the gathers and raises ShardError on all ranks when one differs. A rank that waits there long reports
        where the others are.
    Memory: the homes' shards, and the slot pool, which is allocated here once.

    Attributes:
        turns: of the jobs, where several models share the base.
        reader: of base weights, outside of passes.
    """

    def __init__(
        self,
        schedule: Sequence[ScheduleEntry],
        roots: Sequence[nn.Module],
        group: ShardGroup,
        device: torch.device,
        prefetch: int = 1,
        others: Sequence[Sequence[nn.Module]] = (),
    ) -> None:
        """Hook the modules of `schedule`.

        Args:
            schedule: the static order of one forward.
            roots: the modules whose call is one pass: the outermost model and those inside it that are called
                by themselves (`generate` calls the inner model). An optimizer that holds a parameter of the outermost
                marks the steps.
            group: the ranks that the units are sharded over.
            device: where the slots are.
            prefetch: how many units ahead to gather; 0 gathers each unit when it is needed.
            others: the roots of each further model on the same base, whose modules `schedule` has too: see `Turns`.
        """
        self._schedule = tuple(schedule)
        self.units = tuple(dict.fromkeys(entry.unit for entry in schedule))
        self._group = group
        self._prefetch = prefetch
        self._stream = SideStream(device)
        sharded = [unit for unit in self.units if not unit.is_resident]
        self.turns = Turns(device, shares_visits=bool(sharded)) if others else None
        self.pool: SlotPool[Unit] = SlotPool(plan_slots(sharded, num_layer_slots=2 + prefetch), device)
        self._order_slots()
        self._positions = {unit: [i for i, entry in enumerate(schedule) if entry.unit is unit] for unit in self.units}
        self._with_backward = {entry.unit for entry in schedule if entry.has_backward}
        self._classes = [None if entry.unit.is_resident else entry.unit.size_class for entry in schedule]
        self._ahead = [self._find_ahead(position) for position in range(len(schedule))]
        self._position = 0
        self._direction = Direction.FORWARD
        self._is_training = False  # whether the pass that is running is one with gradients
        self._inside: set[int | None] = set()  # the jobs that are inside of a pass; None: where there are no jobs
        self._graph_task = -1
        self._num_forwards = 0  # with gradients, since the last backward
        self._leaf_hooks: list[RemovableHandle] = []
        self._unsharded_bytes = 0
        self._peak_unsharded_bytes = 0
        self._hash = group.number  # ranks that run another model than this one gather other units
        self._models = [of_job[0] for of_job in (roots, *others)]
        self.reader = BaseReader(self.units, self._read, self._outside_of_passes)
        if sharded:
            self._install_hooks([root for of_job in (roots, *others) for root in of_job])

    # -- what users may ask ------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return what this rank has gathered, waited for and holds.

        Ranks: local. On CUDA it waits for the device.
        """
        return Stats(
            num_gathers=self._group.num_gathers,
            gathered_bytes=self._group.gathered_bytes,
            num_copies=sum(unit.home.num_copies for unit in self.units),
            copied_bytes=sum(unit.home.copied_bytes for unit in self.units),
            peak_unsharded_bytes=self._peak_unsharded_bytes,
            num_slots=len(self.pool),
            slot_bytes=self.pool.total_bytes,
            num_resident=sum(unit.is_resident for unit in self.units),
            bytes_at_rest=sum(unit.home.device_bytes for unit in self.units),
            host_bytes_at_rest=sum(unit.home.host_bytes for unit in self.units),
            wait_s=self._stream.waited_s(),
            workspace_bytes=sum(
                workspace.num_bytes
                for workspace in {w.format.workspace for unit in self.units for w in unit.weights if w.format}
            ),
        )

    def follow_ranks(self, describe_ranks: Callable[[], str]) -> None:
        """Let a rank that waits long in a comparison report what `describe_ranks` knows of them, a line each.

        Ranks: local.
        """
        if self._group.lookout is not None:
            self._group.lookout.describe_ranks = describe_ranks

    @contextlib.contextmanager
    def _outside_of_passes(self, is_compared: bool) -> Iterator[None]:
        """Surround a read of base weights; a job waits, as if it were a pass, until no other is inside of one."""
        if self.turns is not None and self.turns.job is not None:
            with torch.no_grad(), self.running():
                yield
            return
        if is_compared:
            check_ranks_agree(self._group, 3, self._hash)
        yield

    def _read(self, unit: Unit, index: int) -> torch.Tensor:
        self._unshard(unit)
        owner = unit.weights[index].owners[0]
        value = owner.module._parameters[owner.attribute].detach().clone()  # type: ignore[union-attr]
        unit.release(self._stream)
        return value

    def write(self, unit: Unit, index: int, value: torch.Tensor) -> None:
        """Give a base weight other values from now on: those of a checkpoint, before training resumes from there.

        Ranks: local, but every rank must write the same between the same passes.
        """
        if unit.slot is not None:
            unit.release(self._stream)
            self._reshard(unit)
        unit.write(index, value)
        self._order_slots()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _install_hooks(self, roots: Sequence[nn.Module]) -> None:
        for root in roots:
            make_root(root, self.running)
        for position, entry in enumerate(self._schedule):
            for module in entry.modules:
                self._hook(module, position)
        if self._group.size > 1:
            engine_of = weakref.ref(self)

            def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                engine = engine_of()
                if engine is not None and engine.is_trained_by(optimizer):
                    job = None if engine.turns is None else engine.turns.job
                    check_ranks_agree(engine._group, 2, engine._hash, () if job is None else (job,))

            handle = register_optimizer_step_pre_hook(before_step)
            weakref.finalize(self, handle.remove)

    def _hook(self, module: nn.Module, position: int) -> None:
        module.register_forward_pre_hook(self._before_forward(position), with_kwargs=True)
        module.register_forward_hook(self._after_forward(position), with_kwargs=True)

    def follow(self, replaced: Mapping[nn.Module, nn.Module]) -> None:
        """Enter units by the modules that have taken the places of others too, as when an adapter is taken off.

        Ranks: local, but every rank must do the same between the same passes.
        """
        if len(self.pool) == 0:  # nothing is hooked where every unit is resident
            return
        for position, entry in enumerate(self._schedule):
            for module in entry.modules:
                if module in replaced:
                    self._hook(replaced[module], position)

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer holds a parameter of the adapter."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        job = None if self.turns is None else self.turns.job
        first = self._models[job : job + 1] if job is not None else []  # most likely that of the job
        return any(id(parameter) in held for model in [*first, *self._models] for parameter in model.parameters())

    def _before_forward(self, position: int) -> Callable[..., tuple[Any, Any] | None]:
        unit = self._schedule[position].unit

        def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if self.turns is not None and self.turns.job is not None:
                return self._enter_as_job(self.turns, position, args, kwargs)
            if is_in_backward():  # activation checkpointing recomputes the unit
                self._enter_backward(unit)
            else:
                self._enter_forward(position)
            if torch.is_grad_enabled():
                entry = first_differentiable(args)
                entry = entry if entry is not None else first_differentiable(kwargs)
                # A leaf ends the graph, unless a recomputation has cut it out: nothing below trains.
                unit.has_backward_below = entry is not None and (not entry.is_leaf or is_in_backward())
                if entry is not None:
                    handle = entry.register_hook(lambda grad: self._leave_backward(unit))
                    if entry.is_leaf:  # it may outlive the step, and collect a hook in each
                        self._leaf_hooks.append(handle)
            return None

        return hook

    def _after_forward(self, position: int) -> Callable[..., Any]:
        scheduled = self._schedule[position]

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            linked, is_last = None, True
            if self.turns is not None and self.turns.job is not None and not is_in_backward():
                is_last = self.turns.leave()
                if scheduled.has_backward and torch.is_grad_enabled():
                    linked = self.turns.links.link(output, lambda: self._enter_backward(scheduled.unit))
            elif scheduled.has_backward and torch.is_grad_enabled():
                result = first_differentiable(output)
                if result is not None:
                    result.register_hook(lambda grad: self._enter_backward(scheduled.unit))
            if is_in_backward():
                return None
            if not scheduled.holds and is_last:
                scheduled.unit.release(self._stream)
            following = self._schedule[position + 1 : position + 2]
            if any(after.holds for after in following):  # no module of it need be called before it is read
                self._enter_forward(position + 1)
            return linked

        return hook

    def _enter_as_job(self, turns: Turns, position: int, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Enter a unit where several jobs do, in a forward or a recomputation; return the linked arguments, if any."""
        unit = self._schedule[position].unit
        if is_in_backward():  # its forward has linked it
            self._enter_backward(unit)
            return None
        visit = turns.enter(position)
        self._enter_forward(position)
        if not torch.is_grad_enabled():
            return None
        linked = turns.link_entry((args, kwargs), visit, lambda: self._leave_backward(unit))
        unit.has_backward_below = visit.is_below
        return linked

    # -- the life of a unit ------------------------------------------------------------------------------------------

    def _enter_forward(self, position: int) -> None:
        self._position = position
        self._unshard(self._schedule[position].unit)
        for unit in self._ahead[position]:
            self._start_unshard(unit)

    def _find_ahead(self, position: int) -> list[Unit]:
        """Return the units whose gathers start when a forward enters `position`."""
        ahead = [entry.unit for entry in self._schedule[position + 1 :] if not entry.unit.is_resident]
        following = find_next_of_class(self._classes, position) if self._prefetch > 0 else None
        in_slot_left = [] if following is None else [self._schedule[following].unit]
        return ahead[: self._prefetch] + in_slot_left

    def _enter_backward(self, unit: Unit) -> None:
        """Unshard `unit` because its backward, or its recomputation, begins."""
        if self._graph_task != torch._C._current_graph_task_id():
            self._graph_task = torch._C._current_graph_task_id()
            if not self._inside:
                self._release_all()  # what a backward that an exception cut short has left unsharded
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if unit.state is State.UNSHARDED and not unit.is_resident:
            return
        if unit not in self._with_backward:
            self._unshard(unit)  # recomputation enters it; its position says nothing of where backward is
            return
        for other in self.pool.owners():
            # No gradient reaches the input of such a unit, so nothing else tells that its backward is over.
            if not other.has_backward_below and other is not unit:
                other.release(self._stream)
        self._direction = Direction.BACKWARD
        self._position = self._positions[unit][-1]
        self._unshard(unit)
        self._prefetch_backward(self._position)

    def _prefetch_backward(self, position: int) -> None:
        for unit in itertools.islice(self._ahead_of_backward(position), self._prefetch):
            self._start_unshard(unit)

    def _ahead_of_backward(self, position: int) -> Iterator[Unit]:
        """Yield the units that come after the backward at `position`, ending with the next forward's first."""
        above = self._schedule[position].unit
        for ahead in range(position - 1, -1, -1):
            entry = self._schedule[ahead]
            if not (entry.has_backward and above.has_backward_below):
                break
            above = entry.unit
            if not above.is_resident:
                yield above
        # Not while in the head, which the final norm's backward enters once more; nor where the head is needed again:
        # it is differentiated twice (create_graph), or other forwards share this backward.
        is_last = self._num_forwards == 1 and not torch.is_grad_enabled()
        if self._classes[0] not in (None, self._classes[position]) and is_last:
            yield self._schedule[0].unit

    def _leave_backward(self, unit: Unit) -> None:
        if is_in_backward():
            unit.release(self._stream)
            self._prefetch_backward(self._position)

    def _end_backward(self) -> None:
        self._graph_task = -1
        self._num_forwards = 0
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self._release_all()

    def _release_all(self) -> None:
        for unit in self.pool.owners():
            unit.release(self._stream)

    def _unshard(self, unit: Unit) -> None:
        if not self._start_unshard(unit):
            in_use = [other.name for other in self.units if other.state is State.UNSHARDED and other.slot is not None]
            raise ShardError(
                "no slot is free",
                where=f"unit '{unit.name}'",
                found=f"all in use at once by {in_use}",
                fix="raise prefetch (each step adds a slot), or load with placement='replicate'",
            )
        unit.wait(self._stream)

    def _start_unshard(self, unit: Unit) -> bool:
        """Start to unshard `unit` if a slot can be had; tell whether it is unsharded or on its way."""
        if unit.state is not State.SHARDED:
            return True
        slot = self._take_slot(unit)
        if slot is None:
            return False
        unit.unshard(slot, self._stream)
        self._hash = hash((self._hash, unit.index))
        self._unsharded_bytes += unit.layout.total_bytes
        self._peak_unsharded_bytes = max(self._peak_unsharded_bytes, self._unsharded_bytes)
        return True

    def _take_slot(self, unit: Unit) -> Slot[Unit] | None:
        slots = self.pool.of_class(unit.size_class)
        owners = [slot.owner for slot in slots]
        chosen = choose_slot(
            owners,
            lambda owner: owner.state is State.UNSHARDED,
            self._positions,
            self._position,
            self._direction,
            len(self._schedule),
        )
        if chosen is None:
            return None
        victim = owners[chosen]
        if victim is not None:
            self._reshard(victim)
        return slots[chosen]

    def _reshard(self, unit: Unit) -> None:
        self._unsharded_bytes -= unit.layout.total_bytes
        unit.reshard(self._stream)

    # -- a pass ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Surround one call of a root: handles for autograd, units released at the end, order after an exception.

        Ranks: every rank must run the same passes in the same order; before the first gather of one they compare.
        Memory: the slots; after the body their bytes stay, for nobody to read.
        """
        job = None if self.turns is None else self.turns.job
        if job in self._inside:
            yield
            return
        if is_in_backward():  # a checkpoint around the whole model recomputes it
            with saved_handles(self.pool, self._restore):
                yield
            return
        is_training = torch.is_grad_enabled()
        if self.turns is None or job is None:
            self._begin_pass(is_training)
        elif self.turns.begin_pass(is_training):
            self._begin_pass(self.turns.is_training, self.turns.in_pass)
        self._inside.add(job)
        is_done = False
        try:
            with saved_handles(self.pool, self._restore):
                yield
            is_done = True
        finally:
            self._inside.discard(job)
            is_last = self.turns is None or job is None or self.turns.end_pass(None if is_done else sys.exception())
            if not is_done:
                self._recover()
            elif is_last:
                self._num_forwards += self._is_training
                self._release_all()

    def _begin_pass(self, is_training: bool, jobs: Collection[int] = ()) -> None:
        is_left_unsharded = any(unit.state is State.UNSHARDED for unit in self.pool.owners())
        if is_left_unsharded or self._graph_task != -1:
            self._recover()  # the last backward was cut short by an exception
        check_ranks_agree(self._group, int(is_training), self._hash, jobs)
        self._is_training = is_training
        self._direction = Direction.TRAINING_FORWARD if is_training else Direction.FORWARD
        self._position = 0

    def _restore(self, handle: Handle | WeightHandle) -> torch.Tensor:
        if not is_in_backward():  # somebody looks at the graph: their tensor must outlive the slot
            self._unshard(handle.unit)
            return handle.copy()
        if handle.unit.state is not State.UNSHARDED or self._graph_task != torch._C._current_graph_task_id():
            self._enter_backward(handle.unit)
        return handle.find()

    def _recover(self) -> None:
        """Return every unit to SHARDED, whatever an exception left behind."""
        for unit in self.units:
            unit.abandon(self._stream)
        self.pool.replace_held()
        self._order_slots()
        self._unsharded_bytes = 0
        self._graph_task = -1
        self._num_forwards = 0

    def _order_slots(self) -> None:
        # The side stream must not overtake what used the slots' memory before, nor the filling of the shards.
        for slot in self.pool:
            slot.readers_done = self._stream.mark()
