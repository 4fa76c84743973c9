"""The examples that learn from preferences and rewards, each as with its trainer alone, under both launchers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import assert_same_run, run_example

import lorashard

STEPS = 4
OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": STEPS,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "report_to": "none",
}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}
ANSWERS = {"num_generations": 2, "max_completion_length": 16}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dpo": ("dpo", "accelerate", EVALUATION),
    "dpo, reference first": ("dpo", "torchrun", {"data": True, "precompute_ref_log_probs": True}),
    "kto": ("kto", "torchrun", EVALUATION),
    "kto, from pairs": ("kto", "accelerate", {"data": True}),
    "reward": ("reward", "accelerate", EVALUATION),
    "grpo": ("grpo", "torchrun", ANSWERS),
    "grpo, reference": ("grpo", "accelerate", ANSWERS | {"data": True, "beta": 0.1, "num_iterations": 2}),
}


def write_pairs(path: Path) -> Path:
    """Write texts of uneven lengths, as real data has them: a prompt, a chosen and a rejected answer."""
    rows = [
        {
            "prompt": f"Sam has {n} apples" + " and one more" * (n % 4) + ". How many are there?",
            "chosen": f" There are {n + n % 4}.",
            "rejected": " I do not know" + ", really" * (n % 5) + f" {n}.",
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_example_trains_as_without_lorashard(case: str, tmp_path: Path) -> None:
    """Catches another loss, norm, reward, evaluation or adapter: from a "ref" that is not the adapter's copy, a head
    made from other random numbers, or answers of ranks that wait for one another."""
    name, launcher, options = CASES[case]
    options = OPTIONS | options
    if "data" in options:
        options["data"] = write_pairs(tmp_path / "pairs.jsonl")
    plain = run_example(name, options, launcher, tmp_path, is_plain=True)
    sharded = run_example(name, options, launcher, tmp_path)
    assert_same_run(sharded, plain, STEPS)
    if name == "grpo":  # steps that go on with the answers of the step before say nothing of them
        said = [line for line in plain.steps if "completions/min_length" in line]
        lengths = [(line["completions/min_length"], line["completions/max_length"]) for line in said]
        assert any(shortest < longest for shortest, longest in lengths)
    if name == "reward":
        model = lorashard.load_adapter(sharded.folder)
        assert model.config.num_labels == 1 and model.get_base_model().score.weight.shape[0] == 1
