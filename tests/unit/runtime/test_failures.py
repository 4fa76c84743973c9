"""Which rank is blamed, and what is said of it."""

from __future__ import annotations

import errno
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorashard.errors import ConfigError, RunStopped, TrainingError
from lorashard.runtime.failures import Failure, explain_failures, find_cause, record_failure
from lorashard.runtime.worker import find_log


def make_failure(
    exitcode: int, timestamp: int = 100, error: BaseException | None = None, time_s: float = 0.0
) -> SimpleNamespace:
    data: dict[str, Any] = {"message": "<NONE>"}
    if error is not None:
        name = type(error).__name__
        user_error = str(error) if isinstance(error, ConfigError) else None
        details = {"time_s": time_s, "timestamp": str(timestamp), "user_error": user_error, "py_callstack": ""}
        data = {"message": {"message": f"{name}: {error}", "extraInfo": details}}
    return SimpleNamespace(
        exitcode=exitcode,
        timestamp=timestamp,
        error_file_data=data,
        signal_name=lambda: signal.Signals(-exitcode).name,
    )


MISTAKE = ConfigError("no such file")
LOST = RuntimeError("Connection closed by peer")
BAD = ValueError("bad\nbatch")
BLAMES = {
    # The rank that was left alone, within the same second.
    "a lost connection": ({0: (1, LOST, 100.6), 1: (1, BAD, 100.4)}, 1, "rank 1 failed: ValueError: bad ("),
    # An out-of-memory kill that is reported as the other rank's network error.
    "a kill": ({0: (1, LOST, 100.1), 1: (-9, None, 101)}, 1, "rank 1 was killed by SIGKILL"),
    # The rank that hung after another had failed, and had to be killed.
    "the launcher's own kill": ({1: (1, BAD, 100.4), 0: (-9, None, 130)}, 1, "rank 1 failed: ValueError: bad ("),
    # A mistake found by all ranks that is reported as a crash of one.
    "a mistake": ({0: (2, MISTAKE, 100), 1: (2, MISTAKE, 101)}, 2, "no such file"),
    # The launcher's own SIGTERM taken for the cause, when all ranks find a mistake at once.
    "an end on the way out": ({1: (2, MISTAKE, 100.2), 0: (-15, MISTAKE, 100.1)}, 2, "no such file"),
}


@pytest.mark.parametrize("name", BLAMES)
def test_one_rank_is_blamed(tmp_path: Path, name: str) -> None:
    """Catches the blame for what stands above each case."""
    ranks, exit_code, message = BLAMES[name]
    failures = {rank: make_failure(code, int(time_s), error, time_s) for rank, (code, error, time_s) in ranks.items()}
    failure = explain_failures(failures, tmp_path)

    assert (failure.exit_code, failure.message[: len(message)]) == (exit_code, message)
    assert (f"log: {tmp_path}/rank_1.log" in failure.message) == (exit_code == 1)


@pytest.mark.parametrize(("written", "reason"), [("step 1\nOSError: disk full\n\n", "OSError: disk full"), ("", "")])
def test_a_rank_that_left_no_note_is_explained_by_its_log(tmp_path: Path, written: str, reason: str) -> None:
    """Catches a failure of which only the exit code is told."""
    find_log(tmp_path, 0).write_text(written)
    message = explain_failures({0: make_failure(3)}, tmp_path).message

    assert "rank 0" in message and reason in message and "exit code 3" in message


def test_notes_are_written_as_torch_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a note that torch's launcher cannot read, which would crash the launcher itself."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    record_failure(MISTAKE, exit_code=2, is_plain=True)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    record_failure(ValueError("bad batch"), exit_code=1, is_plain=False)
    crash = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))

    assert explain_failures({0: failure}, tmp_path).message == str(MISTAKE)
    assert "ValueError: bad batch" in explain_failures({0: crash}, tmp_path).message
    assert json.loads(path.read_text())["message"]["extraInfo"]["time_s"] > 0


def test_only_what_may_not_happen_again_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mistake or a stop that the ranks are started again for, and a crash that they are not."""

    def note(
        error: BaseException, exit_code: int, is_plain: bool = True, silent_rank: int | None = None
    ) -> SimpleNamespace:
        record_failure(error, exit_code, is_plain, silent_rank)
        failure = make_failure(exit_code)
        failure.error_file_data = json.loads((tmp_path / "error.json").read_text())
        return failure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    found = {
        "killed": make_failure(-9),
        "unexplained": make_failure(3),
        "raised": note(ValueError("boom"), 1, is_plain=False),
        "hung": note(ValueError("rank 1 is silent"), 1, silent_rank=1),
        "mistaken": note(ConfigError("bad rows"), 2),
        "not a number": note(TrainingError("a loss is NaN"), 1),
        "stopped": note(RunStopped("saved"), 75),
        "stopped on a full disk": make_failure(75),
    }
    failures = {name: explain_failures({0: failure}, tmp_path) for name, failure in found.items()}

    assert [name for name, failure in failures.items() if failure.is_crash] == list(found)[:4]
    assert [name for name, failure in failures.items() if failure.is_stop] == list(found)[6:]
    assert [failure.exit_code for failure in failures.values()] == [1, 1, 1, 1, 2, 1, 75, 75]


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (raised_from(ConfigError("damaged"), ValueError("no JSON")), "mistake"),
        (raised_from(ConfigError("a disk refuses"), OSError(errno.ENOSPC, "full")), "disk"),
        (raised_from(ConfigError("too large"), MemoryError()), "memory"),
        (RunStopped("nothing is lost", signal="SIGTERM"), "stop"),
        (TrainingError("a loss is NaN"), "nonfinite"),
        (ValueError("boom"), "crash"),
    ],
)
def test_the_cause_is_that_of_the_error_and_of_what_it_came_from(error: BaseException, cause: str) -> None:
    """Catches a mistake that is called a crash since a library raised first, and a full disk called a mistake."""
    assert find_cause(error) == cause
    assert (Failure.of_error(error).exit_code == 2) == (cause == "mistake")


@pytest.mark.parametrize(("error", "rank"), [(TrainingError("NaN", rank=1), 1), (ConfigError("no such file"), None)])
def test_what_all_ranks_have_found_blames_the_rank_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, rank: int | None
) -> None:
    """Catches the blame for whoever was the first to write down what all ranks raise alike."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    failures = {}
    for number in range(2):
        record_failure(error, 1, is_plain=True)
        failures[number] = make_failure(1)
        failures[number].error_file_data = json.loads((tmp_path / "error.json").read_text())
    assert explain_failures(failures, tmp_path).rank == rank
