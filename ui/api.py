"""The public endpoints: what the pages do, for programs. docs/ui.md lists them.

No annotations from the future here: Gradio reads the result's type as it stands.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_origin

import gradio as gr

from lorashard.errors import ConfigError, UserError
from lorashard.runtime.gpus import list_gpus as find_gpus

from .app_context import AppContext
from .form import exporting
from .form.form import MORE, NAME, Form, read_form, write_yaml
from .reading.comparing import differences
from .running import control, jobs
from .running.packing import find_adapter_run, pack_adapter

_MOST_PREVIEW_ROWS = 100
_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("text", (str,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
    list: ("a list of texts", (list,)),
    dict: ("a mapping", (dict,)),
}


def build(context: AppContext) -> None:
    """Add the endpoints to the app that is being built."""
    for make in (_make_reading, _make_checking, _make_control, _make_jobs):
        for endpoint in make(context):
            gr.api(_answer_plainly(endpoint))


def _make_reading(context: AppContext) -> list[Callable[..., Any]]:
    def list_runs() -> list[dict]:
        """List the runs, the newest first."""
        return [asdict(row) for row in context.runs.list()]

    def list_sweep_jobs(name: str) -> list[dict]:
        """List the jobs of a sweep, the best first; each is a run, by the name that `run` says."""
        return [asdict(job) for job in context.runs.list_jobs(name)]

    def get_run(name: str) -> dict:
        """Tell how a run is, how far it has come, and what it was given."""
        run = context.runs.get(name)
        return asdict(run.summary()) | {
            "folder": str(run.folder),
            "progress": asdict(run.progress()),
            "options": run.options(),
            "checkpoints": [asdict(row) for row in run.checkpoints()],
            "why_no_resume": control.explain_no_resume(context.root, name),
        }

    def get_series(name: str, names: list[str], max_points: int = 500, smoothing: float = 0.0) -> dict:
        """Give numbers of a run over its steps; all that it has where no names are given."""
        run = context.runs.get(name)
        found = run.series(names or run.series_names(), max_points, smoothing)
        return {key: {"steps": xs, "values": ys, "smoothed": smoothed} for key, (xs, ys, smoothed) in found.items()}

    def get_ranks(name: str) -> list[dict]:
        """Tell what each rank of a run holds, and how long it has waited."""
        return [asdict(row) for row in context.runs.get(name).ranks()]

    def get_log(name: str, rank: str = "launcher", query: str = "", max_lines: int = 400) -> str:
        """Give the end of a log of a run, or the last lines that hold a text."""
        return context.runs.get(name).log(_read_rank(rank), query, max_lines)

    def get_alerts(name: str) -> list[dict]:
        """Tell what is wrong with a run, and with which rank; the worst first."""
        return [asdict(alert) for alert in context.runs.get(name).alerts()]

    def get_samples(name: str) -> list[dict]:
        """Give what a run has answered to its sample prompts, in the order of the steps."""
        return [asdict(sample) for sample in context.runs.get(name).samples()]

    def get_plan(name: str) -> dict:
        """Give what each placement of a run was predicted to cost; empty where nothing was planned."""
        return context.runs.get(name).plan() or {}

    def get_adapter(name: str, checkpoint: str = "") -> dict:
        """Give the adapter of a run, or of a checkpoint, the newest if need be, as a zip for gradio_client."""
        find_adapter_run(context.root, name, checkpoint)
        folder = find_adapter_run(context.root, name)
        packed = pack_adapter(folder, Path(os.environ["GRADIO_TEMP_DIR"]) / "adapters", checkpoint)
        return {"path": str(packed), "orig_name": packed.name, "meta": {"_type": "gradio.FileData"}}

    def compare_runs(names: list[str]) -> list[dict]:
        """Tell in which options, and versions of libraries, runs differ."""
        found = differences([context.runs.get(name) for name in names])
        return [{"option": option, "values": dict(zip(names, values, strict=True))} for option, values in found]

    def list_gpus() -> list[dict]:
        """List the GPUs of the server's machine, with their free memory."""
        return [asdict(gpu) for gpu in find_gpus()]

    return [
        list_runs,
        list_sweep_jobs,
        get_run,
        get_series,
        get_ranks,
        get_log,
        get_alerts,
        get_samples,
        get_plan,
        get_adapter,
        compare_runs,
        list_gpus,
    ]


def _make_checking(context: AppContext) -> list[Callable[..., Any]]:
    def plan(options: dict, gpu_type: str = "", num_gpus: int = 1) -> dict:
        """Tell what each placement would cost a run with these options, and which is chosen."""
        words = _read_options(context, options, ["model_name_or_path"]).to_words()
        return context.worker.plan(words, gpu_type or None, num_gpus)

    def estimate(options: dict, gpu_type: str = "", num_gpus: int = 1) -> dict:
        """Tell how many examples, tokens and steps a run with these options has, and how long it may take."""
        return context.worker.estimate(_read_options(context, options).to_words(), gpu_type or None, num_gpus)

    def validate(options: dict) -> list[str]:
        """Check a run with these options without training: devices, the model's files, every row of the data."""
        return list(context.worker.validate(_read_options(context, options).to_words(context.root)))

    def preview(options: dict, num_rows: int = 3) -> list[dict]:
        """Give the first rows as the model will see them, with the tokens that it learns marked."""
        if not 1 <= num_rows <= _MOST_PREVIEW_ROWS:
            raise ConfigError(option="num_rows", expected=f"a number from 1 to {_MOST_PREVIEW_ROWS}", found=num_rows)
        return context.worker.preview(_read_options(context, options).to_words(), num_rows)

    return [plan, estimate, validate, preview]


