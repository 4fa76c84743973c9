"""The options of transformers and TRL that keep activations on the host work with the engine's own hooks.

On the CPU neither runs as it is, sharded or not: transformers pins memory, TRL asks for an accelerator. Here pinning is
left out, and TRL is told that the CPU is the accelerator; the hooks, and the order in which they nest, are theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from peft import PeftModel
from support import run_ranks
from tiny import build_model, find_differences, make_batch, take_gradients
from transformers import PreTrainedModel
from trl.models.activation_offloading import get_act_offloading_ctx_manager

import lorashard
from lorashard.model.layer_major import split_layers
from lorashard.model.stacks import find_decoder_stack

FAMILIES = ("llama", "llama-tied")
# Returns what surrounds a training step.
Offload = Callable[[PeftModel, str], AbstractContextManager]


class CopyToHost(torch.autograd.graph.saved_tensors_hooks):
    """transformers' `save_on_cpu`, without pinned memory; notes the size of each storage that it was handed."""

    sizes: set[int] = set()

    def __init__(self, **options: Any) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.sizes.add(tensor.untyped_storage().nbytes())
            return tensor.clone()

        super().__init__(pack, lambda packed: packed)


def offload_checkpoints(model: PeftModel, checkpointing: str) -> AbstractContextManager:
    transformers.modeling_utils.save_on_cpu = CopyToHost
    enable = model.get_base_model().activation_checkpointing_enable
    enable({"use_reentrant": checkpointing == "reentrant"}, offload=True)
    return nullcontext()


def offload_with_trl(model: PeftModel, checkpointing: str) -> AbstractContextManager:
    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")
    torch.cpu.empty_cache = lambda: None  # TRL asks for it where bitsandbytes is imported
    offload = get_act_offloading_ctx_manager(model, use_pin_memory=False, use_streams=False, min_offload_size=1)
    pack = offload.pack_hook

    def note(tensor: torch.Tensor) -> Any:
        CopyToHost.sizes.add(tensor.untyped_storage().nbytes())
        return pack(tensor)

    offload.pack_hook = note
    return offload


def compare(offload: Offload, family: str, checkpointing: str, rows: int | None) -> list[str]:
    """Return the gradients that differ between a plain and a sharded model, both with `offload`."""
    results = []
    for is_sharded in (False, True):
        model = build_model(family, checkpointing=checkpointing)
        if is_sharded:
            lorashard.shard(model)
        if rows is not None:
            split_layers(find_decoder_stack(model)[1], rows)
        around = offload(model, checkpointing)
        CopyToHost.sizes.clear()
        for _ in range(2):
            with around:
                model(**make_batch(rows=3), use_cache=False).loss.backward()
        results.append(take_gradients(model))
        assert CopyToHost.sizes, "nothing was offloaded"
    slot_sizes = {slot.num_bytes for slot in lorashard.api.engine_of(model).pool}
    handed_over = ["a slot was offloaded"] if slot_sizes & CopyToHost.sizes else []
    return find_differences(*results) + handed_over


def check_offload(rank: int, offload: Offload, modes: tuple[str, ...]) -> dict:
    cases = itertools.product(FAMILIES, modes, (None, 2))
    return {case: wrong for case in cases if (wrong := compare(offload, *case))}


def test_transformers_offloads_checkpoints():
    """Its hooks are placed around each layer, inside of the engine's: what a layer saves must still find its slot."""
    if not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers has no offload option")
    assert run_ranks(check_offload, 2, offload_checkpoints, ("non-reentrant", "reentrant")) == [{}] * 2


def test_trl_offloads_activations():
    """Its hooks are placed around the whole step, and it looks at every parameter's storage before."""
    assert run_ranks(check_offload, 2, offload_with_trl, ("off", "non-reentrant")) == [{}] * 2
