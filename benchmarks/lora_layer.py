"""Time a decoder layer with LoRA under autocast, and count what it keeps for backward: plain PEFT's and lorashard's.

    python benchmarks/lora_layer.py                       measure, write a record, print its table
    python benchmarks/lora_layer.py --table RECORD.json   print the table of a record

A Llama layer in bf16 with an adapter in fp32, as `finetune` trains it, forward and backward on a CPU. Both take turns,
a step each, in one process, and every gradient is compared to the bit. A CPU without bf16 instructions shows bytes, but
no times that mean anything.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from typing import Any

import torch
from common import describe_environment, format_table, in_mib, make_parser, run_command, summarize
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaModel

from lorashard.model.lora_linear import spare_lora_steps

TITLES = {"peft": "PEFT's `lora.Linear`", "lorashard": "lorashard's"}
WARMUP_STEPS = 2


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--lora-r", type=int, default=16)
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each, in turn")
    run_command(parser.parse_args(), f"lora_layer-cpu-{os.cpu_count()}", measure, make_table, lambda job: None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Let both layers take turns and return the record."""
    plain = build(args)
    models = {"peft": plain, "lorashard": copy.deepcopy(plain)}
    spare_lora_steps(models["lorashard"])
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "processor_s": []} for name in models}
    for step in range(WARMUP_STEPS + args.steps):
        hidden = torch.randn(1, args.tokens, args.hidden, generator=torch.Generator().manual_seed(step)).bfloat16()
        for name in list(models) if step % 2 == 0 else reversed(models):
            wall_s, processor_s, saved_bytes = run_step(models[name], hidden)
            found[name]["saved_bytes"] = saved_bytes
            if step >= WARMUP_STEPS:
                found[name]["seconds"].append(wall_s)
                found[name]["processor_s"].append(processor_s)
        check_equal(models)
    for values in found.values():
        values |= {name: summarize(values[name]) for name in ("seconds", "processor_s")}
    config = {name: getattr(args, name) for name in ("hidden", "intermediate", "tokens", "lora_r", "steps")}
    config["threads"] = torch.get_num_threads()
    return {"benchmark": "lora_layer", **describe_environment(), "config": config, "layers": found}


def build(args: argparse.Namespace) -> PeftModel:
    """Return one decoder layer, without a head, and with an adapter of which nothing is zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=1,
        num_attention_heads=args.hidden // 64,
    )
    lora = LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(LlamaModel(config).bfloat16(), lora, autocast_adapter_dtype=True)


def run_step(model: PeftModel, hidden: torch.Tensor) -> tuple[float, float, int]:
    """Return the seconds, those of the processor, and the bytes that were kept for backward beside the parameters."""
    model.zero_grad()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    begin_s, processor_begin_s = time.perf_counter(), time.process_time()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        output = model(inputs_embeds=hidden.clone().requires_grad_(), use_cache=False).last_hidden_state
    output.float().pow(2).mean().backward()
    return time.perf_counter() - begin_s, time.process_time() - processor_begin_s, sum(kept.values())


def check_equal(models: dict[str, PeftModel]) -> None:
    """Stop if a gradient is not PEFT's."""
    pairs = zip(models["peft"].named_parameters(), models["lorashard"].parameters(), strict=True)
    wrong = [name for (name, own), other in pairs if own.requires_grad and not torch.equal(own.grad, other.grad)]
    assert not wrong, f"gradients differ from PEFT's: {wrong[:3]}"


def make_table(record: dict[str, Any]) -> str:
    """Return the markdown table of a record, with a line that says what was measured."""
    layers, config = record["layers"], record["config"]
    rows = [
        [
            title,
            f"{1000 * layers[name]['seconds']['median']:.0f}",
            f"{1000 * layers[name]['processor_s']['median']:.0f}",
            in_mib(layers[name]["saved_bytes"]),
        ]
        for name, title in TITLES.items()
    ]
    table = format_table(["", "ms", "processor, ms", "kept for backward, MiB"], rows)
    return (
        f"{table}\n\nForward and backward of one Llama layer, hidden {config['hidden']}, {config['tokens']} tokens, "
        f"LoRA r {config['lora_r']} on all linears in fp32 under bf16 autocast; {config['threads']} threads of "
        f"{record['hardware']['cpu']}, medians of {config['steps']} steps, taken in turn."
    )


if __name__ == "__main__":
    main()
