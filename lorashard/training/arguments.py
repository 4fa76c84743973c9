"""The arguments of TRL's trainer: the user's, and what lorashard decides for them."""

from __future__ import annotations

from typing import Any

import trl
from transformers import Trainer, TrainingArguments
from transformers.utils import is_liger_kernel_available

from ..config.adapter_options import refuse_fused_beside
from ..config.device_checks import check_cpu_options
from ..config.run_config import RunConfig
from ..errors import ConfigError
from ..runtime.launch_env import read_launcher_env


def build_arguments(config: RunConfig, use_cpu: bool, world_size: int | None = None) -> TrainingArguments:
    """Return the trainer's arguments: the user's, and what lorashard's way of preparing and sharding decides.

    Making them also makes accelerate's state, and with it the process group.

    Args:
        world_size: How many ranks the arguments are for, where they are checked in one process.

    Raises:
        ConfigError: TRL or transformers refuses an option.
    """
    if use_cpu:
        check_cpu_options(config)
    if config.trainer_options.get("use_liger_kernel"):
        if config.numerics == "fused":
            raise refuse_fused_beside("use_liger_kernel")
        if not is_liger_kernel_available():
            raise ConfigError(
                "Liger's kernels are not installed", option="use_liger_kernel", fix="pip install liger-kernel"
            )
    assert config.dtype != "auto", "the trainer's flags follow from what it becomes"
    method = config.trl_method
    env = read_launcher_env()
    decided: dict[str, Any] = config.count_accumulation(world_size or (env.world_size if env else 1)) | {
        "output_dir": config.output_dir,
        "use_cpu": use_cpu,
        "trust_remote_code": config.trust_remote_code,
        "ddp_find_unused_parameters": False,
    }
    if method.is_prepared_here:
        names = ("packing", "packing_strategy", "eval_packing", "max_length")
        decided |= {name: getattr(config, name) for name in names}
        decided["dataset_kwargs"] = {"skip_prepare_dataset": True}
    config_class = getattr(trl, method.config_class)
    if world_size is not None:
        config_class = type(method.config_class, (config_class,), {"world_size": world_size})
    options = config.trainer_options | decided
    if hasattr(config_class, "activation_checkpointing"):  # the newer name, without which transformers warns
        options = {
            name.replace("gradient_checkpointing", "activation_checkpointing"): options[name] for name in options
        }
    try:
        arguments = config_class(**options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(" ".join(str(error).split()), where=f"TRL's {method.config_class}") from error
    if arguments.optim_target_modules is None:  # the others are made for a model
        try:
            Trainer.get_optimizer_cls_and_kwargs(arguments)
        except (ImportError, ValueError) as error:
            raise ConfigError(" ".join(str(error).split()), option="optim") from error
    if arguments.mixed_precision != "no" and not (arguments.bf16 or arguments.fp16):
        raise ConfigError(
            option="dtype",
            expected=f"{arguments.mixed_precision}, as accelerate's mixed precision is set",
            found=config.dtype,
            fix="answer no to mixed precision in `accelerate config`, where dtype is what counts, or give the dtype "
            "that is meant",
        )
    return arguments
