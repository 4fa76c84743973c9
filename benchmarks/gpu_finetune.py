"""`lorashard finetune` as a person runs it, and TRL's trainer with plain PEFT and the same arguments beside it.

An adapter in fp32, autocast, and the loss of TRL's head; each step is timed from one logged line to the next.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import run_process, summarize
from random_base import LORA_R, Shape, name_word

WARMUP_STEPS = 2


@dataclass(frozen=True)
class Run:
    """A run, by the options that it has beside those of all runs.

    Attributes:
        plain: of a run of `lorashard finetune`, the one of TRL's trainer that it is compared with.
    """

    title: str
    options: dict[str, Any] = field(default_factory=dict)
    plain: str | None = None


# Those first that tell most: a GPU may be at hand for minutes.
RUNS = {
    "finetune": Run("finetune, `replicate`", {"placement": "replicate"}, "trl"),
    "finetune_auto": Run(
        "finetune, `replicate`, `activation_checkpointing_layers: auto`",
        {"placement": "replicate", "activation_checkpointing_layers": "auto"},
        "trl_saving",
    ),
    "finetune_fused": Run(
        "finetune, `replicate`, `activation_checkpointing_layers: auto`, `numerics: fused`",
        {"placement": "replicate", "activation_checkpointing_layers": "auto", "numerics": "fused"},
        "trl_saving",
    ),
    "trl": Run("TRL and plain PEFT"),
    "finetune_nf4": Run("finetune, `replicate`, nf4", {"placement": "replicate", "quantization": "nf4"}, "trl_nf4"),
    "finetune_host": Run("finetune, `host`", {"placement": "host"}, "trl"),
    "finetune_file": Run("finetune, `file`", {"placement": "file"}, "trl"),
    "trl_saving": Run("TRL and plain PEFT, no activation checkpointing", {"activation_checkpointing": False}),
    "trl_nf4": Run("TRL and plain PEFT, bitsandbytes nf4", {"quantization": "nf4"}),
}


def choose_batch(shape: Shape) -> tuple[int, int]:
    """Return the rows and tokens of a row that runs train on."""
    return shape.batches[-1]


def make_words(name: str, shape: Shape, base: str, folder: Path, steps: int, device: str) -> list[str]:
    """Return the command line of a run, whose dataset is written into `folder`: no token of it is padding."""
    rows, tokens = choose_batch(shape)
    num_steps = WARMUP_STEPS + steps
    dataset = folder / "rows.jsonl"
    write_rows(dataset, shape.vocab, num_steps * rows, tokens)
    options = {
        "model_name_or_path": base,
        "dataset": dataset,
        "output_dir": folder / "run",
        "cpu" if device == "cpu" else "gpus": 1,
        "dtype": "bfloat16",
        "lora_r": LORA_R,
        "lora_alpha": 2 * LORA_R,
        "max_steps": num_steps,
        "max_length": tokens,
        "per_device_train_batch_size": rows,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return [word for key, value in (options | RUNS[name].options).items() for word in (f"--{key}", str(value))]


def write_rows(path: Path, vocab: int, count: int, tokens: int) -> None:
    """Write `count` rows of `tokens` random words, each of which is one token."""
    generator = random.Random(0)
    texts = (" ".join(name_word(generator.randrange(vocab)) for _ in range(tokens)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run_finetune(words: Sequence[str], folder: Path, shape: Shape, device: str, most_s: float) -> dict[str, Any]:
    """Run `lorashard finetune` and return what its folder tells: steps, memory, and what was predicted of both."""
    error = run_process([sys.executable, "-m", "lorashard", "finetune", *words], 1, device, most_s)
    rows, tokens = choose_batch(shape)
    try:
        found: dict[str, Any] = {"batches": {str(rows * tokens): read_run(folder / "run", rows * tokens)}}
    except (OSError, ValueError, LookupError) as problem:
        found, error = {}, error or f"its folder cannot be read: {problem}"
    return found if error is None else found | {"error": explain_failure(folder / "run", error)}


def explain_failure(folder: Path, error: str) -> str:
    """Return what a run says of its end in place of `error`, unless somebody else ended it."""
    status = folder / "status.json"
    failure = json.loads(status.read_text()).get("failure") if status.exists() else None
    if failure is None or failure["cause"] == "stop":
        return error
    return f"{failure['cause']}: {failure['message']}".splitlines()[0][:300]


def read_run(folder: Path, num_tokens: int) -> dict[str, Any]:
    """Return what a run's folder tells of its steps of `num_tokens` tokens each.

    Raises:
        OSError, ValueError, LookupError: it did not come to its last step.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    own: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, (folder / "ranks" / "rank_0.jsonl").read_text().splitlines()):
        own.setdefault(line["step"], line)  # a later line of the last step counts the saving of the adapter too
    found = describe_steps([line["time"] for line in lines], [line["loss"] for line in lines], num_tokens)
    first, last = own[lines[WARMUP_STEPS - 1]["step"]], own[lines[-1]["step"]]
    num_steps = len(lines) - WARMUP_STEPS
    copied_bytes = (last["copied_bytes"] - first["copied_bytes"]) / num_steps
    plan = json.loads((folder / "plan.json").read_text())
    row = plan["rows"][plan["chosen"]]
    return found | {
        "exposed_wait_s": (last["wait_s"] - first["wait_s"]) / num_steps,
        "copied_bytes_per_step": copied_bytes,
        "copied_bytes_per_s": copied_bytes / found["step_s"]["median"],
        "peak_bytes": last.get("device_peak_bytes"),
        "placement": row["placement"],
        "predicted": {"peak_bytes": row["peak_bytes"], "tokens_per_s": row["tokens_per_s"], "notes": plan["notes"]},
    }


