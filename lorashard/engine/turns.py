"""Several jobs on one engine: threads that take turns, so that all of them visit a unit while it is unsharded.

Note [Turns]
    A job is a thread with a model of its own, whose base is the engine's. One job runs at a time: it goes on until it
    comes to a unit, a pass or a backward, and there it waits until every other job waits too. Those that have come
    least far are let in together. So all jobs visit a unit one after the other, for one gather; and a job that does
    something else meanwhile (it evaluates, generates, has ended) is waited for, or is not.

    Threads, and not generators or greenlets: modes of torch (gradients, autocast, hooks on saved tensors) belong to a
    thread, and each job must find its own again in the middle of its forward. Which job comes next follows from what
    the jobs do and not from the clock, so that all ranks choose alike.

Note [Random numbers]
    Each job draws from random numbers of its own, as if it were alone: torch's are exchanged at each turn, since
    dropout draws inside of units; those of Python and numpy outside of passes, where they are drawn from. To exchange
    those at each turn too would take longer than many a unit does, since numpy copies its state number by number.
"""

from __future__ import annotations

import enum
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import ShardError
from .autograd import first_differentiable
from .links import Links


class _Place(enum.Enum):
    """What a job waits for."""

    START = "to start"
    PASS = "to begin a pass"
    UNIT = "to enter a unit"
    BACKWARD = "to begin a backward"
    CONDITION = "for what the others decide"
    OVER = "nothing: it has ended"


class JobsEnded(BaseException):
    """Ends a job's thread where it waits, since another job has failed; nobody outside of `Turns` sees it."""


@dataclass(eq=False)
class Visit:
    """One visit of a unit by the jobs that were let in together.

    Attributes:
        jobs: that have not left it yet in this forward.
        backwards: that have not left it yet in the backward of this forward; each adds itself.
        is_below: whether backward continues to the units before this one, for any of them.
    """

    jobs: set[int]
    backwards: set[int] = field(default_factory=set)
    is_below: bool = False


@dataclass(eq=False)
class _Job:
    wake: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    place: _Place = _Place.START
    position: int = 0  # of the unit that it waits for
    is_training: bool = False  # the pass that it waits for
    loss: torch.Tensor | None = None
    torch_state: Any = None
    host_state: Any = None
    error: Exception | None = None
    is_free: Callable[[], bool] | None = None  # of one that waits for a condition
    is_over: threading.Event = field(default_factory=threading.Event)


