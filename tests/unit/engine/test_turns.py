"""Jobs that take turns, as plain functions: who runs when, whose random numbers are drawn, and how all end."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lorashard.engine.turns import Turns
from lorashard.errors import ShardError, TrainingError

Said = list[tuple[str, str, int]]


def make_turns() -> Turns:
    return Turns(torch.device("cpu"))


def make_pass(turns: Turns, name: str, said: Said, units: int = 3, is_training: bool = False) -> None:
    """Go through units as the engine does in a forward."""
    turns.begin_pass(is_training)
    for position in range(units):
        turns.enter(position)
        said.append((name, "unit", position))
        turns.leave()
    turns.end_pass(None)


def test_jobs_visit_each_unit_one_after_the_other():
    """Catches an order that follows from the clock, by which ranks would diverge, and units that are not visited
    together; a job that begins later joins the next pass, and one that has ended is not waited for."""

    def run() -> Said:
        turns, said = make_turns(), []

        def once() -> None:
            make_pass(turns, "a", said)

        def twice() -> None:
            make_pass(turns, "b", said)
            make_pass(turns, "b", said, units=2)

        assert turns.run([once, twice]) == [None, None]
        return said

    first = [(name, "unit", position) for position in range(3) for name in "ab"]
    assert run() == run() == [*first, ("b", "unit", 0), ("b", "unit", 1)]


def test_who_is_first_and_last_in_a_pass_is_told():
    """Catches a pass that begins for each job, where ranks would compare too often, and units released too early."""
    turns, firsts, lasts, ends, kinds = make_turns(), [], [], [], []

    def work(is_training: bool) -> Callable[[], None]:
        def go() -> None:
            firsts.append(turns.begin_pass(is_training))
            kinds.append(turns.is_training)
            turns.enter(0)
            lasts.append(turns.leave())
            ends.append(turns.end_pass(None))

        return go

    turns.run([work(False), work(True), work(False)])
    assert (firsts, lasts, ends) == ([True, False, False], [False, False, True], [False, False, True])
    assert kinds == [True] * 3, "one job of the pass has gradients"


def test_one_backward_differentiates_the_losses_of_all():
    """Catches a backward for each job, by which each unit would be gathered once for each."""
    turns, tasks = make_turns(), []
    leaves = [torch.ones(2, requires_grad=True) for _ in range(3)]

    def work(leaf: torch.Tensor) -> Callable[[], None]:
        def go() -> None:
            leaf.register_hook(lambda grad: tasks.append(torch._C._current_graph_task_id()))
            turns.backward((leaf * 3).sum())
            assert leaf.grad is not None and leaf.grad.tolist() == [3, 3]

        return go

    turns.run([work(leaf) for leaf in leaves])
    assert len(tasks) == 3 and len(set(tasks)) == 1


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def test_each_job_draws_from_random_numbers_of_its_own():
    """Catches dropout and shuffling that depend on which jobs run beside; torch's are drawn inside of units too."""

    def make(seed: int, turns: Turns, drawn: list[float]) -> Callable[[], None]:
        def go() -> None:
            seed_all(seed)
            for _ in range(2):
                drawn.extend(draw())
                turns.begin_pass(True)
                for position in range(2):
                    turns.enter(position)
                    drawn.append(torch.rand(()).item())
                    turns.leave()
                turns.end_pass(None)
                drawn.extend(draw())
                turns.backward(torch.ones((), requires_grad=True) * 1)

        return go

    together: list[list[float]] = [[], [], []]
    turns = make_turns()
    seed_all(100)
    turns.run([make(seed, turns, drawn) for seed, drawn in enumerate(together)])
    after = draw()
    for seed in range(3):
        alone: list[float] = []
        single = make_turns()
        single.run([make(seed, single, alone)])
        assert together[seed] == alone
    seed_all(100)
    assert after == draw(), "the caller's random numbers are as they were"


def test_an_error_of_its_own_ends_a_job_alone():
    """Catches a failing job that takes the others with it, or is waited for."""
    turns, said = make_turns(), []

    def fail() -> None:
        make_pass(turns, "a", said, units=1)
        raise TrainingError("enough")

    def go_on() -> None:
        for _ in range(3):
            make_pass(turns, "b", said, units=1)

    errors = turns.run([fail, go_on], (TrainingError,))
    assert isinstance(errors[0], TrainingError) and errors[1] is None
    assert [name for name, _, _ in said] == ["a", "b", "b", "b"]


@pytest.mark.parametrize("place", ["outside, of another kind", "inside of a pass", "in the joint backward"])
def test_any_other_error_ends_all(place):
    """Catches threads that wait for ever, a second error in place of the first, and turns that are not usable then."""
    turns, said, undone = make_turns(), [], []

    def fail_backward(grad: torch.Tensor) -> None:
        raise TrainingError("enough")

    def fail() -> None:
        make_pass(turns, "a", said)
        if place == "outside, of another kind":
            raise ValueError("enough")
        if place == "inside of a pass":
            turns.begin_pass(True)
            try:
                raise TrainingError("enough")
            except TrainingError as error:
                turns.end_pass(error)
                raise
        leaf = torch.ones((), requires_grad=True)
        leaf.register_hook(fail_backward)
        turns.backward(leaf * 2)

    def wait(at_end: Callable[[], None]) -> Callable[[], None]:
        def go() -> None:
            try:
                make_pass(turns, "b", said)
                at_end()
                said.append(("b", "went on", 0))
            finally:
                undone.append(turns.job is not None)

        return go

    def go_backward() -> None:
        turns.backward(torch.ones((), requires_grad=True) * 2)

    def forward() -> None:
        for _ in range(2):
            make_pass(turns, "b", said)
        go_backward()

    before = threading.active_count()
    with pytest.raises((ValueError, TrainingError), match="enough"):
        turns.run([wait(go_backward), fail, wait(forward), wait(go_backward)], (TrainingError,))
    assert turns.job is None and threading.active_count() == before
    assert len(undone) == 3 and ("b", "went on", 0) not in said
    assert turns.run([go_backward, go_backward]) == [None, None]


