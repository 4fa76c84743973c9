"""What is said of a run before its start: steps as transformers and TRL count them, seconds from the plan."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from accelerate.data_loader import prepare_data_loader
from helpers.paths import ROOT
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from trl.trainer.utils import RepeatSampler

from lorashard.cli import main
from lorashard.config.run_config import RunConfig
from lorashard.data.survey import Survey
from lorashard.planning.estimate import count_steps, estimate, expect_longest
from lorashard.planning.estimate_words import list_figures, render_estimate
from lorashard.planning.hardware import HardwareOptions
from lorashard.planning.run_plan import forecast

ON_GPU = HardwareOptions(gpu_type="l4")


def make_config(method: str = "sft", trainer: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    rewards = {"reward_funcs": "think_format_reward"} if method == "grpo" else {}
    given = {"model": str(ROOT / "examples/demo/base"), "dataset": "d", "output_dir": "o"} | rewards | options
    return RunConfig(method=method, **given, trainer=trainer or {})


def count_by_trainer(loader: DataLoader, num_ranks: int, arguments: TrainingArguments) -> int:
    """Return the steps that transformers' Trainer would make on the first of some ranks; 0 where it raises."""
    prepared = prepare_data_loader(loader, num_processes=num_ranks, process_index=0, put_on_device=False)
    if not len(prepared):
        return 0
    answers = {"get_total_train_batch_size": 1, "get_sp_size": 1, "num_examples": 1}
    trainer: Any = SimpleNamespace(**{name: lambda *_, value=value: value for name, value in answers.items()})
    *_, max_steps = Trainer.set_initial_training_values(trainer, arguments, prepared)
    return max_steps


def test_steps_are_those_of_the_trainer():
    """Catches a step that is lost or added where examples, batches and ranks do not divide."""
    draw = random.Random(0)
    for _ in range(40):
        num_ranks, count, batch = draw.randint(1, 4), draw.randint(1, 60), draw.randint(1, 4)
        options = {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": draw.randint(1, 3),
            "num_train_epochs": draw.choice([1, 0.5, 3]),
            "dataloader_drop_last": draw.choice([True, False]),
            "max_steps": draw.choice([-1, -1, 7]),
        }
        arguments = TrainingArguments(output_dir="o", use_cpu=True, report_to=[], **options)
        loader = DataLoader(range(count), batch_size=batch, drop_last=options["dataloader_drop_last"])
        found = count_steps(make_config(trainer=options), count, num_ranks)[1]
        assert found == count_by_trainer(loader, num_ranks, arguments), (num_ranks, count, options)
    assert count_steps(make_config(trainer={"max_steps": 5}), None, 1) == (None, 5, None)
    batch = {"per_device_train_batch_size": 2}
    assert count_steps(make_config(trainer=batch, global_batch_size=8), 20, 2)[:2] == (3, 9)
    # Four ranks of which two share each sequence make the steps of two.
    shared = make_config(trainer=batch, global_batch_size=8, sequence_parallel_size=2)
    assert count_steps(shared, 20, 4, 2)[:2] == (3, 9)
    assert count_steps(make_config(trainer=batch), 20, 4, 2) == count_steps(make_config(trainer=batch), 20, 2)


def test_steps_of_grpo_are_those_of_its_trainer():
    """Catches steps without the repeated prompts, or with a group of them that is not full."""
    for count, num_ranks, options in itertools.product(
        (9, 40),
        (1, 2),
        ({}, {"steps_per_generation": 4}, {"generation_batch_size": 16, "num_iterations": 2, "num_generations": 4}),
    ):
        options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2} | options
        config_class = type("GRPOConfig", (trl.GRPOConfig,), {"world_size": num_ranks})
        arguments = config_class(output_dir="o", use_cpu=True, bf16=False, report_to=[], **options)
        num_prompts, repeat_count = (
            arguments.generation_batch_size // arguments.num_generations,
            arguments.num_iterations,
        )
        repeat_count *= arguments.steps_per_generation
        sampler = RepeatSampler(range(count), arguments.num_generations, num_prompts, repeat_count)
        loader = DataLoader(range(count), batch_size=4 * arguments.steps_per_generation, sampler=sampler)
        found = count_steps(make_config("grpo", options), count, num_ranks)[1]
        assert found == count_by_trainer(loader, num_ranks, arguments), (count, num_ranks, options)


