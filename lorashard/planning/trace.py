"""What one training microbatch keeps in memory and computes, from running it on tensors without values.

The model's own code runs on torch's fake tensors: shapes, dtypes, what autograd saves and when it is freed are all
real, whatever the architecture, and nothing is allocated. Of decoder layers that are alike three are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from ..config.quantization_options import Quantization
from ..errors import ConfigError
from ..model.adapters import base_test
from ..model.lora_linear import spare_lora_steps
from ..model.micro_batching import split_layers
from ..model.quantizing import quantize_structure
from ..model.sequence_attention import count_shared_heads
from ..model.stacks import find_decoder_stack
from ..model.tiled_mlp import tile_mlps
from ..model.units import find_structure
from .activations import Activations
from .attention import planned_attention
from .fused_head import fused_loss
from .tracker import Tracker, Unpacking, Work
from .unpacking import measure_unpacking

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
        tile_tokens: tokens that go through an MLP at a time; None means all.
        sequence_parallel_size: ranks that compute it together, of which each has as many tokens of each sequence.
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
    tile_tokens: int | None = None
    sequence_parallel_size: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.row_tokens

    @property
    def rank_tokens(self) -> int:
        """Tokens of each sequence that one rank has."""
        return -(-self.row_tokens // self.sequence_parallel_size)


@dataclass
class _Layer:
    """What was seen of one decoder layer.

    Attributes:
        saved_bytes: what it adds to what is kept when the forward leaves it.
        forward_bytes: the most at once on top of what was kept before it.
        kept_bytes: what it adds to what is kept when the backward enters it: without autocast's copies of weights.
        backward_bytes: the most at once on top of that.
    """

    saved_bytes: int = 0
    forward_bytes: int = 0
    kept_bytes: int = 0
    backward_bytes: int = 0
    forward: Work = Work()
    backward: Work = Work()


@dataclass
class _Run:
    """What was seen with some of the layers.

    Attributes:
        start_bytes: what is kept when the forward enters the first layer.
        embedding_bytes: the most at once until then.
        head_bytes: the most at once in the forward of the head and the loss, on top of what all layers save.
        head_backward_bytes: the same of their backward, on top of what all layers keep then.
        hidden_bytes: of what one layer gives to the next.
        work: of everything, layers included.
    """

    layers: list[_Layer]
    start_bytes: int = 0
    embedding_bytes: int = 0
    head_bytes: int = 0
    head_backward_bytes: int = 0
    workspace_bytes: int = 0
    hidden_bytes: int = 0
    work: Work = Work()


def trace(model: PeftModel, microbatch: Microbatch, quantization: Quantization | None = None) -> Activations:
    """Run `microbatch` through `model` on fake tensors.

    Args:
        model: on the meta device; its tensors and layers are replaced, so it is of no further use.
        quantization: of the base, whose weights are then unpacked by each operation that reads them.

    Raises:
        ConfigError: the model's code reads values of tensors, so that it cannot run without them; or ranks are to share
            each sequence, and cannot share its attention.
    """
    if microbatch.sequence_parallel_size > 1:
        count_shared_heads(model.get_base_model())
    path, stack = find_decoder_stack(model)
    layers = list(stack)
    _enable_checkpointing(model, microbatch)
    spare_lora_steps(model)
    # A packed sequence is split where its examples begin, which only values show: it is planned without a split.
    if microbatch.layer_rows is not None and microbatch.layer_rows < microbatch.num_rows:
        split_layers(layers, microbatch.layer_rows)
    if microbatch.tile_tokens is not None:
        tile_mlps(layers, microbatch.tile_tokens)
    unpackings = _find_unpackings(model, quantization, microbatch.device_type)
    kinds = _find_kinds(model, layers)
    # The first of a kind may get an input that needs no gradient, which shows until the second is left.
    few = sorted(index for indices in kinds.values() for index in indices[:3])
    with FakeTensorMode(), _code_for(model, microbatch.device_type):
        fakes = _fill(model, path, [layers[index] for index in few])
        quantized = [(fakes[parameter], unpackings[parameter]) for parameter in fakes if parameter in unpackings]
        run = _run(model, microbatch, quantized)
    seen = dict(zip(few, run.layers, strict=True))
    alike = {index: seen[indices[:3][-1]] for indices in kinds.values() for index in indices}
    activations = _assemble(run, seen, [alike[index] for index in range(len(layers))])
    if microbatch.is_offloading or (microbatch.checkpointing or {}).get("offload"):
        # One layer's are copied to the host, and one layer's back.
        kept_bytes = activations.saved_bytes * min(2, len(layers)) // len(layers)
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


def _assemble(run: _Run, seen: Mapping[int, _Layer], alike: Sequence[_Layer]) -> Activations:
    """Return the activations of a whole stack.

    Args:
        seen: those layers that were run, by their index.
        alike: what stands for each layer; what those that were run differ by counts as work of the rest.
    """
    live_bytes, peak_bytes, kept_bytes, rest = run.start_bytes, run.embedding_bytes, 0, run.work
    for index, stand_in in enumerate(alike):
        layer = seen.get(index, stand_in)
        peak_bytes = max(peak_bytes, live_bytes + layer.forward_bytes)
        live_bytes += layer.saved_bytes
        kept_bytes += layer.kept_bytes
        peak_bytes = max(peak_bytes, kept_bytes + layer.backward_bytes)
        if index in seen:
            rest -= stand_in.forward + stand_in.backward
    return Activations(
        saved_bytes=live_bytes,
        layer_bytes=peak_bytes - live_bytes,
        logits_bytes=max(run.head_bytes, kept_bytes + run.head_backward_bytes - live_bytes),
        layers_saved=tuple(layer.saved_bytes for layer in alike),
        forward=tuple(layer.forward for layer in alike),
        backward=tuple(layer.backward for layer in alike),
        rest=rest,
        workspace_bytes=run.workspace_bytes,
        hidden_bytes=run.hidden_bytes,
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
    shape = (microbatch.num_rows, microbatch.rank_tokens)
    batch = {name: torch.empty(shape, dtype=torch.int64) for name in ("input_ids", "labels")}
    _, stack = find_decoder_stack(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    resting = [*model.parameters(), *model.buffers(), *gradients, *batch.values()]
    tracker = Tracker(resting, is_for_cuda=microbatch.device_type == "cuda", quantized=quantized)
    borders = _Borders(tracker, list(stack))
    base, num_sharing = model.get_base_model(), microbatch.sequence_parallel_size
    try:
        with planned_attention(base, tracker, microbatch.has_mask, num_sharing), tracker:
            loss = _compute_loss(model, batch, microbatch)
            borders.end_forward()
            _run_backward(loss)
            borders.end_backward()
    except RuntimeError as error:
        raise ConfigError(
            f"it cannot be planned, since its forward needs the values of tensors ({str(error).splitlines()[0]})",
            where=type(base).__name__,
            fix="give a placement other than auto",
        ) from error
    finally:
        borders.remove()
    return borders.run


class _Borders:
    """Hooks at the borders of decoder layers, which part what a tracker sees.

    Backward leaves a layer's output for the layer's inside when the output's gradient is there: no operation of a later
    layer is left then.

    Attributes:
        run: what was seen; whole after `end_backward`.
    """

    def __init__(self, tracker: Tracker, stack: Sequence[nn.Module]) -> None:
        self.run = _Run([_Layer() for _ in stack])
        self._tracker = tracker
        self._work = Work()  # of what was parted already
        self._live_bytes: list[int] = []  # where the forward leaves each layer
        self._kept_bytes: list[int] = []  # where the backward enters each; of those that it does not enter, the same
        self._entered: int | None = None
        self._handles = [stack[0].register_forward_pre_hook(self._enter_stack)]
        for index, layer in enumerate(stack):
            # Each layer is compiled alone, when it is recomputed too.
            self._handles.append(layer.register_forward_pre_hook(lambda *_: tracker.end_run()))
            self._handles.append(layer.register_forward_hook(partial(self._leave_layer, index)))

    def end_forward(self) -> None:
        """Part the forward of the head and the loss from the backward."""
        self.run.head_bytes = self._take()[0] - self._live_bytes[-1]
        self._kept_bytes = list(self._live_bytes)

    def end_backward(self) -> None:
        """Take what backward has done since it entered the last layer that it has."""
        self._leave_backward()
        before = [0, *self._kept_bytes]
        for layer, bytes_before, kept_bytes in zip(self.run.layers, before, self._kept_bytes, strict=False):
            layer.kept_bytes = kept_bytes - bytes_before
        self.run.work, self.run.workspace_bytes = self._tracker.work, self._tracker.workspace_bytes

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _take(self) -> tuple[int, Work]:
        """Return the peak, and the work, since the last call."""
        self._tracker.end_run()
        work, self._work = self._tracker.work - self._work, self._tracker.work
        return self._tracker.take_peak(), work

    def _enter_stack(self, module: nn.Module, args: Any) -> None:
        if not _is_recomputing():
            self.run.embedding_bytes, _ = self._take()
            self.run.start_bytes = self._tracker.live_bytes

    def _leave_layer(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if _is_recomputing():
            self._tracker.end_run()
            return
        layer, before_bytes = self.run.layers[index], [self.run.start_bytes, *self._live_bytes][-1]
        peak_bytes, layer.forward = self._take()
        self._live_bytes.append(self._tracker.live_bytes)
        layer.forward_bytes = peak_bytes - before_bytes
        layer.saved_bytes = self._tracker.live_bytes - before_bytes
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        self.run.hidden_bytes = hidden.nbytes
        if hidden.requires_grad or layer is self.run.layers[-1]:
            hidden.register_hook(partial(self._enter_backward, index))

    def _enter_backward(self, index: int, gradient: torch.Tensor) -> None:
        live_bytes = self._tracker.live_bytes
        if self._entered is None:
            self.run.head_backward_bytes = self._take()[0] - live_bytes
        else:
            self._leave_backward()
        self._entered, self._kept_bytes[index] = index, live_bytes

    def _leave_backward(self) -> None:
        assert self._entered is not None
        layer, kept_bytes = self.run.layers[self._entered], self._kept_bytes[self._entered]
        peak_bytes, layer.backward = self._take()
        layer.backward_bytes = peak_bytes - kept_bytes


def _is_recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


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
def _code_for(model: PeftModel, device_type: str) -> Iterator[None]:
    """While the body runs, let the model's code take the path that it takes on the device that is planned for."""
    for module in model.modules():
        # Other kinds read the positions' values; memory is the same.
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"
    with _CudaKernels() if device_type == "cuda" else contextlib.nullcontext():
        yield


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
