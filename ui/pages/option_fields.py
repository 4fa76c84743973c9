"""Fields of a form for options, made from what the options say of themselves. Every field holds text: see `form`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from lorashard.config.methods import Method
from lorashard.config.options import Option
from lorashard.config.sweep import JOB_OPTIONS
from lorashard.runtime.gpus import Gpu

from ..form.form import describe_option

_ERROR = "\u2715 "
_WORD_JOINER = "\u2060"  # unseen
_MAX_INFO_LETTERS = 260


def make_field(name: str, option: Option, method: Method, **properties: Any) -> gr.components.Component:
    """Return a field for an option: a choice where its values are few, else a line of text."""
    default, _ = describe_option(option, method)
    label = properties.get("label", name)
    properties = {"label": label, "info": explain(option, method, has_name=label != name)} | properties
    properties |= {"elem_id": f"option-{name}", "elem_classes": ["option"]}
    choices = list(option.choices) or (["true", "false"] if "bool" in option.kinds else [])
    if choices and not option.kinds & {"int", "float", "list", "dict"} and not _takes_text(option):
        shown = [(f"default ({default})" if default else "default", ""), *((choice, choice) for choice in choices)]
        several = name in JOB_OPTIONS  # as "true, false", which is a sweep
        return gr.Dropdown(shown, value="", allow_custom_value=several, **properties)
    return gr.Textbox(**({"value": "", "placeholder": default, "max_lines": 4} | properties))


def explain(option: Option, method: Method, has_name: bool = False) -> str:
    """Return what the tooltip of an option's field says."""
    default, help_text = describe_option(option, method)
    if len(help_text) > _MAX_INFO_LETTERS:
        help_text = help_text[:_MAX_INFO_LETTERS].rsplit(" ", 1)[0] + " ..."
    words = [f"{option.name}: {help_text}" if has_name else help_text]
    return " ".join([*words, f"[{default}]"] if default else words)


def show_problem(problem: str) -> str:
    """Return what stands above a field that is wrong, in place of its tooltip.

    Gradio makes links of `[text](address)` there, and this quotes what somebody wrote.
    """
    return _ERROR + problem.replace("](", f"]{_WORD_JOINER}(")


def to_text(value: Any) -> str:
    """Return what a field holds as text: of ticked boxes their ids."""
    if isinstance(value, bool):
        return "true" if value else ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "".join(f"{item}," for item in sorted(value, key=int))
    return "" if value is None else str(value)


def from_text(name: str, text: str, gpus: Sequence[Gpu] = ()) -> Any:
    """Return what a field of the ranks holds where the option reads `text`; others hold the text itself."""
    if name == "queue":
        return text == "true"
    if name != "gpus":
        return text
    if text.strip().isdigit():  # a count
        return [str(gpu.index) for gpu in gpus[: int(text)]]
    return [item for item in text.strip("[] ").replace(" ", "").split(",") if item]


def list_gpu_choices(gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    """Return a line for each GPU, with its free memory."""
    return [(_describe(gpu), str(gpu.index)) for gpu in gpus]


def _takes_text(option: Option) -> bool:
    return "str" in option.kinds and not option.choices


def _describe(gpu: Gpu) -> str:
    if not gpu.total_bytes:
        return f"GPU {gpu.index}: {gpu.name}, does not answer"
    busy = f", {gpu.utilization_percent} % busy" if gpu.utilization_percent else ""
    free = f"{gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB free"
    return f"GPU {gpu.index}: {gpu.name}, {free}{busy}"
