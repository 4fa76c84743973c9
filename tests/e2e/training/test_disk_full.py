"""Runs and merges on a disk that fills up: a small file system of their own, and a file that takes all its room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from helpers import warm
from helpers.after_import import call_after_import
from helpers.finetune import LORASHARD, make_options, read_lines, run
from helpers.tiny import add_lora, build_base
from safetensors.torch import load_file

from lorashard.runs.checkpoints import verify

_SIZE = "16m"
_WAIT_S = 180
# Run by Python at the start of every process: before a step that HOLDS names, ranks wait until `go_STEP` is there.
_SITE = """
import json, os, sys, time

HOLDS = json.loads(os.environ["HOLDS"])

def hold(module):
    train = module.CheckpointingTrainer.training_step
    def training_step(self, *args, **kwargs):
        step = self.state.global_step + 1
        folder = os.path.dirname(__file__)
        if step in HOLDS:
            open(os.path.join(folder, f"held_{step}_{os.environ['RANK']}"), "w").close()
        while step in HOLDS and not os.path.exists(os.path.join(folder, f"go_{step}")):
            time.sleep(0.02)
        return train(self, *args, **kwargs)
    module.CheckpointingTrainer.training_step = training_step
""" + call_after_import("lorashard.training.trainer", "hold")


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(disk: Path, *begun: Path) -> Iterator[None]:
    """No room is left on the disk while the body runs, nor in the last pages of the files `begun`."""
    ballast = disk / "ballast"
    for path, block in ((ballast, bytes(4096)), *((path, b"\n") for path in begun)):
        with path.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(block)
    yield
    ballast.unlink()


class Started:
    """`lorashard finetune` in the background, and what it says; before each of the steps `holds` it waits for `go`."""

    def __init__(self, options: list[str], hf_home: Path, site: Path, holds: list[int]) -> None:
        self._site = site
        site.mkdir()
        (site / "sitecustomize.py").write_text(_SITE)
        paths = filter(None, [str(site), os.environ.get("PYTHONPATH")])
        ours = {"HF_HOME": str(hf_home), "PYTHONPATH": os.pathsep.join(paths), "HOLDS": json.dumps(holds)}
        environment = os.environ | ours
        command = [*LORASHARD, "finetune", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = warm.Popen(command, env=environment, text=True, **pipes)
        self.said = {"stdout": "", "stderr": ""}
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in self.said]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        with getattr(self.process, name) as stream:
            for line in stream:
                self.said[name] += line

    def go(self, step: int) -> None:
        (self._site / f"go_{step}").touch()

    def wait_until_held(self, step: int) -> None:
        """Wait until both ranks stand before a step, and so write nothing."""
        self.wait_for(lambda: all((self._site / f"held_{step}_{rank}").exists() for rank in range(2)))

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        begin_s = time.monotonic()
        while not is_true():
            is_waiting = self.process.poll() is None and time.monotonic() - begin_s < _WAIT_S
            assert is_waiting, self.said["stdout"] + self.said["stderr"]
            time.sleep(0.01)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        if sys.exc_info()[0] is not None:
            self.process.terminate()
        self.process.wait(timeout=_WAIT_S)
        for reader in self._readers:
            reader.join()


def steps_in(path: Path) -> list[int]:
    """The steps of a file of lines, each of which must be whole."""
    return [line["step"] for line in read_lines(path) if "loss" in line or "gathers" in line]


def test_a_run_outlives_a_full_disk(task, disk, tmp_path):
    """A run of days that ends, at 3 a.m., because a line of metrics did not fit; or a last checkpoint cut in half."""
    out = disk / "run"
    options = dict(cpu=2, max_steps=60, save_strategy="steps", save_steps=10, report_to="tensorboard")
    with Started(make_options(task, str(out), **options), task / "hf", tmp_path / "site", [11, 41]) as training:
        training.wait_for(lambda: (out / "checkpoint-10").exists())
        with filled(disk, out / "logs" / "rank_0.log"):
            training.go(11)
            training.wait_until_held(41)
            training.wait_for(lambda: "checkpoint-40" in training.said["stderr"])
            assert len(steps_in(out / "metrics.jsonl")) < 40
            assert json.loads((out / "status.json").read_text())["step"] < 40
            verify(out / "checkpoint-10")
        training.go(41)
    said = training.said["stdout"] + training.said["stderr"]
    assert training.process.returncode == 0, said
    assert len([line for line in said.splitlines() if "cannot be written" in line and "0.0 MiB free" in line]) == 1
    assert [line for line in said.splitlines() if "TensorBoard" in line and "No space left" in line]
    assert steps_in(out / "metrics.jsonl") == list(range(1, 61))
    for rank in range(2):
        assert sorted(set(steps_in(out / "ranks" / f"rank_{rank}.jsonl"))) == list(range(1, 61))
    status = json.loads((out / "status.json").read_text())
    assert (status["phase"], status["step"]) == ("done", 60)
    log = (out / "logs" / "rank_0.log").read_text()
    assert "bytes of output" in log and "lines that waited" in log
    for step in (10, 60):
        verify(out / f"checkpoint-{step}")
    assert not list(out.glob(".*partial"))


def test_a_trained_adapter_that_does_not_fit_is_not_lost(task, disk, tmp_path):
    """A truncated adapter that loads; an error that does not say that nothing is lost, and how to go on."""
    out = disk / "run"
    options = make_options(task, str(out), cpu=2, max_steps=6, save_strategy="steps", save_steps=2)
    with Started(options, task / "hf", tmp_path / "site", [3]) as training:
        training.wait_for(lambda: (out / "checkpoint-2").exists())
        with filled(disk):
            training.go(3)
            training.process.wait(timeout=_WAIT_S)
    assert training.process.returncode == 2, training.said
    [error] = [line for line in training.said["stderr"].splitlines() if line.startswith("lorashard: error: ")]
    assert "adapter" in error and "No space left" in error
    assert "--resume_from_checkpoint auto" in error and "checkpoint-2" in error
    assert not (out / "adapter_config.json").exists() and not list(out.glob(".*partial"))
    verify(out / "checkpoint-2")
    resumed = run([*LORASHARD, "finetune", *options, "--resume_from_checkpoint", "auto"], task, _WAIT_S)
    assert resumed.returncode == 0, resumed.stderr
    assert steps_in(out / "metrics.jsonl") == list(range(1, 7))
    assert all(tensor.any() for tensor in load_file(out / "adapter_model.safetensors").values())


MERGE = """
import sys
from pathlib import Path
from lorashard.export import merger, writing
original = writing.TensorWriter.write
def write(self, key, begin, values):
    if "layers.1" in key:
        print("writing", flush=True)
        input()
    original(self, key, begin, values)
