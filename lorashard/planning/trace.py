"""What one training microbatch keeps in memory and computes, from running it on tensors without values.

The model's own code runs on torch's fake tensors: shapes, dtypes, what autograd saves and when it is freed are all
real, whatever the architecture, and nothing is allocated. Of decoder layers that are alike two are run, or three.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..config.quantization_options import Quantization
from ..errors import ConfigError
from ..model.adapters import base_test
from ..model.lora_linear import spare_lora_steps
from ..model.micro_batching import split_layers
from ..model.quantizing import quantize_structure
from ..model.stacks import find_decoder_stack
from ..model.units import find_structure
from .activations import Activations
from .fused_head import fused_loss
from .tracker import Amounts, Tracker, Unpacking, Work
from .unpacking import measure_unpacking

_ATTENTION_NAME = "lorashard_trace"
# What CUDA's autocast computes in float32 of what layers call (AT_FORALL_FP32 in ATen/autocast_mode.h), by the names in
# torch, torch.Tensor and torch.nn.functional; and what it makes sum up in float32 (AT_FORALL_FP32_SET_OPT_DTYPE).
# fmt: off
_FLOAT32_ON_CUDA = {
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "norm", "cosine_similarity", "logsumexp", "softplus",
    "pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "__rdiv__", "__rtruediv__",
    "exp", "expm1", "log", "log10", "log2", "log1p", "acos", "asin", "cosh", "erfinv", "sinh", "tan",
}
# fmt: on
_FLOAT32_SUMS_ON_CUDA = {"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"}
_FEW_LAYERS = 2  # the first layer's input may need no gradient, so one layer does not stand for all


@dataclass(frozen=True)
class Microbatch:
    """What one rank computes at once, and how.

    Attributes:
        num_rows: sequences.
        row_tokens: tokens of each, padding included.
        has_mask: whether attention needs a mask: padded sequences, or packed ones without flash attention.
        loss: `model` is the model's own, from all logits at once; `fused` that of TRL's trainers, a tile of logits at a
            time; `score` that of a classifier, whose head gives few values a sequence.
        is_autocast: whether a trainer computes under autocast, in the base's dtype.
        checkpointing: transformers' options for activation checkpointing, or None where it is off.
        is_offloading: whether what layers save for backward is kept in host memory.
        layer_rows: sequences that go through a decoder layer at a time; None means all.
    """

    num_rows: int
    row_tokens: int
    device_type: str = "cuda"
    has_mask: bool = False
    loss: Literal["model", "fused", "score"] = "fused"
    is_autocast: bool = True
    checkpointing: dict[str, Any] | None = field(default_factory=dict)
    is_offloading: bool = False
    layer_rows: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.row_tokens


@dataclass(frozen=True)
class _Run(Amounts):
    """What was seen with some of the layers. Each number grows by the same with each layer; their maximum need not."""

    saved_bytes: float
    layers_forward_bytes: float
    head_forward_bytes: float
    head_backward_bytes: float
    layers_backward_bytes: float
    workspace_bytes: float
    forward: Work
    backward: Work


def trace(model: PeftModel, microbatch: Microbatch, quantization: Quantization | None = None) -> Activations:
    """Run `microbatch` through `model` on fake tensors.

    Args:
        model: on the meta device; its tensors and layers are replaced, so it is of no further use.
        quantization: of the base, whose weights are then unpacked by each operation that reads them.

    Raises:
        ConfigError: the model's code reads values of tensors, so that it cannot run without them.
    """
    path, stack = find_decoder_stack(model)
    layers = list(stack)
    _enable_checkpointing(model, microbatch)
    spare_lora_steps(model)
    # A packed sequence is split where its examples begin, which only values show: it is planned without a split.
    if microbatch.layer_rows is not None and microbatch.layer_rows < microbatch.num_rows:
        split_layers(layers, microbatch.layer_rows)
    unpackings = _find_unpackings(model, quantization, microbatch.device_type)
    kinds = _find_kinds(model, layers)
    few = sorted(index for indices in kinds.values() for index in indices[:_FEW_LAYERS])
    with FakeTensorMode(), _code_for(model, microbatch):
        used = [layers[index] for indices in kinds.values() for index in indices[: _FEW_LAYERS + 1]]
        fakes = _fill(model, path, used)
        quantized = [(fakes[parameter], unpackings[parameter]) for parameter in fakes if parameter in unpackings]

        def run(indices: Sequence[int]) -> _Run:
            _replace(model, path, [layers[index] for index in indices])
            return _run(model, microbatch, quantized)

        base = run(few)
        # What one more layer of each kind adds; where there are only few of a kind, what these add on average.
        added = {}
        for kind, indices in kinds.items():
            if len(indices) > _FEW_LAYERS:
                added[kind] = run(sorted([*few, indices[_FEW_LAYERS]])) - base
            else:
                without = [index for index in few if index not in indices[1:]]
                added[kind] = (base - run(without)) * (1 / max(1, len(few) - len(without)))
    activations = _assemble(base, added, kinds)
    if microbatch.is_offloading or (microbatch.checkpointing or {}).get("offload"):
        # One layer's are copied to the host, and one layer's back.
        kept_bytes = activations.saved_bytes * min(_FEW_LAYERS, len(layers)) // len(layers)
        return replace(activations, saved_bytes=kept_bytes)
    return activations


def _find_kinds(model: PeftModel, layers: Sequence[nn.Module]) -> dict[Hashable, list[int]]:
    """Return the indices of the layers of each kind; those of one kind are alike."""
    types = getattr(model.get_base_model().config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(layers):
        shapes = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
        kind = (types[index], getattr(layer, "gradient_checkpointing", False), shapes)
        kinds.setdefault(kind, []).append(index)
    return kinds


def _assemble(base: _Run, added: Mapping[Hashable, _Run], kinds: Mapping[Hashable, Sequence[int]]) -> Activations:
    total = base
    kind_of: dict[int, Hashable] = {}
    rest = base.forward + base.backward
    for kind, indices in kinds.items():
        num_run = min(len(indices), _FEW_LAYERS)
        total += added[kind] * (len(indices) - num_run)
        rest -= (added[kind].forward + added[kind].backward) * num_run
        kind_of |= dict.fromkeys(indices, kind)
    order = [added[kind_of[index]] for index in sorted(kind_of)]
    layers_bytes = max(total.layers_forward_bytes, total.layers_backward_bytes)
    head_bytes = max(total.head_forward_bytes, total.head_backward_bytes)
    return Activations(
        saved_bytes=round(total.saved_bytes),
        layer_bytes=round(layers_bytes - total.saved_bytes),
        logits_bytes=round(head_bytes - total.saved_bytes),
        layers_saved=tuple(round(run.saved_bytes) for run in order),
        forward=tuple(run.forward for run in order),
        backward=tuple(run.backward for run in order),
        rest=rest,
        workspace_bytes=round(base.workspace_bytes + max(0, *(run.workspace_bytes for run in added.values()))),
    )


def _find_unpackings(
    model: PeftModel, quantization: Quantization | None, device_type: str
) -> dict[torch.Tensor, Unpacking]:
    """Return what it takes to unpack each weight that is quantized."""
    if quantization is None:
        return {}
    structure = find_structure(model, base_test(model))
    quantize_structure(structure, quantization)
    known: dict[Hashable, Unpacking] = {}
    found: dict[torch.Tensor, Unpacking] = {}
    for weight in (weight for unit in structure.units for weight in unit.weights):
        if weight.quantizer is not None:
            key = (weight.quantizer, weight.parameter.shape, weight.parameter.dtype)
            if key not in known:
                known[key] = measure_unpacking(*key, device_type)
            found[weight.parameter] = known[key]
    return found


def _run(model: PeftModel, microbatch: Microbatch, quantized: Sequence[tuple[torch.Tensor, Unpacking]]) -> _Run:
    shape = (microbatch.num_rows, microbatch.row_tokens)
    batch = {name: torch.empty(shape, dtype=torch.int64) for name in ("input_ids", "labels")}
    _, stack = find_decoder_stack(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    resting = [*model.parameters(), *model.buffers(), *gradients, *batch.values()]
    tracker = Tracker(resting, is_for_cuda=microbatch.device_type == "cuda", quantized=quantized)
    seen: dict[str, int] = {}

    def leave_layers(module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed
            return
        seen["layers_forward_bytes"] = tracker.take_peak()
        seen["saved_bytes"] = tracker.live_bytes
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden.register_hook(enter_layers)

    def enter_layers(gradient: torch.Tensor) -> None:
        seen["head_backward_bytes"] = tracker.take_peak()

    def end_run(module: nn.Module, *_: Any) -> None:
        tracker.end_run()  # each layer is compiled alone

    def end_layer(module: nn.Module, args: Any, output: Any) -> None:
        tracker.end_run()
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: tracker.end_run())

    handles = [stack[-1].register_forward_hook(leave_layers)]
    handles += [layer.register_forward_pre_hook(end_run) for layer in stack]
    handles += [layer.register_forward_hook(end_layer) for layer in stack]
    try:
        with tracker:
            loss = _compute_loss(model, batch, microbatch)
            seen["head_forward_bytes"] = tracker.take_peak()
            tracker.end_run()
            forward = tracker.work
            _run_backward(loss)
            seen["layers_backward_bytes"] = tracker.take_peak()
            tracker.end_run()
    except RuntimeError as error:
        raise ConfigError(
            f"it cannot be planned, since its forward needs the values of tensors ({str(error).splitlines()[0]})",
            where=type(model.get_base_model()).__name__,
            fix="give a placement other than auto",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return _Run(**seen, workspace_bytes=tracker.workspace_bytes, forward=forward, backward=tracker.work - forward)


def _compute_loss(model: PeftModel, batch: dict[str, torch.Tensor], microbatch: Microbatch) -> torch.Tensor:
    base = model.get_base_model()
    dtype = next(parameter.dtype for parameter in base.parameters() if not parameter.requires_grad)
    is_autocast = microbatch.is_autocast and dtype != torch.float32
    with torch.autocast("cpu", dtype=dtype, enabled=is_autocast):
        if microbatch.loss == "fused":
            hidden = base.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
            head = base.get_output_embeddings()
            return fused_loss(hidden, head.weight, batch["labels"], microbatch.device_type)
        if microbatch.loss == "score":
            base.config.get_text_config().pad_token_id = 0  # training sets it; sequences end before their padding
            return base(input_ids=batch["input_ids"], use_cache=False).logits.float().sum()
        output = model(**batch, use_cache=False)
    if is_autocast:
        output.logits.float()  # accelerate converts outputs to fp32
    return output.loss


def _run_backward(loss: torch.Tensor) -> None:
    """Run `loss.backward()` without its Python function, in which a TorchFunctionMode is off while layers recompute."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _enable_checkpointing(model: PeftModel, microbatch: Microbatch) -> None:
    model.train()
    if microbatch.checkpointing is None:
        return
    base = model.get_base_model()
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    options = dict(microbatch.checkpointing)
    own = {name: options.pop(name) for name in ("every_n_layers",) if name in options}
    options.pop("offload", None)
    enable(options or None, **own)
    model.enable_input_require_grads()  # as TRL's trainer does