def test_an_error_in_a_pass_ends_all_though_its_job_goes_on():
    """Catches jobs that are cut off and reported as done, where one catches an error of its forward and tries again."""
    turns, said = make_turns(), []

    def try_again() -> None:
        turns.begin_pass(True)
        try:
            raise ValueError("too large")
        except ValueError as error:
            turns.end_pass(error)
        make_pass(turns, "a", said)

    with pytest.raises(ValueError, match="too large"):
        turns.run([try_again, lambda: make_pass(turns, "b", said)], (ValueError,))
    assert said == []


def test_a_job_that_visits_units_while_it_is_ended_hangs_nobody():
    """Catches a job that takes another's place while it clears up, so that those behind it are never woken."""
    turns, ended = make_turns(), []

    def fail() -> None:
        raise ValueError("enough")

    def clear_up() -> None:
        try:
            make_pass(turns, "b", [])
        finally:
            try:
                make_pass(turns, "b", [])
            finally:
                ended.append(turns.job)

    with pytest.raises(ValueError, match="enough"):
        turns.run([lambda: make_pass(turns, "a", []), clear_up, clear_up, fail])
    assert ended == [1, 2]


def test_an_interrupt_waits_for_the_jobs_to_end():
    """Catches threads that train on beside what a person does after Ctrl-C, with the state of the next sweep."""
    turns, ended = make_turns(), []

    def work(interrupts: bool) -> Callable[[], None]:
        def go() -> None:
            try:
                if interrupts:
                    os.kill(os.getpid(), signal.SIGINT)
                while time.monotonic() < deadline_s:
                    make_pass(turns, "", [])
                    time.sleep(1e-3)  # jobs that do nothing else hand the interpreter over past the caller
            finally:
                ended.append(turns.job)

        return go

    deadline_s = time.monotonic() + 30
    num_before = threading.active_count()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            turns.run([work(False), work(True), work(False)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() < deadline_s, "the jobs trained on"
    assert threading.active_count() == num_before and turns.job is None and {0, 1} <= set(ended)
    assert turns.run([lambda: make_pass(turns, "a", [])] * 2) == [None, None]


class _Thing:
    """Something large."""


@pytest.mark.parametrize("is_own", [True, False])
def test_nothing_is_kept_of_a_job_that_has_failed(is_own):
    """Catches the states of a failed job's optimizer that the others have to do without, and graphs that stay after a
    sweep has failed, so that the next one finds no memory."""
    turns, kept, alive = make_turns(), [], []

    def fail() -> None:
        thing = _Thing()
        kept.append(weakref.ref(thing))
        try:
            raise TrainingError("first")
        except TrainingError:
            raise TrainingError(f"enough, in {thing}") from None

    def go_on() -> None:
        leaf = torch.ones((), requires_grad=True)
        loss = leaf * 2
        loss.grad_fn.metadata["thing"] = thing = _Thing()
        kept.append(weakref.ref(thing))
        del thing
        turns.links.link(loss, lambda: None)
        for _ in range(2):
            make_pass(turns, "b", [])
        alive.append(kept[0]() is not None)
        turns.backward(loss)

    gc.disable()
    try:
        if is_own:
            assert isinstance(turns.run([fail, go_on], (TrainingError,))[0], TrainingError)
            assert alive == [False]
        else:
            with pytest.raises(TrainingError, match="enough"):
                turns.run([go_on, fail])
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def test_a_job_waits_until_the_others_have_decided_or_wait_too():
    """Catches a job that goes on before that, that is left waiting then, and one that has ended and is missed."""
    turns, said = make_turns(), []

    def work(name: str, passes: int) -> Callable[[], None]:
        def go() -> None:
            random.seed(name)
            before = random.getstate()
            for _ in range(passes):
                make_pass(turns, name, said, units=1)
            if name != "c":
                turns.wait_until(lambda: len(said) > 2)
                said.append((name, "met", 0))
                assert random.getstate() == before
            turns.backward(torch.ones((), requires_grad=True) * 1)

        return go

    assert turns.run([work("a", 1), work("b", 3), work("c", 0), lambda: None]) == [None] * 4
    units = [(name, "unit", 0) for name in "abb"]
    assert said == [*units, ("a", "met", 0), ("b", "unit", 0), ("b", "met", 0)]
    said.clear()
    assert turns.run([work("a", 1), work("b", 1), work("c", 0)]) == [None] * 3
    assert said == [("a", "unit", 0), ("b", "unit", 0), ("a", "met", 0), ("b", "met", 0)], "nobody decides"


def test_jobs_cannot_start_jobs():
    """Catches a deadlock: the inner jobs would wait for the outer one, which waits for them."""
    turns = make_turns()
    with pytest.raises(ShardError, match="jobs cannot start jobs"):
        turns.run([lambda: (turns.run([]), None)[1]])
