"""The page "New run" as the server builds it, asked without a browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio as gr

from lorashard.runtime.gpus import Gpu
from lorashard_ui import app_context
from lorashard_ui.app_context import AppContext
from lorashard_ui.pages import new_run
from lorashard_ui.running import control


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., gr.Blocks]]:
    """Build the page as a server that is started has it: `serve(Path("datasets"))`, with folders that may be read."""
    contexts: list[AppContext] = []

    def build(*folders: Path) -> gr.Blocks:
        contexts.append(AppContext.open(tmp_path / "runs", folders))
        with gr.Blocks() as page:
            new_run.build(contexts[-1])
        return page

    yield build
    for context in contexts:
        context.close()


def find_field(page: gr.Blocks, elem_id: str) -> Any:
    return next(block for block in page.blocks.values() if getattr(block, "elem_id", None) == elem_id)


def refresh(page: gr.Blocks, texts: dict[str, str], shown: str | None = None) -> tuple[str, dict[str, Any]]:
    """Send what a browser holds to a server that has no session of it; return what the browser holds then, by field.

    Args:
        texts: of fields, by their ids.
        shown: what the browser has kept of the last answer; None where there was none.
    """
    gather, event = (
        next(event for event in page.fns.values() if is_it(event))
        for is_it in (lambda event: "stringify" in str(event.js), lambda event: event.name == "refresh")
    )
    (typed,) = gather.outputs
    nameless = [block for block in event.inputs if getattr(block, "elem_id", None) is None and not is_state(block)]
    (kept,) = [block for block in nameless if block is not typed]
    held = {typed: json.dumps([texts.get(block.elem_id, block.value) for block in gather.inputs])}
    held |= {} if shown is None else {kept: shown}
    values = [held.get(block, block.value) for block in event.inputs]
    answers = dict(zip(event.outputs, event.fn(*values), strict=True))
    return answers[kept], {block.elem_id: answer for block, answer in answers.items() if not is_state(block)}


def is_state(block: Any) -> bool:
    return isinstance(block, gr.State)


def test_a_problem_that_an_earlier_server_has_told_is_taken_back(serve, tmp_path):
    """Catches an error that stays at its field when the server was started anew and the option is right by now: what
    the fields show has to be the browser's to remember."""
    base = tmp_path / "files/base"
    base.mkdir(parents=True)
    texts = {"option-model_name_or_path": str(base)}
    shown, answers = refresh(serve(), texts)
    told = answers["option-model_name_or_path"]
    assert told["elem_classes"] == ["option", "wrong"] and "--allow" in told["info"]
    _, answers = refresh(serve(tmp_path / "files"), texts, shown)
    told = answers["option-model_name_or_path"]
    assert told["elem_classes"] == ["option"] and "--allow" not in told["info"]


@pytest.mark.parametrize(("num_gpus", "ranks"), [(0, "1"), (1, "")])
def test_a_machine_without_a_gpu_begins_with_a_cpu_rank(serve, monkeypatch, num_gpus, ranks):
    """Catches a form whose plan says that GPUs are missing, on a machine that has none."""
    gpus = [Gpu(index, f"GPU-{index}", "a GPU", 2**34, 2**34) for index in range(num_gpus)]
    monkeypatch.setattr(new_run, "list_gpus", lambda: gpus)
    page = serve()
    assert find_field(page, "option-cpu").value == ranks
    assert find_field(page, "option-gpus").visible == bool(num_gpus)


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("act", ["start_run", "resume_run"])
def test_what_has_planned_for_gpus_ends_before_a_run_starts(tmp_path, monkeypatch, num_gpus, act):
    """Catches a process that keeps memory of a GPU which the run needs; and, where there is none, six seconds of the
    processor's time for the next plan, beside the run."""
    context, done = AppContext.open(tmp_path), []
    monkeypatch.setattr(app_context, "list_gpus", lambda: [Gpu(0, "GPU-0", "a GPU", 2**34, 2**34)] * num_gpus)
    monkeypatch.setattr(context.worker, "close", lambda: done.append("closed"))
    monkeypatch.setattr(control, act, lambda *_: done.append("started"))
    getattr(context, act)(*["name", "config"][: 2 if act == "start_run" else 1])
    assert done == ["closed"] * num_gpus + ["started"]
