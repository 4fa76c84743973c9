"""`lorashard finetune --method ...` against TRL's own trainers on plain PEFT: step by step, and after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from datasets import load_dataset
from helpers import warm
from helpers.bases import write_small_base
from helpers.forked_ranks import run_ranks
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    set_seed,
)

from lorashard.config.methods import METHODS

CPU_BUDGET_S = 90  # 11 forked runs, and TRL alone

LORASHARD = [str(Path(sys.executable).with_name("lorashard"))]
STEPS, SAVE_STEPS = 4, 2
TRAINING = {
    "max_steps": STEPS,
    "save_steps": SAVE_STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "report_to": "none",
}
# DPO's rows are conversations, KTO's are unpaired by TRL, GRPO's KL term needs the reference.
OPTIONS = {
    "dpo": {"loss_type": ["sigmoid", "sft"]},
    "kto": {"beta": 0.2},
    "reward": {"center_rewards_coefficient": 0.01},
    "grpo": {"num_generations": 4, "max_completion_length": 12, "beta": 0.1, "learning_rate": 1e-4},
}
SCHEDULING = {"tokens_per_s", "step_time"}
REWARDS = """
def tens(completions, answer, **kwargs):
    return [completion.count(str(a)) + len(completion) / 20 for completion, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with rows for each method, and a reward function."""
    folder = tmp_path_factory.mktemp("task")
    write_small_base(folder / "base")
    pairs = [
        {"prompt": f"{a} plus {b} is ", "chosen": f"{a + b}", "rejected": f"{abs(a - b)}, or so"}
        for a in range(6)
        for b in range(6)
    ]
    chats = [
        {name: [{"role": "user" if name == "prompt" else "assistant", "content": text}] for name, text in pair.items()}
        for pair in pairs
    ]
    prompts = [{"prompt": pair["prompt"], "answer": int(pair["chosen"])} for pair in pairs]
    for method, rows in {"dpo": chats, "kto": pairs, "reward": pairs, "grpo": prompts}.items():
        (folder / f"{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # TRL finds margins in KTO's evaluation only where a batch holds completions of both kinds.
    judged = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    for method, rows in {"dpo": chats, "kto": judged, "reward": pairs}.items():
        (folder / f"{method}-eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny_rewards.py").write_text(REWARDS)
    return folder


def finetune(task: Path, method: str, out: str, **options) -> subprocess.CompletedProcess:
    """Run the command on two CPU ranks, in the task's folder."""
    rewards = {"reward_funcs": "tiny_rewards.tens"} if method == "grpo" else {}
    values = {
        "method": method,
        "model": "base",
        "dataset": f"{method}.jsonl",
        "output_dir": out,
        "cpu": 2,
        "dtype": "float32",
        "placement": "shard",
        "lora_r": 4,
    }
    values |= rewards | TRAINING | OPTIONS[method] | options
    words = []
    for name, value in values.items():
        words += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {k: v for k, v in os.environ.items() if k not in names} | {"HF_HOME": str(task / "hf")}
    return warm.run([*LORASHARD, "finetune", *words], cwd=task, env=env, capture_output=True, text=True)


def train_plainly(rank: int, task: Path, name: str) -> list[dict]:
    """Train with TRL on plain PEFT; rank 0 returns what was logged, and leaves the adapter in `task`."""
    method = METHODS[name]
    tokenizer = AutoTokenizer.from_pretrained(task / "base")
    arguments = getattr(trl, method.config_class)(
        output_dir=str(task / f"plain-{name}"),
        use_cpu=True,
        bf16=False,
        ddp_find_unused_parameters=False,
        **TRAINING | OPTIONS[name] | {"save_strategy": "no"},
    )
    set_seed(arguments.seed)
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type=method.task_type)
    if name == "reward":
        base = AutoModelForSequenceClassification.from_pretrained(task / "base", dtype=torch.float32, num_labels=1)
    else:
        base = AutoModelForCausalLM.from_pretrained(task / "base", dtype=torch.float32)
    model = get_peft_model(base, lora)
    rows = load_dataset("json", data_files=str(task / f"{name}.jsonl"), split="train", cache_dir=str(task / "cache"))
    rewards = {}
    if name == "grpo":
        space: dict = {}
        exec(REWARDS, space)
        rewards["reward_funcs"] = [space["tens"]]
    trainer = getattr(trl, method.trainer_class)(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, **rewards
    )
    trainer.train()
    if rank == 0:
        torch.save(get_peft_model_state_dict(model, save_embedding_layers=False), task / f"plain-{name}.pt")
    return trainer.state.log_history


def read_steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def find_different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    names = found.keys() | expected.keys()
    both = found.keys() & expected.keys()
    return sorted(names - {name for name in both if torch.equal(found[name], expected[name])})


@pytest.mark.parametrize(
    "method", [name if name == "dpo" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_a_method_trains_as_plain_trl_does(task, method):
    """Rows in another order or cut otherwise, a reference that is not the base, a head drawn from other numbers."""
    plain = [line for line in run_ranks(train_plainly, 2, task, method)[0] if "loss" in line]
    result = finetune(task, method, f"run-{method}")
    assert result.returncode == 0, result.stdout + result.stderr
    steps = read_steps(task / f"run-{method}")
    assert len(steps) == len(plain) == STEPS
    for found, expected in zip(steps, plain, strict=True):
        assert {name: found[name] for name in expected.keys() - SCHEDULING} == {
            name: value for name, value in expected.items() if name not in SCHEDULING
        }
    saved = load_file(task / f"run-{method}/adapter_model.safetensors")
    assert find_different(saved, torch.load(task / f"plain-{method}.pt")) == []
    assert not (task / f"run-{method}/ref").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", OPTIONS)
def test_a_resumed_run_ends_as_an_uninterrupted_one(task, method):
    """The reference adapter beside the trained one in a checkpoint, taken for it; random numbers that start anew."""
    if not (task / f"run-{method}").exists():
        assert finetune(task, method, f"run-{method}").returncode == 0
    checkpoint = f"run-{method}/checkpoint-{SAVE_STEPS}"
    result = finetune(task, method, f"resumed-{method}", resume_from_checkpoint=checkpoint)
    assert result.returncode == 0, result.stdout + result.stderr
    steps, whole = read_steps(task / f"resumed-{method}"), read_steps(task / f"run-{method}")
    assert [step["loss"] for step in steps] == [step["loss"] for step in whole[SAVE_STEPS:]]
    found, expected = (load_file(task / f"{run}-{method}/adapter_model.safetensors") for run in ("resumed", "run"))
    assert find_different(found, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, metric", [("dpo", "rewards/accuracies"), ("kto", "rewards/margins"), ("reward", "accuracy")]
)
def test_the_best_checkpoint_is_chosen_by_the_methods_own_metric(task, method, metric):
    """A metric that only SFT has, or the reference adapter loaded over the best one."""
    evaluation = {"eval_dataset": f"{method}-eval.jsonl", "max_eval_samples": 8, "per_device_eval_batch_size": 2}
    evaluation |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    result = finetune(task, method, f"best-{method}", metric_for_best_model=metric, **evaluation)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = task / f"best-{method}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line[f"eval_{metric}"] for line in lines if f"eval_{metric}" in line}
    best = max(found, key=found.__getitem__)
    saved, chosen = (load_file(path / "adapter_model.safetensors") for path in (folder, folder / f"checkpoint-{best}"))
    assert len(found) == STEPS and find_different(saved, chosen) == []
