"""Run a command of the command line: here, or in ranks that are started for it, and again where one has died."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from ..config.base_options import OPTIONS_FILE, BaseOptions, RankOptions
from ..config.run_config import RunConfig
from ..errors import ConfigError, RunStopped
from ..runs.lock import lock_run
from ..runs.root import find_existing
from ..runs.status import Status, has_begun, read_status, show_status, told_status
from ..runs.sweep_file import select_jobs
from ..runtime.devices import (
    Launcher,
    VisibleGpus,
    build_environment,
    check_device,
    check_launcher,
    choose_ranks,
    find_gpus,
    find_launcher,
)
from ..runtime.importing import quick_imports
from ..runtime.output import RESULT_FILE_VARIABLE
from ..runtime.plugins import refuse_plugins
from ..runtime.progress import LiveBar, is_terminal, told_progress
from ..runtime.signals import RESTARTS_VARIABLE, StopRequest, find_restarts
from ..training.resume_request import check_wanted, resumes_in_place
from .checks import check_data, check_options
from .cpu_binding import choose_cpus
from .device_queue import hold_devices
from .elastic import Signals, find_python_flags, run_ranks
from .log_mirror import Terminal

_LOOK_S = 0.2
_RUN_FILES = ("metrics.jsonl", "adapter_config.json", "adapter_model.safetensors")


def finetune(config: RunConfig) -> int:
    """Train: in this process if a launcher started it, else in ranks that are started here.

    Args:
        config: The resolved configuration.

    Returns:
        The exit code: 0; 1 for a crash; 2 for a user's mistake; 75 where it saved and stopped as a signal asked;
        128 + n where signal n ended it at once. Failed ranks are explained on stderr.

    Raises:
        UserError: A mistake found here, before any rank starts or in this rank.
        RunStopped: A signal asked for it, before any rank started or in this rank.
    """
    refuse_plugins(os.environ)
    launcher = find_launcher(os.environ)
    if launcher is not None:
        _train_here(config, launcher)
        return 0
    signals = Signals(can_save=True)
    with signals.watched(), ExitStack() as stack:  # without a moment in which a signal kills
        with signals.before_ranks():
            choice = check_options(config, find_gpus() if config.cpu is None else VisibleGpus(0))
            runs = stack.enter_context(own_folders(config))
            for each in runs:
                check_output_dir(each)
                check_wanted(each)
            status = stack.enter_context(told_status(Path(config.output_dir)))
            check_data(runs)
            held = hold_devices(
                Path(config.output_dir).resolve().name,
                choice,
                status,
                is_count=isinstance(config.gpus, int),
                is_queued=config.queue,
            )
            choice = stack.enter_context(held)
            status.enter("start", world_size=choice.num_ranks)
            os.environ.update(build_environment(choice, os.environ))
            if choice.device_type == "cuda":
                _check_torch_sees_gpus()
            _check_model(config, status)
            if choice.note:
                print(f"lorashard: {choice.note}", file=sys.stderr)
            logs_dir = prepare_logs_dir(config, runs)
            status.enter("start")
        command = build_rank_command("finetune", config, logs_dir)
        return run_with_restarts(config, command, choice.num_ranks, logs_dir, signals, status, choose_cpus(choice))


def run_with_restarts(
    config: RunConfig,
    command: Sequence[str],
    num_ranks: int,
    logs_dir: Path,
    signals: Signals,
    status: Status,
    cpus: Sequence[Sequence[int]] = (),
) -> int:
    """Run a command in ranks, and again where one has died, as often as `max_restarts` says; return the exit code."""
    has_bar = not config.trainer_options.get("disable_tqdm")
    draw = partial(_draw, Path(config.output_dir)) if has_bar else None
    status.add(has_bar=has_bar and is_terminal(sys.stdout))  # so that rank 0's log does not tell the same on lines
    restarts = 0
    with signals.watched():  # between two starts too
        while True:
            os.environ[RESTARTS_VARIABLE] = str(restarts)
            failure = run_ranks(command, num_ranks, logs_dir, signals=signals, draw=draw, cpus=cpus)
            if failure is None:
                return 0
            if not failure.is_crash or restarts == config.max_restarts or signals.stop_signal is not None:
                break
            restarts += 1
            count = f"{restarts} of {config.max_restarts}"
            failure.report(f": starting the ranks again ({count})")
            status.record_restart(failure, restarts, config.max_restarts)
    is_used_up = failure.is_crash and 0 < restarts == config.max_restarts
    failure.report(f"; all restarts are used up ({restarts})" if is_used_up else "")
    status.hear_ranks()
    status.end("stopped" if failure.is_stop else "failed", failure)
    return failure.exit_code


def _draw(folder: Path, bar: LiveBar) -> None:
    """Show how far a run is, twice a second; what cannot be read is told by who needs it."""
    said = read_status(folder, is_told=False)
    if said:
        show_status(said, bar)


def build_rank_command(name: str, options: RankOptions, folder: Path) -> list[str]:
    """Return the command line of a rank: `lorashard NAME --options_file FILE`, of which FILE is written in `folder`.

    So the ranks take the options that were resolved here, and parse nothing again.
    """
    file = folder / "options.json"
    options.to_file(file)
    return [sys.executable, *find_python_flags(), "-m", "lorashard", name, OPTIONS_FILE, str(file)]


def run_command(name: str, options: BaseOptions, work: Callable[[], None], is_interactive: bool = False) -> int:
    """Do a command's work: here if a launcher started this process or one rank is enough, else in ranks.

    Args:
        name: Of the command.
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
        from ..runtime.dist import leave_group

        leave_group()
        return 0
    choice = choose_ranks(options, find_gpus() if options.cpu is None else VisibleGpus(0))
    check_device(options, choice.device_type)
    os.environ.update(build_environment(choice, os.environ))
    if choice.device_type == "cuda":
        _check_torch_sees_gpus()
    if choice.num_ranks == 1:
        work()
        return 0
    logs_dir = Path(tempfile.mkdtemp(prefix="lorashard-"))
    command = build_rank_command(name, options, logs_dir)
    result_file = logs_dir / "result"
    os.environ[RESULT_FILE_VARIABLE] = str(result_file)
    try:
        with Terminal(logs_dir) if is_interactive else nullcontext():
            failure = run_ranks(command, choice.num_ranks, logs_dir, mirror=sys.stderr, cpus=choose_cpus(choice))
    finally:
        del os.environ[RESULT_FILE_VARIABLE]
    if failure is not None:
        failure.report()
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
    if config.queue and not launcher.is_lorashard:
        raise ConfigError(
            "torchrun or accelerate launch has started these ranks already",
            option="queue",
            fix="leave it out, or start the run with lorashard finetune alone",
        )
    stop = StopRequest()
    stop.install(launcher.is_lorashard)
    check_device(config, take_place(config, launcher))
    if find_restarts(os.environ):
        config = go_on(config)
    with ExitStack() as stack:
        if not launcher.is_lorashard and _writes_folder(config, launcher):
            runs = stack.enter_context(own_folders(config))
            for each in runs if launcher.rank == 0 else ():
                check_output_dir(each)
            if launcher.rank == 0 and not find_restarts(os.environ):
                stack.enter_context(told_status(Path(config.output_dir)))
        with quick_imports():
            from ..training.train import finetune

        stack.callback(stop.close)
        finetune(config, stop)


