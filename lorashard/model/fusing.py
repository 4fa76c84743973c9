"""Which kernels `numerics: fused` takes: one choice, the same on every rank. And Liger's, put into a sharded model.

Note [Compiled before Liger]
    Where both are possible, decoder layers are compiled. Bytes moved decide: inductor makes one kernel of each run of
    elementwise operations between two matmuls, and Liger's norm, rotary embedding and SwiGLU are some of these runs;
    casts, LoRA's scale and the residual sums are not among them. So a layer moves no more bytes compiled than with
    Liger's kernels. Nothing is timed: a choice by a timer could differ from one start to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from ..config.adapter_options import refuse_fused_beside
from ..config.quantization_options import Quantization
from ..errors import ConfigError
from ..runtime import dist
from .compiling import find_inductor_lack

_NAMES = {"compile": "torch.compile", "liger": "Liger's kernels"}  # the first that is possible is taken
# The layers' kernels alone: the loss is the trainer's.
_LIGER_OPTIONS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@dataclass(frozen=True)
class Numerics:
    """How decoder layers compute, with nothing left to choose.

    Attributes:
        kernels: `exact`, those of plain PEFT; `compile`; or `liger`.
        reason: why these, in a phrase.
    """

    kernels: str = "exact"
    reason: str = ""

    def __str__(self) -> str:
        return f"fused, by {_NAMES[self.kernels]}: {self.reason}" if self.kernels in _NAMES else self.kernels


def read_numerics(
    numerics: str | Numerics, torch_compile: bool | Mapping[str, Any], choose: Callable[[], Numerics]
) -> Numerics:
    """Return what `load` or `shard` was asked for, `fused` as `choose` decides.

    Raises:
        ConfigError: it is none of the choices, or the kernels are chosen by hand too; or as for `choose`.

    Ranks: as `choose`, where that is called.
    """
    if isinstance(numerics, str) and numerics not in ("exact", "fused"):
        raise ConfigError(option="numerics", expected="exact or fused", found=repr(numerics))
    if torch_compile is not False and numerics != "exact" and numerics != Numerics():
        raise refuse_fused_beside("torch_compile")
    if isinstance(numerics, Numerics):
        return numerics
    return choose() if numerics == "fused" else Numerics()


def choose_numerics(
    device: torch.device, model_type: str | None, quantization: Quantization | None, before: str | None = None
) -> Numerics:
    """Return what `fused` becomes on these ranks. See [Compiled before Liger].

    Args:
        model_type: of the base's config, by which Liger chooses its kernels.
        quantization: of the base, however it became quantized.
        before: the kernels of the run that is resumed, which are taken again.

    Raises:
        ConfigError: neither is possible on every rank, or not the one of `before`.

    Ranks: collective over all ranks; all get the same, or raise alike.
    """
    own = {
        "compile": _find_compile_lack(device, quantization),
        "liger": _find_liger_lack(device, model_type),
    }
    everyone = dist.gather_objects(own)
    lacks = {name: next((one[name] for one in everyone if one[name]), None) for name in _NAMES}
    possible = [name for name in _NAMES if lacks[name] is None and before in (None, name)]
    if not possible:
        told = "; ".join(f"{_NAMES[name]}: {lack}" for name, lack in lacks.items() if lack and before in (None, name))
        raise ConfigError(
            f"fused is not possible here: {told}",
            option="numerics",
            expected=f"{_NAMES[before]}, as the run began with" if before else "",
            fix="install what is lacking, or give numerics: exact",
        )
    chosen = possible[0]
    if before is not None:
        return Numerics(chosen, "as the run began")
    other = next(name for name in _NAMES if name != chosen)
    if lacks[other] is None:
        return Numerics(chosen, f"it fuses what {_NAMES[other]} do, and casts, sums and LoRA's scale besides")
    return Numerics(chosen, f"{_NAMES[other]} cannot be taken, {lacks[other]}")


def _find_compile_lack(device: torch.device, quantization: Quantization | None) -> str | None:
    return "the base is quantized" if quantization is not None else find_inductor_lack(device)


def _find_liger_lack(device: torch.device, model_type: str | None) -> str | None:
    if device.type != "cuda":
        return "they run on GPUs"
    if not is_liger_kernel_available():
        return "they are not installed (pip install liger-kernel)"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return None if model_type in MODEL_TYPE_TO_APPLY_LIGER_FN else f"there are none for {model_type} models"


def put_liger_kernels(model: PeftModel) -> None:
    """Let the layers and the final norm of `model`, which may be sharded, compute with Liger's kernels.

    The rotary embedding is a function of transformers' module, so that models made later in the process have Liger's.
    """
    apply_liger_kernel(model, _LIGER_OPTIONS)
