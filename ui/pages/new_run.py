"""The page "New run": a form, and next to it Start, the plan and the checks; below, a preview and the command."""

from __future__ import annotations

from typing import Any

import gradio as gr

from lorashard.config.data_options import DATA_SUFFIXES
from lorashard.config.help import group_options
from lorashard.config.methods import METHODS
from lorashard.config.run_config import RunConfig, read_known_options, read_own_options
from lorashard.runtime.gpus import list_gpus

from ..app_context import AppContext
from ..form.choices import Choices
from ..form.form import BASIC, COMMON, MORE, NAME
from .estimate_panel import EstimatePanel
from .new_run_events import Parts, bind
from .new_run_layout import STYLE
from .new_run_updates import list_others
from .option_fields import explain, list_gpu_choices, make_field
from .plan_panel import PlanPanel
from .plotting import load_plotly
from .preview_panel import PreviewPanel

_LABELS = {
    "model_name_or_path": "Model",
    "quantization": "Quantization",
    "dataset": "Dataset",
    "method": "Method",
    "placement": "Placement",
    "dtype": "Data type",
    "max_length": "Max sequence length (tokens)",
    "lora_r": "LoRA rank",
    "lora_alpha": "LoRA alpha",
    "learning_rate": "Learning rate",
    "per_device_train_batch_size": "Batch size per device",
    "num_train_epochs": "Epochs",
}
_NOT_SHOWN = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "task_type"}


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    own, method = read_own_options(RunConfig), METHODS["sft"]
    options = read_known_options(method) | own
    choices = Choices(context.root, context.allowed)
    fields: dict[str, gr.components.Component] = {}

    def add(name: str, **properties: Any) -> gr.components.Component:
        fields[name] = make_field(name, options[name], method, **({"label": _LABELS.get(name, name)} | properties))
        return fields[name]

    def add_typed(name: str, found: list[str]) -> None:
        fields[name] = gr.Dropdown(
            found, value="", allow_custom_value=True, label=_LABELS[name], elem_id=f"option-{name}",
            info=explain(options[name], method, has_name=True), interactive=True, elem_classes=["option"],
        )  # fmt: skip

    gr.HTML(STYLE, visible=True, padding=False)
    load_plotly()
    gr.Markdown("# New run")
    with gr.Row(elem_id="new-run"):
        with gr.Column(elem_id="form"):
            with gr.Row():
                source = gr.Dropdown(
                    choices.sources(),
                    value=None,
                    label="Start from a recipe or an earlier run",
                    elem_id="clone",
                    interactive=False,  # like the others that fill in the form, until the page has done so
                    scale=3,
                    min_width=180,
                )
                load = gr.UploadButton(
                    "Load YAML",
                    file_types=[".yaml", ".yml"],
                    size="sm",
                    elem_id="load-yaml",
                    elem_classes="at-field",
                    interactive=False,
                    min_width=90,
                )
                clear = gr.Button(
                    "Clear", size="sm", elem_id="clear", elem_classes="at-field", interactive=False, min_width=60
                )
            loaded = gr.HTML(elem_id="loaded")
            add_typed("model_name_or_path", choices.models())
            model_note = gr.HTML(elem_id="model-note")
            add_typed("dataset", choices.datasets())
            offline = gr.HTML(elem_id="offline", apply_default_css=False, elem_classes="markup")
            upload = gr.UploadButton(
                f"Upload a dataset ({', '.join(DATA_SUFFIXES)})", size="sm", elem_id="upload-dataset",
                file_types=list(DATA_SUFFIXES),
            )  # fmt: skip
            short = [name for name in BASIC if name not in fields]
            for left in range(0, len(short), 2):
                with gr.Row():
                    for name in short[left : left + 2]:
                        add(name, min_width=140)
            _add_devices(fields, add, explain(options["cpu"], method, True), explain(options["queue"], method, True))
            fields[NAME] = gr.Textbox(
                label="Run name", info="The name of its folder; if empty, the suggested one", elem_id="run-name",
                max_lines=1, elem_classes=["option"],
            )  # fmt: skip
            find = gr.Dropdown(
                list_others("sft"), value=None, label="Find any option", elem_id="find-option", elem_classes=["option"],
                info="Type part of its name or description; choosing one adds it to the form",
            )  # fmt: skip
            names = dict.fromkeys((*COMMON, *(name for group in group_options().values() for name in group)))
            with gr.Row():
                for name in names:
                    if name not in fields and name not in _NOT_SHOWN:
                        add(name, min_width=200, visible=False)
            fields[MORE] = gr.Textbox(
                label="More options, as YAML", info="One line 'option: value' for each", lines=2, max_lines=20,
                elem_id="more", elem_classes=["option"],
            )  # fmt: skip
        with gr.Column(elem_id="beside"):
            with gr.Row(elem_id="go"):
                start = gr.Button("Start the run", variant="primary", elem_id="start", min_width=140)
                check = gr.Button("Check everything", elem_id="check", min_width=140)
            summary = gr.HTML(elem_id="problems")
            checked = gr.Textbox(
                label="The check", lines=3, max_lines=14, interactive=False, visible=False, elem_id="checked",
                buttons=["copy"],
            )  # fmt: skip
            estimate = EstimatePanel(context)
            plan = PlanPanel(context, fields)
            estimate.connect(plan.machine)
        with gr.Column(elem_id="below"):
            preview = PreviewPanel(context)
            command = gr.Code(
                language="shell", label="As a command", interactive=False, wrap_lines=True, elem_id="command"
            )
            yaml = gr.Code(language="yaml", label="As YAML", interactive=False, wrap_lines=True, elem_id="yaml")
    bind(
        context,
        choices,
        Parts(
            fields=fields, source=source, load=load, clear=clear, upload=upload, find=find, model_note=model_note,
            offline=offline, loaded=loaded, plan=plan, estimate=estimate,
            preview=preview, summary=summary, start=start, check=check,
            checked=checked, command=command, yaml=yaml,
        ),
    )  # fmt: skip


def _add_devices(fields: dict[str, gr.components.Component], add: Any, cpu_help: str, queue_help: str) -> None:
    gpus = list_gpus()
    fields["gpus"] = gr.CheckboxGroup(
        list_gpu_choices(gpus), value=[], label="GPUs", elem_id="option-gpus", visible=bool(gpus),
        elem_classes=["option"], info="gpus: the run uses the selected ones, or all if none is selected",
    )  # fmt: skip
    with gr.Row():
        no_gpus = "This machine has no usable GPU, so the run uses the CPU. "
        add(
            "cpu",
            label="CPU ranks",
            value="" if gpus else "1",
            info=("" if gpus else no_gpus) + cpu_help,
            min_width=140,
        )
        fields["queue"] = gr.Checkbox(
            False, label=f"Queue until no other run uses {'these GPUs' if gpus else 'the CPU'}", info=queue_help,
            elem_id="option-queue", elem_classes=["option"], min_width=140,
        )  # fmt: skip
