"""What the page "New run" shows for a form: pure functions from the form to updates of components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from lorashard.config.data_options import DataOptions
from lorashard.config.methods import METHODS, Method
from lorashard.config.options import Option
from lorashard.config.run_config import RunConfig, read_known_options, read_own_options
from lorashard.config.sweep import DATA_JOB_OPTIONS
from lorashard.runtime.gpus import Gpu

from ..drawing import markup
from ..form.finding import Finding, tell
from ..form.form import BASIC, MORE, NAME, RANKS, Form, describe_option, list_choosable
from .option_fields import explain, from_text, show_problem

_TOKENIZER = ("model_name_or_path", "model_revision", "trust_remote_code", "chat_template_path", "eos_token")
# Without which a method's options are not complete, or which its trainer's chat template reads.
_OF_METHODS = ("reward_funcs", "reward_model_name_or_path", "chat_template_kwargs")
_MOST_JOBS = 6  # that are named
_NAMES = {"model_name_or_path": "a model", "dataset": "a dataset"}


def list_others(method: str) -> list[tuple[str, str]]:
    """Return all options of a method, lorashard's and TRL's, each with the beginning of what it is for."""
    chosen = METHODS[method]
    described = {name: describe_option(option, chosen)[1] for name, option in list_choosable(chosen).items()}
    described.pop("gpus", None)  # they are chosen by ticking them, where there are any
    return [(f"{name}: {text[:100]}", name) for name, text in sorted(described.items())]


def update_fields(
    fields: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return an update of each field: problems in place of explanations, and another method's options and defaults.

    Args:
        before, now: the `method` and the `problems` that are shown, and those that are to be; `opened`, the options
            that were chosen by the search.
        texts: of the fields; one that is filled in stays, though the method has no such option.
    """
    is_other_method = before["method"] != now["method"]
    method = METHODS[now["method"]]
    known = read_known_options(method)
    options = read_own_options(RunConfig) | known
    updates = {}
    for name, field in fields.items():
        update: dict[str, Any] = {}
        problem = now["problems"].get(name)
        if problem != before["problems"].get(name) or (is_other_method and name in known):
            update["elem_classes"] = ["option", "wrong"] if problem else ["option"]
            update |= {"visible": True} if problem and name not in RANKS else {}
            update["info"] = show_problem(problem) if problem else _explain(options.get(name), field, method)
        if is_other_method and name not in (NAME, MORE, *RANKS):
            update["visible"] = bool(texts[name] or problem) or (name in known and name in (*BASIC, *now["opened"]))
            if name in known and isinstance(field, gr.Textbox):
                update["placeholder"] = describe_option(known[name], method)[0]
        updates[name] = merge({}, **update)
    return updates


def merge(update: Mapping[str, Any], **properties: Any) -> dict[str, Any]:
    """Return an update with more properties."""
    return {**update, **properties, "__type__": "update"}


def fill_field(name: str, text: str, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return the update by which a field holds a text; one that is not on the first screen is shown if it has any."""
    update = gr.update(value=from_text(name, text, gpus))
    return update if name in (*BASIC, *RANKS, NAME, MORE) else merge(update, visible=bool(text))


def ask_plan(form: Form) -> list[str] | None:
    """Return the options to plan for, or None if there is nothing to plan yet.

    A plan reads no dataset, and may be for GPUs that are not here.
    """
    if "model_name_or_path" not in form.values or set(form.problems) - {NAME, "gpus"}:
        return None
    values = {name: value for name, value in form.values.items() if name != "dataset"}
    return Form(form.method, values, form.name).to_words()


def ask_preview(form: Form) -> tuple[str, list[str]] | None:
    """Return the method, and the options that decide what examples look like."""
    if form.missing or set(form.problems) - {NAME, *RANKS}:
        return None
    names = {*DataOptions.model_fields, *_TOKENIZER, *_OF_METHODS, "method"}
    values = {name: value for name, value in form.values.items() if name in names}
    jobs = [{name: value for name, value in job.options.items() if name in DATA_JOB_OPTIONS} for job in form.jobs]
    if any(jobs):
        named = [{"name": job.name, **options} for job, options in zip(form.jobs, jobs, strict=True)]
        # Jobs with data of their own are refused without steps, whose number changes no example.
        values |= {"sweep": {"jobs": named}, "max_steps": 1}
    return form.method.name, Form(form.method, values, form.name).to_words()


def ask_model(form: Form) -> str | None:
    """Return the model to describe."""
    return form.values.get("model_name_or_path")


def summarize(form: Form, told: Sequence[Finding] = (), is_waiting: bool = False) -> str:
    """Return a list of all problems, or what is still missing, or what to know before the start.

    Args:
        told, is_waiting: what the panels have found, and whether one has not answered yet: see `read_findings`.
    """
    problems = [tell(error, form.method) for error in form.problems.values()]
    problems += [finding.problem for finding in told if finding.problem]
    warnings = [warning for finding in told for warning in finding.warnings]
    name = f"The run will be named {form.name}."
    if form.jobs:
        more = f", and {len(form.jobs) - _MOST_JOBS} more" if len(form.jobs) > _MOST_JOBS else ""
        jobs = ", ".join(job.name for job in form.jobs[:_MOST_JOBS])
        name = f"{len(form.jobs)} jobs: {jobs}{more}. The sweep will be named {form.name}."
    if problems:
        return _list("\u2715 Fix these first:", problems, "error")
    if form.missing:
        return markup.note(f"Still missing: {' and '.join(_NAMES[name] for name in form.missing)}.", "warning")
    if is_waiting:
        return markup.note(f"All options are valid; the plan and the first examples follow. {name}")
    if warnings:
        return _list(f"\u26a0 All options are valid. {name} But:", warnings, "warning")
    return markup.note(f"\u2713 All options are valid. {name}")


def place_problems(form: Form, told: Sequence[Finding], fields: Mapping[str, Any]) -> dict[str, str]:
    """Return what is shown at each field: the form's own problems, then those that the panels have found."""
    found = {finding.option: finding.problem for finding in told if finding.problem and finding.option in fields}
    return found | {name: tell(error, form.method) for name, error in form.problems.items()}


def explain_first(form: Form) -> str | None:
    """Return why a run cannot start, or None."""
    if form.problems:
        return tell(next(iter(form.problems.values())), form.method)
    return f"{form.missing[0]} is required" if form.missing else None


def find_bad_rows(question: Any, rows: Sequence[Mapping[str, Any]]) -> Finding:
    """Return what is wrong with the previewed examples: there are none, or none can be trained on."""
    if not rows:
        return Finding(question, "The dataset is empty.", "dataset")
    if all(row["problem"] for row in rows):
        first = rows[0]
        return Finding(question, f"{first['place']} cannot be trained on: {first['problem']}", "dataset")
    return Finding(question)


def _list(title: str, lines: Sequence[str], kind: str) -> str:
    items = [markup.tag("li", line) for line in lines]
    return markup.tag("div", title, markup.tag("ul", *items), class_=f"note note-{kind}")


def _explain(option: Option | None, field: Any, method: Method) -> str:
    """Return what stands above a field that is right: what its option is for, or what the page says of it."""
    if option is None or option.name in ("gpus", "cpu"):
        return field.info or ""
    return explain(option, method, has_name=field.label != option.name)
