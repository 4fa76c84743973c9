"""Runs started, stopped, saved, resumed and deleted. A run is a process of its own, which outlives the web UI."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from lorashard.config.data_options import DATA_SUFFIXES
from lorashard.config.run_config import RunConfig
from lorashard.errors import CheckpointError, ConfigError
from lorashard.launch.elastic import find_python_flags
from lorashard.runs.checkpoints import find_newest, read_manifest
from lorashard.runs.lock import find_owner, lock_run
from lorashard.runs.root import find_run
from lorashard.training.resume_request import check_wanted

from ..reading.jsonl_tail import read_json
from ..reading.process_file import PROCESS_NAME, read_launch
from ..reading.states import ASKED_NAME, EXIT_NAME, LAUNCHER_LOG, STOP_NAME
from ..reading.summaries import is_run
from . import detached
from .jobs import Jobs

_STARTING_NAME = ".starting.lock"  # of a folder of runs
_DELETED_PREFIX = ".deleted-"
_LOOK_S = 1.0
_LOOK_INTERVAL_S = 0.05
_ALONE_S = 30.0
_PATIENCE_S = 20.0  # more than a launcher itself takes to kill ranks that do not end
_RESUME_WORDS = ("--resume_from_checkpoint", "auto", "--overwrite_output_dir", "false")
_USER_ERROR = 2
_NOT_TRAINING = ("", "queue", "start", "download", "tokenize", "load")


def start_run(root: Path, name: str, config_yaml: str) -> None:
    """Start a new run.

    Args:
        config_yaml: what `lorashard finetune --config` takes; `output_dir` is the run's folder whatever it says.

    Raises:
        ConfigError: the name is taken or is none, or the configuration is refused, at once or within a second. Then no
            folder is left.
    """
    folder = find_run(root, name)
    asked = folder / ASKED_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError
        with asked.open("x", encoding="utf-8") as file:
            file.write(config_yaml)
    except FileExistsError:
        raise ConfigError(
            f"there is something called {name} already: choose another name, or delete it first"
        ) from None
    except OSError as error:
        raise ConfigError(f"the run {name} cannot be written to {root}: {error.strerror}") from error
    try:
        _read_config(folder, asked)
        _launch(folder, asked)
        _hear_refusal(folder)
    except ConfigError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(str(error).replace(f"{folder}{os.sep}", "")) from None


def resume_run(root: Path, name: str) -> None:
    """Go on with a run from its newest complete checkpoint, or from the beginning where it has none.

    Raises:
        ConfigError: it cannot be resumed; as `explain_no_resume` says it, or the launcher within a second.
    """
    folder = find_run(root, name)
    with _alone(root):  # of two tabs one starts it, and the other is told that it is starting
        reason = explain_no_resume(root, name)
        if reason is not None:
            raise ConfigError(reason)
        for left in (EXIT_NAME, STOP_NAME):
            (folder / left).unlink(missing_ok=True)
        config = _find_config(folder)
        assert config is not None
        _launch(folder, config, *_RESUME_WORDS)
    _hear_refusal(folder)


def explain_no_resume(root: Path, name: str) -> str | None:
    """Say why a run cannot be resumed; None where it can, as far as can be told without starting it."""
    try:
        folder = find_run(root, name)
        _check_is_run(folder)
        _check_is_over(folder)
        if read_json(folder / "status.json").get("phase") == "done":
            return "the run has come to its end: to train longer, clone it with more steps"
        path = _find_config(folder)
        if path is None:
            return f"the run {name} has neither {ASKED_NAME} nor config.yaml, so what it was asked is not known"
        config = _read_config(folder, path, *_RESUME_WORDS)
        _check_places(config)
        newest = find_newest(folder)
        if newest is None:
            check_wanted(config)
        elif not read_manifest(newest).facts.get("is_resumable", True):
            return f"{newest.name} holds the adapter alone (save_only_model), so no run can go on from it"
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return None


def stop_run(root: Path, name: str, now: bool = False, patience_s: float = _PATIENCE_S) -> None:
    """Have a run save a checkpoint and end; or end all of its ranks at once. Asking twice is asking once.

    Args:
        patience_s: a launcher that has not ended at once so long after is killed, and the kernel ends its ranks.

    Raises:
        ConfigError: it does not run, or not on this machine.
    """
    folder = find_run(root, name)
    process, is_owner = _find_process(folder, name)
    (folder / STOP_NAME).touch()
    if not is_owner:  # it has not come to its own handling of signals
        _send(process, signal.SIGTERM, name)
    elif not now:
        # As SIGTERM, which means the end at once where it comes twice: from two tabs, or an impatient finger.
        _send(process, signal.SIGUSR1, name)
    if now:
        if is_owner:
            _send(process, signal.SIGQUIT, name)
        threading.Thread(target=_kill_later, args=(process, patience_s), daemon=True).start()


def save_run(root: Path, name: str) -> None:
    """Have a run save a checkpoint at the end of its step, and go on.

    Raises:
        ConfigError: it does not train, or not on this machine, or was started by something that cannot pass this on.
    """
    folder = find_run(root, name)
    process, is_owner = _find_process(folder, name)
    phase = str(read_json(folder / "status.json").get("phase", ""))
    if not is_owner or phase in _NOT_TRAINING:
        raise ConfigError(f"the run {name} has not begun to train (phase {phase or 'start'}): there is nothing to save")
    if not _catches(process.pid, signal.SIGUSR2):
        raise ConfigError(f"the run {name} cannot save on request: it was started by another version or launcher")
    _send(process, signal.SIGUSR2, name)


def delete_run(root: Path, name: str) -> None:
    """Delete a run's folder, whole.

    Raises:
        ConfigError: it lives, a job works with it, or it is no run.
    """
    folder = find_run(root, name)
    with _alone(root):
        _check_is_run(folder)
        _check_is_over(folder)
        busy = [job for job in Jobs(root).list() if job.run_name == name and job.state == "running"]
        if busy:
            raise ConfigError(f"the run {name} is needed by a job that is running ({busy[0].kind}): cancel it, or wait")
        for left in root.glob(f"{_DELETED_PREFIX}*"):  # of a server that was killed
            shutil.rmtree(left, ignore_errors=True)
        going = root / f"{_DELETED_PREFIX}{secrets.token_hex(4)}"
        try:
            with lock_run(folder):  # nor does anybody start it in a terminal meanwhile
                os.rename(folder, going)
            shutil.rmtree(going)
        except OSError as error:
            raise ConfigError(f"the run {name} cannot be deleted: {error.strerror} ({error.filename})") from error


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Have the body to oneself among all tabs and servers of a folder of runs."""
    lock = FileLock(root / _STARTING_NAME, timeout=_ALONE_S)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"others have been starting or deleting runs in {root} for {_ALONE_S:g} s: try again"
        ) from None
    except OSError as error:
        raise ConfigError(f"{root} cannot be written to: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _find_config(folder: Path) -> Path | None:
    """Return what the run was asked: by a person through the web UI, else as it was resolved."""
    return next((folder / name for name in (ASKED_NAME, "config.yaml") if (folder / name).is_file()), None)


def _read_config(folder: Path, path: Path, *words: str) -> RunConfig:
    return RunConfig.resolve(path, ["--output_dir", str(folder), *words])


def _check_is_run(folder: Path) -> None:
    if not folder.is_dir() or not is_run(folder):
        raise ConfigError(f"there is no run called {folder.name}")


def _check_is_over(folder: Path) -> None:
    """Refuse a run that lives.

    Raises:
        ConfigError: naming its process.
    """
    owner = find_owner(folder)
    if owner is not None:
        raise ConfigError(f"the run {folder.name} is alive ({owner}): stop it first")
    launch = read_launch(folder / PROCESS_NAME, folder / EXIT_NAME)
    if launch.process is not None:
        pid = launch.process.pid
        raise ConfigError(f"the run {folder.name} is starting (process {pid}): wait a moment, or stop it first")
    if not launch.is_over:
        raise ConfigError(f"the run {folder.name} is ending: wait a moment")


def _check_places(config: RunConfig) -> None:
    """Refuse a run whose base or data were a folder or a file that is gone."""
    places = {name: getattr(config, name) for name in ("model_name_or_path", "dataset", "eval_dataset")}
    for name, place in places.items():
        if place and _is_path(place) and not Path(place).expanduser().exists():
            raise ConfigError(f"{name}: {place} is not there any more (seen from {Path.cwd()})")


def _is_path(place: str) -> bool:
    """Tell a path from a hub id, as the command line does."""
    return (
        place.startswith(("/", ".", "~"))
        or place.endswith("/")
        or place.count("/") > 1
        or Path(place).suffix in DATA_SUFFIXES
    )


def _launch(folder: Path, config: Path, *words: str) -> None:
    """Start the process.

    Raises:
        ConfigError: that cannot be done.
    """
    log = folder / LAUNCHER_LOG
    command = [sys.executable, *find_python_flags(), "-m", "lorashard", "finetune"]
    command += ["--config", str(config), "--output_dir", str(folder), *words]
    try:
        log.parent.mkdir(exist_ok=True)
        detached.start(command, log, folder / EXIT_NAME, folder / PROCESS_NAME)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"the run {folder.name} cannot be started: {error}") from error


