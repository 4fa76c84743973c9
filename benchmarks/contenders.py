"""The same model, LoRA and optimizer under each way of spreading a run over ranks."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import read_memory, report
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelSize:
    """The Llama and the batch that are measured; one dtype throughout, base and adapters."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    lora_r: int
    batch_size: int
    sequence_tokens: int
    dtype: str = "bfloat16"
    head_dim: int = 64
    queries_per_key: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def build_base(size: ModelSize) -> LlamaForCausalLM:
    """Return the seeded base, whole, on the host: the same on every rank."""
    torch.manual_seed(0)
    num_heads = size.hidden_size // size.head_dim
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // size.queries_per_key,
        max_position_embeddings=size.sequence_tokens,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(size.torch_dtype)


def add_lora(base: LlamaForCausalLM, size: ModelSize, activation_checkpointing: bool) -> PeftModel:
    """Put LoRA on every linear of `base`: of its dtype, seeded, and with an lora_B that is not zero.

    With lora_B at zero every gradient of lora_A would be zero, and comparing them would prove nothing.
    """
    lora = LoraConfig(r=size.lora_r, lora_alpha=2 * size.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)
    fill_adapter(model, size.torch_dtype)
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def fill_adapter(model: PeftModel, dtype: torch.dtype = torch.bfloat16) -> None:
    """Make the adapter of `dtype`, seeded, and nowhere zero, without consuming the global random state."""
    generator = torch.Generator().manual_seed(1)
    for parameter in trainable_parameters(model):
        values = torch.randn(parameter.shape, generator=generator) * 0.02
        parameter.data = values.to(parameter.device, dtype)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_batches(size: ModelSize, count: int, rank: int, device: torch.device) -> list[Batch]:
    """Return `count` batches of random tokens, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (size.batch_size, size.sequence_tokens)
    batches = [torch.randint(size.vocab_size, shape, generator=generator).to(device) for _ in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in batches]


class Contender:
    """One way of running the model. The constructor takes a PeftModel that is whole and its own."""

    name = ""
    title = ""

    def __init__(self, model: PeftModel, size: ModelSize, device: torch.device) -> None:
        self.model = self.wrap(model, device)
        self.optimizer = torch.optim.AdamW(trainable_parameters(self.model), lr=1e-4)

    def wrap(self, model: PeftModel, device: torch.device) -> nn.Module:
        raise NotImplementedError

    def backward(self, batch: Batch) -> float:
        """Run forward and backward and return the loss; gradients are averaged over the ranks."""
        loss = self.model(**batch).loss
        loss.backward()
        return loss.item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Batch) -> float:
        loss = self.backward(batch)
        self.update()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """Return copies of the adapter's whole gradients, in one order for all contenders. Collective."""
        return [parameter.grad.clone() for parameter in trainable_parameters(self.model)]


class Alone(Contender):
    """The model as it is, nothing around it."""

    def wrap(self, model: PeftModel, device: torch.device) -> nn.Module:
        return model


class Ddp(Contender):
    """The base whole on every rank; only the adapter's gradients are communicated."""

    name, title = "ddp", "PEFT + DDP"

    def wrap(self, model: PeftModel, device: torch.device) -> nn.Module:
        return wrap_in_ddp(model, device)


class Fsdp2(Contender):
    """`fully_shard` on each decoder layer and on the root, which holds the embedding, the final norm and the head.

    Layers are resharded after their forward; the root is not, which is FSDP2's default and spares it a gather.
    """

    name, title = "fsdp2", "PEFT + FSDP2"

    def wrap(self, model: PeftModel, device: torch.device) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        options = self.options(device)
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, reshard_after_forward=True, **options)
        fully_shard(model, **options)
        return model

    def options(self, device: torch.device) -> dict[str, Any]:
        return {}

    def gradients(self) -> list[torch.Tensor]:
        found = [parameter.grad for parameter in trainable_parameters(self.model)]
        return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


class Fsdp2Offload(Fsdp2):
    """All parameters rest in pinned host memory; so do the adapter's, which the optimizer updates there."""

    def options(self, device: torch.device) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}


class Zero3(Contender):
    """DeepSpeed ZeRO-3 with the sizes that transformers fills in for "auto"; its optimizer works on fp32 copies."""

    name, title = "zero3", "PEFT + DeepSpeed ZeRO-3"
    sharding_options: dict[str, Any] = {}

    def __init__(self, model: PeftModel, size: ModelSize, device: torch.device) -> None:
        import deepspeed

        optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-4)
        config = deepspeed_config(size)
        config["zero_optimization"] |= self.sharding_options
        self.model, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def backward(self, batch: Batch) -> float:
        loss = self.model(**batch).loss
        self.model.backward(loss)
        return loss.item()

    def update(self) -> None:
        self.model.step()

    def gradients(self) -> list[torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return [safe_get_full_grad(parameter).clone() for parameter in trainable_parameters(self.model)]


class Zero3Offload(Zero3):
    """The parameters rest in pinned host memory."""

    sharding_options = {"offload_param": {"device": "cpu", "pin_memory": True}}


def deepspeed_config(size: ModelSize) -> dict[str, Any]:
    """Return DeepSpeed's configuration: what transformers writes for "auto", communication overlapped."""
    return {
        "train_micro_batch_size_per_gpu": size.batch_size,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": size.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": size.hidden_size**2,
            "stage3_prefetch_bucket_size": int(0.9 * size.hidden_size**2),
            "stage3_param_persistence_threshold": 10 * size.hidden_size,
        },
        "zero_allow_untested_optimizer": True,
    }


class Lorashard(Contender):
    """The base sharded by lorashard, the adapter under DDP, as Trainer would wrap it."""

    name, title = "lorashard", "lorashard"

    def wrap(self, model: PeftModel, device: torch.device) -> nn.Module:
        import lorashard

        self.peft_model = lorashard.shard(model, placement="shard", device=device)
        return wrap_in_ddp(self.peft_model, device)


def wrap_in_ddp(model: PeftModel, device: torch.device) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


CONTENDERS: dict[str, type[Contender]] = {kind.name: kind for kind in (Ddp, Fsdp2, Zero3, Lorashard)}


def build_contenders(
    names: list[str], size: ModelSize, activation_checkpointing: bool, device: torch.device
) -> dict[str, Contender]:
    """Build the contenders `names` side by side, each with a copy of one base."""
    base = build_base(size)
    built = {}
    for index, name in enumerate(names):
        own = base if index == len(names) - 1 else copy.deepcopy(base)
        model = add_lora(own, size, activation_checkpointing).to(device)
        built[name] = CONTENDERS[name](model, size, device)
    return built


def start_ranks(device_type: str, shares_gpu: bool = False) -> torch.device:
    """Start the default process group from torchrun's environment and return this rank's device.

    Args:
        shares_gpu: the ranks compute on one GPU, which NCCL refuses; gloo moves their bytes through the host.
    """
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", 0 if shares_gpu else int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if shares_gpu:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=device)
    return device


Measure = Callable[[dict[str, Any], ModelSize, torch.device], dict[str, Any]]


def run_job(job_path: str, measures: Mapping[str, Measure]) -> None:
    """Measure on this rank what the job says, and report it to the parent.

    Args:
        measures: by what a job calls them.
    """
    job = json.loads(Path(job_path).read_text())
    device = start_ranks(job["device"])
    report(job_path, measures[job["measure"]](job, ModelSize(**job["size"]), device))
    dist.barrier()
    dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def held_bytes(device: torch.device) -> int:
    """Return the GPU memory that tensors take, or on a CPU this process's anonymous memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else read_memory()["RssAnon"]