@contextlib.contextmanager
def _code_for(model: PeftModel, microbatch: Microbatch) -> Iterator[None]:
    """While the body runs, let the model's code take the path that it takes on the device that is planned for."""
    config = model.get_base_model().config
    implementation = config._attn_implementation
    # Falcon's code knows only its own kinds, and treats any other name as eager.
    is_asked_by_name = any(
        "ALL_ATTENTION_FUNCTIONS" in getattr(sys.modules.get(type(m).__module__), "__dict__", {})
        for m in model.modules()
    )
    is_replaced = implementation == "sdpa" and is_asked_by_name
    if is_replaced:
        # transformers cannot see in fake tensors that no sequence is padded, and would make masks.
        ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME] = _attention(microbatch)
        config._attn_implementation = _ATTENTION_NAME
    for module in model.modules():
        # Other kinds read the positions' values; memory is the same.
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"
    mode = _CudaKernels() if microbatch.device_type == "cuda" else contextlib.nullcontext()
    try:
        with mode:
            yield
    finally:
        if is_replaced:
            del ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME]
            config._attn_implementation = implementation


def _attention(microbatch: Microbatch) -> Callable[..., Any]:
    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        rows, _, tokens, _ = query.shape
        window = options.get("sliding_window")
        has_mask = microbatch.has_mask or (window is not None and tokens > window)
        mask = torch.empty(rows, 1, tokens, tokens, dtype=torch.bool) if has_mask else None
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    return attend


