"""The events of the page "New run": each change reads the whole form again, and everything else follows from it.

A change is handled in milliseconds. The plan, the model's size and the preview follow, each by an event of its own that
takes the newest request once it is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from lorashard.config.methods import METHODS
from lorashard.errors import ConfigError
from lorashard.runtime.gpus import list_gpus

from ..app_context import AppContext
from ..drawing import markup
from ..drawing.plan_chart import describe_checkpointing, plan_chart
from ..form.choices import list_datasets, list_models, list_runs
from ..form.form import (
    MORE,
    NAME,
    Form,
    clone_run,
    describe_option,
    fill_fields,
    keep_upload,
    list_choosable,
    read_form,
    read_yaml_file,
)
from ..reading.places import show_paths, write_path
from .new_run_updates import (
    ask_model,
    ask_plan,
    ask_preview,
    describe_rows,
    explain_first,
    fill_field,
    highlight,
    list_others,
    merge,
    summarize,
    update_fields,
)
from .option_fields import list_gpu_choices, to_text
from .plotting import CLASSES
from .refreshing import QUIET

_PREVIEW_ROWS = 3
_GPUS_EVERY_S = 15
_OPEN_RUN = (
    "(name) => { if (name) setTimeout(() => { window.location.href = 'run?name=' + encodeURIComponent(name); }, 300); }"
)

PLAN_WAITS = "The plan appears once a model is chosen and all options are valid."
PREVIEW_WAITS = "The first examples appear once a model and a dataset are chosen and all options are valid."

Components = dict[str, gr.components.Component]


@dataclass(frozen=True)
class Parts:
    """The components of the page."""

    fields: Components
    source: gr.Dropdown
    load: gr.UploadButton
    upload: gr.UploadButton
    find: gr.Dropdown
    loaded: gr.HTML
    model_note: gr.HTML
    plan_status: gr.HTML
    plan_chart: gr.HTML
    plan_notes: gr.HTML
    preview_status: gr.HTML
    preview: gr.HighlightedText
    summary: gr.HTML
    start: gr.Button
    check: gr.Button
    checked: gr.Textbox
    command: gr.Code
    yaml: gr.Code


def bind(context: AppContext, parts: Parts) -> None:
    """Add the page's events."""
    names, inputs = list(parts.fields), list(parts.fields.values())
    shown = gr.State({"method": "sft", "problems": {}})
    plan_question, preview_question, model_question = gr.State(None), gr.State(None), gr.State(None)
    started = gr.Textbox(visible="hidden")

    def read(values: Sequence[Any]) -> Form:
        return read_form(
            {name: to_text(value) for name, value in zip(names, values, strict=True)}, context.root, context.allowed
        )

    def refresh(before: dict[str, Any], *values: Any) -> list[Any]:
        form = read(values)
        texts = dict(zip(names, map(to_text, values), strict=True))
        method = form.method
        now = {"method": method.name, "problems": {name: str(error) for name, error in form.problems.items()}}
        updates = update_fields(parts.fields, before, now, texts)
        updates[NAME] = merge(updates[NAME], placeholder=form.name)
        finds = (
            gr.update(choices=list_others(parts.fields, method.name)) if before["method"] != method.name else gr.skip()
        )
        return [
            now,
            ask_plan(form),
            ask_preview(form),
            ask_model(form),
            form.to_command(context.root),
            form.to_yaml(),
            summarize(form),
            finds,
            *updates.values(),
        ]

    outputs = [shown, plan_question, preview_question, model_question, parts.command, parts.yaml, parts.summary]
    outputs += [parts.find, *inputs]
    refreshing: dict[str, Any] = {
        "fn": refresh, "inputs": [shown, *inputs], "outputs": outputs, "trigger_mode": "always_last", **QUIET,
    }  # fmt: skip
    # Not `input`: Gradio's text fields do not send it for Backspace or pasted text.
    gr.on([field.change for field in inputs], **refreshing)

    stale = gr.update(elem_classes=[*CLASSES, "stale"])

    def plan(question: list[str] | None) -> Iterator[list[Any]]:
        if question is None:
            yield [markup.note(PLAN_WAITS), stale, gr.skip()]
            return
        yield [markup.note("Planning \u2026"), stale, gr.skip()]
        try:
            found = context.worker.plan(question)
        except ConfigError as error:
            yield [markup.note(str(error), "error"), gr.update(visible=False), ""]
            return
        kind = "info" if found["chosen"] is not None else "error"
        notes = markup.join(markup.tag("li", show_paths(note)) for note in found["notes"])
        size = found["model"].rpartition(": ")[2]  # its name stands in the form
        about = markup.tag("p", f"{size}; {found['cluster']}. The same on every rank.", class_="subdued")
        line = describe_checkpointing(found)
        recomputing = markup.tag("p", line) if line else ""
        yield [
            markup.note(show_paths(found["reason"]), kind),
            gr.update(value=plan_chart(found).to_json(), visible=True, elem_classes=list(CLASSES)),
            about + recomputing + markup.tag("ul", notes),
        ]

    plan_parts = [parts.plan_status, parts.plan_chart, parts.plan_notes]
    plan_question.change(plan, plan_question, plan_parts, trigger_mode="always_last", **QUIET)

    def describe_model(name: str | None) -> str:
        if not name:
            return ""
        try:
            return markup.note(show_paths(context.worker.describe_model(name)))
        except ConfigError as error:
            return markup.note(str(error), "error")

    model_question.change(describe_model, model_question, parts.model_note, trigger_mode="always_last", **QUIET)

    def preview(question: tuple[str, list[str]] | None) -> Iterator[list[Any]]:
        if question is None:
            yield [markup.note(PREVIEW_WAITS), gr.update(visible=False)]
            return
        method, words = question
        if method != "sft":
            yield [
                markup.note(
                    f"No preview for {method}: TRL tokenizes its examples itself. The check above reads them all."
                ),
                gr.update(visible=False),
            ]
            return
        yield [markup.note("Reading the first examples \u2026"), gr.skip()]
        try:
            rows = context.worker.preview(words, _PREVIEW_ROWS)
        except ConfigError as error:
            yield [markup.note(str(error), "error"), gr.update(visible=False)]
            return
        yield [describe_rows(rows), gr.update(value=highlight(rows), visible=True)]

    preview_question.change(
        preview, preview_question, [parts.preview_status, parts.preview], trigger_mode="always_last", **QUIET
    )

    def check(*values: Any) -> Iterator[Any]:
        form = read(values)
        if (wrong := explain_first(form)) is not None:
            yield gr.update(value=wrong, visible=True)
            return
        text = "Checking \u2026"
        yield gr.update(value=text, visible=True)
        lines: list[str] = []
        try:
            for line in context.worker.validate(form.to_words(context.root)):
                lines.append(f"\u2713 {show_paths(line)}")
                yield gr.update(value="\n".join([*lines, text]), visible=True)
            lines.append("\u2713 All checks passed.")
        except ConfigError as error:
            lines.append(f"\u2715 {show_paths(str(error))}")
        yield gr.update(value="\n".join(lines), visible=True)

    parts.check.click(check, inputs, parts.checked, trigger_mode="once", **QUIET)

    def start(*values: Any) -> Iterator[list[Any]]:
        form = read(values)
        if (wrong := explain_first(form)) is not None:
            yield ["", markup.note(wrong, "error")]
            return
        yield ["", markup.note("Starting \u2026")]
        try:
            context.start_run(form.name, form.to_yaml())
        except ConfigError as error:
            yield ["", markup.note(str(error), "error")]
            return
        link = markup.link("run", form.name, name=form.name)
        yield [form.name, markup.tag("p", "Started: ", link, class_="note", role="status")]

    starting = parts.start.click(start, inputs, [started, parts.summary], trigger_mode="once", **QUIET)
    starting.then(None, started, None, js=_OPEN_RUN)

    def fill(values: Mapping[str, Any], said: str) -> list[Any]:
        texts = fill_fields(values, [name for name in names if name != NAME])
        gpus = list_gpus()
        return [markup.note(said), *(fill_field(name, texts.get(name, ""), gpus) for name in names)]

    def refuse(error: ConfigError) -> list[Any]:
        return [markup.note(str(error), "error"), *(gr.skip() for _ in names)]

    def load(path: str) -> list[Any]:
        file = Path(path)
        try:
            return fill(read_yaml_file(file), f"Options loaded from {file.name}.")
        except ConfigError as error:
            return refuse(error)

    def clone(name: str | None) -> list[Any]:
        if not name:
            return [gr.skip()] * (1 + len(names))
        try:
            return fill(clone_run(context.root, name), f"Options copied from the run {name}.")
        except ConfigError as error:
            return refuse(error)

    filled = [parts.loaded, *inputs]
    parts.load.upload(load, parts.load, filled, trigger_mode="always_last", **QUIET)
    parts.source.input(clone, parts.source, filled, trigger_mode="always_last", **QUIET)

    def keep(path: str | None) -> list[Any]:
        try:
            kept = keep_upload(Path(path or ""), context.root)
        except ConfigError as error:
            return [markup.note(str(error), "error"), gr.skip()]
        return [markup.note(f"{kept.name} is stored with the runs."), gr.update(value=write_path(str(kept)))]

    dataset = parts.fields["dataset"]
    parts.upload.upload(keep, parts.upload, [parts.loaded, dataset], trigger_mode="always_last", **QUIET)

    def add_option(name: str | None, more: str, method: str) -> list[Any]:
        option = list_choosable(METHODS[method or "sft"]).get(name or "")
        if option is None:
            return [gr.skip(), gr.skip()]
        default, help_text = describe_option(option, METHODS[method or "sft"])
        line = f"{option.name}: {default}"
        return [
            gr.update(info=f"{option.name}: {help_text}", value=None),
            "\n".join([*more.rstrip().splitlines(), line]),
        ]

    more = parts.fields[MORE]
    parts.find.input(add_option, [parts.find, more, parts.fields["method"]], [parts.find, more], **QUIET)

    def arrive(request: gr.Request) -> list[Any]:
        source, runs = request.query_params.get("from"), list_runs(context.root)
        said, *fields = clone(source)
        updates = dict(zip(names, fields, strict=True))
        updates["model_name_or_path"] = merge(updates["model_name_or_path"], choices=list_models(context.root))
        updates["dataset"] = merge(updates["dataset"], choices=list_datasets(context.root))
        return [gr.update(choices=runs, value=source if source in runs else None), said, *updates.values()]

    page = gr.context.Context.root_block
    assert page is not None
    page.load(arrive, None, [parts.source, *filled], **QUIET).then(**refreshing)
    if list_gpus():
        timer = gr.Timer(_GPUS_EVERY_S)
        timer.tick(lambda: gr.update(choices=list_gpu_choices(list_gpus())), None, parts.fields["gpus"], **QUIET)
