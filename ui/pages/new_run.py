"""The page "New run": a form, and next to it the plan, the checks and a preview of the data."""

from __future__ import annotations

from typing import Any

import gradio as gr

from lorashard.config.data_options import DATA_SUFFIXES
from lorashard.config.help import group_options
from lorashard.config.methods import METHODS
from lorashard.config.run_config import RunConfig, read_known_options, read_own_options
from lorashard.runtime.gpus import list_gpus

from ..app_context import AppContext
from ..drawing import markup
from ..form.choices import list_datasets, list_models, list_runs
from ..form.form import BASIC, MORE, NAME
from .new_run_events import PLAN_WAITS, PREVIEW_WAITS, Parts, bind
from .new_run_updates import list_others
from .option_fields import explain, list_gpu_choices, make_field
from .plotting import load_plotly, make_chart

_LABELS = {
    "model_name_or_path": "Model",
    "quantization": "Quantization",
    "dataset": "Dataset",
    "method": "Method",
    "eval_dataset": "Evaluation dataset",
    "max_length": "Max sequence length (tokens)",
    "lora_r": "LoRA rank",
    "learning_rate": "Learning rate",
    "per_device_train_batch_size": "Batch size per device",
    "global_batch_size": "Global batch size",
    "num_train_epochs": "Epochs",
    "max_steps": "Max steps (overrides epochs)",
}
_NOT_SHOWN = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "task_type"}
_STYLE = """<style>
.wrong input, .wrong textarea { border-color: #b91c1c !important; }
.wrong [data-testid="block-info"] ~ *, .wrong .info { color: var(--bad, #b91c1c) !important; }
.dark .wrong .info { color: #fca5a5 !important; }
.stale { opacity: 0.4; }
#preview * { word-break: normal !important; overflow-wrap: anywhere; }
/* The plan stays in view while the form is filled in. */
@media (min-width: 900px) {
  #beside { position: sticky; top: 0; align-self: flex-start; max-height: 100vh; overflow-y: auto; flex-wrap: nowrap;
    padding: 4px; }
  #beside > * { flex-shrink: 0; }
}
#preview .token, #preview .textfield { white-space: pre-wrap; }
/* Gradio writes supervised tokens in black, which is unreadable on the dark blue of this theme. */
.dark #preview .token.highlighted .text { color: #fff !important; }
</style>"""


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    own, method = read_own_options(RunConfig), METHODS["sft"]
    options = read_known_options(method) | own
    fields: dict[str, gr.components.Component] = {}

    def add(name: str, **properties: Any) -> gr.components.Component:
        fields[name] = make_field(name, options[name], method, **({"label": _LABELS.get(name, name)} | properties))
        return fields[name]

    def add_typed(name: str, choices: list[str]) -> None:
        fields[name] = gr.Dropdown(
            choices, value="", allow_custom_value=True, label=_LABELS[name], elem_id=f"option-{name}",
            info=explain(options[name], method, has_name=True), interactive=True,
        )  # fmt: skip

    gr.HTML(_STYLE, visible=True, padding=False)
    load_plotly()
    gr.Markdown("# New run")
    with gr.Row():
        source = gr.Dropdown(
            list_runs(context.root),
            value=None,
            label="Copy the options of an earlier run",
            elem_id="clone",
            scale=2,
        )
        load = gr.UploadButton("Load a YAML file", file_types=[".yaml", ".yml"], size="sm", elem_id="load-yaml")
    loaded = gr.HTML()
    with gr.Row():
        with gr.Column(min_width=340):
            gr.Markdown("## Model and data")
            add_typed("model_name_or_path", list_models(context.root))
            model_note = gr.HTML(elem_id="model-note")
            add("quantization")
            add_typed("dataset", list_datasets(context.root))
            upload = gr.UploadButton(
                f"Upload a dataset ({', '.join(DATA_SUFFIXES)})", size="sm", elem_id="upload-dataset",
                file_types=list(DATA_SUFFIXES),
            )  # fmt: skip
            add("eval_dataset")
            gr.Markdown("## Training")
            add("method")
            numbers = [name for name in BASIC if name not in fields]
            for left in range(0, len(numbers), 2):
                with gr.Row():
                    for name in numbers[left : left + 2]:
                        add(name, min_width=200)
            gr.Markdown("## Devices")
            gpus = list_gpus()
            fields["gpus"] = gr.CheckboxGroup(
                list_gpu_choices(gpus), value=[], label="GPUs", elem_id="option-gpus", visible=bool(gpus),
                info="gpus: the run uses the selected ones, or all if none is selected",
            )  # fmt: skip
            no_gpus = "This machine has no usable GPU, so the run uses the CPU. "
            add("cpu", label="CPU ranks", info=("" if gpus else no_gpus) + explain(options["cpu"], method, True))
            fields["queue"] = gr.Checkbox(
                False,
                label="Queue until no other run uses these GPUs" if gpus else "Queue until no other run uses the CPU",
                info=explain(options["queue"], method, True),
                elem_id="option-queue",
            )
            fields[NAME] = gr.Textbox(
                label="Run name",
                info="The name of its folder; if empty, the suggested one",
                elem_id="run-name",
                max_lines=1,
            )
            find = _build_advanced(fields, add)
        with gr.Column(min_width=340, elem_id="beside"):
            gr.Markdown("## Plan")
            parts = Parts(
                fields=fields,
                source=source,
                load=load,
                upload=upload,
                find=find,
                model_note=model_note,
                loaded=loaded,
                plan_status=gr.HTML(markup.note(PLAN_WAITS), elem_id="plan-status"),
                plan_chart=make_chart("Memory per rank, by placement", visible=False, elem_id="plan-chart"),
                plan_notes=gr.HTML(elem_id="plan-notes"),
                summary=_head("## Start", "", "problems"),
                start=gr.Button("Start the run", variant="primary", elem_id="start"),
                check=gr.Button("Check everything first", elem_id="check"),
                checked=gr.Textbox(
                    label="The check", lines=3, max_lines=14, interactive=False, visible=False, elem_id="checked",
                    buttons=["copy"],
                ),
                preview_status=_head("## What the model will see", markup.note(PREVIEW_WAITS), "preview-status"),
                preview=gr.HighlightedText(
                    show_label=False, combine_adjacent=True, show_inline_category=True, show_legend=False,
                    visible=False, color_map={"supervised": "#0072B2"}, elem_id="preview", show_whitespaces=True,
                ),
                command=gr.Code(
                    language="shell", label="As a command", interactive=False, wrap_lines=True,
                    elem_id="command",
                ),
                yaml=gr.Code(
                    language="yaml", label="As YAML", interactive=False, wrap_lines=True, elem_id="yaml"
                ),
            )  # fmt: skip
    bind(context, parts)


def _head(title: str, text: str, elem_id: str) -> gr.HTML:
    gr.Markdown(title)
    return gr.HTML(text, elem_id=elem_id)


def _build_advanced(fields: dict[str, gr.components.Component], add: Any) -> gr.Dropdown:
    """Add the less common options: lorashard's by the groups of its help, then all of TRL's."""
    with gr.Accordion("Advanced", open=False, elem_id="advanced"):
        for title, names in group_options().items():
            others = [name for name in dict.fromkeys(names) if name not in fields and name not in _NOT_SHOWN]
            if others:
                with gr.Accordion(title, open=False):
                    for name in others:
                        add(name)
        with gr.Accordion("All other options (TRL)", open=True):
            find = gr.Dropdown(
                list_others(fields, "sft"), value=None, label="Find an option", elem_id="find-option",
                info="Type part of its name or description; choosing it adds a line below",
            )  # fmt: skip
            fields[MORE] = gr.Textbox(
                label="More options, as YAML", info="One line 'option: value' for each", lines=4, max_lines=20,
                elem_id="more",
            )  # fmt: skip
    return find
