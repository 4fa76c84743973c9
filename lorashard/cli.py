"""The command line: `lorashard finetune | plan | preview | validate | chat | eval | verify | runs | watch | ...`.

Exit codes: 0 done; 2 the user's mistake, reported in one line on stderr; 1 a crash, with a traceback; 75 a run that
saved and stopped as a signal asked; 128 + n after signal n. Heavy imports are inside the commands, so that help and
mistakes are printed without importing torch.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from .errors import ConfigError, RunStopped, TrainingError, UserError, VerificationError
from .runtime.disk import find_fault
from .runtime.importing import quick_imports
from .runtime.output import RESULT_FILE_VARIABLE, leave_out_notices, outlive_full_disks
from .runtime.signals import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    from .config.base_options import RankOptions
    from .config.use_options import CommandWords

_Options = TypeVar("_Options", bound="RankOptions")

# The libraries that decide what a run computes.
_LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "safetensors")


class _UseCommand(TyperCommand):
    """A command whose options are the fields of the class `options_name` of `options_module`."""

    options_module = "lorashard.config.use_options"
    options_name = ""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        words = self._load_options().positionals
        formatter.write_usage(ctx.command_path, " ".join([*(word.upper() for word in words), "[OPTIONS]"]))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        options = self._load_options()
        formatter.write("\nOptions of the command:\n")
        from .config.help import describe_fields

        formatter.write("\n".join(describe_fields(options, options.find_own_names())) + "\n")

    def _load_options(self) -> type[CommandWords]:
        return getattr(importlib.import_module(self.options_module), self.options_name)


def _use_command(options_name: str, options_module: str = "lorashard.config.use_options") -> type[_UseCommand]:
    names = {"options_name": options_name, "options_module": options_module}
    return type(f"_{options_name}Command", (_UseCommand,), names)


class _OptionsCommand(TyperCommand):
    """A command that takes any option of a run, and lists the main ones in its help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from .config.help import build_options_help

        formatter.write(build_options_help())


# The commands whose ranks all call one function: the class of their options, the function, and what help prints.
_RANKED_COMMANDS = {
    "chat": ("ChatOptions", "lorashard.inference.chat", "chat", "Chat with an adapter on its base."),
    "merge": (
        "MergeOptions",
        "lorashard.export.merge_command",
        "merge",
        "Merge an adapter into its base, and write the merged model.",
    ),
    "generate": (
        "GenerateOptions",
        "lorashard.inference.generation",
        "generate_file",
        "Generate completions of a file of prompts with an adapter on its base.",
    ),
    "eval": (
        "EvalOptions",
        "lorashard.inference.evaluation",
        "evaluate",
        "Measure loss, perplexity and exact matches on a dataset.",
    ),
    "verify": (
        "VerifyOptions",
        "lorashard.diagnostics.verify",
        "verify",
        "Check an adapter, a merged model, or that sharding changes no gradient of a model on this machine.",
    ),
}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # brackets in help stay, and rich need not be imported
    pretty_exceptions_enable=False,
    help="Fine-tune LoRA adapters with the frozen base model sharded over ranks.",
)
_ANY_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
_ConfigPath = Annotated[Path | None, typer.Option("--config", help="A flat YAML file of options.", metavar="FILE")]


@app.command("finetune", cls=_OptionsCommand, context_settings=_ANY_OPTIONS)
def _finetune(ctx: typer.Context, config: _ConfigPath = None) -> int:
    """Train a LoRA adapter.

    lorashard finetune --model_name_or_path M --dataset D --output_dir O [--gpus N | --cpu N] [any option]
    """
    from .config.run_config import RunConfig

    run_config = _read_handed_over(ctx, RunConfig) or RunConfig.resolve(config, ctx.args)
    from .launch.launcher import finetune

    return finetune(run_config)


@app.command("preview", cls=_OptionsCommand, context_settings=_ANY_OPTIONS)
def _preview(
    ctx: typer.Context,
    config: _ConfigPath = None,
    num_rows: Annotated[int, typer.Option("--num_rows", "--num-rows", min=1, help="Number of examples.")] = 3,
) -> int:
    """Print examples as the model will see them, with the supervised tokens marked.

    lorashard preview --model_name_or_path M --dataset D [--num_rows N]
    """
    from .config.run_config import RunConfig

    run_config = RunConfig.resolve(config, ctx.args, required=("model_name_or_path", "dataset"))
    with quick_imports():
        from .data.preview import preview_run, render_preview

    print(render_preview(preview_run(run_config, num_rows), color=sys.stdout.isatty()))
    return 0


@app.command("validate", cls=_OptionsCommand, context_settings=_ANY_OPTIONS)
def _validate(ctx: typer.Context, config: _ConfigPath = None) -> int:
    """Check a run without training.

    Takes finetune's options. Checks them, devices, the model's files and every example of the data; reads no weights.
    """
    from .config.run_config import RunConfig

    run_config = RunConfig.resolve(config, ctx.args)
    with quick_imports():
        from .diagnostics.validate import validate

    for line in validate(run_config):
        print(line, flush=True)
    return 0


