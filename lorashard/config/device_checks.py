"""Options that only a GPU can do. Imports no torch."""

from __future__ import annotations

from ..errors import ConfigError
from .run_config import RunConfig


def check_cpu_options(config: RunConfig) -> None:
    """Refuse what CPU ranks cannot do.

    Raises:
        ConfigError: Activations are to leave a GPU, or kernels to run on one.
    """
    kwargs = config.activation_checkpointing_kwargs or {}
    reasons = (
        ("activation_checkpointing_kwargs", kwargs.get("offload"), "offload moves activations from a GPU"),
        ("activation_offloading", config.trainer.get("activation_offloading"), "it moves activations from a GPU"),
        ("use_liger_kernel", config.trainer.get("use_liger_kernel"), "Liger's kernels run on GPUs"),
    )
    for option, is_wanted, reason in reasons:
        if is_wanted:
            raise ConfigError(reason, option=option, fix="leave it out with --cpu")
