"""Ways for ranks to train on one long row together, beside a row for each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    Batch,
    Contender,
    Fsdp2,
    Lorashard,
    ModelSize,
    Zero3,
    deepspeed_config,
    trainable_parameters,
    wrap_in_ddp,
)
from peft import PeftModel
from torch import nn

IGNORED = -100  # the label of a token that is not supervised


class SharedRows(Lorashard):
    """lorashard's sequence parallelism: each rank is given whole rows and computes a slice of their tokens."""

    name, title = "lorashard_shared", "lorashard, `sequence_parallel_size` {size}"

    def wrap(self, model: PeftModel, device: torch.device) -> nn.Module:
        import lorashard

        size = dist.get_world_size()
        self.peft_model = lorashard.shard(model, placement="shard", device=device, sequence_parallel_size=size)
        return wrap_in_ddp(self.peft_model, device)


class OwnRows(Lorashard):
    """Data parallelism: a row on each rank."""

    title = "lorashard, a row on each rank"


class Ring(Fsdp2):
    """torch's `context_parallel`: keys and values of a slice go from rank to rank. The base rests as under `Fsdp2`."""

    name, title = "torch_ring", "PEFT + FSDP2, torch's `context_parallel`"

    def wrap(self, model: PeftModel, device: torch.device) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
        for layer in model.get_base_model().model.layers:
            layer.self_attn.register_forward_pre_hook(_leave_out_mask, with_kwargs=True)
        return super().wrap(model, device)

    def backward(self, batch: Batch) -> float:
        rows = shift_labels(batch)
        num_labels = int((rows["shift_labels"] != IGNORED).sum())
        with self.cut(rows):
            # FSDP2 averages over the ranks what each adds to the sum.
            loss = self.model(**rows, num_items_in_batch=num_labels).loss * dist.get_world_size()
            loss.backward()
        return loss.item()

    def cut(self, rows: Batch) -> AbstractContextManager:
        """Return a context in which `rows` are this rank's slices, and attention is that of whole rows."""
        from torch.distributed.tensor.experimental import context_parallel

        return context_parallel(self.mesh, **_list_buffers(rows))


class AccelerateRing(Ring):
    """The same through accelerate, as Trainer does it."""

    name, title = "accelerate_ring", "PEFT + accelerate's FSDP2, `cp_size` {size}"

    def __init__(self, model: PeftModel, size: ModelSize, device: torch.device) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import ParallelismConfig

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        ranks = ParallelismConfig(cp_size=dist.get_world_size())
        self.accelerator = Accelerator(parallelism_config=ranks, fsdp_plugin=plugin)
        optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-4)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def cut(self, rows: Batch) -> AbstractContextManager:
        return self.accelerator.maybe_context_parallel(**_list_buffers(rows))


class Ulysses(Zero3):
    """DeepSpeed's Ulysses under ZeRO-3, by its own interface, which accelerate's `sp_backend="deepspeed"` calls too.

    Ranks: a process can have one, and nothing else that calls transformers' `sdpa`, which it replaces.
    """

    name, title = "ulysses", "PEFT + DeepSpeed ZeRO-3, Ulysses"

    def __init__(self, model: PeftModel, size: ModelSize, device: torch.device) -> None:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed(dist.get_backend())
        groups = UlyssesSPAttentionHF.register_with_transformers(
            model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=dist.get_world_size(),
            micro_batch_size=size.batch_size,
        )
        optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-4)
        config = deepspeed_config(size)
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=groups
        )

    def backward(self, batch: Batch) -> float:
        from torch.distributed.nn.functional import all_reduce

        rows = shift_labels(batch)
        num_labels = int((rows["shift_labels"] != IGNORED).sum())
        num_tokens = rows["input_ids"].shape[1] // dist.get_world_size()
        own = {key: rows[key].narrow(1, dist.get_rank() * num_tokens, num_tokens).contiguous() for key in rows}
        loss = all_reduce(self.model(**own, num_items_in_batch=num_labels).loss)
        self.model.backward(loss)
        return loss.item()


def shift_labels(batch: Batch) -> Batch:
    """Return new rows that may be cut: labels that were shifted before, and true positions."""
    labels = batch["labels"]
    shifted = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], 1)
    positions = torch.arange(labels.shape[1], device=labels.device).repeat(len(labels), 1)
    return {
        "input_ids": batch["input_ids"].clone(),
        "labels": shifted,
        "shift_labels": shifted.clone(),
        "position_ids": positions,
    }


def _list_buffers(rows: Batch) -> dict[str, Any]:
    buffers = list(rows.values())
    return {"buffers": buffers, "buffer_seq_dims": [1] * len(buffers), "no_restore_buffers": set(buffers)}


def _leave_out_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"attention_mask": None, "is_causal": True}


CONTENDERS: dict[str, type[Contender]] = {
    kind.name: kind for kind in (SharedRows, OwnRows, AccelerateRing, Ring, Ulysses)
}
# What each imports: before memory is counted, so that a library is nobody's activations.
MODULES = {
    SharedRows.name: ("lorashard.model.sequence_rows",),
    OwnRows.name: ("lorashard.api",),
    AccelerateRing.name: ("accelerate", "torch.distributed.tensor.experimental"),
    Ring.name: ("torch.distributed.fsdp", "torch.distributed.tensor.experimental"),
    Ulysses.name: ("deepspeed.runtime.sequence_parallel.ulysses_sp",),
}