def _writes_folder(config: RunConfig, launcher: Launcher) -> bool:
    """Tell whether this rank is the first one that writes into the folder: of all, or of its own machine's."""
    has_own_disk = bool(config.trainer_options.get("save_on_each_node"))
    return launcher.rank == 0 or (has_own_disk and os.environ.get("LOCAL_RANK") == "0")


def go_on(config: RunConfig) -> RunConfig:
    """Return what a run that is started again does: it continues with its own checkpoints, where it had come so far.

    What it was told to do with an earlier run's (resume elsewhere, overwrite) holds until it has begun to train, and a
    checkpoint from elsewhere until there is one of its own.
    """
    from ..runs.checkpoints import find_newest

    folder = Path(config.output_dir)
    if not has_begun(folder):
        return config
    wanted = config.resume_from_checkpoint
    resume = wanted if isinstance(wanted, str) and find_newest(folder) is None else "auto"
    return config.model_copy(update={"resume_from_checkpoint": resume, "overwrite_output_dir": False})


@contextmanager
def own_folders(config: RunConfig) -> Iterator[Sequence[RunConfig]]:
    """Own a run's folder while the body runs; of a sweep, those of its jobs too.

    Yields:
        The jobs of a sweep that are to be trained, each with a folder of its own; or the run itself.

    Raises:
        ConfigError: one cannot be made or written to, or is another's; or as `select_jobs`.
    """
    with ExitStack() as stack:

        def own(folder: str) -> None:
            check_folder(Path(folder))
            stack.enter_context(lock_run(Path(folder)))

        own(config.output_dir)
        jobs = [job.config for job in select_jobs(config)]
        for job in jobs:
            own(job.output_dir)
        yield jobs or [config]


