"""Start, stop, save, resume and delete runs. A run is a process of its own, which outlives the web UI."""

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
from lorashard.errors import CheckpointError, ConfigError, UserError
from lorashard.launch.elastic import find_python_flags
from lorashard.runs.checkpoints import find_newest, read_manifest
from lorashard.runs.lock import find_owner, lock_run
from lorashard.runs.root import JOB_STOP_NAME, find_place, find_run, is_job
from lorashard.training.resume_request import check_wanted

from ..reading.jsonl_tail import read_json
from ..reading.process_file import PROCESS_NAME, read_launch
from ..reading.states import (
    ASKED_NAME,
    EXIT_NAME,
    LAUNCHER_LOG,
    STOP_NAME,
    STOP_NOW,
    explain_exit,
    find_run_owner,
    find_state,
    read_failure,
)
from ..reading.summaries import is_run, read_options
from . import detached
from .jobs import Jobs
from .packing import list_merged

_STARTING_NAME = ".starting.lock"  # of a folder of runs
_DELETED_PREFIX = ".deleted-"
_LOOK_S = 1.0
_LOOK_INTERVAL_S = 0.05
_ALONE_S = 30.0
_PATIENCE_S = 20.0  # more than a launcher itself takes to kill ranks that do not end
_RESUME_WORDS = ("--resume_from_checkpoint", "auto", "--overwrite_output_dir", "false")
_USER_ERROR = 2
_NOT_TRAINING = ("", "queue", "start", "download", "tokenize", "load")


def start_run(root: Path, name: str, config_yaml: str, is_suggested: bool = False) -> str:
    """Start a new run; return its name.

    Args:
        is_suggested: nobody has chosen the name, so that `NAME-2`, `NAME-3`, ... are taken where it is taken.
        config_yaml: what `lorashard finetune --config` takes; `output_dir` is the run's folder whatever it says.

    Raises:
        ConfigError: the name is taken or is none, or the configuration is refused, at once or within a second. Then no
            folder is left.
    """
    stem, number = name, 1
    while not _take_name(find_place(root, name), config_yaml):
        if not is_suggested:
            raise ConfigError(
                f"there is already something called {name}", fix="choose another name, or delete it first"
            )
        number += 1
        name = f"{stem}-{number}"
    folder = find_run(root, name)
    asked = folder / ASKED_NAME
    try:
        _read_config(folder, asked)
        _launch(folder, asked)
        _hear_refusal(folder)
    except ConfigError as error:
        shutil.rmtree(folder, ignore_errors=True)
        _shorten_paths(error, folder)
        raise
    return name


