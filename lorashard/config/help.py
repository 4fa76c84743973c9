"""The options in `--help`: the fields of the configuration, by group."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from .adapter_options import AdapterOptions
from .base_options import BaseOptions
from .data_options import DataOptions
from .methods import METHODS
from .names import REFUSED_OPTIONS
from .options import read_own_options, read_trainer_options
from .placement import PlacementOptions
from .quantization_options import QuantizationOptions
from .run_config import RunConfig
from .sweep_options import SweepOptions


def group_options() -> dict[str, tuple[str, ...]]:
    """Return the names of lorashard's own options by the titles of their groups."""
    data = [name for name in DataOptions.model_fields if name != "dataset"]
    is_shared = {name: name not in METHODS["dpo"].absent_options for name in data}
    adapter = [name for name in AdapterOptions.model_fields if name not in QuantizationOptions.model_fields]
    kernels = [name for name in adapter if name == "numerics" or name.startswith("torch_compile")]
    return {
        "The run": ("model_name_or_path", "method", "dataset", "output_dir", "overwrite_output_dir", "queue")
        + ("global_batch_size", "profile_steps"),
        "Sweeps": tuple(SweepOptions.model_fields),
        "Resuming and failures": ("resume_from_checkpoint", "max_restarts", "heartbeat_timeout", "on_nonfinite"),
        "Placement of the base": (*PlacementOptions.model_fields, "activation_checkpointing"),
        "Quantization": tuple(QuantizationOptions.model_fields),
        "Base and ranks": tuple(BaseOptions.model_fields),
        "Chat": ("chat_template_path", "eos_token"),
        "Evaluation": ("early_stopping_patience", "early_stopping_threshold", "sample_prompts"),
        "LoRA": tuple(name for name in adapter if name not in kernels),
        "Kernels": tuple(kernels),
        "Rewards": ("reward_funcs", "reward_model_name_or_path"),
        "Data": tuple(name for name in data if is_shared[name]),
        "Data of sft": tuple(name for name in data if not is_shared[name]),
    }


def build_options_help() -> str:
    """Return the help of a run's options."""
    num_options = len(read_trainer_options().keys() - REFUSED_OPTIONS)
    rates = ", ".join(
        f"{m.name} {m.learning_rate:.0e}".replace("e-0", "e-") for m in METHODS.values() if m.name != "sft"
    )
    config_classes = [method.config_class for method in METHODS.values()]
    lines = []
    for title, names in group_options().items():
        lines += ["", f"{title}:", *describe_fields(RunConfig, names)]
    return "\n".join(lines) + textwrap.dedent(
        f"""

        Training:
          Every option of TRL's SFTConfig ({num_options} in all) works by its own name too:
          --learning_rate 1e-4, --max_steps 100, --per_device_train_batch_size 2, --report_to tensorboard, ...
          and with another --method those of its class, such as --beta: {", ".join(config_classes[1:])}.
          lorashard's own defaults are learning_rate 2e-4 ({rates}), lr_scheduler_type cosine,
          activation checkpointing on, and eval_strategy epoch with an eval_dataset. All of them are described in
          https://huggingface.co/docs/trl/sft_trainer#trl.SFTConfig, dpo_trainer#trl.DPOConfig, ...

        --a_b and --a-b, --key value and --key=value are the same; a bare --flag is true. The same names are the keys
        of the --config file; the command line wins over it.
        """
    )


def describe_fields(options: type[BaseModel], names: Sequence[str]) -> list[str]:
    """Return the lines of help of some fields: name and choices, then description and default."""
    known = read_own_options(options)
    lines = []
    for name in names:
        field = options.model_fields[name]
        default = "" if field.default in (None, "") or field.is_required() else f" [{_show(field.default)}]"
        text = f"{' '.join((field.description or '').split())}{default}"
        shown = getattr(options, "short_names", {}).get(name, name)
        lines.append(f"  --{shown} {'|'.join(known[name].choices)}".rstrip())
        lines += textwrap.wrap(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
