"""Start the ranks of a run, show what rank 0 says, and end them all, whatever ends the run.

Torch's elastic launcher starts and watches the ranks. One rank is started the same way as many: it has a log too, and
its death by the kernel's hand is noticed and named.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import psutil

from .base_options import BaseOptions, RankOptions
from .config import RunConfig
from .devices import (
    RUN_ID_PREFIX,
    Launcher,
    VisibleGpus,
    build_environment,
    check_device,
    check_launcher,
    choose_ranks,
    find_gpus,
    find_launcher,
)
from .environment import find_existing
from .errors import ConfigError
from .failures import Failure, explain_failures, explain_signal
from .output import RESULT_FILE_VARIABLE
from .plugins import refuse_plugins
from .rank import find_log

GRACE_S = 15
_MIRROR_INTERVAL_S = 0.1
_PIPE_BYTES = 65536
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_RUN_FILES = ("metrics.jsonl", "adapter_config.json", "adapter_model.safetensors")


def finetune(config: RunConfig, arguments: Sequence[str]) -> int:
    """Train: in this process if a launcher started it, else in ranks that are started here.

    Args:
        config: The resolved configuration.
        arguments: The words of the command line that say the same to a rank, such as `["finetune", "--cpu", "2"]`.

    Returns:
        The exit code: 0; 1 for a crash; 2 for a user's mistake; 128 + n after signal n. Failed ranks are explained on
        stderr.

    Raises:
        UserError: A mistake found here, before any rank starts or in this rank.
    """
    refuse_plugins(os.environ)
    launcher = find_launcher(os.environ)
    if launcher is not None:
        _train_here(config, launcher)
        return 0
    choice = choose_ranks(config, find_gpus() if config.cpu is None else VisibleGpus(0))
    check_device(config, choice.device_type)
    check_output_dir(config)
    os.environ.update(build_environment(choice, os.environ) | _describe_terminal())
    if choice.device_type == "cuda":
        _check_torch_sees_gpus()
    _check_model(config)
    if choice.note:
        print(f"lorashard: {choice.note}", file=sys.stderr)
    command = [sys.executable, *find_python_flags(), "-m", "lorashard", *arguments]
    begin_s = time.time()
    failure = run_ranks(command, choice.num_ranks, prepare_logs_dir(config))
    if failure is None:
        return 0
    from .runs import record_end

    record_end(Path(config.output_dir), "stopped" if failure.is_stop else "failed", failure.message, begin_s)
    return failure.exit_code


def run_command(
    options: BaseOptions, arguments: Sequence[str], work: Callable[[], None], is_interactive: bool = False
) -> int:
    """Do a command's work: here if a launcher started this process or one rank is enough, else in ranks.

    Args:
        arguments: The words of the command line that say the same to a rank.
        work: Each rank's part; its result goes through `output.give`.
        is_interactive: Rank 0 reads this process's stdin and writes to its stdout, through the pipes `stdin` and
            `stdout` beside the result file.

    Returns:
        The exit code, as for `finetune`.

    Raises:
        UserError: A mistake found here, before any rank starts or in this rank.
    """
    refuse_plugins(os.environ)
    launcher = find_launcher(os.environ)
    if launcher is not None:
        check_device(options, take_place(options, launcher))
        work()
        from .dist import leave_group

        leave_group()
        return 0
    choice = choose_ranks(options, find_gpus() if options.cpu is None else VisibleGpus(0))
    check_device(options, choice.device_type)
    os.environ.update(build_environment(choice, os.environ) | _describe_terminal())
    if choice.device_type == "cuda":
        _check_torch_sees_gpus()
    if choice.num_ranks == 1:
        work()
        return 0
    command = [sys.executable, *find_python_flags(), "-m", "lorashard", *arguments]
    logs_dir = Path(tempfile.mkdtemp(prefix="lorashard-"))
    result_file = logs_dir / "result"
    os.environ[RESULT_FILE_VARIABLE] = str(result_file)
    try:
        with _Terminal(logs_dir) if is_interactive else nullcontext():
            failure = run_ranks(command, choice.num_ranks, logs_dir, mirror=sys.stderr)
    finally:
        del os.environ[RESULT_FILE_VARIABLE]
    if result_file.is_file():
        print(result_file.read_text(encoding="utf-8"), end="", flush=True)
    if failure is None or failure.is_stop:  # nobody needs the logs
        shutil.rmtree(logs_dir)
    return 0 if failure is None else failure.exit_code


def take_place(options: RankOptions, launcher: Launcher) -> str:
    """Become the rank that a launcher started; return the type of its device.

    Raises:
        ConfigError: It started another number of ranks than the options say.
    """
    check_launcher(options, launcher)
    is_cpu = options.cpu is not None or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    device_type = "cpu" if is_cpu or not find_gpus().count else "cuda"
    if device_type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return device_type


def _train_here(config: RunConfig, launcher: Launcher) -> None:
    check_device(config, take_place(config, launcher))
    if launcher.rank == 0 and not launcher.is_lorashard:
        check_output_dir(config)
    from .train import finetune

    finetune(config)


def check_output_dir(config: RunConfig) -> None:
    """Refuse to write over another run.

    Raises:
        ConfigError: The folder holds one, and it is neither resumed nor to be overwritten; or it cannot be made.
    """
    folder = Path(config.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir {folder} is a file: expected a folder, or a name that is free")
    there = find_existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir {folder} cannot be made: {there} is no folder that can be written to")
    if config.overwrite_output_dir or config.resumes_in_place or not folder.is_dir():
        return
    found = [name for name in _RUN_FILES if (folder / name).exists()]
    found += sorted(path.name for path in folder.glob("checkpoint-*"))
    if found:
        raise ConfigError(
            f"output_dir {folder} holds another run ({found[0]}): choose another folder, go on with "
            "--resume_from_checkpoint true, or start anew with --overwrite_output_dir"
        )


def prepare_logs_dir(config: RunConfig) -> Path:
    """Make the folder of the ranks' logs; a run that is resumed goes on with its logs, another begins new ones.

    Raises:
        ConfigError: The folder cannot be made.
    """
    logs_dir = Path(config.output_dir, "logs")
    try:
        logs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {config.output_dir} cannot be made: {error.strerror}") from error
    if not config.resumes_in_place:
        for log in logs_dir.glob("rank_*.log"):
            log.unlink()
    return logs_dir


def _check_torch_sees_gpus() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"there are GPUs, but the installed torch {torch.__version__} cannot use them: install a build that suits "
            "the driver, or give --cpu N"
        )


def _check_model(config: RunConfig) -> None:
    """Find the model and read its files' headers once, so that no rank starts for a model that cannot be loaded."""
    from .model.checkpoint import Checkpoint, resolve_folder

    with Checkpoint.open(resolve_folder(config.model_name_or_path, config.model_revision)):
        pass


