"""The page "New run" as the server builds it, asked without a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio as gr

from lorashard.runtime.gpus import Gpu
from lorashard_ui.app_context import AppContext
from lorashard_ui.pages import new_run


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
    event = next(event for event in page.fns.values() if event.name == "refresh")
    ids = [getattr(block, "elem_id", None) for block in event.inputs]
    kept = next(block for block, name in zip(event.inputs, ids, strict=True) if name is None and not is_state(block))
    values = [
        shown if block is kept and shown is not None else texts.get(name or "", block.value)
        for block, name in zip(event.inputs, ids, strict=True)
    ]
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
