"""The events of the page "New run": each change reads the whole form again, and everything else follows from it.

A change is handled in milliseconds. The plan, the model's size and the preview follow, each by an event of its own that
takes the newest request once it is free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gradio as gr

from lorashard.config.methods import METHODS
from lorashard.diagnostics.validate import WARNING
from lorashard.errors import ConfigError
from lorashard.runtime.gpus import list_gpus

from ..app_context import AppContext
from ..drawing import markup
from ..form.choices import RECIPE, RUN, Choices, list_recipes
from ..form.finding import Finding, read_findings, tell
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
from ..form.hub_search import HubSearch
from ..reading.places import show_paths, write_path
from .estimate_panel import EstimatePanel
from .new_run_layout import FOCUS, REFILTER, SCRIPT, SHOW_PROBLEMS
from .new_run_updates import (
    ask_model,
    ask_plan,
    ask_preview,
    explain_first,
    fill_field,
    list_others,
    merge,
    place_problems,
    summarize,
    update_fields,
)
from .option_fields import list_gpu_choices, to_text
from .plan_panel import PlanPanel
from .preview_panel import PreviewPanel
from .refreshing import QUIET

_GPUS_EVERY_S = 15
_NOTHING_SHOWN: dict[str, Any] = {"method": "sft", "problems": {}}
_OPEN_RUN = (
    "(name) => { if (name) setTimeout(() => { window.location.href = 'run?name=' + encodeURIComponent(name); }, 300); }"
)
# Gradio goes through all inputs of an event at each of its steps, which took half a second of the browser's time for
# each change of a form of this size: its values are sent as one.
_GATHER = "(...values) => JSON.stringify(values)"
# A reload is to show what has been changed since, and not the run of the address again.
_FORGET_SOURCE = "() => { history.replaceState(history.state, '', location.pathname); return []; }"

Components = dict[str, gr.components.Component]


@dataclass(frozen=True)
class Parts:
    """The components of the page."""

    fields: Components
    source: gr.Dropdown
    load: gr.UploadButton
    clear: gr.Button
    upload: gr.UploadButton
    find: gr.Dropdown
    loaded: gr.HTML
    offline: gr.HTML
    model_note: gr.HTML
    plan: PlanPanel
    estimate: EstimatePanel
    preview: PreviewPanel
    summary: gr.HTML
    start: gr.Button
    check: gr.Button
    checked: gr.Textbox
    command: gr.Code
    yaml: gr.Code


def bind(context: AppContext, choices: Choices, parts: Parts) -> None:
    """Add the page's events."""
    names, inputs = list(parts.fields), list(parts.fields.values())
    # What the fields show is the browser's to remember: a server that was started anew would take a problem for new.
    shown = gr.Textbox(json.dumps(_NOTHING_SHOWN), visible="hidden")
    key = hashlib.blake2b(str(context.root).encode(), digest_size=8).hexdigest()
    kept = gr.BrowserState({}, storage_key=f"lorashard-form-{key}", secret="not a secret")
    opened = gr.State([])  # the options that were chosen by the search
    model_question = gr.State(None)
    started = gr.Textbox(visible="hidden")
    typed = gr.Textbox(visible="hidden")  # what all fields hold
    gathering: dict[str, Any] = {"fn": None, "inputs": inputs, "outputs": typed, "js": _GATHER, **QUIET}
    is_starting, refused = gr.State(False), gr.State(Finding())
    checked_options = gr.State(None)  # those that the check shown is of

    def read_texts(typed: str) -> dict[str, str]:
        return {name: to_text(value) for name, value in zip(names, json.loads(typed), strict=True)}

    def read(texts: dict[str, str]) -> Form:
        return read_form(texts, context.root, context.allowed)

    def to_start(form: Form) -> list[str]:
        return [form.name, form.to_yaml()]

    def refresh(
        seen: str,
        opened: list[str],
        is_starting: bool,
        refused: Finding,
        planned: Finding,
        previewed: Finding,
        checked_options: str | None,
        typed: str,
    ) -> list[Any]:
        if not typed:  # the page is still being filled in
            return [gr.skip()] * len(outputs)
        texts, before = read_texts(typed), json.loads(seen)
        form = read(texts)
        method = form.method
        to_plan, to_preview = (None, None) if is_starting else (ask_plan(form), ask_preview(form))
        told, is_waiting = read_findings([(to_plan, planned), (to_preview, previewed)])
        told += [refused] if refused.question == to_start(form) else []
        is_wrong = bool(form.problems or any(finding.problem for finding in told))
        problems, options = place_problems(form, told, parts.fields), form.to_yaml()
        now = {"method": method.name, "problems": problems, "opened": opened}
        updates = update_fields(parts.fields, before, now, texts)
        updates[NAME] = merge(updates[NAME], placeholder=form.name)
        finds = gr.update(choices=list_others(method.name)) if before["method"] != method.name else gr.skip()
        return [
            json.dumps(now),
            {name: text for name, text in texts.items() if text},
            to_plan,
            to_preview,
            (to_plan, to_preview[1]) if to_plan and to_preview else None,
            None if is_starting else ask_model(form),
            form.to_command(context.root),
            options,
            gr.skip() if is_starting else summarize(form, told, is_waiting),
            finds,
            gr.update(variant="secondary" if is_wrong else "primary"),
            gr.update(elem_classes=[] if checked_options in (None, options) else ["stale"]),
            *updates.values(),
        ]

    outputs = [
        shown,
        kept,
        parts.plan.question,
        parts.preview.question,
        parts.estimate.question,
        model_question,
        parts.command,
        parts.yaml,
        parts.summary,
    ]
    outputs += [parts.find, parts.start, parts.checked, *inputs]
    findings = [parts.plan.finding, parts.preview.finding]
    refreshing: dict[str, Any] = {
        "fn": refresh, "outputs": outputs, "trigger_mode": "always_last",
        "inputs": [shown, opened, is_starting, refused, *findings, checked_options, typed], **QUIET,
    }  # fmt: skip
    # Not `input`: Gradio's text fields do not send it for Backspace or pasted text.
    gr.on([part.change for part in inputs], **gathering)
    gr.on([part.change for part in (typed, *findings, is_starting, checked_options)], **refreshing)

    def describe_model(name: str | None) -> str:
        if not name:
            return ""
        try:
            return markup.note(show_paths(context.worker.describe_model(name)))
        except ConfigError as error:
            return markup.note(str(error), "error")

    model_question.change(describe_model, model_question, parts.model_note, trigger_mode="always_last", **QUIET)

    def check(typed: str) -> Iterator[dict[Any, Any]]:
        form, text = read(read_texts(typed)), "Checking \u2026"
        wrong = explain_first(form)
        begun = gr.update(value=wrong or text, visible=True, elem_classes=[])
        yield {parts.checked: begun, checked_options: form.to_yaml()}
        if wrong is not None:
            return
        lines: list[str] = []
        try:
            for line in context.worker.validate(form.to_words(context.root)):
                is_warning = line.startswith(WARNING)
                mark = "\u26a0" if is_warning else "\u2713"
                lines.append(f"{mark} {show_paths(line.removeprefix(WARNING))}")
                yield {parts.checked: gr.update(value="\n".join([*lines, text]), visible=True)}
            lines.append("\u2713 All checks passed.")
        except ConfigError as error:
            lines.append(f"\u2715 {show_paths(tell(error, form.method))}")
        yield {parts.checked: gr.update(value="\n".join(lines), visible=True)}

    checking = parts.check.click(**gathering)
    checking.then(check, typed, [parts.checked, checked_options], trigger_mode="once", **QUIET)

    questions = [parts.plan.question, parts.preview.question, parts.estimate.question, model_question]

    def start(typed: str) -> Iterator[dict[Any, Any]]:
        texts = read_texts(typed)
        form = read(texts)
        if explain_first(form) is not None:
            yield {started: ""}  # the summary tells it, maybe by now of other options: this answer may be late
            return
        # What plans holds a GPU's memory, which the run needs: questions that are still to be asked are taken back.
        yield {started: "", parts.summary: markup.note("Starting \u2026"), is_starting: True} | dict.fromkeys(questions)
        try:
            is_suggested = not texts[NAME].strip()
            name = context.start_run(form.name, form.to_yaml(), is_suggested)
        except ConfigError as error:
            yield {is_starting: False, refused: Finding.of_error(to_start(form), error)}
            return
        link = markup.link("run", name, name=name)
        yield {started: name, parts.summary: markup.tag("p", "Started: ", link, class_="note", role="status")}

    outcome = [started, parts.summary, is_starting, refused, *questions]
    starting = parts.start.click(**gathering).then(start, typed, outcome, trigger_mode="once", **QUIET)
    starting.then(None, started, None, js=_OPEN_RUN)
    starting.then(None, None, None, js=SHOW_PROBLEMS)

    empty = {name: to_text(field.value) for name, field in parts.fields.items()}

    def fill(values: Mapping[str, Any], said: str) -> list[Any]:
        texts = fill_fields(values, [name for name in names if name != NAME])
        texts["cpu"] = texts["cpu"] or ("" if texts["gpus"] else empty["cpu"])
        gpus = list_gpus()
        return [markup.note(said), *(fill_field(name, texts.get(name, ""), gpus) for name in names)]

    def refuse(error: ConfigError) -> list[Any]:
        return [markup.note(str(error), "error"), *(gr.skip() for _ in names)]

    def fill_kept(texts: Mapping[str, str]) -> list[Any]:
        gpus = list_gpus()
        return ["", *(fill_field(name, str(texts.get(name, "")), gpus) for name in names)]

    def load(path: str) -> list[Any]:
        file = Path(path)
        try:
            return fill(read_yaml_file(file), f"Options loaded from {file.name}.")
        except ConfigError as error:
            return refuse(error)

    def begin(source: str | None) -> list[Any]:
        if not source:
            return [gr.skip()] * (2 + len(names))
        name = source.removeprefix(RECIPE).removeprefix(RUN)
        try:
            if source.startswith(RECIPE) and (path := list_recipes().get(name)) is not None:
                return [None, *fill(read_yaml_file(path), f"Options of the recipe {name}.")]
            return [None, *fill(clone_run(context.root, name), f"Options copied from the run {name}.")]
        except ConfigError as error:
            return [None, *refuse(error)]

    filled = [parts.loaded, *inputs]
    # A field that is not shown tells of no change, so what fills in the form asks for the rest itself.
    parts.load.upload(load, parts.load, filled, trigger_mode="always_last", **QUIET).then(**gathering)
    # Not `input`: Gradio's lists send it also when they are left, which would fill in again. What was chosen does not
    # stay, so that it can be chosen once more.
    beginning = parts.source.change(begin, parts.source, [parts.source, *filled], trigger_mode="always_last", **QUIET)
    beginning.then(**gathering)
    parts.clear.click(lambda: fill_kept(empty), None, filled, **QUIET).then(**gathering)

    def keep(path: str | None) -> list[Any]:
        try:
            stored = keep_upload(Path(path or ""), context.root)
        except ConfigError as error:
            return [markup.note(str(error), "error"), gr.skip()]
        said = markup.note(f"{stored.name} is stored with the runs.")
        return [said, gr.update(value=write_path(str(stored)), choices=choices.datasets())]

    dataset = parts.fields["dataset"]
    parts.upload.upload(keep, parts.upload, [parts.loaded, dataset], trigger_mode="always_last", **QUIET)

    def add_option(name: str | None, opened: list[str], more: str, method: str) -> list[Any]:
        chosen = METHODS[method or "sft"]
        option = list_choosable(chosen).get(name or "")
        updates = dict.fromkeys(names, gr.skip())
        if option is None:
            return [gr.skip(), gr.skip(), gr.skip(), *updates.values()]
        if option.name in parts.fields:
            updates[option.name] = gr.update(visible=True)
            opened = list(dict.fromkeys([*opened, option.name]))
        else:
            updates[MORE] = "\n".join(
                [*more.rstrip().splitlines(), f"{option.name}: {describe_option(option, chosen)[0]}"]
            )
        field = option.name if option.name in parts.fields else MORE
        return [gr.update(value=None), opened, field, *updates.values()]

    more, added = parts.fields[MORE], gr.Textbox(visible="hidden")
    adding = parts.find.input(
        add_option, [parts.find, opened, more, parts.fields["method"]], [parts.find, opened, added, *inputs], **QUIET
    )
    adding.then(None, added, None, js=FOCUS)

    def arrive(texts: dict[str, str], request: gr.Request) -> list[Any]:
        source = request.query_params.get("from")
        with suppress(OSError):  # a name that is too long
            if (context.root / texts.get(NAME, "")).exists():  # it was started, and another run needs another name
                texts = {name: text for name, text in texts.items() if name != NAME}
        said, *fields = fill_kept(texts or empty)
        if source:
            try:
                said, *fields = fill(clone_run(context.root, source), f"Options copied from the run {source}.")
            except ConfigError as error:
                said = markup.note(str(error), "error")
        updates = dict(zip(names, fields, strict=True))
        updates["model_name_or_path"] = merge(updates["model_name_or_path"], choices=choices.models())
        updates["dataset"] = merge(updates["dataset"], choices=choices.datasets())
        ready = gr.update(interactive=True)
        return [gr.update(choices=choices.sources(), interactive=True), ready, ready, said, *updates.values()]

    page = gr.context.Context.root_block
    assert page is not None
    arriving = page.load(arrive, kept, [parts.source, parts.load, parts.clear, *filled], **QUIET)
    arriving.then(None, None, None, js=_FORGET_SOURCE).then(**gathering)
    parts.plan.taken.then(**gathering)
    page.load(None, None, None, js=SCRIPT)
    _bind_completion(choices, parts)
    if list_gpus():
        timer = gr.Timer(_GPUS_EVERY_S)
        timer.tick(lambda: gr.update(choices=list_gpu_choices(list_gpus())), None, parts.fields["gpus"], **QUIET)


