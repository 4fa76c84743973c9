"""Jobs: merges, verifications and uploads, as processes of their own that outlive the web UI.

A job is a folder in `<root>/.jobs`: `job.json` (the command), `output.log`, `process.json`, `progress.json`,
`exit.json` (how it ended), and `canceled` if somebody has canceled it.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lorashard.errors import ConfigError

from ..reading.jsonl_tail import read_end, read_json
from ..reading.process_file import read_launch
from ..reading.sanitize import show_safely
from ..reading.series import to_finite
from . import detached
from .packing import list_adapter_files

_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_FACTS_NAME, _LOG_NAME, _PROCESS_NAME, _EXIT_NAME = "job.json", "output.log", "process.json", "exit.json"
_PROGRESS_NAME = "progress.json"
_CANCELED_NAME = "canceled"
_MOST_ENDED = 100
_TAIL_BYTES = 16384
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_PATIENCE_S = 10.0  # before the next of them
_BAR = re.compile(r"\b(\d{1,3})%\|")  # a tqdm bar, as `hf upload` prints it


@dataclass(frozen=True)
class Job:
    """A command in the background, and how it ended.

    Attributes:
        state: running, done, failed, canceled, or lost: it has ended, and its exit code is unknown.
        exit_code: 128 + n if signal n ended it; None while it runs, and if it is lost.
        progress: from 0 to 1; None if unknown.
        last_line: the last line of its output, without secrets.
    """

    id: str
    kind: str
    run_name: str
    command: list[str]
    state: str
    exit_code: int | None
    begin_s: float
    end_s: float | None
    progress: float | None
    last_line: str
    log_path: Path


class Jobs:
    """The jobs of a folder of runs. Safe to use from several threads, and beside other servers.

    Args:
        root: the folder of the runs.
        most_ended: how many ended jobs are kept; older ones are deleted when another starts.
    """

    def __init__(self, root: Path, most_ended: int = _MOST_ENDED) -> None:
        self._folder = root / ".jobs"
        self._most_ended = most_ended

    def start(self, kind: str, run_name: str, words: Sequence[str]) -> str:
        """Start a command; return the job's id.

        Args:
            kind: such as merge.
            run_name: the run whose adapter it uses.
            words: the whole command line.

        Raises:
            ConfigError: it cannot be started.
        """
        job_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        folder = self._folder / job_id
        facts = {"kind": kind, "run_name": run_name, "command": list(words), "begin_s": time.time()}
        try:
            folder.mkdir(parents=True)
            (folder / _FACTS_NAME).write_text(json.dumps(facts), encoding="utf-8")
            files = (folder / name for name in (_LOG_NAME, _EXIT_NAME, _PROCESS_NAME, _PROGRESS_NAME))
            detached.start(words, *files)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"the {kind} cannot be started: {error}") from error
        ended = [job.id for job in self.list() if job.state != "running"]
        for old_id in ended[self._most_ended :]:
            shutil.rmtree(self._folder / old_id, ignore_errors=True)
        return job_id

    def list(self) -> list[Job]:
        """Return all jobs, the newest first."""
        try:
            ids = sorted((path.name for path in self._folder.iterdir() if _ID.fullmatch(path.name)), reverse=True)
        except FileNotFoundError:
            return []
        found = (_read_job(self._folder / job_id) for job_id in ids)
        return sorted((job for job in found if job is not None), key=lambda job: job.begin_s, reverse=True)

    def get(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            ConfigError: there is none with this id.
        """
        job = _read_job(self._folder / job_id) if _ID.fullmatch(job_id) else None
        if job is None:
            raise ConfigError(f"there is no job {job_id!r}")
        return job

    def cancel(self, job_id: str, patience_s: float = _PATIENCE_S) -> None:
        """End a job and all its child processes: first by signals, so that it can clean up, then by killing them.

        Args:
            patience_s: how long to wait after SIGINT, and again after SIGTERM, before it is killed.

        Raises:
            ConfigError: there is none with this id, or it is not running.
        """
        job = self.get(job_id)
        folder = self._folder / job_id
        process = read_launch(folder / _PROCESS_NAME, folder / _EXIT_NAME).process
        if job.state != "running" or process is None:
            state = "ending" if job.state == "running" else job.state
            raise ConfigError(f"the {job.kind} of {job.run_name} is no longer running", found=state)
        (folder / _CANCELED_NAME).touch()
        group = _find_group(process)
        _signal(process, group, signal.SIGINT)
        threading.Thread(target=_end, args=(process, group, patience_s), daemon=True).start()


