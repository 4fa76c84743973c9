"""A merge that fails, is killed or is refused leaves nothing, and nobody's files are touched."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate.state import PartialState
from helpers.forked_ranks import run_ranks
from helpers.merging import (
    save_adapter,
    save_base,
)
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from lorashard.errors import CheckpointError, ConfigError, LorashardError
from lorashard.export import merger, writing
from lorashard.export.merger import merge_checkpoint
from lorashard.runtime.atomic_folder import list_partials


@pytest.fixture(autouse=True)
def _quiet():
    transformers_logging.disable_progress_bar()


def fail_on(rank_to_fail: int, rank: int, error: BaseException) -> None:
    original = writing.TensorWriter.write

    def write(self, key, begin, values):
        if rank == rank_to_fail and "layers.0" in key:
            raise error
        original(self, key, begin, values)

    writing.TensorWriter.write = write


def check_failure(rank: int, adapter: str, out: str, base: str) -> str:
    fail_on(1, rank, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(CheckpointError) as caught:
        merge_checkpoint(Path(adapter), Path(out), Path(base))
    return str(caught.value)


def test_a_rank_that_fails_ends_all_and_leaves_nothing(tmp_path):
    """Ranks that wait for one that has failed; `rank 1 failed` in place of what the disk has refused; half a model."""
    base = save_base(tmp_path / "base", "llama")
    adapter = save_adapter(tmp_path / "adapter", base)
    before = {file: file.read_bytes() for file in adapter.iterdir()}
    messages = run_ranks(check_failure, 2, str(adapter), str(tmp_path / "out"), str(base))
    assert all(os.strerror(errno.ENOSPC) in message and "\n" not in message for message in messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    assert before == {file: file.read_bytes() for file in adapter.iterdir()}


@pytest.mark.parametrize("error", (KeyboardInterrupt(), RuntimeError("a bug")), ids=("ctrl-c", "bug"))
def test_an_interrupted_merge_leaves_nothing(tmp_path, monkeypatch, error):
    """Litter beside the target after Ctrl-C."""
    base = save_base(tmp_path / "base", "llama")
    adapter = save_adapter(tmp_path / "adapter", base)
    monkeypatch.setattr(writing.TensorWriter, "write", writing.TensorWriter.write)  # put back afterward
    fail_on(0, 0, error)
    with pytest.raises(type(error)):
        merge_checkpoint(adapter, tmp_path / "new" / "deep" / "out", base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def merge_slowly(folder: Path, how: str, is_writing: Event, store: Path, rank: int) -> None:
    """Merge, and stop in the middle: in a process of its own."""
    PartialState._reset_state()
    if how == "rank":
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    original = writing.TensorWriter.write

    def write(self, key, begin, values):
        original(self, key, begin, values)
        if how == "wait" and "layers.1" in key or how == "rank" and rank == 1:
            is_writing.set()
            time.sleep(60)

    writing.TensorWriter.write = write
    merge_checkpoint(folder / "adapter", folder / "out", folder / "base")


def start(tmp_path: Path, how: str, rank: int = 0) -> tuple[multiprocessing.Process, Event]:
    """Return a forked process that merges, and what is set when it stands still."""
    context: Any = multiprocessing.get_context("fork")
    is_writing = context.Event()
    store = tmp_path / "adapter" / "store"
    process = context.Process(target=merge_slowly, args=(tmp_path, how, is_writing, store, rank), daemon=True)
    process.start()
    return process, is_writing


def prepare(tmp_path: Path) -> None:
    save_base(tmp_path / "base", "llama", max_shard_size="1GB")
    save_adapter(tmp_path / "adapter", tmp_path / "base")


def names_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_sigterm_leaves_nothing(tmp_path):
    """Job schedulers send SIGTERM, which ends Python without any finally."""
    prepare(tmp_path)
    process, is_writing = start(tmp_path, "wait")
    assert is_writing.wait(60)
    process.terminate()
    process.join(timeout=60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert names_in(tmp_path) == ["adapter", "base"]


def test_ranks_that_survive_a_killed_one_leave_nothing(tmp_path):
    """A rank that waits for ever for one that is gone, or leaves the folder that they shared."""
    prepare(tmp_path)
    (first, _), (second, is_writing) = (start(tmp_path, "rank", rank) for rank in range(2))
    try:
        assert is_writing.wait(60)
        second.kill()
        first.join(timeout=60)
        assert first.exitcode not in (0, None)
    finally:
        for process in (first, second):
            process.kill()
            process.join()
    assert names_in(tmp_path) == ["adapter", "base"]


def test_what_a_killed_merge_left_is_removed_by_the_next(tmp_path):
    """Nobody can clean up after SIGKILL but the next one to come."""
    prepare(tmp_path)
    process, is_writing = start(tmp_path, "wait")
    assert is_writing.wait(60)
    process.kill()
    process.join()
    assert not (tmp_path / "out").exists() and len(list_partials(tmp_path / "out")) == 1
    (tmp_path / "out").mkdir()  # an empty folder is no reason to stop
    merge_checkpoint(tmp_path / "adapter", tmp_path / "out", tmp_path / "base")
    assert names_in(tmp_path) == ["adapter", "base", "out"] and (tmp_path / "out" / "model.safetensors").is_file()


def test_a_target_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    """Hours of work, then no place to put it; or somebody's files overwritten.

    A container's volume is a mount point, to which nothing can be renamed.
    """
    monkeypatch.setattr(merger, "read_config", lambda folder: pytest.fail("work began"))
    for name in ("out", "mounted"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "mounted")
    for name in ("out", "file", "mounted"):
        with pytest.raises(ConfigError) as error:
            merge_checkpoint(tmp_path / "adapter", tmp_path / name, tmp_path / "base")
        assert error.value.where == tmp_path / name
    assert (tmp_path / "out" / "precious").read_text() == "x"


def test_what_peft_cannot_merge_is_refused_before_anything_is_written(tmp_path):
    """An error after an hour; a merge that leaves out what it does not understand."""
    base = save_base(tmp_path / "base", "llama", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    get_peft_model(loaded, prompt).save_pretrained(tmp_path / "prompt")
    adapters = {"PROMPT_TUNING": tmp_path / "prompt"}
    adapters["no bias"] = save_adapter(tmp_path / "biased", base, target_modules=["q_proj"], lora_bias=True)
    adapters["rewrites the base"] = save_adapter(tmp_path / "pissa", base, target_modules=["q_proj"])
    config = json.loads((tmp_path / "pissa" / "adapter_config.json").read_text())
    (tmp_path / "pissa" / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    for reason, adapter in adapters.items():
        with pytest.raises(LorashardError, match=reason) as caught:
            merge_checkpoint(adapter, tmp_path / "out", base)
        assert isinstance(caught.value, ConfigError) and "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
