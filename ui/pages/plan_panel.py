"""The plan of the form next to it: a bar for each placement, and what the planner says of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError
from lorashard.planning.hardware import describe_gpu_type, known_gpu_types
from lorashard.planning.wording import show_time

from ..app_context import AppContext
from ..drawing import markup
from ..drawing.plan_chart import (
    PLACEMENT_FIELDS,
    describe_checkpointing,
    fill_placement,
    list_placements,
    order_rows,
    plan_chart,
)
from ..form.finding import Finding
from ..reading.places import show_paths
from .plotting import CLASSES, make_chart
from .refreshing import QUIET
from .warming import warm_up_on_open

_WAITS = "The plan appears once a model is chosen and all options are valid."
_HERE = "This machine"
_ELSEWHERE = "The plan is for other machines: whether the run fits on this one was not checked."
_COUNTS = (1, 2, 3, 4, 6, 8, 16, 32, 64)


class PlanPanel:
    """The plan's components, built where the page is.

    What is planned for is no option of the run: neither the YAML nor the command has it.

    Args:
        fields: of the form; those of the placement are filled in when a placement is taken.

    Attributes:
        question: the words to plan for, as `new_run_updates.ask_plan` gives them; each change is answered.
        finding: what is wrong by the newest answer, a `Finding`; the page's summary and fields tell it.
        taken: the event of a placement that was taken, after which the form is to be read: fields that were not shown
            tell of no change.
        machine: the components of what is planned for: a type of GPU, empty for this machine, and their number.
    """

    def __init__(self, context: AppContext, fields: Mapping[str, gr.components.Component]) -> None:
        self.question, self.finding = gr.State(None), gr.State(Finding())
        machines = [(_HERE, ""), *((describe_gpu_type(name), name) for name in known_gpu_types())]
        with gr.Row(elem_id="plan-head"):
            gr.Markdown("## Plan for")
            gpu_type = gr.Dropdown(
                machines, value="", label="Plan for", show_label=False, container=False, elem_id="plan-for", scale=3,
                min_width=180,
            )  # fmt: skip
            count = gr.Dropdown(
                [(f"{number} GPU{'s' * (number > 1)}", number) for number in _COUNTS], value=1, label="How many",
                show_label=False, container=False, elem_id="plan-count", visible=False, scale=1, min_width=110,
            )  # fmt: skip
        self.machine = (gpu_type, count)
        status = gr.HTML(markup.note(_WAITS), elem_id="plan-status")
        chart = make_chart("Memory per rank, by placement", visible=False, elem_id="plan-chart")
        take = gr.Radio([], label="Take a placement (or click its bar)", visible=False, elem_id="plan-take")
        notes = gr.HTML(elem_id="plan-notes")
        rows = gr.State([])
        stale = gr.update(elem_classes=[*CLASSES, "stale"])
        hidden = gr.update(visible=False)

        def plan(question: list[str] | None, gpu_type: str, count: int) -> Iterator[list[Any]]:
            if question is None:
                yield [markup.note(_WAITS), stale, *[gr.skip()] * 3, Finding()]
                return
            yield [markup.note("Planning \u2026"), stale, *[gr.skip()] * 4]
            elsewhere = Finding(question, warnings=(_ELSEWHERE,))
            try:
                found = context.worker.plan(question, gpu_type or None, count)
            except ConfigError as error:
                finding = elsewhere if gpu_type else Finding.of_error(question, error)
                yield [markup.note(str(error), "error"), hidden, "", hidden, [], finding]
                return
            lines = [(line, index) for index, line in enumerate(list_placements(found))]
            texts = [fill_placement(found, index) for index in order_rows(found)]
            yield [
                _describe_choice(found, is_here=not gpu_type),
                gr.update(value=plan_chart(found).to_json(), visible=True, elem_classes=list(CLASSES)),
                _describe_rest(found),
                gr.update(choices=lines, value=None, visible=True),
                texts,
                elsewhere if gpu_type else find_problem(question, found),
            ]

        outputs = [status, chart, notes, take, rows, self.finding]
        gr.on(
            [self.question.change, gpu_type.change, count.change], plan, [self.question, gpu_type, count], outputs,
            trigger_mode="always_last", **QUIET,
        )  # fmt: skip
        gpu_type.change(lambda name: gr.update(visible=bool(name)), gpu_type, count, **QUIET)
        names = [name for name in PLACEMENT_FIELDS if name in fields]

        def fill(index: int | None, texts: list[dict[str, str]]) -> list[Any]:
            if index is None or index >= len(texts):
                return [gr.skip()] * len(names)
            return [gr.update(value=texts[index][name], visible=True) for name in names]

        self.taken = take.input(fill, [take, rows], [fields[name] for name in names], **QUIET)
        warm_up_on_open(context)


def find_problem(question: list[str], found: Mapping[str, Any]) -> Finding:
    """Return what a plan finds wrong: nothing fits, which a run that is queued may outwait."""
    warnings = tuple(found["warnings"])
    if found["chosen"] is not None:
        return Finding(question, warnings=warnings)
    reason = show_paths(found["reason"])
    if ("--queue", "true") in itertools.pairwise(question):
        wait = f"{reason}. It waits in the queue until no other run uses these devices, and is planned anew then."
        return Finding(question, warnings=(wait, *warnings))
    return Finding(question, reason, "placement", warnings)


def _describe_choice(found: Mapping[str, Any], is_here: bool) -> str:
    """Return what the planner chose, for which machines where they are not these, and what is slow about it."""
    row = None if found["chosen"] is None else found["rows"][found["chosen"]]
    kind = "info" if row is not None else "error" if is_here else "warning"
    line = show_paths(found["reason"])
    if row is not None:
        line += f", {show_time(row['step_s'])} a step"
    if not is_here:
        line = f"Planned for {found['cluster']}, not for this machine, where Start runs it: {line}"
    warnings = markup.join(markup.note(show_paths(warning), "warning") for warning in found["warnings"])
    return markup.note(line, kind) + warnings


def _describe_rest(found: Mapping[str, Any]) -> str:
    said = markup.join(markup.tag("li", show_paths(note)) for note in found["notes"])
    size = found["model"].rpartition(": ")[2]  # its name stands in the form
    about = markup.tag("p", f"{size}; {found['cluster']}. The same on every rank.", class_="subdued")
    line = describe_checkpointing(found)
    return about + (markup.tag("p", line) if line else "") + markup.tag("ul", said)