def _hear_refusal(folder: Path) -> None:
    """Look for a second whether a run that was started is refused.

    Raises:
        ConfigError: it is, in the launcher's own words.
    """
    log, exit_file = folder / LAUNCHER_LOG, folder / EXIT_NAME
    deadline_s = time.monotonic() + _LOOK_S
    while time.monotonic() < deadline_s and not exit_file.exists():
        time.sleep(_LOOK_INTERVAL_S)
    if read_json(exit_file).get("exit_code") == _USER_ERROR:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line for line in lines if line.startswith("lorashard: error: ")]
        raise ConfigError(said[-1].removeprefix("lorashard: error: ") if said else f"the run is refused: see {log}")


def _find_process(folder: Path, name: str) -> tuple[psutil.Process, bool]:
    """Return a run's launcher, which is certainly that: and whether it owns the folder yet.

    Raises:
        ConfigError: there is none on this machine.
    """
    _check_is_run(folder)
    owner = find_owner(folder)
    if owner is not None and owner.is_here and owner.pid is not None and owner.pid != os.getpid():
        with suppress(psutil.Error):
            return psutil.Process(owner.pid), True
    if owner is not None:
        raise ConfigError(
            f"the run {name} is owned by {owner}, and no signal goes from here to there: end it on its own machine"
        )
    process = read_launch(folder / PROCESS_NAME, folder / EXIT_NAME).process
    if process is None:
        raise ConfigError(f"the run {name} does not run")
    return process, False


def _send(process: psutil.Process, number: signal.Signals, name: str) -> None:
    try:
        process.send_signal(number)  # not to another that has been given its number
    except psutil.NoSuchProcess:
        raise ConfigError(f"the run {name} has just ended") from None
    except psutil.AccessDenied:
        raise ConfigError(f"the run {name} belongs to another user, who alone can end it") from None


def _kill_later(process: psutil.Process, patience_s: float) -> None:
    with suppress(psutil.Error):
        try:
            process.wait(patience_s)
        except psutil.TimeoutExpired:
            process.kill()


def _catches(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process handles a signal, which ends it otherwise; on Linux, and elsewhere it is believed to."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return sys.platform != "linux"
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
