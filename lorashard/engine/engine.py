"""The engine: hooks that keep each unit whole exactly while it is needed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError, ShardError
from ..runtime.dist import ShardGroup
from .autograd import Handle, PackedHandle, first_differentiable, is_in_backward, saved_handles
from .schedule import Direction, choose_slot
from .slots import Slot, SlotPool, plan_slots
from .stats import Stats
from .streams import SideStream
from .unit import State, Unit

_CHECKS = ("a forward without gradients", "a forward with gradients", "an optimizer step", "a read of base weights")


@dataclass(frozen=True)
class ScheduleEntry:
    """One stop in the static order of a forward: entering any of `modules` needs `unit` whole.

    Args:
        unit: what is visited. A tied embedding's unit is visited twice: first as embedding, last as LM head.
        modules: leaving one gives the unit back, unless `holds`.
        holds: keep the unit to the end of the forward, since it is read outside of its modules: fused losses read
            `lm_head.weight` after the final norm without calling the LM head.
        has_backward: false for a frozen embedding, which needs only its indices for that.
    """

    unit: Unit
    modules: tuple[nn.Module, ...]
    holds: bool = False
    has_backward: bool = True


class Engine:
    """Runs a model whose frozen base is sharded.

    Correct from waiting on demand alone: any order of forwards and backwards is right. Prefetch and what stays in the
    slots are hints that save time.

    Ranks: every rank must run the same passes in the same order; each pass and each optimizer step compares a rolling
        hash of the gathers and raises ShardError on all ranks when one differs. A rank that waits there for long says
        where the others are.
    Memory: the homes' shards, and the slot pool, which is allocated here once.
    """

    def __init__(
        self,
        visits: Sequence[ScheduleEntry],
        roots: Sequence[nn.Module],
        group: ShardGroup,
        device: torch.device,
        prefetch: int = 1,
    ) -> None:
        """Hook the modules of `visits`.

        Args:
            visits: the static order of one forward.
            roots: the modules whose call is a whole pass: the outermost model and those inside it that are called
                by themselves (`generate` calls the inner model). An optimizer that holds a parameter of the outermost
                marks the steps.
            group: the ranks that the units are sharded over.
            device: where the slots are.
            prefetch: how many units ahead to gather; 0 gathers each unit when it is needed.
        """
        self._visits = tuple(visits)
        self.units = tuple(dict.fromkeys(visit.unit for visit in visits))
        self._group = group
        self._prefetch = prefetch
        self._stream = SideStream(device)
        sharded = [unit for unit in self.units if not unit.is_resident]
        self.pool = SlotPool(plan_slots(sharded, num_layer_slots=2 + prefetch), device)
        self._order_slots()
        self._positions = {unit: [i for i, visit in enumerate(visits) if visit.unit is unit] for unit in self.units}
        self._position = 0
        self._direction = Direction.FORWARD
        self._depth = 0
        self._graph_task = -1
        self._leaf_hooks: list[RemovableHandle] = []
        self._unsharded_bytes = 0
        self._peak_unsharded_bytes = 0
        self._hash = group.number  # ranks that run another model than this one gather other units
        self._model = roots[0]
        if sharded:
            self._install_hooks(roots)

    # -- what users may ask ------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return what this rank has gathered, waited for and holds."""
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
            workspace_bytes=sum(workspace.num_bytes for workspace in {unit.workspace for unit in self.units}),
        )

    def follow_ranks(self, describe_ranks: Callable[[], str]) -> None:
        """Let a rank that waits long for others in a comparison say what `describe_ranks` knows of them, a line each.

        Ranks: local.
        """
        if self._group.lookout is not None:
            self._group.lookout.describe_ranks = describe_ranks

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """While the body runs, reading a base weight outside of a pass gathers its unit and gives a copy.

        Ranks: every rank must read the same weights in the same order.
        Memory: a copy of each weight that is read, for as long as the reader keeps it.
        """
        sharded = [
            (weight.placeholder, functools.partial(self._copy_weight, unit, index))
            for unit in self.units
            if not unit.is_resident
            for index, weight in enumerate(unit.weights)
        ]
        readers = [placeholder.reader for placeholder, _ in sharded]  # set where this is called inside of itself
        for placeholder, reader in sharded:
            placeholder.reader = reader
        try:
            yield
        finally:
            for (placeholder, _), previous in zip(sharded, readers, strict=True):
                placeholder.reader = previous

    def _copy_weight(self, unit: Unit, index: int) -> torch.Tensor:
        self._make_whole(unit)
        weight = unit.weights[index]
        copy = weight.owners[0].module._parameters[weight.owners[0].attribute].detach().clone()  # type: ignore
        unit.reshard(self._stream)
        return copy

    def read(self, wanted: Sequence[tuple[Unit, int]]) -> list[torch.Tensor]:
        """Return copies of base weights, each given by its unit and its number there, outside of a pass.

        Ranks: collective over the shard group where one of their units is sharded: every rank must read the same.
        Memory: the copies, and one slot at a time.
        """
        if not all(unit.is_resident for unit, _ in wanted):
            self._check_ranks_agree(3)
        return [self._copy_weight(unit, number) for unit, number in wanted]

    def write(self, unit: Unit, number: int, value: torch.Tensor) -> None:
        """Let a base weight have other numbers from now on: those of a checkpoint, before training goes on from there.

        Ranks: local, but every rank must write the same between the same passes.
        """
        if unit.slot is not None:
            unit.reshard(self._stream)
            self._unsharded_bytes -= unit.layout.total_bytes
            unit.evict(self._stream)
        unit.write(number, value)
        self._order_slots()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _install_hooks(self, roots: Sequence[nn.Module]) -> None:
        for root in roots:
            _make_root(root, self)
        for position, visit in enumerate(self._visits):
            for module in visit.modules:
                self._hook(module, position)
        if self._group.size > 1:
            engine_of = weakref.ref(self)

            def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                engine = engine_of()
                if engine is not None and engine.is_trained_by(optimizer):
                    engine._check_ranks_agree(2)

            handle = register_optimizer_step_pre_hook(before_step)
            weakref.finalize(self, handle.remove)

    def _hook(self, module: nn.Module, position: int) -> None:
        module.register_forward_pre_hook(self._before_forward(position), with_kwargs=True)
        module.register_forward_hook(self._after_forward(position), with_kwargs=True)

    def follow(self, replaced: Mapping[nn.Module, nn.Module]) -> None:
        """Enter units by the modules that have taken the places of others too, as when an adapter is taken off."""
        if len(self.pool) == 0:  # nothing is hooked where every unit is resident
            return
        for position, visit in enumerate(self._visits):
            for module in visit.modules:
                if module in replaced:
                    self._hook(replaced[module], position)

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer holds a parameter of the adapter."""
        own = {id(parameter) for parameter in self._model.parameters()}  # adapters are added and deleted
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def _before_forward(self, position: int) -> Callable[..., None]:
        unit = self._visits[position].unit

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
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

        return hook

    def _after_forward(self, position: int) -> Callable[..., None]:
        visit = self._visits[position]

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if visit.has_backward and torch.is_grad_enabled():
                result = first_differentiable(output)
                if result is not None:
                    result.register_hook(lambda grad: self._enter_backward(visit.unit))
            if is_in_backward():
                return
            if not visit.holds:
                visit.unit.reshard(self._stream)
            following = self._visits[position + 1 : position + 2]
            if any(after.holds for after in following):  # no module of it need be called before it is read
                self._enter_forward(position + 1)

        return hook

    # -- the life of a unit ------------------------------------------------------------------------------------------

    def _enter_forward(self, position: int) -> None:
        self._position = position
        self._make_whole(self._visits[position].unit)
        ahead = (visit.unit for visit in self._visits[position + 1 :] if not visit.unit.is_resident)
        for unit in itertools.islice(ahead, self._prefetch):
            self._start_gather(unit)

    def _enter_backward(self, unit: Unit) -> None:
        """Make `unit` whole because its backward, or its recomputation, begins."""
        if self._graph_task != torch._C._current_graph_task_id():
            self._graph_task = torch._C._current_graph_task_id()
            if self._depth == 0:
                self._reshard_all()  # what a backward that an exception cut short has left whole
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if unit.state is State.UNSHARDED and not unit.is_resident:
            return
        if not any(self._visits[position].has_backward for position in self._positions[unit]):
            self._make_whole(unit)  # recomputation enters it; its place says nothing of where backward is
            return
        for other in self.units:
            # No gradient reaches the input of such a unit, so nothing else tells that its backward is over.
            if not other.has_backward_below and other is not unit:
                other.reshard(self._stream)
        self._direction = Direction.BACKWARD
        self._position = self._positions[unit][-1]
        self._make_whole(unit)
        self._prefetch_backward(self._position)

    def _prefetch_backward(self, position: int) -> None:
        num_started = 0
        for ahead in reversed(range(position)):
            is_reached = self._visits[ahead].has_backward and self._visits[ahead + 1].unit.has_backward_below
            if not is_reached or num_started == self._prefetch:
                return
            if not self._visits[ahead].unit.is_resident:
                self._start_gather(self._visits[ahead].unit)
                num_started += 1

    def _leave_backward(self, unit: Unit) -> None:
        if is_in_backward():
            unit.reshard(self._stream)
            self._prefetch_backward(self._position)

    def _end_backward(self) -> None:
        self._graph_task = -1
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self._reshard_all()

    def _reshard_all(self) -> None:
        for unit in self.units:
            unit.reshard(self._stream)

    def _make_whole(self, unit: Unit) -> None:
        if not self._start_gather(unit):
            in_use = [other.name for other in self.units if other.state is State.UNSHARDED and other.slot is not None]
            raise ShardError(
                f"no slot is free for '{unit.name}': {in_use} are all in use at once. Raise prefetch (each step adds "
                "a slot), or load with placement='replicate'"
            )
        unit.wait(self._stream)

    def _start_gather(self, unit: Unit) -> bool:
        """Start the gather of `unit` if it is sharded and a slot can be had; tell whether it is whole or on its way."""
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

    def _take_slot(self, unit: Unit) -> Slot | None:
        slots = self.pool.of_class(unit.size_class)
        owners = [slot.owner for slot in slots]
        chosen = choose_slot(
            owners,
            lambda owner: owner.state is State.UNSHARDED,
            self._positions,
            self._position,
            self._direction,
            len(self._visits),
        )
        if chosen is None:
            return None
        victim = owners[chosen]
        if victim is not None:
            self._unsharded_bytes -= victim.layout.total_bytes
            victim.evict(self._stream)
        return slots[chosen]

    # -- a pass ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Surround one call of a root: handles for autograd, units given back at the end, order after an exception."""
        if self._depth > 0:
            yield
            return
        if is_in_backward():  # a checkpoint around the whole model recomputes it
            with saved_handles(self.pool, self._restore):
                yield
            return
        is_left_whole = any(unit.state is State.UNSHARDED and unit.slot is not None for unit in self.units)
        if is_left_whole or self._graph_task != -1:
            self._recover()  # the last backward was cut short by an exception
        is_training = torch.is_grad_enabled()
        self._check_ranks_agree(int(is_training))
        self._direction = Direction.TRAINING_FORWARD if is_training else Direction.FORWARD
        self._position = 0
        self._depth += 1
        is_done = False
        try:
            with saved_handles(self.pool, self._restore):
                yield
            is_done = True
        finally:
            self._depth -= 1
            if is_done:
                self._reshard_all()
            else:
                self._recover()

    def _restore(self, handle: Handle | PackedHandle) -> torch.Tensor:
        if is_in_backward():
            self._enter_backward(handle.unit)
        else:
            self._make_whole(handle.unit)
        if isinstance(handle, PackedHandle):
            packed = handle.unit.packed(handle.number).viewed(handle.views)
            return packed if is_in_backward() else packed.unpack()
        assert handle.unit.slot is not None
        tensor = handle.unit.slot.view(handle.dtype, handle.shape, handle.stride, handle.offset)
        if not is_in_backward():
            return tensor.clone()  # somebody looks at the graph: their tensor must outlive the slot
        return tensor

    def _recover(self) -> None:
        """Return every unit to SHARDED, whatever an exception left behind."""
        for unit in self.units:
            unit.abandon(self._stream)
        self.pool.replace_held()
        self._order_slots()
        self._unsharded_bytes = 0
        self._graph_task = -1

    def _order_slots(self) -> None:
        # The side stream must not overtake what used the slots' memory before they were allocated, nor the filling of
        # the shards.
        for slot in self.pool:
            slot.readers_done = self._stream.mark()

    def _check_ranks_agree(self, check: int) -> None:
        if self._group.size == 1:
            return
        differing = self._group.compare(
            [check, self._group.num_gathers, self._hash],
            f"begin {_CHECKS[check]} after {self._group.num_gathers} gathers",
        )
        if differing is None:
            return
        found = "; ".join(
            f"rank {rank} begins {_CHECKS[kind]} after {num_gathers} gathers"
            for rank, (kind, num_gathers, _) in enumerate(differing)
        )
        raise ShardError(
            f"the ranks have diverged: {found}. Sharded ranks must run the same forwards and backwards in the same "
            "order, or they would read each other's wrong units: give every rank the same number of batches, "
            "evaluate on all ranks, and call generate equally often on all"
        )


def _make_root(module: nn.Module, engine: Engine) -> None:
    """Surround every call of `module` with `engine.running()`, by a subclass that is otherwise the same class.

    A forward hook would not run after KeyboardInterrupt, and `forward` itself is replaced by others.
    """
    original = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # an error that the compiler meets while it traces would make it skip this call
            raise ConfigError(
                "torch.compile was given the whole model (a trainer's torch_compile=True does that), the sharding with "
                "it: leave it out there and give torch_compile to lorashard.load or lorashard.shard, which compile "
                "the decoder layers"
            )
        with engine.running():
            return original.__call__(self, *args, **kwargs)

    namespace = {"__call__": call, "__module__": original.__module__, "__qualname__": original.__qualname__}
    module.__class__ = type(original.__name__, (original,), namespace)
