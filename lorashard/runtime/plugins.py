"""What accelerate is told to do with models, through the environment, that a sharded one does not survive. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError

# What shards a model, by the variable that `accelerate launch` sets for it, and the flag behind that.
SHARDING_PLUGINS = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "--use_deepspeed"),
    "ACCELERATE_USE_FSDP": ("FSDP", "--use_fsdp"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "--use_megatron_lm"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism config", "--use_parallelism_config"),
}
_COMPILER = "ACCELERATE_DYNAMO_BACKEND"


def is_on(value: str | None) -> bool:
    """Tell whether accelerate takes a variable for true."""
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")


def refuse_plugins(environ: Mapping[str, str]) -> None:
    """Refuse what would shard or compile the whole model, before any rank waits for another.

    Raises:
        ConfigError: a plugin is switched on.
    """
    for variable, (plugin, flag) in SHARDING_PLUGINS.items():
        if is_on(environ.get(variable)):
            raise ConfigError(explain_plugin(plugin, f"{variable}={environ[variable]}", flag))
    backend = environ.get(_COMPILER, "no")
    if backend.lower() not in ("", "no"):
        raise ConfigError(
            "accelerate is told to compile the whole model, the sharding with it",
            option=_COMPILER,
            found=backend,
            fix="answer no to torch dynamo in `accelerate config`, or leave out --dynamo_backend and the trainer's "
            "torch_compile; give torch_compile to lorashard, which compiles the decoder layers",
        )


def explain_plugin(plugin: str, found: str, flag: str) -> str:
    """Say how to switch a plugin off."""
    return (
        f"accelerate is told to use {plugin} ({found}), which wants to shard the model, but lorashard shards the base "
        f"itself: switch it off (answer no to it in `accelerate config`, or leave out {flag}); plain multi-GPU, "
        "distributed_type MULTI_GPU, is right"
    )
