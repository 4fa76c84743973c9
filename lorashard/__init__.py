"""lorashard: PEFT fine-tuning with the frozen base model sharded over ranks."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Quantization", "SweepTrainer", "load", "load_adapter", "merge", "shard", "stats"]


def __getattr__(name: str) -> Any:
    # Lazy: the command line answers --help and user errors without importing torch.
    if name in __all__ or name == "api":
        from importlib import import_module

        module = import_module(".training.jobs" if name == "SweepTrainer" else ".api", __name__)
        return module if name == "api" else getattr(module, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
