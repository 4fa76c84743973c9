"""The command line: `lorashard finetune | plan | preview | validate | chat | eval | verify | doctor | env | ...`.

Exit codes: 0 done; 2 the user's mistake, said in one line on stderr; 1 a crash, with a traceback; 75 a run that saved
and stopped as a signal asked; 128 + n after signal n. Heavy imports wait inside the commands: help and mistakes are
answered without torch.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from .errors import ConfigError, RunStopped, TrainingError, UserError, VerificationError
from .runtime.disk import find_fault
from .runtime.importing import quick_imports
from .runtime.output import RESULT_FILE_VARIABLE, leave_out_notices, outlive_full_disks
from .runtime.signals import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    from .config.use_options import CommandWords

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

    run_config = RunConfig.resolve(config, ctx.args)
    from .launch.launcher import finetune

    config_arguments = ["--config", str(config)] if config else []
    return finetune(run_config, ["finetune", *config_arguments, *ctx.args])


@app.command("preview", cls=_OptionsCommand, context_settings=_ANY_OPTIONS)
def _preview(
    ctx: typer.Context,
    config: _ConfigPath = None,
    num_rows: Annotated[int, typer.Option("--num_rows", "--num-rows", min=1, help="How many rows.")] = 3,
) -> int:
    """Show rows as the model will see them.

    The tokens that it learns are marked: lorashard preview --model_name_or_path M --dataset D [--num_rows N]
    """
    from .config.run_config import RunConfig

    run_config = RunConfig.resolve(config, ctx.args, required=("model_name_or_path", "dataset"))
    if run_config.method != "sft":
        raise ConfigError(
            f"preview shows which tokens sft learns, and TRL tokenizes the rows of {run_config.method}: lorashard "
            "validate checks them"
        )
    with quick_imports():
        from .config.data_options import DataOptions
        from .data.preview import preview, render_preview
        from .data.tokenizer import load_tokenizer

    rows = preview(DataOptions(**run_config.data_options()), load_tokenizer(**run_config.tokenizer_options()), num_rows)
    print(render_preview(rows, color=sys.stdout.isatty()))
    return 0


@app.command("validate", cls=_OptionsCommand, context_settings=_ANY_OPTIONS)
def _validate(ctx: typer.Context, config: _ConfigPath = None) -> int:
    """Check a run without training.

    Takes what finetune takes. Checks options, devices, the model's files and every row of the data; reads no weights.
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
        str | None, typer.Option("--gpu_memory", "--gpu-memory", help="With this much memory each, such as 24GiB.")
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="On this many machines; --gpus counts those of one.")
    ] = 1,
    peer_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--peer_gb_per_s", "--peer-gb-per-s", help="What a GPU receives from others of its machine.", min=0.001
        ),
    ] = None,
    network_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--network_gb_per_s", "--network-gb-per-s", help="What a machine receives from others.", min=0.001
        ),
    ] = None,
    epoch_tokens: Annotated[
        int | None,
        typer.Option("--epoch_tokens", "--epoch-tokens", min=1, help="Tokens of the data, to tell its time."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Say what each placement would cost.

    Bytes, seconds, and which is chosen, from the model's config and headers alone: lorashard plan
    --model_name_or_path M [--gpus N | --cpu N] [--gpu_type T --nodes N] [any option]
    """
    from .config.run_config import RunConfig

    run_config = RunConfig.resolve(config, ctx.args, required=("model_name_or_path",))
    from .planning.hardware import HardwareOptions

    wanted = HardwareOptions(gpu_type, gpu_memory, nodes, peer_gb_per_s, network_gb_per_s)
    with quick_imports():
        from .planning.run_plan import forecast

    plan, cluster = forecast(run_config, wanted, epoch_tokens=epoch_tokens)
    if as_json:
        print(json.dumps(plan.to_json(), indent=1))
        return 0
    from .planning.table import render_plan

    print(render_plan(plan, cluster.num_ranks))
    return 0


@app.command("chat", cls=_use_command("ChatOptions"), context_settings=_ANY_OPTIONS)
def _chat(ctx: typer.Context) -> int:
    """Talk to an adapter on its base."""
    from .config.use_options import ChatOptions

    options = ChatOptions.read(ctx.args)
    from .launch.launcher import run_command

    def work() -> None:
        with quick_imports():
            from .inference.chat import chat

        chat(options)

    return run_command(options, ["chat", *ctx.args], work, is_interactive=True)


@app.command("merge", cls=_use_command("MergeOptions"), context_settings=_ANY_OPTIONS)
def _merge(ctx: typer.Context) -> int:
    """Write an adapter merged into its base, as a model of its own."""
    from .config.use_options import MergeOptions

    options = MergeOptions.read(ctx.args)
    from .launch.launcher import run_command

    def work() -> None:
        with quick_imports():
            from .export.merge_command import merge

        merge(options)

    exit_code = run_command(options, ["merge", *ctx.args], work)
    if exit_code:  # ranks that were killed could not clear up
        from .runtime.atomic_folder import remove_abandoned

        remove_abandoned(Path(options.out).resolve())
    return exit_code


@app.command("generate", cls=_use_command("GenerateOptions"), context_settings=_ANY_OPTIONS)
def _generate(ctx: typer.Context) -> int:
    """Answer a file of prompts with an adapter on its base."""
    from .config.use_options import GenerateOptions

    options = GenerateOptions.read(ctx.args)
    from .launch.launcher import run_command

    def work() -> None:
        with quick_imports():
            from .inference.generation import generate_file

        generate_file(options)

    return run_command(options, ["generate", *ctx.args], work)


@app.command("eval", cls=_use_command("EvalOptions"), context_settings=_ANY_OPTIONS)
def _eval(ctx: typer.Context) -> int:
    """Measure loss, perplexity and exact matches on a dataset."""
    from .config.use_options import EvalOptions

    options = EvalOptions.read(ctx.args)
    from .launch.launcher import run_command

    def work() -> None:
        with quick_imports():
            from .inference.evaluation import evaluate

        evaluate(options)

    return run_command(options, ["eval", *ctx.args], work)


@app.command("verify", cls=_use_command("VerifyOptions"), context_settings=_ANY_OPTIONS)
def _verify(ctx: typer.Context) -> int:
    """Check an adapter, a merged model, or that sharding changes no gradient of a model on this machine."""
    from .config.use_options import VerifyOptions

    options = VerifyOptions.read(ctx.args)
    from .launch.launcher import run_command

    def work() -> None:
        with quick_imports():
            from .diagnostics.verify import verify

        verify(options)

    return run_command(options, ["verify", *ctx.args], work)


@app.command("env")
def _env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Describe this machine for a bug report: versions, GPUs and links, memory, disk, variables. Holds no secrets."""
    from .diagnostics.env import describe_environment, render_environment

    sections = describe_environment()
    print(json.dumps(sections, indent=1) if as_json else render_environment(sections))
    return 0


@app.command("doctor", cls=_use_command("DoctorOptions"), context_settings=_ANY_OPTIONS)
def _doctor(ctx: typer.Context) -> int:
    """Try packages, GPUs, links, memory and disks here; say what is wrong and how to fix it."""
    from .config.use_options import DoctorOptions

    options = DoctorOptions.read(ctx.args)
    from .diagnostics.doctor import diagnose

    return diagnose(options, ["doctor", *ctx.args])


@app.command("ui", cls=_use_command("UiOptions", "lorashard_ui.serving.options"), context_settings=_ANY_OPTIONS)
def _ui(ctx: typer.Context) -> int:
    """Serve the web UI: start, watch and compare runs in a browser.

    lorashard ui [--root runs] [--port 7860] [--host ADDRESS --auth FILE]
    """
    # By name: the UI stands on lorashard, which knows nothing else of it.
    options = importlib.import_module("lorashard_ui.serving.options").UiOptions.read(ctx.args)
    missing = [name for name in ("gradio", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the web UI needs {' and '.join(missing)}: pip install 'lorashard[ui]'")
    return importlib.import_module("lorashard_ui.serving.server").serve(options)


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
        # Typer's own errors (an unknown command) know how to show themselves, and their exit code.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            print(f"lorashard: error: {error.format_message()}", file=sys.stderr)
            return error.exit_code
        if find_fault(error) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            refused = ConfigError(f"a disk refuses: {error}; make room or fix it, and run this again")
            return _report(refused, exit_code=2, is_plain=True)
        return _report(error, exit_code=1, is_plain=False)


def _report(error: Exception, exit_code: int, is_plain: bool) -> int:
    """Say why the command failed, once, however many ranks run it."""
    from .runtime.devices import find_launcher
    from .runtime.failures import record_failure

    error = error.with_traceback(_skip_typer(error.__traceback__))
    record_failure(error, exit_code, is_plain)
    if not is_plain:
        traceback.print_exception(error)
        return exit_code
    try:
        launcher = find_launcher(os.environ)
    except UserError:
        launcher = None
    # lorashard's launcher prints it; torchrun's summary has it; where neither is told, each rank speaks.
    is_told = launcher is not None and "TORCHELASTIC_ERROR_FILE" in os.environ
    if launcher is None or not is_told or (launcher.rank == 0 and not launcher.is_lorashard):
        print(f"lorashard: {'' if isinstance(error, RunStopped) else 'error: '}{error}", file=sys.stderr)
    return exit_code


def _skip_typer(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames below Typer's own, which tell nothing of the crash."""
    start = frame = frames
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").startswith("typer."):
            start = frame.tb_next
        frame = frame.tb_next
    return start or frames
