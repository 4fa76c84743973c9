"""A rank that waits for others in a comparison reports where they are, and does not wait in silence."""

from __future__ import annotations

import contextlib
import io
import threading
import time

import pytest
import torch
import torch.distributed as dist
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_model, make_batch

import lorashard
from lorashard.errors import ShardError
from lorashard.runtime.dist import HostGroup, set_timeout
from lorashard.runtime.rank_store import Lookout, RankStore

WARNING_S = 1.0
TIMEOUT_S = 4.0


def diverge(rank: int, done: str) -> tuple[str, BaseException | None, str, int]:
    set_timeout(TIMEOUT_S)
    model = lorashard.shard(build_model(), wait_warning_s=WARNING_S)
    model(**make_batch())
    num_threads = threading.active_count()
    store = dist.FileStore(done, 3)
    said, failure = io.StringIO(), None
    with contextlib.redirect_stderr(said):
        try:
            if rank == 2:  # as DDP does when a forward with gradients begins
                dist.broadcast(torch.zeros(1), src=0)
            else:
                with torch.no_grad():
                    model(**make_batch())
        except (RuntimeError, ShardError) as error:
            failure = error
    store.set(f"done/{rank}", "")  # one that has ended would end the others' waits
    store.wait([f"done/{other}" for other in range(3)])
    text = "\n".join([str(failure), *getattr(failure, "__notes__", ())])
    return said.getvalue(), type(failure), text, threading.active_count() - num_threads


def test_ranks_that_wait_for_one_that_is_elsewhere_say_where_all_are(tmp_path):
    """Catches ranks that diverge into different collectives and hang in silence to the end of gloo's half hour."""
    found = run_ranks(diverge, 3, str(tmp_path / "done"))

    for rank, (said, _, text, num_more_threads) in enumerate(found[:2]):
        assert said.count("lorashard:") == 1
        for words in (said, text):
            assert f"rank {rank} has waited" in words
            assert "rank 2 is elsewhere" in words
            assert "without gradients" in words and "with gradients" in words
        assert f"rank {1 - rank} waits too" in said
        assert num_more_threads == 0
    # The first to come to its timeout ends the other's wait, which gloo calls a closed connection.
    assert ShardError in [kind for _, kind, _, _ in found[:2]]
    assert found[2][0] == ""


def agree_late(rank: int, late: int) -> str:
    host_group = HostGroup.of_all(wait_warning_s=0.2)
    host_group.find_largest([rank], "begin")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if rank == late:
            time.sleep(1)
        host_group.find_largest([rank], "end a step")
    return said.getvalue()


@pytest.mark.parametrize("late", [2, 0])
def test_what_an_absent_rank_did_last_is_what_all_did_last(late):
    """Catches a rank that takes its own message for one that all have answered, or waits in silence to send it to 0."""
    for rank, said in enumerate(run_ranks(agree_late, 3, late)):
        if rank != late:
            assert f"rank {rank} has waited" in said
            assert f"rank {late} is elsewhere" in said and "to begin" in said


class Work:
    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done

    def wait(self, timeout: object = None) -> None:
        if not self.is_done:
            raise RuntimeError("Timed out")

    def is_completed(self) -> bool:
        return self.is_done


def test_a_wait_in_vain_is_forgotten_when_the_ranks_meet_again(monkeypatch):
    """Catches a rank that continues after a ShardError and is still reported to have waited in vain."""
    store = RankStore(dist.HashStore(), 0, 1, "waits")
    monkeypatch.setattr(RankStore, "of_group", lambda name: store)
    lookout = Lookout(0, range(1), 0)
    with pytest.raises(ShardError):
        lookout.wait(Work(False), "begin")
    (word,) = store.read_messages()
    assert word is not None and "in vain" in word
    lookout.wait(Work(True), "begin")
    assert store.read_messages() == [""]


def be_late(rank: int) -> tuple[str, list[str | None]]:
    model = lorashard.shard(build_model(), wait_warning_s=0.2)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for _ in range(2):
            model(**make_batch())
        if rank == 1:
            time.sleep(1)
        for _ in range(2):
            model(**make_batch())
    return said.getvalue(), lorashard.runtime.rank_store.RankStore.of_group("waits").read_messages()


def test_a_rank_that_is_late_is_named_once_and_then_forgotten():
    """Catches a wait that fails the run when it is reported, and a rank that is said to wait long after it has not."""
    (said, words), (_, _) = run_ranks(be_late, 2)

    assert said.count("has waited") == said.count("rank 1 is elsewhere") >= 1
    assert "waits too" not in said
    assert words[0] in (None, "")