def describe_steps(times: Sequence[float], losses: Sequence[float], num_tokens: int) -> dict[str, Any]:
    """Return what the times at which steps ended tell of those after the warm-up.

    Raises:
        ValueError: there is none.
    """
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)][WARMUP_STEPS - 1 :]
    if not seconds:
        raise ValueError(f"{len(times)} steps were done, of which {WARMUP_STEPS} warm up")
    return {
        "step_s": summarize(seconds) | {"all": seconds},
        "tokens_per_s": num_tokens / statistics.median(seconds),
        "losses": list(losses),
    }


def measure_trl(job: dict[str, Any], found: dict[str, Any], save: Callable[[], None]) -> None:
    """Train as TRL and PEFT do by themselves, with the arguments that `lorashard finetune` gives to TRL."""
    import time

    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback, set_seed
    from trl import SFTTrainer

    from lorashard.config.run_config import RunConfig
    from lorashard.data.prepare import prepare
    from lorashard.data.tokenizer import load_tokenizer
    from lorashard.model.loftq import make_lora
    from lorashard.training.arguments import build_arguments

    config = RunConfig.resolve(None, job["words"])
    is_cuda = job["device"] == "cuda"
    arguments = build_arguments(config, use_cpu=not is_cuda)
    tokenizer = load_tokenizer(**config.tokenizer_options())
    prepared = prepare(config.data_options(), tokenizer)
    set_seed(arguments.seed)
    options: dict[str, Any] = {"device_map": {"": 0}} if is_cuda else {}
    if config.resolve_quantization() is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    base = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.bfloat16, **options)
    base.config.use_cache = False
    model = get_peft_model(base, make_lora(config.lora_options()))
    times: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                times.append(time.time())
                losses.append(logs["loss"])

    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=prepared.train, processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    num_tokens = config.max_length * arguments.per_device_train_batch_size
    peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else None
    found["batches"] = {str(num_tokens): describe_steps(times, losses, num_tokens) | {"peak_bytes": peak_bytes}}