def _bind_completion(choices: Choices, parts: Parts) -> None:
    """Offer how a path or a Hub id that is being typed may go on: at once what is here, then what the Hub has."""
    hub = HubSearch()

    def say_why_off() -> str:
        return markup.tag("p", hub.why_off, class_="subdued") if hub.why_off else ""

    def bind_field(name: str, kind: Literal["models", "datasets"]) -> None:
        field, list_known = parts.fields[name], choices.models if kind == "models" else choices.datasets
        offered = gr.State({})  # a set in order, only added to: an open list cannot lose what it shows
        typed = gr.State("")

        def add(before: dict[str, None], found: list[str]) -> dict[str, Any]:
            if before.keys() >= set(found):
                return gr.skip()
            before.update(dict.fromkeys(found))
            return gr.update(choices=[*dict.fromkeys([*list_known(), *before])])

        def complete(before: dict[str, None], event: gr.KeyUpData) -> list[Any]:
            text = event.input_value or ""
            return [text, add(before, choices.complete(text, kind == "models"))]

        def search(text: str, before: dict[str, None]) -> list[Any]:
            return [add(before, hub.find(kind, text)), say_why_off()]

        show: dict[str, Any] = {"fn": None, "js": REFILTER % name}
        # Each key, since Gradio would send an old one with `always_last`; the Hub is asked for the last of them.
        field.key_up(complete, offered, [typed, field], trigger_mode="multiple", **QUIET).then(**show)
        if not hub.why_off:
            outputs = [field, parts.offline]
            typed.change(search, [typed, offered], outputs, trigger_mode="always_last", **QUIET).then(**show)

    parts.offline.value = say_why_off()
    bind_field("model_name_or_path", "models")
    bind_field("dataset", "datasets")
