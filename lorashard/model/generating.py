"""Generation on a sharded base: a rank whose answers have ended goes on for the others' sake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import GenerationMixin

from ..engine import Engine
from ..errors import ConfigError

# In these transformers' loops do not follow `synced_gpus`: they run a forward for each piece of the rank's own prompt,
# go on adding tokens to answers that have ended, or never hear of it.
_UNSYNCHRONIZED = (
    "prefill_chunk_size",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "custom_generate",
)


def needs_all_ranks(engine: Engine) -> bool:
    """Tell whether a forward gathers units from other ranks, so that all ranks must run it."""
    return any(unit.home.layout.num_shards > 1 for unit in engine.units)


def prepare_generation(model: nn.Module, engine: Engine) -> None:
    """Let the base's `generate` keep the ranks together where they need one another, and refuse continuous batching.

    Every call gets transformers' `synced_gpus=True`: each rank runs forwards until all have finished. A caller's own
    value does not count, since it cannot know where the base rests: TRL passes none, and Seq2SeqTrainer passes False
    wherever neither DeepSpeed nor FSDP is at work.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, GenerationMixin):
        return
    if needs_all_ranks(engine):
        base.generate = partial(_generate_together, base, base.generate)
    if not all(unit.is_resident for unit in engine.units):
        base.init_continuous_batching = _refuse_continuous_batching


def _generate_together(base: GenerationMixin, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    configs = (given, base.generation_config)
    for name in _UNSYNCHRONIZED:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        if any(value is not None for value in values):
            raise ConfigError(
                f"{name}: transformers cannot keep ranks together with it, and the base is sharded over ranks: leave "
                "it out, or load with placement='replicate' or 'file'"
            )
    return generate(*args, **kwargs | {"synced_gpus": True})


def _refuse_continuous_batching(*args: object, **kwargs: object) -> None:
    raise ConfigError(
        "continuous batching (generate_batch, TRL's use_transformers_continuous_batching) runs as many forwards as "
        "each rank's own requests need, in a thread and on whole weights, but the base is not whole here: leave it "
        "off, or load with placement='replicate'"
    )