writing.TensorWriter.write = write
merger.merge_checkpoint(*map(Path, sys.argv[1:4]))
"""


@pytest.mark.parametrize("when", ["before", pytest.param("in the middle", marks=pytest.mark.slow)])
def test_a_merge_that_does_not_fit_leaves_nothing_and_says_what_it_takes(tmp_path, disk, when):
    """An hour of work for a model that cannot fit; half a model that loads; room that is still taken afterward."""
    base = build_base(hidden_size=128)
    base.save_pretrained(tmp_path / "base")
    add_lora(base).save_pretrained(tmp_path / "adapter")
    (disk / "kept").write_text("x")
    words = [tmp_path / "adapter", disk / "new" / "out", tmp_path / "base"]
    if when == "before":
        with filled(disk):
            command = [*LORASHARD, "merge", *words[:2], "--base", words[2], "--cpu", "1"]
            result = warm.run([*map(str, command)], capture_output=True, text=True, timeout=_WAIT_S)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        assert "1.8 MiB" in result.stderr and "0.0 MiB" in result.stderr
    else:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        merging = warm.Popen([sys.executable, "-c", MERGE, *map(str, words)], text=True, **pipes)
        assert merging.stdout.readline() == "writing\n"
        with filled(disk):
            _, errors = merging.communicate("\n" * 100, timeout=_WAIT_S)
        assert merging.returncode != 0
        assert "CheckpointError" in errors and "1.8 MiB" in errors and "No space left" in errors
    assert [path.name for path in disk.iterdir()] == ["kept"]


def test_the_files_of_an_adapter_come_together(task, tmp_path, monkeypatch):
    """A kill between two files: an adapter whose weights are new and whose config is not there, or old."""
    from transformers import AutoTokenizer

    from lorashard.export.save import save_adapter
    from lorashard.model.saved import find_adapter

    model = add_lora(build_base())
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    replaced = []
    replace = os.replace

    def stop_at_the_last(source: Path, target: Path) -> None:
        replaced.append(Path(target).name)
        if replaced[-1] == "adapter_config.json":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        save_adapter(model, tokenizer, tmp_path)
    assert "adapter_model.safetensors" in replaced and not (tmp_path / "adapter_config.json").exists()
    monkeypatch.setattr(os, "replace", replace)
    save_adapter(model, tokenizer, tmp_path)
    assert find_adapter(tmp_path) == tmp_path and not list(tmp_path.glob(".*"))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