def _take_name(folder: Path, config_yaml: str) -> bool:
    """Write a new run's configuration; return whether its folder was free. Of several who ask at once, one gets it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return False
        with (folder / ASKED_NAME).open("x", encoding="utf-8") as file:
            file.write(config_yaml)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"the run {folder.name} cannot be written: {error.strerror}", where=folder.parent) from error


def resume_run(root: Path, name: str) -> None:
    """Resume a run from its newest complete checkpoint, or from the beginning if it has none.

    Raises:
        UserError: it cannot be resumed, as far as its folder tells or the launcher reports within a second.
    """
    folder = find_run(root, name)
    with _alone(root):  # of two tabs one starts it, and the other gets an error
        _check_resumable(root, name)
        for left in (EXIT_NAME, STOP_NAME):
            (folder / left).unlink(missing_ok=True)
        config = _find_config(folder)
        assert config is not None
        _launch(folder, config, *_RESUME_WORDS)
    _hear_refusal(folder)


def explain_no_resume(root: Path, name: str) -> str | None:
    """Return why a run cannot be resumed; None if it can, as far as is known without starting it."""
    try:
        _check_resumable(root, name)
    except UserError as error:
        return str(error)
    return None


def stop_run(root: Path, name: str, now: bool = False, patience_s: float = _PATIENCE_S) -> None:
    """Have a run save a checkpoint and end, or end all of its ranks at once. Asking twice is harmless.

    Args:
        now: not of a job, whose sweep's ranks are those of other jobs too.
        patience_s: a launcher that has not ended at once so long after is killed, and the kernel ends its ranks.

    Raises:
        ConfigError: it does not run, or not on this machine.
    """
    folder = find_run(root, name)
    if is_job(folder):
        _stop_job(folder, name, now)
        return
    process, is_owner = _find_process(folder, name)
    (folder / STOP_NAME).write_text(STOP_NOW if now else "", encoding="utf-8")
    if not is_owner:  # it has not come to its own handling of signals
        _send(process, signal.SIGTERM, name)
    elif not now:
        # As SIGTERM, which means the end at once where it comes twice: from two tabs, or an impatient finger.
        _send(process, signal.SIGUSR1, name)
    if now:
        if is_owner:
            _send(process, signal.SIGQUIT, name)
        threading.Thread(target=_kill_later, args=(process, patience_s), daemon=True).start()


def _stop_job(folder: Path, name: str, now: bool) -> None:
    """Have one job of a sweep save a checkpoint and end at its next step; the others continue."""
    _check_is_run(folder)
    if now:
        raise ConfigError(f"the job {name} saves and ends at its next step", fix="stop the whole sweep now, or save")
    if not find_state(folder).is_live:
        raise ConfigError(f"the job {name} is not running")
    (folder / JOB_STOP_NAME).touch()


def save_run(root: Path, name: str) -> None:
    """Have a run save a checkpoint at the end of its step, and continue.

    Raises:
        ConfigError: it is not training, not on this machine, or its launcher cannot forward the request.
    """
    folder = find_run(root, name)
    _refuse_job(folder, name)
    process, is_owner = _find_process(folder, name)
    phase = str(read_json(folder / "status.json").get("phase", ""))
    if not is_owner or phase in _NOT_TRAINING:
        raise ConfigError(f"the run {name} has nothing to save yet", found=f"phase {phase or 'start'}")
    if not _catches(process.pid, signal.SIGUSR2):
        raise ConfigError(f"the run {name} cannot save on request: another version or launcher started it")
    _send(process, signal.SIGUSR2, name)


def delete_run(root: Path, name: str) -> None:
    """Delete a run's folder.

    Raises:
        ConfigError: it is alive, a job uses it, or it is not a run.
    """
    folder = find_run(root, name)
    with _alone(root):
        _check_is_run(folder)
        _check_is_over(folder)
        busy = [job for job in Jobs(root).list() if is_of(job.run_name, name) and job.state == "running"]
        if busy:
            raise ConfigError(f"a job uses the run {name}", found=busy[0].kind, fix="cancel the job, or wait for it")
        with _deleting(name):
            with lock_run(folder):  # nor does anybody start it in a terminal meanwhile
                going = _take_away(root, folder)
            shutil.rmtree(going)


def delete_merged(root: Path, name: str) -> None:
    """Delete the folder of a merged model.

    Raises:
        ConfigError: it is none, no merge that was begun here made it, or a job or a run uses it.
    """
    folder = find_place(root, name)
    with _alone(root):
        if name not in list_merged(root):
            raise ConfigError(f"there is no merged model called {name!r}")
        jobs = Jobs(root).list()
        if not any(job.kind == "merge" and str(folder) in job.command for job in jobs):
            raise ConfigError(f"{name} was not merged here", fix="delete its folder by hand if it is not needed")
        users = [run.name for run in find_users(root, folder)]
        if users:
            raise ConfigError(f"the run {users[0]!r} has {name} as its base, and could not be resumed")
        busy = [job for job in jobs if job.state == "running" and str(folder) in job.command]
        if busy:
            raise ConfigError(f"a job uses {name}", found=busy[0].kind, fix="cancel the job, or wait for it")
        with _deleting(name):
            shutil.rmtree(_take_away(root, folder))


def find_users(root: Path, folder: Path) -> list[Path]:
    """Return the runs that were given the model in `folder`."""
    names = ("model_name_or_path", "reward_model_name_or_path")
    found = []
    for asked in root.glob(f"*/{ASKED_NAME}"):
        options = read_options(asked.parent)
        if any(isinstance(options.get(n), str) and Path(options[n]).resolve() == folder.resolve() for n in names):
            found.append(asked.parent)
    return found


def _take_away(root: Path, folder: Path) -> Path:
    """Take a folder's name away, so that nobody finds half of it, and return its new place."""
    for left in root.glob(f"{_DELETED_PREFIX}*"):  # of a server that was killed
        shutil.rmtree(left, ignore_errors=True)
    going = root / f"{_DELETED_PREFIX}{secrets.token_hex(4)}"
    os.rename(folder, going)
    return going


@contextmanager
def _deleting(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name} cannot be deleted: {error.strerror}", where=error.filename) from error


