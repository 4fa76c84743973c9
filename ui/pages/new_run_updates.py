"""What the page "New run" shows for a form: pure functions from the form to updates of components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import gradio as gr

from lorashard.config.data_options import DataOptions
from lorashard.config.methods import METHODS, Method
from lorashard.config.options import Option
from lorashard.config.run_config import RunConfig, read_known_options, read_own_options
from lorashard.runtime.gpus import Gpu

from ..drawing import markup
from ..form.form import MORE, NAME, Form, describe_option, list_choosable
from .option_fields import explain, from_text, show_problem

_TOKENIZER = ("model_name_or_path", "model_revision", "trust_remote_code", "chat_template_path", "eos_token")
_NAMES = {"model_name_or_path": "a model", "dataset": "a dataset"}


def list_others(fields: Mapping[str, Any], method: str) -> list[tuple[str, str]]:
    """Return the options of a method that have no field, each with the beginning of what it is for."""
    chosen = METHODS[method]
    options = list_choosable(chosen)
    described = {name: describe_option(option, chosen)[1] for name, option in options.items() if name not in fields}
    return [(f"{name}: {text[:100]}", name) for name, text in sorted(described.items())]


def update_fields(
    fields: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return an update of each field: problems in place of explanations, and another method's options and defaults.

    Args:
        before, now: the `method` and the `problems` that are shown, and those that are to be.
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
            update["elem_classes"] = ["wrong"] if problem else []
            update["info"] = show_problem(problem) if problem else _explain(options.get(name), field, method)
        if is_other_method and name not in (NAME, MORE, "gpus"):
            update["visible"] = name in known or bool(texts[name])
            if name in known and isinstance(field, gr.Textbox):
                update["placeholder"] = describe_option(known[name], method)[0]
        updates[name] = merge({}, **update)
    return updates


def merge(update: Mapping[str, Any], **properties: Any) -> dict[str, Any]:
    """Return an update with more properties."""
    return {**update, **properties, "__type__": "update"}


def fill_field(name: str, text: str, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return the update by which a field holds a text."""
    return gr.update(value=from_text(name, text, gpus))


def ask_plan(form: Form) -> list[str] | None:
    """Return the options to plan for, or None if there is nothing to plan yet. A plan reads no dataset."""
    if "model_name_or_path" not in form.values or set(form.problems) - {NAME}:
        return None
    values = {name: value for name, value in form.values.items() if name != "dataset"}
    return Form(form.method, values, form.name).to_words()


def ask_preview(form: Form) -> tuple[str, list[str]] | None:
    """Return the method, and the options that decide what examples look like."""
    if form.missing or set(form.problems) - {NAME}:
        return None
    names = {*DataOptions.model_fields, *_TOKENIZER, "method"}
    values = {name: value for name, value in form.values.items() if name in names}
    return form.method.name, Form(form.method, values, form.name).to_words()


def ask_model(form: Form) -> str | None:
    """Return the model to describe."""
    return form.values.get("model_name_or_path")


def summarize(form: Form) -> str:
    """Return a list of all problems, or what is still missing."""
    if form.problems:
        lines = [markup.tag("li", str(problem)) for problem in form.problems.values()]
        return markup.tag("div", "\u2715 Fix these first:", markup.tag("ul", *lines), class_="note note-error")
    if form.missing:
        return markup.note(f"Still missing: {' and '.join(_NAMES[name] for name in form.missing)}.", "warning")
    return markup.note(f"\u2713 All options are valid. The run will be named {form.name}.")


def explain_first(form: Form) -> str | None:
    """Return why a run cannot start, or None."""
    if form.problems:
        return str(next(iter(form.problems.values())))
    return f"{form.missing[0]} is required" if form.missing else None


def describe_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a description of the previewed examples: format, token counts, and why one cannot be used."""
    lines = []
    for row in rows:
        if row["problem"]:
            lines.append(markup.tag("li", f"\u2715 {row['place']} cannot be trained on: {row['problem']}"))
            continue
        is_cut = row["num_tokens"] < row["num_tokens_before_cut"]
        cut = f", cut from {row['num_tokens_before_cut']}" if is_cut else ""
        counts = f"{row['num_tokens']} tokens{cut}, {row['num_supervised_tokens']} supervised"
        lines.append(markup.tag("li", f"{row['place']}: {counts}"))
    if not rows:
        return markup.note("The dataset is empty.", "error")
    about = f"Format: {rows[0]['format']}; supervised: {rows[0]['mask_method']}."
    legend = "The loss is computed on the colored tokens marked \u201csupervised\u201d; the others are context."
    return markup.note(about) + markup.tag("ul", *lines) + markup.tag("p", legend, class_="subdued")


def highlight(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str | None]]:
    """Return the examples' text in parts, each marked as supervised or not."""
    parts: list[tuple[str, str | None]] = []
    for row in rows:
        if parts:
            parts.append(("\n\n", None))
        for is_supervised, tokens in groupby(row["tokens"], key=lambda token: token[1]):
            parts.append(("".join(text for text, _ in tokens), "supervised" if is_supervised else None))
    return parts


def _explain(option: Option | None, field: Any, method: Method) -> str:
    """Return what stands above a field that is right: what its option is for, or what the page says of it."""
    if option is None or option.name in ("gpus", "cpu"):
        return field.info or ""
    return explain(option, method, has_name=field.label != option.name)