def test_the_longest_of_a_step_is_expected():
    """Catches a step as long as the mean sequence, for whose longest all others and all ranks wait."""
    lengths = (3, 10, 4, 50)
    drawn = [max(longest) for longest in itertools.product(lengths, repeat=3)]
    assert expect_longest(lengths, 3) == pytest.approx(sum(drawn) / len(drawn))
    assert expect_longest(lengths, 1) == pytest.approx(sum(lengths) / 4)


def test_seconds_are_those_of_the_usual_length():
    """Catches the time of a run whose every sequence is as long as max_length, a range that does not hold it, and
    seconds where there are none to be had."""
    usual = Survey(90, 90, 9 * 90, 90, 90, True, (60,) * 90)
    options = {"gpus": 1, "activation_checkpointing": False, "trainer": {"num_train_epochs": 2}}
    long, short = make_config(max_length=512, **options), make_config(max_length=60, **options)
    plans = [forecast(config, ON_GPU)[0] for config in (long, short)]
    found = estimate(long, usual, plans[0], ON_GPU)
    assert found.step_s == plans[1].choice.step_s < plans[0].choice.step_s
    assert (found.num_steps, found.train_s) == (24, 24 * found.step_s)
    assert found.least_s < found.train_s < found.most_s and found.speeds == "listed"
    assert found.peak_bytes == plans[0].choice.peak_bytes  # which the longest sequence decides

    pairs = estimate(make_config("dpo", gpus=1, trainer={"max_length": 60}), usual, plans[1], ON_GPU)
    assert pairs.step_s > plans[1].choice.step_s  # the reference passes too
    assert pairs.most_s / pairs.least_s > found.most_s / found.least_s
    prompts = estimate(make_config("grpo", gpus=1), usual, plans[0], ON_GPU)
    assert (prompts.why_no_time, prompts.train_s) == ("generates", None) and prompts.num_steps
    full = estimate(long, usual, replace(plans[0], chosen=None), ON_GPU)
    assert (full.why_no_time, full.train_s) == ("nothing fits", None) and full.peak_bytes > 0

    figures = {figure.name: figure for figure in list_figures(asdict(found))}
    assert list(figures) == ["Examples", "Supervised tokens", "Steps", "Expected time", "Peak memory per rank"]
    assert (figures["Steps"].value, figures["Steps"].notes) == ("24", ("2 epochs of 12",))
    assert "unknown (no placement fits)" in render_estimate(asdict(full))
    unknown = replace(usual, num_examples=None, num_sequences=None, num_tokens=None, num_supervised_tokens=None)
    said = render_estimate(asdict(estimate(long, unknown, plans[0], ON_GPU)))
    assert "examples: over 90" in said and "steps: unknown" in said and "supervised" not in said


def test_a_plan_counts_the_examples_that_are_here(tmp_path, capsys):
    """Catches a plan that says less than the form does of the same run, and one that data keep from being made."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 is ", "completion": "2"}\n' * 20)
    words = ["plan", "--model", str(ROOT / "examples/demo/base"), "--gpus", "1", "--gpu_type", "l4"]
    words += ["--max_length", "64", "--activation_checkpointing", "false", "--dataset", str(rows)]
    assert main(words) == 0
    assert "examples: 20\n" in (said := capsys.readouterr().out) and "steps: 9 (3 epochs of 3)\n" in said
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "1 + 1 is equal to ", "completion": "2"}\n' * 8)
    jobs = [{"name": "a", "lora_r": 2}, {"name": "b", "dataset": str(long)}]
    assert main([*words, "--max_steps", "6", "--sweep", json.dumps({"jobs": jobs})]) == 0
    said = capsys.readouterr().out
    assert "examples: 8 (of job b; chosen as the longest of 2 datasets)\n" in said
    assert "steps: 6 (6 epochs of 1 for job b)\n" in said and "; if the examples of all jobs are as long)" in said
    rows.write_text("{}")
    assert main(words) == 0
    assert "note: the dataset is not counted: " in capsys.readouterr().out
