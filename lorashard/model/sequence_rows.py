"""Sequence parallelism: the ranks of a group share each row, each with a slice of its tokens.

Note [Whole rows outside, slices inside]
    A trainer gives every rank of a group the same whole rows, and gets what it would get without us: the loss of whole
    rows, or TRL's values of each of their tokens. Only between the call of the model and its return does a rank have a
    slice: ids, true positions, labels that were shifted before they were cut. So no trainer need know, and whatever it
    computes from the values (DPO's margins, KTO's references) is right; see [Adjoints].

    What is long is never whole: hidden states, and the logits. A pass with labels returns no logits. A pass without
    labels and without gradients, such as those of `generate`, is not shared: each rank computes what it is given.

Note [Frequencies of long rows]
    Some rotary embeddings (`longrope`, `dynamic`) choose their frequencies by the last position that they are given. A
    slice's would not be that of the row, so it is added to them, and what is computed for it taken off.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import PeftModel, TaskType
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from ..config.placement import check_sequence_parallel_size
from ..errors import ConfigError, ShardError
from ..runtime import dist
from ..runtime.dist import SequenceGroup
from .loader_groups import give_rows_by_group
from .patches import on_release
from .sequence_attention import ROWS_ARGUMENT, SlicedRows, count_shared_heads, exchange_heads
from .sequence_collectives import join, sum_over
from .stacks import find_layers, unwrap

_OPTION = "sequence_parallel_size"
_IGNORED = -100  # the label of a token that is not supervised
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
_NOT_TOKENS = ("cu_seq_lens", "max_length", "num_items_in_batch")
_WHOLE_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def share_sequences(model: PeftModel, size: int, wait_warning_s: float) -> None:
    """Let groups of `size` consecutive ranks share each row that `model` is trained on.

    Loaders that accelerate prepares from here on give the ranks of a group the same rows.

    Raises:
        ConfigError: the model or its adapter cannot be computed in slices. Later, from a forward: an argument or output
            that has no slices.
        ShardError: from a forward, on all ranks of a group: they were given different rows.

    Ranks: collective over all ranks; then each forward and backward is collective over the group.
    Memory: of activations, 1/size of each row's on each rank.
    """
    config = check_sequences(model, size)
    group = SequenceGroup.of_size(size, wait_warning_s)
    undo = exchange_heads(config)
    passes = _Passes(model, group)
    handles = [
        model.register_forward_pre_hook(passes.begin, with_kwargs=True),
        model.register_forward_hook(passes.end, with_kwargs=True),
    ]
    for rotary in _find_adaptive_rotaries(model):
        handles.append(rotary.register_forward_pre_hook(passes.begin_rotary, with_kwargs=True))
        handles.append(rotary.register_forward_hook(passes.end_rotary))
    give_rows_by_group(model, size)

    def release() -> None:
        for handle in handles:
            handle.remove()
        undo()

    on_release(model.get_base_model(), release)


def check_sequences(model: PeftModel, size: int) -> PretrainedConfig:
    """Return the config that the decoder layers read.

    Raises:
        ConfigError: the model or its adapter cannot be computed in slices of `size` ranks.
    """
    base: Any = unwrap(model)
    adapter = model.active_peft_config
    if adapter.task_type != TaskType.CAUSAL_LM or adapter.is_prompt_learning:
        raise ConfigError(
            "a row is shared where each token has a value of its own",
            option=_OPTION,
            expected="task_type CAUSAL_LM, and no virtual tokens",
            found=f"{adapter.task_type} with {adapter.peft_type}",
            fix="leave it out",
        )
    check_sequence_parallel_size(size, dist.get_world_size(), count_shared_heads(base))
    return base.config.get_text_config()


class _Passes:
    """Cuts the arguments of a pass, and joins its outputs; see [Whole rows outside, slices inside]."""

    def __init__(self, model: PeftModel, group: SequenceGroup) -> None:
        self._group = group
        self._names = [*inspect.signature(type(model).forward).parameters][1:]
        self._layers = find_layers(model)
        self._rows: SlicedRows | None = None  # of the forward that runs
        self._is_checked = False

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        self._rows = None  # that of a forward that has failed
        named = dict(zip(self._names, args, strict=False)) | kwargs
        labels, shifted = named.get("labels"), named.get("shift_labels")
        if labels is None and shifted is None and not torch.is_grad_enabled():
            return None
        tokens = named["input_ids"] if named.get("input_ids") is not None else named["inputs_embeds"]
        shape = tokens.shape[:2]
        self._check_rows(tokens)
        _check_arguments(named, shape)
        if labels is not None and shifted is None:
            shifted = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), _IGNORED)], 1)
        named |= {"labels": shifted, "shift_labels": shifted} if shifted is not None else {}
        positions = named.get("position_ids")
        if positions is None:
            positions = torch.arange(shape[1], device=tokens.device)[None]
        positions = self._pad_positions(positions)
        mask = named.get("attention_mask")
        rows = SlicedRows(
            self._group,
            # What is put at the end is seen by no other token, and where all tokens count no mask is made.
            attention_mask=None if mask is None else self._pad(mask, 1),
            position_ids=positions,
            num_tokens=shape[1],
            has_last=kwargs.get("shift_labels") is not None,
            arguments=frozenset({*named, "position_ids", "num_items_in_batch"}),
        )
        cut = {name: self._cut(name, value, shape) for name, value in named.items()}
        cut |= {"position_ids": self._slice(positions), "attention_mask": None, "use_cache": False}
        cut[ROWS_ARGUMENT] = self._rows = rows
        if shifted is not None and cut.get("num_items_in_batch") is None:
            cut["num_items_in_batch"] = (shifted != _IGNORED).sum().clamp(min=1)
        return (), cut

    def end(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        self._rows = None
        rows: SlicedRows | None = kwargs.get(ROWS_ARGUMENT)
        if rows is None:
            return None
        self._check_attended(rows)
        if not isinstance(output, ModelOutput):
            raise ConfigError(
                f"the model returns a {type(output).__name__}", option=_OPTION, expected="a ModelOutput (return_dict)"
            )
        values: dict[str, Any] = dict(output.items())
        has_labels = kwargs.get("labels") is not None
        for name, value in values.items():
            if name in _PER_TOKEN:
                values[name] = join(value, self._group)[:, : rows.num_tokens - (not rows.has_last)]
            elif name == "loss":
                values[name] = sum_over(value, self._group)
            elif name == "logits":
                values[name] = None if has_labels else join(value, self._group)[:, : rows.num_tokens]
            else:
                raise ConfigError(
                    f"the model returns {name}, which is not known to have slices",
                    option=_OPTION,
                    fix="leave out what asks for it",
                )
        return type(output)(**values)

    def begin_rotary(self, rotary: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Add the last position of whole rows to those of a slice; see [Frequencies of long rows]."""
        if self._rows is None:
            return None
        named = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        last = self._rows.position_ids[:, : self._rows.num_tokens].max()
        positions = named["position_ids"].clamp(max=last)  # tokens that are added lie behind it
        named["position_ids"] = torch.cat([positions, last.expand(*positions.shape[:-1], 1)], -1)
        return (), named

    def end_rotary(self, rotary: nn.Module, args: Any, output: Any) -> Any:
        """Return what is of the slice: tensors of [..., tokens, size]."""
        if self._rows is None:
            return None
        return output[..., :-1, :] if torch.is_tensor(output) else tuple(each[..., :-1, :] for each in output)

    def _check_rows(self, tokens: torch.Tensor) -> None:
        """Compare the rows that the group's ranks were given."""
        facts = [*tokens.shape[:2], _hash(tokens)]
        differing = self._group.comparisons.compare(facts, "compare the rows that they share")
        if differing is not None:
            found = "; ".join(f"{rows} x {length} tokens, hash {hashed:x}" for rows, length, hashed in differing)
            raise ShardError(
                "the ranks of a sequence group were given different rows",
                expected="the same rows on each",
                found=f"{found}, by rank of the group",
                fix="let accelerate prepare the loader, as Trainer does, once the model is loaded, and without "
                "dispatch_batches; or give the ranks of a group the same rows yourself",
            )

    def _check_attended(self, rows: SlicedRows) -> None:
        """Refuse, after the first pass, layers whose attention did not go through the exchange: they saw slices."""
        if self._is_checked:
            return
        left = [i for i, layer in enumerate(self._layers) if not any(m in rows.attended for m in layer.modules())]
        if left:
            raise ConfigError(
                f"decoder layers {left} of this model do not compute attention through transformers' interface",
                option=_OPTION,
                fix="leave it out for this model",
            )
        self._is_checked = True

    def _cut(self, name: str, value: Any, shape: torch.Size) -> Any:
        """Return this rank's slice of an argument, if it has tokens."""
        if not torch.is_tensor(value) or value.shape[:2] != shape or name in ("attention_mask", "position_ids"):
            return value
        return self._slice(self._pad(value, _IGNORED if name.endswith("labels") else 0))

    def _slice(self, padded: torch.Tensor) -> torch.Tensor:
        num_tokens = padded.shape[1] // self._group.size
        return padded.narrow(1, self._group.rank * num_tokens, num_tokens).contiguous()  # losses take views of it

    def _pad(self, tensor: torch.Tensor, value: int) -> torch.Tensor:
        """Add tokens at the end of [rows, tokens, ...], as many as make slices equal."""
        added = tensor.new_full((len(tensor), -tensor.shape[1] % self._group.size, *tensor.shape[2:]), value)
        return torch.cat([tensor, added], 1) if added.shape[1] else tensor

    def _pad_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Let the positions of the tokens that are added follow on, which begins no packed sequence."""
        num_added = -positions.shape[1] % self._group.size
        following = positions[:, -1:] + torch.arange(1, num_added + 1, device=positions.device)
        return torch.cat([positions, following], 1) if num_added else positions


def _find_adaptive_rotaries(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the rotary embeddings whose frequencies depend on how long rows are."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)  # one, or by type of layer
        kinds = types.values() if isinstance(types, dict) else [types or ""]
        if any("dynamic" in kind or kind == "longrope" for kind in kinds):
            yield module


def _hash(tokens: torch.Tensor) -> int:
    """Return a number that tokens in other places, or other ones, would hardly have."""
    words = tokens.detach().reshape(-1).double()
    places = torch.arange(1, len(words) + 1, device=tokens.device).double().sqrt()
    return int(((words * places).sum() * 1e3).round().clamp(-(2**62), 2**62))


def _check_arguments(named: Mapping[str, Any], shape: torch.Size) -> None:
    """Refuse arguments that have no slices.

    Args:
        shape: (rows, tokens).

    Raises:
        ConfigError: one of them, by name.
    """
    refused = [name for name in _WHOLE_OUTPUTS if named.get(name)]
    refused += [name for name, value in named.items() if value is not None and not _has_slices(name, value, shape)]
    if refused:
        raise ConfigError(
            f"a row that ranks share has no slices of {', '.join(refused)}",
            option=_OPTION,
            expected="ids or embeddings, a mask of [rows, tokens], positions and labels",
            fix="leave out what asks for it",
        )


def _has_slices(name: str, value: Any, shape: torch.Size) -> bool:
    if not torch.is_tensor(value):
        return name not in ("attention_mask", "past_key_values")
    if name == "attention_mask":
        return value.shape == shape
    if name == "position_ids":
        return value.ndim == 2 and value.shape[1] == shape[1]
    return value.shape[:2] == shape or name.startswith(_NOT_TOKENS)
