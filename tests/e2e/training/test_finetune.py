"""`lorashard finetune` as a person runs it: real processes, real files, the run folder they leave."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.cases import slow
from helpers.finetune import (
    ACCELERATE,
    LORASHARD,
    MODULE,
    STEPS,
    TORCHRUN,
    build_task,
    make_options,
    read_lines,
    read_losses,
    run,
    train,
)
from helpers.survival import is_same_adapter
from helpers.tiny import build_base
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CPU_BUDGET_S = 190  # two real starts of two ranks, and some 12 forked runs


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """The same task as elsewhere, on more layers than stay in the slots: each step gathers."""
    return build_task(tmp_path_factory.mktemp("task"), num_layers=6)


@pytest.fixture(scope="module")
def two_ranks(task) -> Path:
    evaluation = dict(eval_dataset=task / "eval.jsonl", eval_strategy="steps", eval_steps=3)
    train(task, "two_ranks", cpu=2, report_to="tensorboard", profile_steps="3-4", **evaluation)
    return task / "two_ranks"


def test_a_run_leaves_what_it_promises(task, two_ranks):
    """The UI and the scripts read these files; an empty or a wrapped adapter is what peers' users find in theirs."""
    losses = list(read_losses(two_ranks).values())
    assert len(losses) == STEPS and losses[-1] < losses[0]
    metrics = read_lines(two_ranks / "metrics.jsonl")
    assert all({"step", "learning_rate", "grad_norm", "tokens_per_s"} <= m.keys() for m in metrics if "loss" in m)
    assert [m["step"] for m in metrics if "eval_loss" in m] == [3, 6]
    status = json.loads((two_ranks / "status.json").read_text())
    assert (status["phase"], status["step"], status["world_size"], status["error"]) == ("done", STEPS, 2, None)
    for rank in (0, 1):
        line = read_lines(two_ranks / "ranks" / f"rank_{rank}.jsonl")[-1]
        assert line["bytes_at_rest"] < line["base_bytes"] * 0.55 and line["gathers"] > 0
    assert "logits equal" in (two_ranks / "logs" / "rank_0.log").read_text()
    assert (two_ranks / "config.yaml").exists() and (two_ranks / "tokenizer.json").exists()
    assert "torch" in json.loads((two_ranks / "versions.json").read_text())
    assert list(two_ranks.rglob("events.out.tfevents*")), "the tracker wrote nothing"
    assert not list(two_ranks.rglob("model*.safetensors")), "the base was written"
    adapter = load_file(two_ranks / "adapter_model.safetensors")
    assert all(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


def test_a_log_has_a_plain_line_for_each_logged_step(two_ranks):
    """Catches dicts, warnings and the carriage returns of bars in what a pipe or a log shows, and a step left out."""
    log = (two_ranks / "logs" / "rank_0.log").read_bytes().decode()
    assert not [noise for noise in ("\r", "{'", "Warning", "it/s") if noise in log]
    lines = [line.split() for line in log.splitlines() if line.startswith("step ")]
    steps = [line[1] for line in lines if {"loss", "lr", "tokens/s"} <= set(line)]
    assert steps == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert [line[1] for line in lines if line[2] == "evaluation"] == [f"3/{STEPS}", f"6/{STEPS}"]


@pytest.mark.slow
def test_what_is_left_to_auto_is_planned(task, two_ranks):
    """Ranks that choose apart hang; a choice that nobody sees cannot be judged; and it must not change a bit."""
    result = run([*LORASHARD, "finetune", *make_options(task, "auto", cpu=2, placement="auto")], task)
    assert result.returncode == 0, result.stdout + result.stderr
    plan = json.loads((task / "auto" / "plan.json").read_text())
    chosen = plan["rows"][plan["chosen"]]
    assert f"placement: {plan['reason']}" in result.stdout
    line = read_lines(task / "auto" / "ranks" / "rank_0.jsonl")[-1]
    assert line["bytes_at_rest"] + line["slot_bytes"] == chosen["rest_bytes"] + chosen["slot_bytes"]
    assert "memory: " in result.stdout
    assert is_same_adapter(task / "auto", two_ranks)


def test_profiled_steps_leave_traces_and_a_page(two_ranks):
    """A trace without the units' names cannot tell which gather is late; a page without a rank, which rank."""
    for rank in range(2):
        trace = json.loads((two_ranks / "profile" / f"rank_{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"unshard layers.3", "wait for layers.3", "gloo:broadcast"} <= names
    page = (two_ranks / "profile" / "summary.md").read_text().splitlines()
    assert page[0] == "# Steps 3 to 4"
    rows = [[float(cell) for cell in line.strip("|").split("|")] for line in page if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == [0, 1]
    for _, total_s, compute_s, exposed_s, *beside in rows:
        # Rounded to milliseconds: on a quiet machine a step may wait for less.
        assert total_s >= compute_s > 0 and abs(total_s - compute_s - exposed_s) < 0.002 and all(s > 0 for s in beside)


def test_the_adapter_loads_in_plain_peft(task, two_ranks):
    """Where the whole model fits: plain PEFT finds every tensor, and the adapter changes what the model says."""
    base = AutoModelForCausalLM.from_pretrained(task / "model")
    model = PeftModel.from_pretrained(base, two_ranks)
    saved = load_file(two_ranks / "adapter_model.safetensors")
    loaded = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[n], loaded[n]) for n in saved)
    ids = torch.tensor([[5, 6, 7]])
    adapted = model(input_ids=ids).logits
    with model.disable_adapter():
        assert not torch.allclose(model(input_ids=ids).logits, adapted)


@pytest.mark.parametrize(
    ("launcher", "ranks", "is_real"),
    [(TORCHRUN, {"cpu": 2}, False), slow(TORCHRUN, {"cpu": 2}, True), slow(ACCELERATE, {}, True)],
)
def test_torchrun_and_accelerate_launch_give_the_same_losses(task, two_ranks, launcher, ranks, is_real):
    """Ranks that train alone, or on the same rows, look healthy and give other losses.

    Where the launchers and their ranks are started, the run that they equal is forked: so forks are as good.
    """
    out = task / f"{launcher[2]}_{is_real}"
    command = [*launcher, *MODULE, "finetune", *make_options(task, out.name, **ranks)]
    result = run(command, task, 300, is_real=is_real, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr
    assert read_losses(out) == read_losses(two_ranks)
    assert is_same_adapter(out, two_ranks)
    assert json.loads((out / "status.json").read_text())["world_size"] == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lora_rr": "8"}, "lora_r"),
        ({"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"model": "nowhere/at/all"}, "nowhere/at/all"),
        ({"resume_from_checkpoint": "nowhere"}, "nowhere"),
        ({"gpus": 2}, "--cpu"),
        ({"output_dir": "HERE/two_ranks"}, "another run"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one case is about machines without GPUs")
def test_a_mistake_is_one_line_and_exit_code_2(task, two_ranks, options, message):
    """A traceback from three libraries deep tells a person nothing."""
    options = {key: str(value).replace("HERE", str(task)) for key, value in options.items()}
    ranks = {} if "gpus" in options else {"cpu": 2}
    result = run([*LORASHARD, "finetune", *make_options(task, "mistake", **ranks | options)], task)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and message in lines[0] and lines[0].startswith("lorashard: ")


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, slow({"lora_modules_to_save": "lm_head", "model": "HERE/untied"})]
)
def test_an_adapter_that_is_made_from_base_weights_is_read_back(task, options):
    """PEFT reads the base to make such an adapter, which is sharded by then: the check must not leave it out."""
    build_base("llama", num_hidden_layers=2, vocab_size=300, eos_token_id=2).save_pretrained(task / "untied")
    for file in (task / "model").glob("tokenizer*"):
        shutil.copy(file, task / "untied")
    options = {key: str(value).replace("HERE", str(task)) for key, value in options.items()}
    result = run(
        [*LORASHARD, "finetune", *make_options(task, next(iter(options)), cpu=2, max_steps=2, **options)], task
    )
    assert result.returncode == 0 and "logits equal" in result.stdout, result.stdout


@pytest.mark.slow
def test_an_adapter_that_learned_nothing_is_an_error(task):
    """A learning rate that is zero in float32 leaves lora_B at zero: the files are right and worthless."""
    options = make_options(task, "dead", cpu=2, learning_rate=1e-60, max_steps=2)
    result = run([*LORASHARD, "finetune", *options], task)
    assert result.returncode == 2 and "learned nothing" in result.stderr
    assert json.loads((task / "dead" / "status.json").read_text())["phase"] == "failed"


def test_a_mistake_costs_the_run_that_was_to_be_overwritten_nothing(task, two_ranks):
    """Clearing the folder before the new run is known to be able to start loses the old adapter for a typing error."""
    shutil.copytree(two_ranks, task / "kept")
    (task / "broken.jsonl").write_text('{"question": "what')
    options = make_options(task, "kept", cpu=1, dataset=task / "broken.jsonl")
    result = run([*LORASHARD, "finetune", *options, "--overwrite_output_dir"], task)
    assert result.returncode == 2 and "broken.jsonl" in result.stderr
    assert is_same_adapter(task / "kept", two_ranks) and len(read_losses(task / "kept")) == STEPS


@pytest.mark.slow
def test_compiled_layers_train_the_same_adapter(task, two_ranks):
    """Catches the switch handed to the trainer, and a compiled layer that computes something else or renames keys."""
    options = make_options(task, "compiled", cpu=2, torch_compile="true", torch_compile_backend="aot_eager")
    result = run([*LORASHARD, "finetune", *options], task, timeout_s=290)
    assert result.returncode == 0, result.stdout + result.stderr
    assert read_losses(task / "compiled") == read_losses(two_ranks)
    assert is_same_adapter(task / "compiled", two_ranks)


@pytest.mark.slow
def test_an_attention_that_is_not_there_is_a_mistake_in_the_options(task):
    """Catches a traceback on each rank, and the exit code of a crash."""
    options = make_options(task, "attention", cpu=2, attn_implementation="fastest")
    result = run([*LORASHARD, "finetune", *options], task)
    assert result.returncode == 2, result.stderr
    assert "attn_implementation: fastest: " in result.stderr
    assert "Traceback" not in result.stderr
