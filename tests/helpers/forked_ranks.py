"""Start ranks for tests, and build tiny models that every rank builds alike."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from lorashard.runs.lock import find_process
from lorashard.runtime.dist import leave_group

# In the environment of scripts, saves a quarter of their start.
QUICK_START = {"PYTHONPATH": str(Path(__file__).with_name("quick_start"))}
_DEADLINE_S = 600  # of ranks that hang


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `body(rank, *args)` on `world_size` gloo ranks and return what each returned.

    Ranks are forked, which takes 0.1 s instead of the 3 s of a new interpreter; that needs a parent in which torch has
    never started threads (OMP_NUM_THREADS=1). A rank that fails ends the others, and its traceback is raised here.
    """
    assert torch.get_num_threads() == 1, "forking ranks needs OMP_NUM_THREADS=1 in the parent"
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_rank_main, args=(rank, world_size, store, results, body, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, results, time.monotonic() + _DEADLINE_S)
        finally:
            for process in ranks:
                process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                    process.join()


def read_status_bytes(key: str) -> int:
    """Return what the kernel says of this process's memory, such as `VmRSS`, or `VmHWM` for the most of it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def wait_for_end(pid: int, timeout_s: float) -> None:
    """Wait until a process has ended that this one has not started.

    It may stay a zombie: in a container the first process, which inherits it, often waits for nobody.
    """
    begin_s, deadline_s = time.time(), time.monotonic() + timeout_s
    while find_process(pid, begin_s) is not None:
        assert time.monotonic() < deadline_s, f"process {pid} has not ended in {timeout_s:g} s"
        time.sleep(0.02)


def _collect(ranks: list, results: Any, deadline_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            dead = [i for i, p in enumerate(ranks) if i not in values and p.exitcode is not None]
            assert not dead, f"ranks {dead} died without a word"
            assert time.monotonic() < deadline_s, f"ranks {set(range(len(ranks))) - set(values)} never finished"
            continue
        assert error is None, f"rank {rank} failed{_tell_ends(ranks)}:\n{error}"
        values[rank] = value
    return [values[rank] for rank in range(len(ranks))]


def _tell_ends(ranks: list) -> str:
    """Return which ranks a signal has ended: what the others then fail with says nothing of the cause."""
    for process in ranks:
        process.join(timeout=1)
    ended = [f"rank {i} ended by signal {-p.exitcode}" for i, p in enumerate(ranks) if (p.exitcode or 0) < 0]
    return "".join(f" ({text})" for text in ended)


def _rank_main(rank: int, world_size: int, store: str, results: Any, body: Callable, args: tuple) -> None:
    value, error = None, None
    try:
        AcceleratorState._reset_state(reset_partial_state=True)  # what a test in the parent made is not this rank's
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        dist.barrier()  # a rank that is done at once would leave while the others still connect
        value = body(rank, *args)
        leave_group()
    except BaseException:
        error = traceback.format_exc()
    results.put((rank, value, error))