class Turns:
    """Lets jobs run in turns; see [Turns] and [Random numbers].

    Attributes:
        visit: of the unit that jobs are let into.
        in_pass: the jobs that are inside of the pass that is running.
        is_training: whether the pass that is running is one with gradients for any of its jobs.
        shares_visits: whether units are gathered at all; if not, no job need wait for another's backward.
        links: of the graph that the next backward goes through.
    """

    def __init__(self, device: torch.device, shares_visits: bool = True) -> None:
        self._device = device
        self._jobs: list[_Job] = []
        self._running: int | None = None
        self._ready: deque[int] = deque()
        self._is_pass_new = False
        self._own_errors: tuple[type[Exception], ...] = ()
        self.shares_visits = shares_visits
        self._is_broken = False
        self._failure: BaseException | None = None
        self.visit = Visit(set())
        self.in_pass: set[int] = set()
        self.is_training = False
        self.links = Links(device)

    @property
    def job(self) -> int | None:
        """The job that runs, or None outside of `run`."""
        return self._running

    def run(
        self, works: Sequence[Callable[[], None]], own_errors: tuple[type[Exception], ...] = ()
    ) -> list[Exception | None]:
        """Run each of `works` as a job, and return the error by which each has ended, or None.

        Args:
            own_errors: that end the job alone where they are raised outside of passes: all ranks raise them alike.

        Raises:
            BaseException: any other error of a job, or an interrupt of the caller, once the others have been ended
                where they come to their next turn; another interrupt does not wait for that.

        Ranks: every rank must run the same jobs; which comes next is the same on all ranks.
        Memory: what each job keeps between its forward and its backward, of all jobs at once.
        """
        if self._running is not None:
            raise ShardError("jobs cannot start jobs", fix="call run outside of a job")
        self._own_errors = own_errors
        self._jobs = [_Job() for _ in works]
        self._ready = deque(range(len(works)))
        self._is_broken, self._failure, self.in_pass = False, None, set()
        self.links.reset()
        state = _read_host(), self._read_torch()
        for job in self._jobs:
            job.host_state, job.torch_state = state
        threads = [
            threading.Thread(target=self._live, args=(index, work), name=f"job {index}", daemon=True)
            for index, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        try:
            self._wake_next()
            self._wait_for(threads)
        except BaseException as error:
            self._break(error)
            self._wait_for(threads)
            raise
        finally:
            errors, failure = self._forget()
            self._write_torch(state[1])
            _write_host(state[0])
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame
        return errors

    def _forget(self) -> tuple[list[Exception | None], BaseException | None]:
        """Return the jobs' errors, and the one that ended all; keep no graph, and no error, whose frames hold more."""
        errors, failure = [job.error for job in self._jobs], self._failure
        self._jobs, self._running, self._failure = [], None, None
        self.links.reset()
        return errors, failure

    def _wait_for(self, threads: Sequence[threading.Thread]) -> None:
        for job, thread in zip(self._jobs, threads, strict=True):
            job.is_over.wait()  # unlike Thread.join, it can be interrupted and called again
            thread.join()

    # -- what the engine calls in a job's thread ---------------------------------------------------------------------

    def begin_pass(self, is_training: bool) -> bool:
        """Wait until the jobs begin a pass together; return whether this one is the first of them."""
        job = self._own()
        job.is_training = is_training
        job.host_state = _read_host()
        self._wait(_Place.PASS)
        is_first, self._is_pass_new = self._is_pass_new, False
        return is_first

    def enter(self, position: int) -> Visit:
        """Wait until this job may enter the unit at `position`; return the visit."""
        self._own().position = position
        self._wait(_Place.UNIT)
        return self.visit

    def link_entry(self, values: Any, visit: Visit, leave: Callable[[], None]) -> Any | None:
        """Link what this job gives to the unit that it visits; return it, or None where nothing is differentiable.

        Args:
            leave: called in the backward of `visit`, when the last of the jobs has left the unit.
        """
        job, entry = self._running, first_differentiable(values)
        assert job is not None
        if entry is None:
            return None
        visit.is_below |= not entry.is_leaf
        visit.backwards.add(job)

        def leave_as_job() -> None:
            visit.backwards.discard(job)
            if not visit.backwards:
                leave()

        return self.links.link(values, leave_as_job)

    def leave(self) -> bool:
        """Leave the unit in a forward; return whether this job is the last."""
        assert self._running is not None
        self.visit.jobs.discard(self._running)
        return not self.visit.jobs

    def end_pass(self, error: BaseException | None) -> bool:
        """End this job's pass; return whether it is the last.

        Args:
            error: that cut it short, in the middle of units: it ends all jobs, also where this one would go on.
        """
        job = self._own()
        assert self._running is not None
        self.in_pass.discard(self._running)
        if error is not None:
            self._break(error)
        _write_host(job.host_state)
        return not self.in_pass

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate the losses of all jobs in one backward, once every job that can has come to its own."""
        job = self._own()
        if not self.shares_visits:
            loss.backward()
        job.loss, job.host_state = loss if self.shares_visits else None, _read_host()
        self._wait(_Place.BACKWARD)
        _write_host(job.host_state)

    def wait_until(self, is_free: Callable[[], bool]) -> None:
        """Wait until `is_free()`, or until each of the other jobs waits like this or has ended."""
        job = self._own()
        job.is_free, job.host_state = is_free, _read_host()
        self._wait(_Place.CONDITION)
        job.is_free = None
        _write_host(job.host_state)

    # -- turns -------------------------------------------------------------------------------------------------------

    def _own(self) -> _Job:
        assert self._running is not None
        return self._jobs[self._running]

    def _live(self, index: int, work: Callable[[], None]) -> None:
        job = self._jobs[index]
        job.wake.acquire()
        try:
            self._take(index)
            _write_host(job.host_state)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            work()
        except BaseException as error:
            if isinstance(error, self._own_errors) and not self._is_broken:
                _clear_frames(error)
                job.error = error
            else:
                self._break(error)
        finally:
            job.place = _Place.OVER
            self._wake_next()
            job.is_over.set()

    def _wait(self, place: _Place) -> None:
        index, job = self._running, self._own()
        assert index is not None
        job.place, job.torch_state = place, self._read_torch()
        if self._wake_next(index):
            job.wake.acquire()
        self._take(index)

    def _take(self, index: int) -> None:
        self._running = index
        if self._is_broken:
            raise JobsEnded
        job = self._jobs[index]
        self._write_torch(job.torch_state)

    def _wake_next(self, own: int | None = None) -> bool:
        """Let the next job run; return whether it is another than `own`, the caller's."""
        if not self._ready and not self._is_broken:
            try:
                self._let_in()
            except BaseException as error:  # of the joint backward, which is nobody's
                self._break(error)
        if self._is_broken:
            left = [] if own is not None else [job for job in self._jobs if job.place is not _Place.OVER]
            for job in left[:1]:  # one after the other, as they end
                job.wake.release()
            return False
        if not self._ready:
            return False  # all are over
        following = self._ready.popleft()
        if following == own:
            return False
        self._jobs[following].wake.release()
        return True

    def _break(self, error: BaseException) -> None:
        self._is_broken = True
        if self._failure is None and not isinstance(error, JobsEnded):
            self._failure = error

    def _let_in(self) -> None:
        """Choose who goes on, now that all wait: who is inside of a pass first, of these who has come least far."""
        at = {place: [i for i, job in enumerate(self._jobs) if job.place is place] for place in _Place}
        free = [i for i in at[_Place.CONDITION] if (is_free := self._jobs[i].is_free) is not None and is_free()]
        if free:
            group = free
        elif at[_Place.UNIT]:
            position = min(self._jobs[i].position for i in at[_Place.UNIT])
            group = [i for i in at[_Place.UNIT] if self._jobs[i].position == position]
            self.visit = Visit(set(group))
        elif at[_Place.PASS]:
            group = at[_Place.PASS]
            self.in_pass, self._is_pass_new = set(group), True
            self.is_training = any(self._jobs[i].is_training for i in group)
        elif at[_Place.BACKWARD]:
            group = at[_Place.BACKWARD]
            self._differentiate([self._jobs[i] for i in group])
        else:
            group = at[_Place.CONDITION]
        self._ready.extend(group)

    def _differentiate(self, jobs: Sequence[_Job]) -> None:
        losses = [job.loss for job in jobs if job.loss is not None]
        for job in jobs:
            job.loss = None
        self.links.reset()
        if losses:
            torch.autograd.backward(losses)

    # -- random numbers ----------------------------------------------------------------------------------------------

    def _read_torch(self) -> Any:
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _write_torch(self, state: Any) -> None:
        on_host, on_device = state
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self._device)


def _clear_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold, such as an optimizer's states: others train on while it is kept."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _read_host() -> Any:
    return random.getstate(), np.random.get_state()


def _write_host(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