def _check_resumable(root: Path, name: str) -> None:
    folder = find_run(root, name)
    _check_is_run(folder)
    _refuse_job(folder, name)
    _check_is_over(folder)
    if read_json(folder / "status.json").get("phase") == "done":
        raise ConfigError("the run is complete", fix="clone it with more steps to train longer")
    path = _find_config(folder)
    if path is None:
        raise ConfigError(f"the run {name} has no configuration", expected=f"{ASKED_NAME} or config.yaml")
    config = _read_config(folder, path, *_RESUME_WORDS)
    _check_places(config)
    newest = find_newest(folder)
    if newest is None:
        check_wanted(config)
    elif not read_manifest(newest).facts.get("is_resumable", True):
        raise CheckpointError("no run can be resumed from an adapter alone (save_only_model)", where=newest.name)


def _shorten_paths(error: ConfigError, folder: Path) -> None:
    """Leave out of an error's fields the folder of a run that was not started."""
    for name in ("problem", "found", "where", "fix"):
        value = getattr(error, name)
        if value is not None:
            setattr(error, name, str(value).replace(f"{folder}{os.sep}", ""))


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the lock that all servers of a folder of runs share."""
    lock = FileLock(root / _STARTING_NAME, timeout=_ALONE_S)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"other servers have been starting or deleting runs for {_ALONE_S:g} s", where=root, fix="try again"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=root) from error
    try:
        yield
    finally:
        lock.release()


def _find_config(folder: Path) -> Path | None:
    """Return the configuration to resume with: as given in the web UI, else as resolved."""
    return next((folder / name for name in (ASKED_NAME, "config.yaml") if (folder / name).is_file()), None)


def _read_config(folder: Path, path: Path, *words: str) -> RunConfig:
    return RunConfig.resolve(path, ["--output_dir", str(folder), *words])


def is_of(name: str, run: str) -> bool:
    """Tell whether a name is that of a run or of one of its jobs."""
    return name == run or name.startswith(f"{run}/")


def _refuse_job(folder: Path, name: str) -> None:
    if is_job(folder):
        raise ConfigError(f"{name} trains with the other jobs of its sweep", fix=f"use {folder.parent.name}")


def _check_is_run(folder: Path) -> None:
    if not folder.is_dir() or not is_run(folder):
        raise ConfigError(f"there is no run called {folder.name}")


def _check_is_over(folder: Path) -> None:
    """Refuse a run that lives.

    Raises:
        ConfigError: naming its process.
    """
    owner = find_run_owner(folder)
    if owner is not None:
        raise ConfigError(f"the run {folder.name} is alive", found=owner, fix="stop it first")
    launch = read_launch(folder / PROCESS_NAME, folder / EXIT_NAME)
    if launch.process is not None:
        pid = launch.process.pid
        raise ConfigError(
            f"the run {folder.name} is starting", found=f"process {pid}", fix="wait a moment, or stop it first"
        )
    if not launch.is_over:
        raise ConfigError(f"the run {folder.name} is ending", fix="wait a moment")


def _check_places(config: RunConfig) -> None:
    """Refuse a run whose base or data no longer exist."""
    places = {name: getattr(config, name) for name in ("model_name_or_path", "dataset", "eval_dataset")}
    for name, place in places.items():
        if place and _is_path(place) and not Path(place).expanduser().exists():
            raise ConfigError(f"{place} no longer exists (seen from {Path.cwd()})", option=name)


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
    """Wait a second for a run that was started to be refused.

    Raises:
        ConfigError: it is, with the fields of the launcher's own.
    """
    exit_file = folder / EXIT_NAME
    deadline_s = time.monotonic() + _LOOK_S
    while time.monotonic() < deadline_s and not exit_file.exists():
        time.sleep(_LOOK_INTERVAL_S)
    if read_json(exit_file).get("exit_code") == _USER_ERROR:
        fields = read_failure(folder).get("fields")
        if fields:
            raise ConfigError.of_json(fields)
        raise ConfigError(explain_exit(folder) or f"the run is refused: see {folder / LAUNCHER_LOG}")


def _find_process(folder: Path, name: str) -> tuple[psutil.Process, bool]:
    """Return the process of a run's launcher, and whether it owns the folder yet.

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
            f"the run {name} cannot be signaled from this machine",
            found=f"owner {owner}",
            fix="stop it on its own machine",
        )
    process = read_launch(folder / PROCESS_NAME, folder / EXIT_NAME).process
    if process is None:
        raise ConfigError(f"the run {name} is not running")
    return process, False


def _send(process: psutil.Process, number: signal.Signals, name: str) -> None:
    try:
        process.send_signal(number)  # psutil refuses a reused PID
    except psutil.NoSuchProcess:
        raise ConfigError(f"the run {name} has just ended") from None
    except psutil.AccessDenied:
        raise ConfigError(f"the run {name} belongs to another user") from None


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