class _CudaKernels(TorchFunctionMode):
    """What CUDA does differently from the CPU, on whose device type the trace runs.

    Its dropout keeps a byte for each element, the CPU's a value. Its autocast runs some functions in float32 that the
    CPU's leaves in the dtype of their input, so that layer norms such as GPT-2's save and return twice the bytes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.dropout, torch.nn.functional.dropout):
            names = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            if names.get("training", True) and names.get("p", 0.5) > 0:
                return torch.native_dropout(names["input"], names.get("p", 0.5), True)[0]
        name = getattr(func, "__name__", "")
        if torch.is_autocast_enabled("cpu"):
            if name in _FLOAT32_ON_CUDA:
                args, kwargs = torch.utils._pytree.tree_map(_upcast, (args, kwargs))
            elif name in _FLOAT32_SUMS_ON_CUDA and _is_low(args[0] if args else kwargs.get("input")):
                has_dtype = kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
                kwargs = kwargs if has_dtype else kwargs | {"dtype": torch.float32}
        return func(*args, **kwargs)


def _is_low(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _upcast(value: Any) -> Any:
    return value.float() if _is_low(value) else value


def _replace(model: nn.Module, path: str, layers: Sequence[nn.Module]) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.ModuleList(layers))


def _fill(model: nn.Module, path: str, layers: Sequence[nn.Module]) -> dict[torch.Tensor, nn.Parameter]:
    """Keep only `layers` in the stack and make the model's meta tensors fake ones; return those of the parameters."""
    _replace(model, path, layers)
    fakes: dict[torch.Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in fakes:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    fakes[parameter] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                module._parameters[name] = fakes[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return fakes
