"""Compile what a decoder layer computes, and nothing of what surrounds it.

Note [Hooks outside, compute inside]
    A layer's `forward` is compiled, not its call: gathers, slots and saved handles run in eager mode, and to the
    compiler a unit's weights are inputs like any others. So one graph serves all layers of one class, in whatever slot
    their weights are. torch.compile of a module would rename the adapter's keys; here the module stays.

    transformers checkpoints a layer's `forward` too, by way of its class. The compiled one is that of a subclass, which
    transformers wraps like any other: the checkpoint stays outside, and recomputes by the same compiled code.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton
from transformers import modeling_layers
from transformers.cache_utils import Cache

from ..config.quantization_options import Quantization, check_compiling
from ..errors import ConfigError
from .patches import extend_classes

_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def read_compile_options(
    torch_compile: bool | Mapping[str, Any], device: torch.device, quantization: Quantization | None = None
) -> dict[str, Any] | None:
    """Return the arguments for torch.compile, or None where nothing is to be compiled.

    Args:
        torch_compile: whether to compile, or arguments of torch.compile, such as `{"mode": ..., "backend": ...}`.
        device: what is compiled for.
        quantization: what the base is quantized to.

    Raises:
        ConfigError: torch refuses them, they need what is not there, or the base is quantized.
    """
    if torch_compile is False:
        return None
    # Dynamo cannot pass a `QuantizedWeight` on to an operation, so that each linear layer would end a graph; where it
    # leaves the unpacking itself to AOTAutograd, that fails on the views of a slot's bytes (torch 2.13).
    check_compiling(quantization)
    options = {} if torch_compile is True else dict(torch_compile)
    has_cuda_graphs = options.get("mode") in _CUDA_GRAPH_MODES or (options.get("options") or {}).get(
        "triton.cudagraphs"
    )
    if has_cuda_graphs or options.get("backend") == "cudagraphs":
        raise ConfigError(
            "CUDA graphs read weights at one address, and a sharded weight may be in any slot",
            option="torch_compile",
            expected="mode default or max-autotune-no-cudagraphs",
            found=options,
        )
    try:
        torch.compile(_nothing, **options)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(" ".join(str(error).split()), option="torch_compile") from error
    lack = find_inductor_lack(device) if options.get("backend", "inductor") == "inductor" else None
    if lack is not None:
        raise ConfigError(lack, option="torch_compile", fix="install it, or leave torch_compile out")
    return options


def _nothing() -> None:
    pass


def find_inductor_lack(device: torch.device) -> str | None:
    """Return what torch's inductor needs for `device` and does not find, or None."""
    if device.type == "cuda":
        return None if has_triton() else "torch's inductor needs Triton, and a GPU of compute capability 7.0 or more"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch's inductor needs a C++ compiler for the CPU, g++ or the one that CXX names, and finds none"
    return None


def compile_layers(layers: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile the `forward` of each of `layers`, in subclasses of their classes.

    Compilation itself happens in the first forwards. See [Hooks outside, compute inside].

    Args:
        options: arguments of torch.compile, from `read_compile_options`.

    Raises:
        ConfigError: a layer's forward has been replaced on the instance, which would leave the class's unused.
    """
    layers = list(layers)
    for layer in layers:
        if "forward" in vars(layer):
            raise ConfigError(
                expected=f"a {type(layer).__name__} with its class's forward",
                found="one that is replaced already",
                option="torch_compile",
                fix="leave torch_compile out, or whatever else wraps the layers",
            )
    extend_classes(layers, partial(_compile_forward, options))


def _compile_forward(options: Mapping[str, Any], original: type[nn.Module]) -> dict[str, Any]:
    plain: Any = original.forward
    while plain.__globals__ is vars(modeling_layers):  # what checkpoints it, which must stay outside
        plain = plain.__wrapped__
    compiled = torch.compile(plain, **options)
    # Inside DDP's forward dynamo would cut each layer's graph where a bucket of the adapter's gradients ends, so that
    # they are sent earlier. They are small, and a cut graph fuses less. Dynamo may compile in any call.
    uncut = torch._dynamo.config.patch(optimize_ddp=False)

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Cache) for value in itertools.chain(args, kwargs.values())):
            # A cache that is indexed by layer, and grows with each token, needs another graph each time.
            if torch.is_grad_enabled():
                warnings.warn(
                    "torch_compile: layers that fill a key-value cache run uncompiled; train with use_cache=False",
                    stacklevel=2,
                )
            return plain(self, *args, **kwargs)
        with uncut:
            return compiled(self, *args, **kwargs)

    return {"forward": forward}
