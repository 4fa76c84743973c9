"""Generation on a sharded base: a rank whose answers have ended runs forwards until all ranks' have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn
from transformers import GenerationMixin

from ..engine import Engine
from ..errors import ConfigError
from .patches import wrap_method
from .stacks import unwrap

# With these, transformers' loops do not follow `synced_gpus`.
_UNSYNCHRONIZED = (
    "prefill_chunk_size",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "custom_generate",
)


def needs_all_ranks(engine: Engine) -> bool:
    """Return whether a forward gathers units from other ranks, so that all ranks must run it."""
    return any(unit.home.layout.num_shards > 1 for unit in engine.units)


def prepare_generation(model: nn.Module, engine: Engine) -> None:
    """Let the base's `generate` keep the ranks together where they need one another, and refuse continuous batching.

    Every call gets transformers' `synced_gpus=True`: each rank runs forwards until all have finished. A caller's own
    value does not count, since it cannot know where the base rests: TRL passes none, and Seq2SeqTrainer passes False
    wherever neither DeepSpeed nor FSDP is used.
    """
    base = unwrap(model)
    if not isinstance(base, GenerationMixin):
        return
    if needs_all_ranks(engine):
        wrap_method(base, "generate", partial(_generate_together, base))
    if not all(unit.is_resident for unit in engine.units):
        wrap_method(base, "init_continuous_batching", _refuse_continuous_batching)


def _generate_together(base: GenerationMixin, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    for name in _UNSYNCHRONIZED:
        if any(getattr(config, name, None) is not None for config in (given, base.generation_config)) or (
            kwargs.get(name) is not None
        ):
            raise ConfigError(
                "transformers cannot keep ranks together with it, and the base is sharded over ranks",
                option=name,
                fix="leave it out, or load with placement='replicate' or 'file'",
            )
    return generate(*args, **kwargs | {"synced_gpus": True})


def _refuse_continuous_batching(*args: object, **kwargs: object) -> NoReturn:
    raise ConfigError(
        "continuous batching runs as many forwards as each rank's own requests need, in a thread and on unsharded "
        "weights, but the base is sharded",
        option="use_transformers_continuous_batching (generate_batch)",
        fix="leave it off, or load with placement='replicate'",
    )
