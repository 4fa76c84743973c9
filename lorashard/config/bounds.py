"""Which numbers an option takes: of lorashard's own options as their fields declare it, of TRL's by the table here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_WORDS = (("ge", "of at least"), ("gt", "above"), ("le", "of at most"), ("lt", "below"))


@dataclass(frozen=True)
class Bounds:
    """The numbers that an option takes.

    Attributes:
        ge, gt, le, lt: the limits, as pydantic names them. Without `le: inf` a number with limits has to be finite.
        off: a number outside of them that switches the option off.
        is_share_or_count: a number below 1 is a share, and any other has to be whole.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    off: float | None = None
    is_share_or_count: bool = False

    @classmethod
    def of_field(cls, metadata: Iterable[Any]) -> Bounds:
        """Return the limits that a field of pydantic's was declared with."""
        return cls(**{name: getattr(limit, name) for limit in metadata for name, _ in _WORDS if hasattr(limit, name)})

    def admit(self, number: float) -> bool:
        """Return whether the option takes a number."""
        if self == Bounds() or number == self.off:
            return True
        if self.is_share_or_count and number > 1 and number != math.floor(number):
            return False
        is_above = (self.ge is None or number >= self.ge) and (self.gt is None or number > self.gt)
        is_below = (self.le is None or number <= self.le) and (self.lt is None or number < self.lt)
        return is_above and is_below and (math.isfinite(number) or self.le == math.inf)

    def __str__(self) -> str:
        """Return the limits as words that follow `a number`; empty where there is none."""
        limits = [(words, getattr(self, name)) for name, words in _WORDS]
        said = " and ".join(f"{words} {_write(limit)}" for words, limit in limits if limit not in (None, math.inf))
        said += ", which is whole or below 1" if self.is_share_or_count else ""
        return f"{said}, or {_write(self.off)}" if self.off is not None else said


def _write(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else f"{number:g}"


_COUNT, _POSITIVE, _NOT_NEGATIVE, _SHARE = Bounds(ge=1), Bounds(gt=0), Bounds(ge=0), Bounds(ge=0, le=1)

# TRL and transformers declare no limits. These refuse what fails later, or silently does something else.
TRAINER_BOUNDS = {
    "logging_steps": Bounds(gt=0, is_share_or_count=True),
    "eval_steps": Bounds(ge=0, is_share_or_count=True),
    "save_steps": Bounds(ge=0, is_share_or_count=True),
    "learning_rate": _POSITIVE,
    "num_train_epochs": _POSITIVE,
    "max_steps": Bounds(ge=1, off=-1),
    "max_length": Bounds(ge=2),
    "max_grad_norm": Bounds(ge=0, le=math.inf),
    "adam_beta1": Bounds(ge=0, lt=1),
    "adam_beta2": Bounds(ge=0, lt=1),
    "temperature": _POSITIVE,
    "top_p": Bounds(gt=0, le=1),
    "repetition_penalty": _POSITIVE,
    "num_generations": Bounds(ge=2),
    "label_smoothing": Bounds(ge=0, le=0.5),
    "data_seed": _NOT_NEGATIVE,
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "eval_accumulation_steps",
            "torch_empty_cache_steps",
            "dataloader_prefetch_factor",
            "dataset_num_proc",
            "ddp_bucket_cap_mb",
            "ddp_timeout",
            "pad_to_multiple_of",
            "precompute_ref_batch_size",
            "max_completion_length",
            "generation_batch_size",
            "steps_per_generation",
            "num_iterations",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "warmup_steps",
            "weight_decay",
            "adam_epsilon",
            "neftune_noise_alpha",
            "eval_delay",
            "dataloader_num_workers",
            "router_aux_loss_coef",
            "beta",
            "desirable_weight",
            "undesirable_weight",
            "epsilon",
            "epsilon_high",
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("label_smoothing_factor", "ld_alpha", "min_p", "top_entropy_quantile"), _SHARE),
}
