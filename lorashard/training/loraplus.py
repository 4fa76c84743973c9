"""LoRA+: another learning rate for LoRA's B than for its A (S. Hayou et al., 2024); PEFT makes the groups."""

from __future__ import annotations

from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from ..errors import ConfigError


def make_loraplus_optimizer(model: PeftModel, arguments: TrainingArguments, ratio: float) -> Optimizer:
    """Return the optimizer that `arguments` ask for, with B's learning rate `ratio` times that of A.

    Raises:
        ConfigError: that optimizer makes parameter groups of its own, or it is not installed.
    """
    try:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except (ImportError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split()), option="optim") from error
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
    ) or not options.keys().isdisjoint(("params", "model", "optimizer_dict")):
        raise ConfigError(
            option="loraplus_lr_ratio",
            expected="an optim that takes parameter groups, such as adamw_torch",
            found=f"{arguments.optim}, which makes its own",
        )
    return create_loraplus_optimizer(
        model,
        optimizer_class,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=arguments.weight_decay,
        **options,
    )