def _make_control(context: AppContext) -> list[Callable[..., Any]]:
    def start_run(name: str, options: dict) -> str:
        """Start a run, and return its name; an empty name asks for one."""
        form = _read_options(context, options, name=name)
        return context.start_run(form.name, form.to_yaml(), is_suggested=not name.strip())

    def stop_run(name: str, now: bool = False) -> str:
        """Stop a run, and return its state: it saves first, or ends now and loses what came after its checkpoint."""
        control.stop_run(context.root, name, now)
        return context.runs.get(name).summary().state

    def stop_job(name: str) -> str:
        """Stop one job of a sweep, SWEEP/JOB, which saves first, and return its state; the other jobs go on."""
        if "/" not in name:
            raise ConfigError(option="name", expected="SWEEP/JOB", found=repr(name), fix="stop_run stops a whole sweep")
        control.stop_run(context.root, name)
        return context.runs.get(name).summary().state

    def save_run(name: str) -> str:
        """Have a run save a checkpoint and go on; return its state."""
        control.save_run(context.root, name)
        return context.runs.get(name).summary().state

    def resume_run(name: str) -> str:
        """Go on with a run from its last checkpoint; return its state."""
        context.resume_run(name)
        return context.runs.get(name).summary().state

    def delete_run(name: str) -> bool:
        """Delete a run that is over, with its checkpoints and its adapter."""
        context.delete_run(name)
        return True

    return [start_run, stop_run, stop_job, save_run, resume_run, delete_run]


def _make_jobs(context: AppContext) -> list[Callable[..., Any]]:
    def start_merge(
        name: str,
        out: str,
        dtype: str = "auto",
        cpu: int = 0,
        repo: str = "",
        is_private: bool = True,
        quantization: str = "",
        requantize: str = "",
        checkpoint: str = "",
    ) -> str:
        """Merge a run's adapter into its base, in a folder beside the runs; return the job's id."""
        base_words = ["--quantization", quantization] if quantization else []
        base_words += ["--requantize", requantize] if requantize else []
        asked = exporting.check_merge(
            context.root, name, out, dtype, _read_device(cpu), repo, is_private, base_words, checkpoint
        )
        return context.jobs.start("merge", name, jobs.merge_words(asked.run_folder, asked.out, asked.options))

    def start_verify(name: str, merged: str = "", cpu: int = 0, checkpoint: str = "") -> str:
        """Verify a run's adapter, or a merged model, against the adapter on its base; return the job's id."""
        folder, options = exporting.check_verify(context.root, name, merged, _read_device(cpu), checkpoint)
        return context.jobs.start("verify", name, jobs.verify_words(folder, options))

    def start_push(name: str, repo: str, is_private: bool = True, checkpoint: str = "") -> str:
        """Upload a run's adapter to a repo of the Hugging Face hub; return the job's id."""
        folder = find_adapter_run(context.root, name, checkpoint)
        return context.jobs.start("push", name, jobs.push_words(folder, exporting.check_repo(repo), is_private))

    def delete_merged(name: str) -> bool:
        """Delete a merged model's folder."""
        control.delete_merged(context.root, name)
        return True

    def list_jobs() -> list[dict]:
        """List the jobs, the newest first."""
        return [_describe_job(job) for job in context.jobs.list()]

    def get_job(job_id: str) -> dict:
        """Tell how a job is."""
        return _describe_job(context.jobs.get(job_id))

    def cancel_job(job_id: str) -> dict:
        """End a job, and tell how it is."""
        context.jobs.cancel(job_id)
        return _describe_job(context.jobs.get(job_id))

    return [start_merge, start_verify, start_push, delete_merged, list_jobs, get_job, cancel_job]


def _read_device(cpu: int) -> list[str]:
    if cpu < 0:
        raise ConfigError(option="cpu", expected="a number of ranks, or 0 for the GPUs", found=cpu)
    return ["--cpu", str(cpu)] if cpu else []


def _describe_job(job: Any) -> dict:
    return asdict(job) | {"log_path": str(job.log_path)}


def _read_options(
    context: AppContext,
    options: Mapping[str, Any],
    needed: Sequence[str] = ("model_name_or_path", "dataset"),
    name: str = "",
) -> Form:
    """Return the form that the page for a new run would have with these options.

    Raises:
        ConfigError: the first that is wrong or missing.
    """
    more = {key: value for key, value in options.items() if key != "method"}
    form = read_form(
        {"method": str(options.get("method", "")), NAME: name, MORE: write_yaml(more)}, context.root, context.allowed
    )
    for problem in form.problems.values():
        raise problem
    for option in needed:
        if option in form.missing:
            raise ConfigError("missing", option=option, fix="add it to the options")
    return form


def _read_rank(text: str) -> Any:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else text


def _answer_plainly(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return an endpoint that checks its arguments' types, which Gradio does not, and reports errors in one line."""
    parameters = list(inspect.signature(endpoint).parameters.values())

    @functools.wraps(endpoint)
    def answer(*values: Any) -> Any:
        try:
            for parameter, value in zip(parameters, values, strict=False):
                _check_type(parameter, value)
            return endpoint(*values)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from error

    return answer


def _check_type(parameter: inspect.Parameter, value: Any) -> None:
    kind = get_origin(parameter.annotation) or parameter.annotation
    named, types = _KINDS[kind]
    is_right = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
    if is_right and kind is list:
        is_right = all(isinstance(element, str) for element in value)
    if not is_right:
        raise ConfigError(option=parameter.name, expected=named, found=f"{value!r:.80}")
