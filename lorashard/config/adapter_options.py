"""The options of the adapter, and of compiling the decoder layers that hold it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ..errors import ConfigError
from .initialization import check_initialization, is_derived
from .quantization_options import QuantizationOptions, check_compiling


def refuse_fused_beside(option: str) -> ConfigError:
    """Return the error for `numerics: fused` where another option chooses the kernels by hand."""
    return ConfigError(
        f"fused chooses the kernels, and {option} does too", option="numerics", fix=f"leave it or {option} out"
    )


class AdapterOptions(QuantizationOptions):
    """LoRA on a base that may be quantized."""

    lora_r: int = Field(default=16, ge=1)
    """The rank of LoRA's matrices."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA's scale: the adapter's output is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout before LoRA's matrices."""
    lora_target_modules: str | list[str] = "all-linear"
    """The layers to adapt: `all-linear`, names such as `q_proj,v_proj`, or a regular expression."""
    lora_modules_to_save: list[str] | None = None
    """Modules to train in full and save with the adapter."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_r)."""
    use_dora: bool = False
    """Weight-decomposed LoRA."""
    init_lora_weights: bool | str = True
    """How LoRA's matrices are initialized: true, `gaussian`, `orthogonal`, or false, which leaves no matrix zero. With
    quantization: nf4 also `loftq`, which makes up for the quantization error, if lora_alpha equals lora_r. `pissa`,
    `pissa_niter_N` and `olora` train on a copy of the base that is derived once and kept (docs/peft.md)."""
    lora_target_parameters: list[str] | None = None
    """Parameters to adapt that are no linear layer's weight, such as fused experts: `mlp.experts.gate_up_proj`."""
    layers_to_transform: list[int] | None = None
    """Adapt these decoder layers alone, counted from 0; backward ends at the lowest. Needs lora_target_modules as a
    list of names."""
    loraplus_lr_ratio: float | None = Field(default=None, ge=1)
    """LoRA+: the learning rate of LoRA's B is this many times that of A, which is learning_rate."""
    numerics: Literal["exact", "fused"] = "exact"
    """`exact`: the kernels and the bits of plain PEFT, unless others are chosen by hand below. `fused`: compiled
    decoder layers or, where these are not possible, Liger's kernels: faster, within a tolerance (docs/kernels.md)."""
    torch_compile: bool = False
    """Compile the forward of each decoder layer: docs/kernels.md."""
    torch_compile_backend: str | None = None
    """torch.compile's backend, if not `inductor`; implies torch_compile."""
    torch_compile_mode: Literal["default", "max-autotune-no-cudagraphs"] | None = None
    """torch.compile's mode, of those that need no weights at fixed addresses; implies torch_compile."""

    @field_validator("lora_target_modules")
    @classmethod
    def _name_one_module(cls, value: str | list[str]) -> str | list[str]:
        """PEFT takes a string for a regular expression of whole paths, which a name alone never matches."""
        return [value] if isinstance(value, str) and value.isidentifier() else value

    @model_validator(mode="after")
    def _check_adapter(self) -> AdapterOptions:
        quantization = self.resolve_quantization()
        check_initialization(self.init_lora_weights, quantization.format if quantization else None, is_new=True)
        if self.compile_options() is not False:
            check_compiling(quantization)
            if self.numerics == "fused":
                raise refuse_fused_beside("torch_compile")
        is_known = self.init_lora_weights in (True, False, "gaussian", "orthogonal", "loftq")
        if not is_known and not is_derived(self.init_lora_weights):
            raise ConfigError(
                option="init_lora_weights",
                expected="true, false, gaussian, orthogonal, loftq, pissa, pissa_niter_N or olora",
                found=repr(self.init_lora_weights),
            )
        if self.init_lora_weights == "loftq":
            self._check_loftq()
        if self.layers_to_transform is not None and isinstance(self.lora_target_modules, str):
            raise ConfigError(
                option="layers_to_transform",
                expected="lora_target_modules as a list of names with it, such as q_proj,v_proj",
                found=repr(self.lora_target_modules),
            )
        return self

    def _check_loftq(self) -> None:
        for option in ("use_dora", "lora_target_parameters"):
            if getattr(self, option):
                raise ConfigError(
                    "LoftQ initializes plain LoRA of linear layers alone",
                    option=option,
                    fix="leave it or init_lora_weights out",
                )
        expected = self.lora_r**0.5 if self.use_rslora else self.lora_r
        if self.lora_alpha != expected:  # PEFT's LoftQ does not divide by the scale: it would add to the error
            raise ConfigError(
                "LoftQ makes up for the quantization error only if the adapter's scale is 1",
                option="lora_alpha",
                expected=f"{expected:g} with lora_r {self.lora_r}{' and use_rslora' if self.use_rslora else ''}",
                found=self.lora_alpha,
            )

    def compile_options(self) -> bool | dict[str, str]:
        """Return the `torch_compile` of `load`. The trainer is not given it: its option compiles whole models."""
        given = {"backend": self.torch_compile_backend, "mode": self.torch_compile_mode}
        return {name: value for name, value in given.items() if value is not None} or self.torch_compile

    def describe_lora(self) -> dict[str, Any]:
        """Return the arguments of PEFT's `LoraConfig`, without the task type."""
        return {
            "r": self.lora_r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": self.lora_target_modules,
            "modules_to_save": self.lora_modules_to_save,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "init_lora_weights": self.init_lora_weights,
            "target_parameters": self.lora_target_parameters,
            "layers_to_transform": self.layers_to_transform,
        }