def _describe_terminal() -> dict[str, str]:
    """Tell ranks, which write to a file, how wide the terminal is where rank 0's progress bar ends up."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines)}


def find_python_flags() -> list[str]:
    """Return the flag that lets ranks import from where this process does, and not from the current folder too."""
    return [] if sys.path[0] in ("", os.getcwd()) else ["-P"]


def run_ranks(
    command: Sequence[str], num_ranks: int, logs_dir: Path, grace_s: int = GRACE_S, mirror: TextIO | None = None
) -> Failure | None:
    """Run a command in each of several ranks, with torchrun's environment, until all are done or one fails.

    Each rank writes to `logs_dir/rank_K.log`; rank 0's log is copied to `mirror`, by default stdout, as it grows.
    SIGINT and SIGTERM are passed on. No rank, nor a process that a rank started, is left when this returns; if this
    process is killed, the kernel kills the ranks (on Linux).

    Args:
        command: The program and its arguments.
        num_ranks: How many ranks, on this machine.
        logs_dir: An existing folder.
        grace_s: How long a rank may take to end after a signal before it is killed.

    Returns:
        None, or what ended the ranks early, which has been said on stderr and in the failed rank's log.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Older versions of torch wait 30 s.
    has_timeout = "shutdown_timeout" in [field.name for field in dataclasses.fields(LaunchConfig)]
    timeout: dict[str, Any] = {"shutdown_timeout": grace_s} if has_timeout else {}
    words = [*find_python_flags(), "-m", "lorashard.rank", str(os.getpid()), str(logs_dir), *command]
    with (
        tempfile.TemporaryDirectory(prefix=".failures-", dir=logs_dir) as errors_dir,
        _LogMirror(find_log(logs_dir, 0), mirror),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            logs_specs=DefaultLogsSpecs(log_dir=errors_dir),
            run_id=f"{RUN_ID_PREFIX}{uuid.uuid4()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            **timeout,
        )
        try:
            with _ended_children(), _quiet_logging():
                # Elastic fills in `$` templates in arguments; `$$` is a plain one.
                elastic_launch(config, sys.executable)(*[word.replace("$", "$$") for word in words])
            return None
        except ChildFailedError as error:
            failure = explain_failures(error.failures, logs_dir)
        except SignalException as error:
            failure = explain_signal(error.sigval)
        except KeyboardInterrupt:
            failure = explain_signal(signal.SIGINT)
    if failure.log is not None:
        with failure.log.open("a", encoding="utf-8") as file:
            file.write(f"lorashard: {failure.message}\n")
    print(f"lorashard: {failure.message}", file=sys.stderr)
    return failure


