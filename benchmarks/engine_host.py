"""Measure the time that the engine takes of the host, beside what the model itself takes: a GPU must not wait for it.

    python benchmarks/engine_host.py                       measure, write a record, print its table
    python benchmarks/engine_host.py --table RECORD.json   print the table of a record

A Llama of many layers of 9 weights, so small that computing and copying take next to nothing, forward and backward on
one CPU thread: with each layer in host memory, and with all of them resident, where the engine has nothing to do. They
take turns, and of each the fastest step counts, since another process can only make a step slower.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from common import describe_environment, format_table, make_parser, run_command
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import lorashard

PLACEMENTS = ("replicate", "host")
WARMUP_STEPS = 5
TOKENS = 4


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="measured steps of each, in turn")
    run_command(parser.parse_args(), f"engine_host-cpu-{os.cpu_count()}", measure, make_table, lambda job: None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Let both placements take turns and return the record."""
    torch.set_num_threads(1)
    models = {placement: build(args.layers, placement) for placement in PLACEMENTS}
    seconds: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
    for _ in range(WARMUP_STEPS + args.steps):
        for placement, model in models.items():
            seconds[placement].append(run_step(model))
    fastest = {placement: min(values[WARMUP_STEPS:]) for placement, values in seconds.items()}
    gathers = lorashard.stats(models["host"]).num_copies / (WARMUP_STEPS + args.steps)
    config = {"layers": args.layers, "steps": args.steps, "tokens": TOKENS}
    found = {"processor_s": fastest, "copies_per_step": gathers}
    return {"benchmark": "engine_host", **describe_environment(), "config": config, **found}


def build(num_layers: int, placement: str) -> PeftModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **sizes))
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return lorashard.shard(get_peft_model(model, lora), placement)


def run_step(model: PeftModel) -> float:
    """Return the processor's seconds of a forward and a backward."""
    tokens = torch.arange(TOKENS)[None]
    begin_s = time.process_time()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return time.process_time() - begin_s


def make_table(record: dict[str, Any]) -> str:
    """Return the markdown table of a record, with a line that says what was measured."""
    found, layers = record["processor_s"], record["config"]["layers"]
    per_layer = {placement: 1e6 * found[placement] / layers for placement in PLACEMENTS}
    own = per_layer["host"] - per_layer["replicate"]
    rows = [["the model alone", f"{per_layer['replicate']:.0f}"], ["lorashard's engine beside it", f"{own:.0f}"]]
    table = format_table(["", "us a layer and step"], rows)
    return (
        f"{table}\n\nA Llama of {layers} layers of 9 weights, forward and backward, "
        f"{record['copies_per_step']:.0f} copies of a unit a step; one thread of "
        f"{record['hardware']['cpu']}, the fastest of {record['config']['steps']} steps."
    )


if __name__ == "__main__":
    main()