def merge_words(run_folder: Path, out: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command that merges a run's adapter into its base."""
    return [*_lorashard_words(), "merge", str(run_folder), str(out), *options]


def verify_words(run_folder: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command that checks a run's adapter, or with `--merged` what it was merged into."""
    return [*_lorashard_words(), "verify", str(run_folder), *options]


def push_words(run_folder: Path, repo: str, is_private: bool) -> list[str]:
    """Return the command that uploads a run's adapter and its tokenizer to the hub; no token is in it.

    Raises:
        ConfigError: the run has no adapter.
    """
    files = list_adapter_files(run_folder)
    included = [word for file in files for word in ("--include", file.name)]
    privacy = "--private" if is_private else "--no-private"
    return [*_hf_words(), "upload", repo, str(files[0].parent), ".", privacy, *included]


def _lorashard_words() -> list[str]:
    return [sys.executable, "-P", "-m", "lorashard"]


def _hf_words() -> list[str]:
    return [sys.executable, "-P", "-m", "huggingface_hub.cli.hf"]


def _read_job(folder: Path) -> Job | None:
    facts = read_json(folder / _FACTS_NAME)
    if not facts:
        return None
    ended = read_json(folder / _EXIT_NAME)
    launch = read_launch(folder / _PROCESS_NAME, folder / _EXIT_NAME)
    is_starting = not launch.begin_s and time.time() - facts["begin_s"] < detached.START_S
    is_running = not ended and (is_starting or not launch.is_over)
    if not ended and not is_running:
        ended = read_json(folder / _EXIT_NAME)  # it may have ended between the two
    exit_code = ended.get("exit_code")
    is_canceled = (folder / _CANCELED_NAME).exists()
    if is_running:
        state = "running"
    elif exit_code == 0:
        state = "done"
    elif is_canceled:
        state = "canceled"
    else:
        state = "lost" if exit_code is None else "failed"
    log = folder / _LOG_NAME
    lines = _read_tail(log)
    return Job(
        id=folder.name,
        kind=facts["kind"],
        run_name=facts["run_name"],
        command=facts["command"],
        state=state,
        exit_code=exit_code,
        begin_s=facts["begin_s"],
        end_s=ended.get("time"),
        progress=1.0 if state == "done" else _find_progress(folder / _PROGRESS_NAME, lines),
        last_line=lines[-1] if lines else "",
        log_path=log,
    )


def _read_tail(log: Path) -> list[str]:
    """Return the last lines of a log that are not blank, as a terminal would show them."""
    text = read_end(log, _TAIL_BYTES).decode("utf-8", "replace")
    return [line.strip() for line in show_safely(text).splitlines() if line.strip()]


def _find_progress(file: Path, lines: Sequence[str]) -> float | None:
    """Return how far a command of lorashard or an upload is, from 0 to 1; None if unknown."""
    written = read_json(file)
    done, total = to_finite(written.get("done")), to_finite(written.get("total"))
    if done is not None and total:
        return min(1.0, done / total)
    bars = [found[-1] for line in lines if (found := _BAR.findall(line))]
    return min(1.0, int(bars[-1]) / 100) if bars else None


def _find_group(process: psutil.Process) -> list[psutil.Process]:
    """Return all child processes, whatever session they are in."""
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _signal(process: psutil.Process, group: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the job's first process, which forwards it; SIGKILL to all of them."""
    for one in (process, *group) if number == signal.SIGKILL else (process,):
        with suppress(psutil.Error):
            one.send_signal(number)


def _end(process: psutil.Process, group: list[psutil.Process], patience_s: float) -> None:
    """Wait for a canceled job to end, with stronger signals in turn, and kill what is left of it."""
    for number in _SIGNALS:
        if number != signal.SIGINT:
            group = [*group, *(child for child in _find_group(process) if child not in group)]
            _signal(process, group, number)
        psutil.wait_procs([process], timeout=patience_s)
        if not process.is_running():
            break
    _signal(process, group, signal.SIGKILL)  # children that outlived the first process