@app.command("plan", cls=_OptionsCommand, context_settings=_ANY_OPTIONS)
def _plan(
    ctx: typer.Context,
    config: _ConfigPath = None,
    gpu_type: Annotated[str | None, typer.Option("--gpu_type", "--gpu-type", help="Plan for these GPUs.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu_memory", "--gpu-memory", help="Memory of each GPU, such as 24GiB.")
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="Number of machines; --gpus counts the GPUs of one.")
    ] = 1,
    peer_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--peer_gb_per_s", "--peer-gb-per-s", help="GB/s that a GPU receives from others of its machine.", min=0.001
        ),
    ] = None,
    network_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--network_gb_per_s", "--network-gb-per-s", help="GB/s that a machine receives from others.", min=0.001
        ),
    ] = None,
    epoch_tokens: Annotated[
        int | None,
        typer.Option(
            "--epoch_tokens", "--epoch-tokens", min=1, help="Tokens of the dataset, to predict the time of an epoch."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Predict the memory and time of each placement, and which one finetune chooses.

    Reads the model's config and headers, and some examples of a dataset that is here: lorashard plan
    --model_name_or_path M [--gpus N | --cpu N] [--gpu_type T --nodes N] [any option]
    """
    from .config.run_config import RunConfig

    run_config = RunConfig.resolve(config, ctx.args, required=("model_name_or_path",))
    from .config.sweep import read_jobs
    from .planning.hardware import HardwareOptions

    hardware = HardwareOptions(gpu_type, gpu_memory, nodes, peer_gb_per_s, network_gb_per_s)
    with quick_imports():
        from .planning.run_plan import forecast

    names = {job.config.dataset for job in read_jobs(run_config)} or {run_config.dataset}
    is_here = all(name and Path(name).expanduser().exists() for name in names)
    planned = run_config.model_copy(update={"dataset": ""}) if is_here else run_config
    plan, cluster = forecast(planned, hardware, epoch_tokens=epoch_tokens)
    found = None
    if is_here:
        from .data.survey import survey_run
        from .planning.estimate import estimate

        try:
            found = dataclasses.asdict(estimate(run_config, survey_run(run_config), plan, hardware))
        except UserError as error:  # the plan holds for other data too
            plan = dataclasses.replace(plan, notes=(*plan.notes, f"the dataset is not counted: {error}"))
    if as_json:
        print(json.dumps(plan.to_json() | {"estimate": found}, indent=1))
        return 0
    from .planning.estimate_words import render_estimate
    from .planning.table import render_plan

    print(render_plan(plan, cluster.num_ranks))
    if found:
        print(f"\n{render_estimate(found)}")
    return 0


def _run_in_ranks(ctx: typer.Context) -> int:
    """Run a command of `_RANKED_COMMANDS`, here or in ranks that are started for it."""
    options_name, module, function, _ = _RANKED_COMMANDS[ctx.info_name or ""]
    options_class = getattr(importlib.import_module("lorashard.config.use_options"), options_name)
    options = _read_handed_over(ctx, options_class) or options_class.read(ctx.args)
    from .launch.launcher import run_command

    def work() -> None:
        with quick_imports():
            run = getattr(importlib.import_module(module), function)
        run(options)

    exit_code = run_command(ctx.info_name or "", options, work, is_interactive=ctx.info_name == "chat")
    if exit_code and ctx.info_name == "merge":  # ranks that were killed could not clear up
        from .runtime.atomic_folder import remove_abandoned

        remove_abandoned(Path(options.out).resolve())
    return exit_code


for _name, (_options_name, _, _, _help) in _RANKED_COMMANDS.items():
    app.command(_name, cls=_use_command(_options_name), context_settings=_ANY_OPTIONS, help=_help)(_run_in_ranks)


def _read_handed_over(ctx: typer.Context, options_class: type[_Options]) -> _Options | None:
    """Return the options that `lorashard.launch` resolved before it started this rank; None in any other process."""
    from .config.base_options import OPTIONS_FILE
    from .runtime.devices import find_launcher

    if ctx.args[:1] != [OPTIONS_FILE] or not (launcher := find_launcher(os.environ)) or not launcher.is_lorashard:
        return None
    return options_class.from_file(Path(ctx.args[1]))


@app.command("env")
def _env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Describe this machine for a bug report: versions, GPUs and links, memory, disk, variables. Holds no secrets."""
    from .diagnostics.env import describe_environment, render_environment

    sections = describe_environment()
    print(json.dumps(sections, indent=1) if as_json else render_environment(sections))
    return 0


@app.command("doctor", cls=_use_command("DoctorOptions"), context_settings=_ANY_OPTIONS)
def _doctor(ctx: typer.Context) -> int:
    """Test packages, GPUs, links, memory and disks here, and report what is wrong and how to fix it."""
    from .config.use_options import DoctorOptions

    options = _read_handed_over(ctx, DoctorOptions) or DoctorOptions.read(ctx.args)
    from .diagnostics.doctor import diagnose

    return diagnose(options)


@app.command("ui", cls=_use_command("UiOptions", "lorashard_ui.serving.options"), context_settings=_ANY_OPTIONS)
def _ui(ctx: typer.Context) -> int:
    """Serve the web UI: start, watch and compare runs in a browser.

    lorashard ui [--root runs] [--port 7860] [--host ADDRESS --auth FILE]
    """
    # By name: the UI imports lorashard, never the other way round.
    options = importlib.import_module("lorashard_ui.serving.options").UiOptions.read(ctx.args)
    missing = [name for name in ("gradio", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the web UI needs {' and '.join(missing)}", fix="pip install 'lorashard[ui]'")
    return importlib.import_module("lorashard_ui.serving.server").serve(options)


@app.command("runs", cls=_use_command("RunsOptions", "lorashard_ui.terminal.options"), context_settings=_ANY_OPTIONS)
def _runs(ctx: typer.Context) -> int:
    """List the runs of a folder: states, steps, losses, time left.

    lorashard runs [--root runs] [--json]
    """
    return _show_runs(ctx, "RunsOptions", "list_runs")


@app.command("watch", cls=_use_command("WatchOptions", "lorashard_ui.terminal.options"), context_settings=_ANY_OPTIONS)
def _watch(ctx: typer.Context) -> int:
    """Show a run in the terminal until it has ended: progress, losses, ranks, alerts.

    lorashard watch RUN [--root runs] [--once] [--json]
    """
    return _show_runs(ctx, "WatchOptions", "watch")


def _show_runs(ctx: typer.Context, options_name: str, function: str) -> int:
    # By name, as the web UI.
    options = getattr(importlib.import_module("lorashard_ui.terminal.options"), options_name).read(ctx.args)
    return getattr(importlib.import_module("lorashard_ui.terminal.commands"), function)(options)


@app.command("version")
def _version() -> int:
    """Print versions."""
    from importlib.metadata import PackageNotFoundError, version

    from . import __version__

    print(f"lorashard {__version__}")
    print(f"python {sys.version.split()[0]}")
    for library in _LIBRARIES:
        try:
            print(f"{library} {version(library)}")
        except PackageNotFoundError:
            print(f"{library} is not installed")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: The words after the program's name; by default this process's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    outlive_full_disks(is_result_elsewhere=words[0] == "finetune" or RESULT_FILE_VARIABLE in os.environ)
    leave_out_notices()
    try:
        return app(args=words, prog_name="lorashard", standalone_mode=False) or 0
    except UserError as error:
        return _report(error, exit_code=2, is_plain=True)
    except RunStopped as error:
        return _report(error, exit_code=STOPPED_EXIT_CODE, is_plain=True)
    except (VerificationError, TrainingError) as error:
        return _report(error, exit_code=1, is_plain=True)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # Typer's own errors, such as an unknown command.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            from .runtime.failures import Failure

            Failure(error.exit_code, error.format_message(), "mistake").report()
            return error.exit_code
        if find_fault(error) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            refused = ConfigError(f"a disk refuses: {error}", fix="make room or fix it, and run this again")
            refused.__cause__ = error
            return _report(refused, exit_code=2, is_plain=True)
        return _report(error, exit_code=1, is_plain=False)


def _report(error: Exception, exit_code: int, is_plain: bool) -> int:
    """Report why the command failed, once, however many ranks run it."""
    from .runtime.devices import find_launcher
    from .runtime.failures import Failure, record_failure

    error = error.with_traceback(_skip_typer(error.__traceback__))
    record_failure(error, exit_code, is_plain)
    try:
        launcher = find_launcher(os.environ)
    except UserError:
        launcher = None
    if launcher is None:
        Failure.of_error(error).write()
    if not is_plain:
        traceback.print_exception(error)
        return exit_code
    # lorashard's launcher prints it, and torchrun's summary has it; without an error file, each rank prints it.
    is_recorded = launcher is not None and "TORCHELASTIC_ERROR_FILE" in os.environ
    if launcher is None or not is_recorded or (launcher.rank == 0 and not launcher.is_lorashard):
        print(f"lorashard: {'' if isinstance(error, RunStopped) else 'error: '}{error}", file=sys.stderr)
    return exit_code


def _skip_typer(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames below Typer's own, which say nothing about the crash."""
    start = frame = frames
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").startswith("typer."):
            start = frame.tb_next
        frame = frame.tb_next
    return start or frames
