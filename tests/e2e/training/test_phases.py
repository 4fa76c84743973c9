"""What a run's folder says while it downloads, tokenizes, loads and trains, and when it is ended or saves in each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import warm
from helpers.cases import slow
from helpers.finetune import LORASHARD, TORCHRUN, make_options, read_losses
from helpers.forked_ranks import wait_for_end
from helpers.hub_server import HubRepo, HubServer
from helpers.ranks import find_ranks
from helpers.survival import count_steps, is_same_adapter, kill_all, kill_when, start, train
from safetensors.torch import save_file

from lorashard.runs.checkpoints import list_checkpoints, read_manifest, verify
from lorashard.runs.lock import find_owner

DEADLINE_S = 120
WEIGHTS_BYTES = 64 * 2**20
ROW = '{"text": "a b c"}\n'


def read_status(run: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return json.loads((run / "status.json").read_text())
    return {}


def wait_for(process: subprocess.Popen, run: Path, is_time: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return the run's status at the moment that is waited for."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_time(status := read_status(run)):
        assert time.monotonic() < deadline_s and process.poll() is None, status
        time.sleep(0.02)
    return status


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command of lorashard; all of it is killed if the test leaves it behind."""
    begun: list[subprocess.Popen[str]] = []

    def begin(words: list[Any], is_real: bool = False, **environment: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        pipe = subprocess.PIPE
        command = [*LORASHARD, *map(str, words)]
        # What is read from a hub needs an interpreter that begins with this environment.
        start = subprocess.Popen if is_real or "HF_ENDPOINT" in environment else warm.Popen
        begun.append(start(command, env=kept | environment, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path))
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            kill_all(process)
        process.communicate()


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[HubServer]:
    """A hub with a model whose weights come slowly; they are of no use."""
    folder = tmp_path_factory.mktemp("hub")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.full((WEIGHTS_BYTES // 2,), number, dtype=torch.uint8)}, folder / name)
    index = {"metadata": {"total_size": WEIGHTS_BYTES}, "weight_map": {f"w{n}": name for n, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    with HubServer({"org/slow": HubRepo(folder, bytes_per_s=2**20)}, {}) as server:
        yield server


def test_a_download_is_seen_and_ends_when_it_is_told_to(hub: HubServer, begin: Callable, tmp_path: Path):
    """A folder that says `start` for an hour, and a launcher that ends when the files are there, or leaves a core."""
    environment = {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "localhost,127.0.0.1",
    }
    run = tmp_path / "run"
    (tmp_path / "rows.jsonl").write_text(ROW)
    words = ["finetune", "--model", "org/slow", "--dataset", "rows.jsonl", "--output_dir", run, "--cpu", "2"]
    process = begin(words, **environment)
    first = wait_for(process, run, lambda status: status.get("progress"))
    wait_for(process, run, lambda status: status["progress"]["done"] > first["progress"]["done"])
    assert first["phase"] == "download" and first["progress"]["unit"] == "bytes"
    done, total = first["progress"]["done"], first["progress"]["total"]
    assert done < WEIGHTS_BYTES < total < WEIGHTS_BYTES + 1000  # with the files' headers
    assert find_owner(run).pid == process.pid == first["pid"]
    process.send_signal(signal.SIGUSR2)  # which has nothing to save yet
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGQUIT)
    stdout, stderr = process.communicate(timeout=20)

    assert process.returncode == 75, stdout + stderr
    assert "Traceback" not in stderr and not list(tmp_path.rglob("core*"))
    status = read_status(run)
    assert status["phase"] == "stopped" and status["error"] in stderr and "SIGQUIT" in status["error"]
    assert find_owner(run) is None


def test_a_run_whose_model_is_not_there_says_so_in_its_folder(begin: Callable, tmp_path: Path):
    """A run that was started for a person who looks at its folder alone, and that says for ever that it starts."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "status.json").write_text(json.dumps({"phase": "done", "step": 9, "begin_s": 1.0}))  # another start's
    (tmp_path / "d.jsonl").write_text(ROW)
    process = begin(["finetune", "--model", "./none", "--dataset", "d.jsonl", "--output_dir", run, "--cpu", "2"])
    _, stderr = process.communicate(timeout=DEADLINE_S)
    status = read_status(run)
    assert process.returncode == 2 and status["phase"] == "failed" and "step" not in status
    assert f"lorashard: error: {status['error']}\n" == stderr and "none" in status["error"]


def make_many_rows(task: Path) -> Path:
    """Return a dataset that takes seconds to tokenize."""
    many = task / "many.jsonl"
    if not many.exists():
        many.write_text((task / "rows.jsonl").read_text() * 1500)
    return many


MOMENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "start": lambda status: status.get("phase") == "start",
    "tokenize": lambda status: status.get("phase") == "tokenize" and status["progress"],
    "load": lambda status: status.get("phase") == "load",
    "train": lambda status: status.get("phase") == "train" and status["step"] > 0,
}


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("tokenize", signal.SIGKILL),
        slow("start", signal.SIGQUIT),
        slow("tokenize", signal.SIGQUIT),
        slow("load", signal.SIGQUIT),
        slow("train", signal.SIGQUIT),
        slow("train", signal.SIGKILL),
    ],
)
def test_a_run_that_is_ended_at_once_is_known_as_such(
    task: Path, begin: Callable, tmp_path: Path, phase: str, number: signal.Signals
):
    """Ranks that outlive their launcher, a core, a folder that says that the run lives or is owned by somebody."""
    run = tmp_path / "run"
    dataset = make_many_rows(task) if phase == "tokenize" else task / "rows.jsonl"
    options = make_options(task, "run", output_dir=run, dataset=dataset, max_steps=100_000)
    # A forked launcher has ranks before anybody can see that it has none.
    process = begin(["finetune", *options, "--cpu", 2], is_real=phase == "start", HF_HOME=str(tmp_path / "hf"))
    status = wait_for(process, run, MOMENTS[phase])
    if phase == "tokenize":
        progress = status["progress"]
        assert progress["unit"] == "rows" and 0 < progress["done"] < progress["total"]
    assert find_owner(run).pid == process.pid
    ranks = find_ranks(process.pid)
    begin_s = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)

    took_s = time.monotonic() - begin_s
    for rank in ranks.values():
        wait_for_end(rank.pid, 20)
    status = read_status(run)
    assert find_owner(run) is None and not list(tmp_path.rglob("core*"))
    if number == signal.SIGKILL:
        assert status["phase"] == phase  # in a folder that nobody owns
    else:
        assert process.returncode == (75 if phase == "start" else 131) and took_s < 20, stderr
        assert status["phase"] == "stopped" and "SIGQUIT" in status["error"]
        assert stderr.splitlines()[-1] == f"lorashard: {status['error']}"


@pytest.mark.slow  # three trainings; what a rank does that is asked is tested with a trainer alone too
def test_a_checkpoint_that_is_asked_for_is_written_and_gone_on_from(task: Path, begin: Callable, tmp_path: Path):
    """A run that stops, that saves on one rank or again a step later, or whose checkpoint is worth less than others."""
    expected = train(task, "uninterrupted", max_steps=44, save_strategy="no")
    process = start(task, "asked", max_steps=44, save_strategy="no", last_step=40)
    run = task / "asked"
    try:
        wait_for(process, run, MOMENTS["start"])
        os.kill(process.pid, signal.SIGUSR2)  # before there are ranks: at the end of the first step
        wait_for(process, run, lambda _: count_steps(run) >= 6)
        os.kill(process.pid, signal.SIGUSR2)
        killed = kill_when(process, lambda: len(list_checkpoints(run)) == 2 and count_steps(run) == 40, "all")
    finally:
        kill_all(process)
    assert killed, (task / "asked.log").read_text()[-3000:]
    newest, first = list_checkpoints(run)
    verify(newest)
    assert read_manifest(first).step < 6 <= read_manifest(newest).step < 40
    said = (task / "asked.log").read_text()
    assert said.count("SIGUSR2: ") == 2 and said.count("(SIGUSR2)") == 2
    went_on = train(task, "asked", max_steps=44, save_strategy="no")
    assert is_same_adapter(went_on, expected) and read_losses(went_on) == read_losses(expected)


@pytest.mark.slow
def test_one_rank_of_torchrun_can_be_asked_for_a_checkpoint(task: Path, tmp_path: Path):
    """Ranks that wait for one another in a save that one of them alone has heard of."""
    run = tmp_path / "run"
    words = make_options(task, "run", output_dir=run, max_steps=100_000, cpu=2)
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "ACCELERATE_USE_CPU": "true"}
    with (tmp_path / "log").open("w") as log:
        command = [*TORCHRUN, "-m", "lorashard", "finetune", *words]
        process = warm.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        status = wait_for(process, run, MOMENTS["train"])
        assert status["begin_s"] <= status["phase_begin_s"]
        find_ranks(process.pid)[1].send_signal(signal.SIGUSR2)
        wait_for(process, run, lambda status: list_checkpoints(run))
        step = read_manifest(list_checkpoints(run)[0]).step
        wait_for(process, run, lambda status: status["step"] > step)
        assert len(list_checkpoints(run)) == 1
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        kill_all(process)


def test_a_run_of_torchrun_that_fails_before_its_training_says_so(task: Path, tmp_path: Path):
    """The status of the run before, which the person takes for this one's."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "status.json").write_text(json.dumps({"phase": "done", "begin_s": 1.0, "has_begun": True}))
    words = make_options(task, "run", output_dir=run, dataset=tmp_path / "none.jsonl", cpu=1)
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "ACCELERATE_USE_CPU": "true"}
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "lorashard", "finetune", *words]
    result = warm.run(command, env=environment | place, capture_output=True, text=True, timeout=DEADLINE_S)
    status = read_status(run)
    assert result.returncode == 2 and status["phase"] == "failed" and "none.jsonl" in status["error"], result.stderr
    assert "has_begun" not in status and status["begin_s"] > 1.0
