"""A folder of runs as somebody with eight GPUs would have it, made up: for pictures, and for pages with many ranks."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from helpers.paths import DEMO
from helpers.ui_runs import owned, write_lines, write_status
from lorashard.config.run_config import RunConfig
from lorashard.runs.checkpoints import place_partial, publish

LIVE = "llama-8b-support"
SWEEP = "llama-8b-sweep"
OTHERS = ("llama-8b-r64", "llama-8b-lr-1e-3", "qwen3-4b-dpo")
_NUM_RANKS = 8
_STEP_S = 10.65
_TOKENS = 131_072  # of a step: 8 ranks, 4 rows of 4,096
_GIB = 2**30
# `lorashard plan --gpus 8 --gpu_type rtx4090 --max_length 4096 --per_device_train_batch_size 4 --json` of an 8B
_PLAN = Path(__file__).parent / "shown_plan.json"
_PROMPTS = {
    "Our invoice lists a seat that we canceled in May. Can you correct it?": (
        "I have credited the seat from May 14 onward; the corrected invoice is in your billing folder.",
        "Sorry about that. Send a mail to billing.",
    ),
    "How do I move a project to another team?": (
        "Open Settings, then Transfer, and choose the team. Its owner confirms it by mail; links stay as they are.",
        "You can move it in the settings.",
    ),
}


@contextmanager
def shown_runs(root: Path) -> Iterator[None]:
    """Make the runs; while the body runs, a process owns the first, which is then shown as running."""
    now_s = time.time()
    live = _make(root, LIVE, now_s, 1000, 1563, "train", 0.62)
    done = _make(root, OTHERS[0], now_s - 86_400, 1000, 1000, "done", 0.58, lora_r=64, lora_alpha=128)
    _make(root, OTHERS[1], now_s - 90_000, 212, 1563, "failed", 1.9, learning_rate=1e-3)
    dpo: dict[str, Any] = {"method": "dpo", "model_name_or_path": "Qwen/Qwen3-4B", "dataset": "datasets/pairs.jsonl"}
    _make_sweep(root, now_s - 300_000)
    _make(root, OTHERS[2], now_s - 200_000, 480, 900, "stopped", 0.41, **dpo)
    for folder in (live, done):
        (folder / "adapter_config.json").write_text(json.dumps({"r": 16, "peft_type": "LORA"}))
        (folder / "adapter_model.safetensors").write_bytes(b"")
        for step in (750, 1000):
            checkpoint = folder / f"checkpoint-{step}"
            partial = place_partial(checkpoint)
            partial.mkdir()
            (partial / "adapter_model.safetensors").write_bytes(bytes(84_000))
            publish(checkpoint, {"step": step})
    with owned(live, since_s=now_s - 1000 * _STEP_S):
        yield


def write_shown_model(folder: Path) -> None:
    """Write an 8B of zeros that takes no disk, with the demo's tokenizer: enough for a plan and a preview."""
    import torch  # for pictures alone: the tests of pages do without
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128_256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(kind | sizes | heads | {"tie_word_embeddings": False}))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    header, end = {}, 0
    for name, weight in model.state_dict().items():
        begin, end = end, end + 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + end)  # a hole, which takes no disk
    for path in [*(DEMO / "base").glob("tokenizer*"), DEMO / "base/chat_template.jinja"]:
        shutil.copy(path, folder)


def _make_sweep(root: Path, end_s: float) -> None:
    """Write a sweep that has ended: two of its jobs were halved."""
    folder = _make(root, SWEEP, end_s, 480, 480, "done", 0.7)
    (folder / "metrics.jsonl").unlink()
    entries = []
    for rank, rate, floor in ((8, 1e-4, 0.71), (8, 3e-4, 0.66), (32, 1e-4, 0.64), (32, 3e-4, 0.59)):
        options, is_kept = {"lora_r": rank, "learning_rate": rate}, floor < 0.65
        name = f"lora_r-{rank}_learning_rate-{rate:g}"
        steps, phase = (480, "done") if is_kept else (250, "stopped")
        _make(folder, name, end_s, steps, 480, phase, floor, **options)
        entry = {"name": name, "options": options, "state": "done" if is_kept else "halved", "step": steps}
        why = "" if is_kept else "its eval_loss was among the worst half at step 250"
        entries.append(json.dumps(entry | {"max_steps": 480, "value": round(floor + 0.06, 4), "why": why}))
    (folder / "sweep.json").write_text('{"metric": "eval_loss", "jobs": [\n' + ",\n".join(entries) + "\n]}")