class _LogMirror(threading.Thread):
    """Copies what is added to a log to a stream, byte for byte: a progress bar's carriage returns too."""

    def __init__(self, log: Path, stream: TextIO | None) -> None:
        super().__init__(daemon=True)
        self._log = log
        self._stream = stream or sys.stdout
        self._offset = log.stat().st_size if log.exists() else 0
        self._file: BinaryIO | None = None
        self._is_done = threading.Event()

    def __enter__(self) -> _LogMirror:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self.join()

    def run(self) -> None:
        try:
            while not self._is_done.wait(_MIRROR_INTERVAL_S):
                self._copy()
            self._copy()
        except OSError:  # the terminal or the pipe is gone; the log is not
            pass
        finally:
            if self._file is not None:
                self._file.close()

    def _copy(self) -> None:
        if self._file is None:
            if not self._log.exists():
                return
            self._file = self._log.open("rb")
            self._file.seek(self._offset)
        added = self._file.read()
        if added:
            self._stream.buffer.write(added)
            self._stream.buffer.flush()


class _Terminal:
    """Hands this process's stdin to rank 0, and rank 0's answers to stdout, through named pipes in a folder.

    Ranks have neither: they are in sessions of their own, and write to logs.
    """

    def __init__(self, folder: Path) -> None:
        self._stdin = folder / "stdin"
        self._stdout = folder / "stdout"
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._shower = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> None:
        for pipe, thread in ((self._stdin, self._feeder), (self._stdout, self._shower)):
            os.mkfifo(pipe)
            thread.start()

    def __exit__(self, *_: object) -> None:
        # The feeder may wait for the person for ever. The shower ends at the pipe's end, once all that was written is
        # shown; a rank 0 that died early has never opened it.
        while self._shower.is_alive():
            with suppress(OSError):
                os.close(os.open(self._stdout, os.O_WRONLY | os.O_NONBLOCK))
            self._shower.join(_MIRROR_INTERVAL_S)

    def _feed(self) -> None:
        with suppress(OSError), self._stdin.open("wb", buffering=0) as pipe:  # waits for rank 0
            while chunk := os.read(0, _PIPE_BYTES):
                pipe.write(chunk)

    def _show(self) -> None:
        with suppress(OSError), self._stdout.open("rb", buffering=0) as pipe:
            while chunk := pipe.read(_PIPE_BYTES):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()


@contextmanager
def _ended_children() -> Iterator[None]:
    """Leave no process behind that was started within, neither a rank nor what a rank started and did not end.

    Elastic ends the ranks that are alive with all that they started, but not what a rank that died left behind. As the
    subreaper this process inherits these (on Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = psutil.Process().children(recursive=True)
    try:
        yield
    finally:
        # An impatient second Ctrl-C must not stop the clearing up.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = [child for child in psutil.Process().children(recursive=True) if child not in before]
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=GRACE_S)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Silence elastic's own report of failures, which `explain_failures` gives in one line."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
