"""`lorashard finetune` as a process, on a tiny model and a few rows of questions and answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from helpers import warm
from helpers.tiny import build_base

LORASHARD = [str(Path(sys.executable).with_name("lorashard"))]
MODULE = ["-m", "lorashard"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
ACCELERATE = [
    sys.executable,
    "-m",
    "accelerate.commands.accelerate_cli",
    "launch",
    "--multi_gpu",
    "--num_processes",
    "2",
]
STEPS = 6


def build_task(folder: Path, num_layers: int = 3) -> Path:
    """Fill a folder with a tiny model, its tokenizer, and rows of questions and answers."""
    rows = [{"question": f"what is {a} and {b}", "answer": f"it is {a + b}"} for a in range(12) for b in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::20]))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator((str(row) for row in rows), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "model")
    build_base("llama-tied", num_hidden_layers=num_layers, vocab_size=len(tokenizer), eos_token_id=2).save_pretrained(
        folder / "model"
    )
    return folder


def make_options(task: Path, out: str, **options) -> list[str]:
    values = {
        "model": task / "model",
        "dataset": task / "rows.jsonl",
        "output_dir": task / out,
        "dtype": "float32",
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "lora_dropout": 0.0,
        "save_strategy": "no",
        "placement": "shard",
    }
    return [word for key, value in (values | options).items() for word in (f"--{key}", str(value))]


def run(
    command: list[str],
    task: Path,
    timeout_s: float = 110,
    is_real: bool = False,
    folder: Path | None = None,
    lines: str = "",
    **environment: str,
) -> subprocess.CompletedProcess:
    """Run a command.

    Args:
        is_real: where the start of its interpreters is part of what is tested.
        folder: to run it in.
        lines: its input.
    """
    env = os.environ | {"HF_HOME": str(task / "hf")} | environment
    start = subprocess.run if is_real else warm.run
    return start(command, env=env, cwd=folder, input=lines, capture_output=True, text=True, timeout=timeout_s)


def train(task: Path, out: str, **options) -> list[float]:
    """Run the command line and return the losses of its steps."""
    result = run([*LORASHARD, "finetune", *make_options(task, out, **options)], task)
    assert result.returncode == 0, result.stdout + result.stderr
    return list(read_losses(task / out).values())


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step; each is there once, in order."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), "a step is there twice, or late"
    return {line["step"]: line["loss"] for line in lines}