def _make(
    root: Path, name: str, end_s: float, steps: int, max_steps: int, phase: str, floor: float, **options: Any
) -> Path:
    """Write a run's folder.

    Args:
        end_s: when it wrote last.
        floor: where its loss goes to.
        options: that differ from those of the first.
    """
    folder = root / name
    chance = random.Random(name)
    config = yaml.safe_load(RunConfig.model_construct(method="sft", trainer={}).to_yaml())
    config |= {
        "model_name_or_path": "meta-llama/Llama-3.1-8B", "dataset": "datasets/support.jsonl", "gpus": _NUM_RANKS,
        "eval_dataset": "datasets/support-test.jsonl", "dtype": "bfloat16", "max_length": 4096, "save_steps": 250,
        "per_device_train_batch_size": 4, "learning_rate": 2e-4, "num_train_epochs": 1, "output_dir": f"runs/{name}",
        "warmup_steps": 50,
    }  # fmt: skip
    config |= options
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "plan.json").write_text(_PLAN.read_text())
    begin_s = end_s - _STEP_S * steps
    is_bad = phase == "failed"
    lines: list[dict[str, Any]] = []
    for step in range(5, steps + 1, 5):
        loss = floor + 1.5 * math.exp(-step / 140) + chance.gauss(0, 0.045)
        loss += 0.02 * (step - 150) ** 1.1 if is_bad and step > 150 else 0
        rate = config["learning_rate"] * min(step / 50, 0.5 + 0.5 * math.cos(math.pi * step / max_steps))
        at_s = begin_s + _STEP_S * step
        norm = 0.35 + 0.9 * math.exp(-step / 90) + abs(chance.gauss(0, 0.06)) + (0.4 * loss if is_bad else 0)
        more = {"num_tokens": _TOKENS * step, "tokens_per_s": 12_300 + chance.gauss(0, 90), "epoch": step / max_steps}
        line = {"step": step, "time": at_s, "loss": round(loss, 4), "grad_norm": round(norm, 4)}
        lines.append(line | more | {"learning_rate": rate})
        if step % 250 == 0:
            lines.append(
                {"step": step, "time": at_s, "eval_loss": round(floor + 0.06 + 1.5 * math.exp(-step / 140), 4)}
            )
    write_lines(folder / "metrics.jsonl", lines)
    os.utime(folder / "metrics.jsonl", (end_s, end_s))
    for rank in range(_NUM_RANKS):
        write_lines(folder / f"ranks/rank_{rank}.jsonl", _tell(rank, steps, begin_s, chance))
        write_lines(folder / f"logs/rank_{rank}.log", [f"rank {rank}: 8.03 B parameters, sharded over 8 ranks"])
    samples = [
        {"step": step, "prompt": prompt, "completion": answers[step < 500]}
        for step in range(250, steps + 1, 250)
        for prompt, answers in _PROMPTS.items()
    ]
    write_lines(folder / "samples.jsonl", samples)
    error = "the loss of step 213 is NaN, in rows 1,702 and 1,703 of datasets/support.jsonl" if is_bad else None
    error = f"stopped by SIGUSR1 at step {steps}" if phase == "stopped" else error
    ended = {"phase": phase, "step": steps, "max_steps": max_steps, "world_size": _NUM_RANKS, "error": error}
    # Of a run that lives: said after its owner's begin, which is in a moment.
    write_status(folder, ended | {"begin_s": begin_s, "time": end_s + (60 if phase == "train" else 0)})
    return folder


def _tell(rank: int, steps: int, begin_s: float, chance: random.Random) -> list[dict[str, Any]]:
    """Return a rank's lines: the sixth is a little slow, so it waits less than the others, and the first holds more."""
    lines = []
    peak = (18.6 + 0.35 * (rank == 0) + chance.uniform(0, 0.25)) * _GIB
    for step in range(5, steps + 1, 5):
        wait_s = step * _STEP_S * (0.004 if rank == 5 else 0.031 + 0.002 * (rank % 3))
        memory = peak - chance.uniform(0.1, 0.9) * _GIB
        heat = {"utilization_percent": chance.randint(95, 99), "temperature_c": 64 + rank % 4 + 5 * (rank == 5)}
        bytes_ = {"device_used_bytes": int(memory), "device_peak_bytes": int(peak), "device_total_bytes": 24 * _GIB}
        lines.append({"step": step, "time": begin_s + step * _STEP_S, "wait_s": round(wait_s, 3)} | heat | bytes_)
    return lines
