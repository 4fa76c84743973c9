"""Jobs that take turns, as plain functions: who runs when, whose random numbers are drawn, and how all end."""

from __future__ import annotations

import random
import threading
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
    turns.end_pass(True)


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
            ends.append(turns.end_pass(True))

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
                turns.end_pass(True)
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
            finally:
                turns.end_pass(False)
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


def test_jobs_cannot_start_jobs():
    """Catches a deadlock: the inner jobs would wait for the outer one, which waits for them."""
    turns = make_turns()
    with pytest.raises(ShardError, match="jobs cannot start jobs"):
        turns.run([lambda: (turns.run([]), None)[1]])