def check_folder(folder: Path) -> None:
    """Refuse an output folder that cannot be made or written to.

    Raises:
        ConfigError: It is a file, or is in no folder that can be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(option="output_dir", expected="a folder, or a name that is free", found=f"{folder}, a file")
    there = find_existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            option="output_dir",
            expected="a folder that can be made",
            found=f"{folder}, and {there} cannot be written to",
        )


def check_output_dir(config: RunConfig) -> None:
    """Refuse to write over another run.

    Raises:
        ConfigError: The folder holds one, and it is neither resumed nor to be overwritten; or it cannot be made.
    """
    folder = Path(config.output_dir)
    check_folder(folder)
    goes_on = resumes_in_place(config) or config.resume_from_checkpoint == "auto"
    if config.overwrite_output_dir or goes_on or not folder.is_dir():
        return
    found = [name for name in _RUN_FILES if (folder / name).exists()]
    found += sorted(path.name for path in folder.glob("checkpoint-*"))
    if found:
        raise ConfigError(
            option="output_dir",
            expected="a folder without a run",
            found=f"another run in {folder} ({found[0]})",
            fix="choose another folder, resume with --resume_from_checkpoint true, or start anew with "
            "--overwrite_output_dir",
        )


def prepare_logs_dir(config: RunConfig, runs: Sequence[RunConfig]) -> Path:
    """Make the folder of the ranks' logs; a run that is resumed continues with its logs, another begins new ones.

    Args:
        runs: from `own_folders`; of a sweep one is enough that is resumed.

    Raises:
        ConfigError: The folder cannot be made.
    """
    logs_dir = Path(config.output_dir, "logs")
    try:
        logs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "it cannot be made", option="output_dir", found=error.strerror, where=config.output_dir
        ) from error
    if not any(resumes_in_place(each) for each in runs):
        for log in logs_dir.glob("rank_*.log"):
            log.unlink()
    return logs_dir


def _check_torch_sees_gpus() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"there are GPUs, but the installed torch {torch.__version__} cannot use them",
            fix="install a build that suits the driver, or give --cpu N",
        )


def _check_model(config: RunConfig, status: Status) -> None:
    """Find the model and read its files' headers once, so that no rank starts for a model that cannot be loaded.

    Raises:
        CheckpointError: It is not there, or damaged.
    """
    with quick_imports():
        from ..weights.hub import resolve_folder
        from ..weights.safetensors_files import Checkpoint

    is_over = threading.Event()

    def advance(done: int, total: int | None, unit: str) -> None:
        if is_over.is_set():
            raise RunStopped("the download is not wanted any more")
        if status.place[0] != "download":
            status.enter("download")
        status.advance(done, total, unit)
        tell(done, total, unit)

    found: Future[Path] = Future()

    def find() -> None:
        try:
            found.set_result(resolve_folder(config.model_name_or_path, config.model_revision, progress=advance))
        except BaseException as error:
            found.set_exception(error)

    with told_progress("downloading", is_shown=not is_terminal(sys.stderr)) as tell:  # there the hub's client has bars
        # The client would wait for gigabytes before it lets a signal end this.
        threading.Thread(target=find, daemon=True).start()
        try:
            while not wait([found], timeout=_LOOK_S).done:
                pass
            folder = found.result()
        finally:
            is_over.set()
    with Checkpoint.open(folder):
        pass
