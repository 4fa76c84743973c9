"""`lorashard doctor` as a person runs it: real ranks, real damage, and each command of its document."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import warm
from helpers.cli import LAUNCHER_VARIABLES
from helpers.ranks import find_ranks
from helpers.tiny import build_base

CPU_BUDGET_S = 80  # 9 forked runs

BINARIES = Path(sys.executable).parent
MODEL = "meta-llama/Llama-3.1-8B"
DEADLINE_S = 100


def start(folder: Path, *words: str, is_real: bool = False, **environ: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    own = {"HF_HOME": str(folder / "hf"), "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir(exist_ok=True)
    begin = subprocess.Popen if is_real else warm.Popen
    return begin(
        [str(BINARIES / words[0]), *words[1:]],
        cwd=folder,
        env=kept | own | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def find_checks(stdout: str) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads(stdout)["checks"]}


def wait_for_rank(process: psutil.Process, rank: int) -> psutil.Process:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = find_ranks(process.pid)
        if rank in found:
            return found[rank]
        time.sleep(0.05)
    raise AssertionError("no rank was started")


def test_a_healthy_machine_is_found_healthy(tmp_path):
    """Catches a doctor whose own checks fail, or that leaves files or an unreadable report."""
    code, stdout, stderr = finish(start(tmp_path, "lorashard", "doctor", "--cpu", "2", "--json", "--output_dir", "out"))

    assert code == 0, stderr + stdout
    checks = find_checks(stdout)
    assert json.loads(stdout)["is_ok"] is True
    assert checks["ranks"]["figures"]["num_ranks"] == 2
    assert checks["gathers"]["figures"]["gather_bytes_per_s"] > 0
    assert {name for name, check in checks.items() if check["result"] == "skip"} == {"GPUs", "hub", "pinned memory"}
    assert not (tmp_path / "out").exists() and list((tmp_path / "tmp").iterdir()) == []


# Python runs it at the start of each rank: a gather delivers one wrong byte, a sum of all ranks is another.
BROKEN_LINKS = """
import lorashard.runtime.dist as dist

gather = dist.ShardGroup.all_gather

def spoil_one_byte(self, whole, shard):
    work = gather(self, whole, shard)
    work.wait()
    whole[-1] += 1
    return work

dist.ShardGroup.all_gather = spoil_one_byte
dist.sum_ = lambda tensor: tensor.mul_(2)
"""


def test_wrong_bytes_are_found(tmp_path):
    """Catches a doctor that only times: broken peer copies deliver quickly, and a model trained on them is garbage."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN_LINKS)
    words = ["lorashard", "doctor", "--cpu", "2", "--json", "--output_dir", "out"]
    code, stdout, stderr = finish(start(tmp_path, *words, PYTHONPATH=str(tmp_path)))

    assert code == 1, stderr + stdout
    checks = find_checks(stdout)
    assert {name for name, check in checks.items() if check["result"] == "FAIL"} == {"collectives", "gathers"}
    assert "rank 1" in checks["gathers"]["found"] and "all-reduce" in checks["collectives"]["found"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_answer_is_named(rank, tmp_path):
    """Catches a doctor that hangs with the ranks that it checks."""
    process = start(tmp_path, "lorashard", "doctor", "--cpu", "2", "--timeout_s", "20", "--json")
    stopped = wait_for_rank(psutil.Process(process.pid), rank)
    stopped.send_signal(signal.SIGSTOP)
    code, stdout, stderr = finish(process)

    assert code == 1
    [check] = [check for check in find_checks(stdout).values() if check["result"] == "FAIL"]  # the step that it was in
    assert check["fix"] is not None
    assert f"rank {rank} " in check["found"] and " 20 s" in check["found"] and f"rank {rank} " in stderr
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE


# Rank 0 stops before it has met the others; by the time that it runs again, its own wait is over. It runs again before
# it is asked to end, whichever signal the launcher's threads send first.
STOPPED_ON_THE_WAY = """
import os, signal
from lorashard.runtime.rank_store import RankStore

connect = RankStore.of_launch

def stop_first(env, timeout_s, *rest):
    if env.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("the client socket has timed out")
    return connect(env, timeout_s, *rest)

RankStore.of_launch = stop_first
"""


def test_a_rank_that_stopped_on_its_way_does_not_blame_the_store(tmp_path):
    """Catches the report of a stopped rank, which runs again at the end, in place of the one that names it."""
    (tmp_path / "sitecustomize.py").write_text(STOPPED_ON_THE_WAY)
    words = ["lorashard", "doctor", "--cpu", "2", "--timeout_s", "2", "--json"]
    code, stdout, stderr = finish(start(tmp_path, *words, PYTHONPATH=str(tmp_path)))

    assert code == 1, stderr + stdout
    [check] = [check for check in find_checks(stdout).values() if check["result"] == "FAIL"]
    assert "rank 0 " in check["found"] and "store" not in check["found"] and "rank 0 " in stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path):
    """Catches a report that is lost with a rank: the machine's findings may say why it died."""
    # A forked rank would be killed while it talks to the other, which then fails as well.
    process = start(tmp_path, "lorashard", "doctor", "--cpu", "2", is_real=True)
    wait_for_rank(psutil.Process(process.pid), 1).kill()
    code, stdout, _ = finish(process)

    assert code == 1
    assert re.search(r"FAIL  ranks +rank 1 .*SIGKILL", stdout)
    assert stdout.startswith("ok    packages")
    [logs] = re.findall(r"1 of \d+ .*logs: (\S+)", stdout)
    assert Path(logs).is_dir()


@pytest.mark.slow
def test_what_breaks_ranks_and_folders_is_reported(tmp_path):
    """Catches a first finding that hides the others, and a failure of ranks that only their logs contain."""
    (tmp_path / "runs").write_text("")
    words = ["lorashard", "doctor", "--cpu", "2", "--output_dir", "runs/mine", "--json", "--model", "nowhere/model"]
    code, stdout, _ = finish(start(tmp_path, *words, GLOO_SOCKET_IFNAME="nope0", ACCELERATE_USE_CPU="true"))

    assert code == 1
    checks = find_checks(stdout)
    failed = {name for name, check in checks.items() if check["result"] == "FAIL"}
    assert failed == {"output_dir", "environment", "model", "ranks"}
    assert "GLOO_SOCKET_IFNAME" in checks["environment"]["found"]
    assert "nope0" in checks["ranks"]["found"] and "rank " in checks["ranks"]["found"]
    assert "nowhere/model" in checks["model"]["found"]


@pytest.mark.slow
def test_it_runs_under_torchrun_and_checks_a_model(tmp_path):
    """Catches ranks of another launcher that each print a report, and a model that is not checked."""
    build_base(num_hidden_layers=2).save_pretrained(tmp_path / MODEL)
    words = ["-m", "lorashard", "doctor", "--output_dir", "runs/mine", "--model", MODEL]
    process = start(tmp_path, "torchrun", "--nproc_per_node", "2", *words, ACCELERATE_USE_CPU="true")
    code, stdout, stderr = finish(process)

    assert code == 0, stdout + stderr
    assert "FAIL" not in stdout and "ok    model " in stdout and len(re.findall(r"ok    ranks +2 on", stdout)) == 1
