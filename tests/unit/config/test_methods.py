"""Methods beside sft: their options are TRL's, their rows are checked, and mistakes are told before any rank starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from helpers.data import CHATML, make_tokenizer, write_jsonl
from helpers.paths import ROOT

from lorashard.cli import main
from lorashard.config.data_options import DataOptions
from lorashard.config.methods import METHODS
from lorashard.config.options import read_trainer_options
from lorashard.config.run_config import RunConfig, read_known_options
from lorashard.data.prepare import prepare
from lorashard.errors import ConfigError, DataError
from lorashard.launch.checks import check_data
from lorashard.training.arguments import build_arguments
from lorashard.training.rewards import load_rewards

OTHERS = [name for name in METHODS if name != "sft"]
BASE = ROOT / "examples/demo/base"
PAIR = {"prompt": "1 + 1 is ", "chosen": "2", "rejected": "3"}
CHAT = {name: [{"role": "user" if name == "prompt" else "assistant", "content": PAIR[name]}] for name in PAIR}
UNPAIRED = {"prompt": "1 + 1 is ", "completion": "2", "label": True}
ROWS = {"dpo": PAIR, "kto": UNPAIRED, "reward": PAIR, "grpo": {"prompt": "1 + 1 is ", "answer": 2}}


def make_config(method: str, **options) -> RunConfig:
    rewards = {"reward_funcs": "think_format_reward"} if method == "grpo" else {}
    return RunConfig(method=method, model="m", dataset="d", output_dir="o", **rewards | options)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_options_of_its_class(name):
    """An option that reading the source misses; a table that names what the class does not have."""
    method = METHODS[name]
    fields = {field.name: field for field in dataclasses.fields(getattr(trl, method.config_class)) if field.init}
    assert set(read_trainer_options(method.config_class)) == set(fields)
    assert set(method.pinned) | set(method.refused) <= set(fields)
    assert all(pinned == fields[option].default for option, (pinned, _) in method.pinned.items())
    assert method.learning_rate == pytest.approx(10 * fields["learning_rate"].default)
    assert method.absent_options <= set(RunConfig.model_fields)
    assert hasattr(trl, method.trainer_class)


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_class_takes_what_is_built_for_it(name, tmp_path):
    """A default that its class refuses, or an own option that is lost on its way to it."""
    config = make_config(name, cpu=1, dtype="float32", max_steps=3, seed=5, activation_checkpointing=False)
    arguments = build_arguments(config, use_cpu=True)
    assert type(arguments) is getattr(trl, METHODS[name].config_class)
    assert (arguments.max_steps, arguments.seed, arguments.gradient_checkpointing) == (3, 5, False)
    assert arguments.learning_rate == METHODS[name].learning_rate


def test_trls_own_data_options_reach_it():
    """`max_length` has the name of an option that sft's rows are prepared with, and DPO's trainer must be told it."""
    config = make_config("dpo", max_length=77, truncation_mode="keep_end", cpu=1, dtype="float32")
    arguments = build_arguments(config, use_cpu=True)
    assert (arguments.max_length, arguments.truncation_mode) == (77, "keep_end")
    shuffled = make_config("grpo", shuffle_dataset=False, cpu=1, dtype="float32")
    assert build_arguments(shuffled, use_cpu=True).shuffle_dataset is False
    assert build_arguments(make_config("grpo", cpu=1, dtype="float32"), use_cpu=True).shuffle_dataset is True


@pytest.mark.parametrize("name", METHODS)
def test_a_written_configuration_is_read_back(name, tmp_path):
    """An option that the method does not have, written out with its default and refused by the next run."""
    config = make_config(name, num_train_epochs=2)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again = RunConfig.resolve(tmp_path / "config.yaml", [])
    assert again.to_yaml() == config.to_yaml() and again.method == name


def test_other_tools_names_of_the_method_and_own_rewards_names_of_metrics():
    """LLaMA-Factory's `stage: rm` and axolotl's `rl: dpo`; and a metric that GRPO names after the user's function."""
    assert RunConfig(stage="rm", model="m", dataset="d").method == "reward"
    assert RunConfig(rl="dpo", model="m", dataset="d", beta=0.2).trainer == {"beta": 0.2}
    config = make_config("grpo", metric_for_best_model="eval_rewards/mine/mean", eval_dataset="e")
    assert config.trainer["metric_for_best_model"] == "eval_rewards/mine/mean"


@pytest.mark.parametrize("num_ranks, is_right", [(2, True), (1, False)])
def test_arguments_are_checked_for_the_ranks_that_will_run(num_ranks, is_right):
    """GRPO's batch over all ranks must hold whole groups, which validate, a single process, could not tell."""
    config = make_config("grpo", cpu=2, dtype="float32", per_device_train_batch_size=4, num_generations=8)
    if is_right:
        assert build_arguments(config, True, num_ranks).generation_batch_size == 8
        return
    with pytest.raises(ConfigError, match="GRPOConfig: .*generation_batch_size"):
        build_arguments(config, True, num_ranks)


@pytest.mark.parametrize(
    "method, row",
    [*ROWS.items(), ("dpo", CHAT), ("kto", PAIR), ("reward", {"chosen": "a b", "rejected": "a c", "margin": 0.5})]
    + [("grpo", {"prompt": CHAT["prompt"], "answer": [1, 2]})],
)
def test_rows_reach_the_trainer_as_they_are(tmp_path, method, row):
    """A column lost, a type changed, or a second pass over the rows that gives others."""
    rows = [row] * 300
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    prepared = prepare(DataOptions(dataset=str(path)), make_tokenizer(CHATML), tmp_path / "cache", METHODS[method])
    assert prepared.train.to_list() == Dataset.from_list(rows).to_list()
    assert prepared.report.rows_kept == 300 and prepared.report.is_chat == isinstance(row.get("prompt"), list)
    assert f"TRL's {METHODS[method].trainer_class} tokenizes them" in prepared.report.summary()
    assert (prepared.report.longest_tokens > 0) == (method == "grpo")


def test_columns_that_the_trainer_does_not_read_are_left_out(tmp_path):
    """A stray column with values of many types would stop the run; GRPO's go to the reward functions."""
    rows = [PAIR | {"score": 1}, PAIR | {"score": "high"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = DataOptions(dataset=str(path))
    prepared = prepare(options, make_tokenizer(), tmp_path / "cache", METHODS["dpo"])
    assert prepared.train.column_names == ["prompt", "chosen", "rejected"]
    with pytest.raises(DataError, match="different types"):
        prepare(options, make_tokenizer(), tmp_path / "cache", METHODS["grpo"])


def test_a_column_of_late_values_has_their_type(tmp_path):
    """Types told from the first rows alone: nulls, and whole numbers where fractions follow."""
    rows = [{"prompt": "a", "answer": 1, "hint": None}] * 300 + [{"prompt": "b", "answer": 0.5, "hint": "c"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    prepared = prepare(DataOptions(dataset=str(path)), make_tokenizer(), tmp_path / "cache", METHODS["grpo"])
    assert prepared.train[300] == rows[300] and prepared.train[0] == rows[0]


@pytest.mark.parametrize(
    "method, row, message",
    [
        ("dpo", {"prompt": "a", "chosen": "b"}, "prompt + chosen + rejected, or chosen + rejected .*dpo"),
        ("kto", {"prompt": "a", "completion": "b"}, "prompt + completion + label, .*kto"),
        ("grpo", {"question": "a"}, "prompt .*grpo.* found question"),
        ("dpo", PAIR | {"image": "x"}, "text .*'image'"),
        ("dpo", PAIR | {"rejected": None}, r"line 2: `rejected` is null"),
        ("dpo", PAIR | {"chosen": ""}, r"line 2: `chosen` is empty"),
        ("dpo", PAIR | {"chosen": 5}, r"line 2: `chosen` .*found a number"),
        ("kto", UNPAIRED | {"label": "yes"}, r"line 2: `label` .*found a string"),
        ("kto", UNPAIRED | {"label": 1}, r"line 2: `label` .*found a number"),
        ("reward", PAIR | {"margin": "big"}, r"line 2: `margin` .*found a string"),
        ("dpo", CHAT | {"chosen": "b"}, r"line 2: `chosen` .*found a string"),
        ("dpo", CHAT | {"chosen": [{"role": "bot", "content": "x"}]}, r"`chosen` message 1 .*role 'bot'"),
        ("dpo", CHAT | {"chosen": [{"role": "user"}]}, r"`chosen` message 1 has no content"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named(tmp_path, method, row, message):
    """TRL fails on it within the ranks, in a library's words, or trains on something else."""
    good = CHAT if isinstance(row.get("prompt"), list) else ROWS[method]
    is_bad_row = "line 2" in message or "message 1" in message
    path = write_jsonl(tmp_path / "rows.jsonl", [good, row] if is_bad_row else [row])
    tokenizer, options = make_tokenizer(CHATML), DataOptions(dataset=str(path))
    with pytest.raises(DataError, match=message.replace("+", r"\+")):
        prepare(options, tokenizer, tmp_path / "cache", METHODS[method])
    if is_bad_row:
        skipping = options.model_copy(update={"on_bad_row": "skip"})
        prepared = prepare(skipping, tokenizer, tmp_path / "cache", METHODS[method])
        assert prepared.train.to_list() == [good] and prepared.report.num_skipped == 1


@pytest.mark.parametrize("pair", [PAIR, CHAT])
def test_an_implicit_prompt_is_what_both_begin_with(tmp_path, pair):
    """TRL takes the first message of an empty prompt in the ranks; a reward model needs no prompt."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{name: pair[name] for name in ("chosen", "rejected")}])
    options, tokenizer = DataOptions(dataset=str(path)), make_tokenizer(CHATML)
    for name in ("dpo", "kto"):
        with pytest.raises(DataError, match="line 1: `chosen` and `rejected` "):
            prepare(options, tokenizer, tmp_path / "cache", METHODS[name])
    assert len(prepare(options, tokenizer, tmp_path / "cache", METHODS["reward"]).train) == 1
    whole = {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")}
    path = write_jsonl(tmp_path / "whole.jsonl", [whole])
    prepared = prepare(DataOptions(dataset=str(path)), tokenizer, tmp_path / "cache", METHODS["dpo"])
    assert prepared.train[0] == whole


def test_methods_do_not_share_a_prepared_dataset(tmp_path):
    """Rows that were prepared for DPO, handed to SFT from the cache."""
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "text": "d", "completion": "e", "label": True}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    options = DataOptions(dataset=str(path))
    found = {
        name: prepare(options, make_tokenizer(), tmp_path / "cache", METHODS[name]).train.column_names
        for name in METHODS
    }
    assert found["sft"] == ["input_ids", "labels"] and found["dpo"] == found["reward"] == list(PAIR)
    assert found["kto"] == list(UNPAIRED) and found["grpo"] == list(row)


@pytest.mark.parametrize("method, row", ROWS.items())
def test_validate_checks_a_run_of_the_method(tmp_path, method, row, capsys, monkeypatch):
    """A run that validate finds right and finetune refuses, or the reverse."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    path = write_jsonl(tmp_path / "rows.jsonl", [row] * 4)
    words = ["validate", "--method", method, "--model", str(BASE), "--dataset", str(path), "--cpu", "1"]
    words += ["--output_dir", str(tmp_path / "out"), "--dtype", "float32"]
    words += ["--activation_checkpointing_layers", "all"]  # one plan less to make
    if method == "grpo":
        words += ["--reward_funcs", "think_format_reward"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"4 rows; {', '.join(METHODS[method].formats[0])} (texts)" in said
    assert f"steps: {'12 (3 epochs of 4)' if method == 'grpo' else '3 (3 epochs of 1)'}" in said
    assert ("expected time: unknown" in said) == (method == "grpo")
    Path(path).write_text(json.dumps({"text": "a"}))
    assert main(words) == 2
    assert f"for {method}, found text; these are plain texts: choose method sft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "meant", "others"),
    [
        ("prompt chosen rejected", "dpo", "kto reward grpo"),
        ("chosen rejected", "dpo", "kto reward"),
        ("prompt completion label", "kto", "sft grpo"),
        ("prompt completion", "sft", "grpo"),
        ("messages", "sft", ""),
        ("conversations system", "sft", ""),
        ("instruction input output", "sft", ""),
        ("question answer", "sft", ""),
        ("prompt answer", "grpo", ""),
        ("text", "sft", ""),
        ("prompt chosen", "", "grpo"),
        ("story", "", ""),
    ],
)
def test_columns_of_another_method_name_it(tmp_path, columns, meant, others):
    """Catches preferences that sft refuses without a word of dpo, for every pair of a method and columns; and a look at
    a file before the ranks start that refuses what they would train on, or lets pass what they would refuse."""
    row = dict.fromkeys(columns.split(), "x")
    path, odd = (write_jsonl(tmp_path / name, [*first, row]) for name, first in (("a.jsonl", []), ("b.jsonl", ["{"])))
    for name, method in METHODS.items():
        is_right = name in (meant, *others.split())
        assert method.takes(list(row)) == is_right
        config = make_config(name).model_copy(update={"dataset": path})
        check_data([config.model_copy(update={"dataset": odd})])  # told with its line, later
        if is_right or not meant:
            check_data([config])
            continue
        with pytest.raises(DataError, match=f"choose method {meant}") as early:
            check_data([config])
        assert early.value.option == "method"
        with pytest.raises(DataError) as late:
            prepare(DataOptions(dataset=path), make_tokenizer(CHATML), tmp_path / "cache", method)
        assert str(late.value) == str(early.value)


def test_rewards_are_found_as_trls_command_finds_them(tmp_path, monkeypatch):
    """A function of the current folder, TRL's own ones, and a model's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rewards_here.py").write_text("def mine(completions, **kwargs):\n    return [0.0]\n\nthing = 3\n")
    (tmp_path / "rewards_broken.py").write_text("import nothing_like_it\n")
    model, own, think, overlong = load_rewards(
        ["rewards_here.mine", "think_format_reward", "get_soft_overlong_punishment"], "org/reward"
    )
    assert (model, own([]), think) == ("org/reward", [0.0], trl.rewards.think_format_reward) and callable(overlong)
    for name, message in {
        "mine": "accuracy_reward, .*my_rewards.is_right, found 'mine'",
        "rewards_here.yours": "'yours' in 'rewards_here', found nothing",
        "rewards_here.thing": "'thing' in 'rewards_here', found int",
        "rewards_broken.mine": "'rewards_broken' .*'nothing_like_it'",
        "absent_module.mine": "'absent_module' .*'absent_module'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_rewards([name], None)


def test_every_own_option_belongs_to_a_method():
    """An option that no method takes any more."""
    known = {name for method in METHODS.values() for name in read_known_options(method)}
    assert set(RunConfig.model_fields) - known == {"trainer"}


@pytest.mark.parametrize("method", [m for m in METHODS.values() if m.losses], ids=lambda method: method.name)
def test_losses_are_those_that_trl_names(method):
    """TRL finds a misspelled loss in the first step, with the base loaded; and a new one must not be refused."""
    path = Path(importlib.util.find_spec("trl").submodule_search_locations[0], "trainer", f"{method.name}_config.py")
    source = path.read_text(encoding="utf-8")
    field = source[source.index("    loss_type: ") :]
    field = field[: field.index("\n    )\n")]
    named = set(re.findall(r"['\"]([a-z][a-z0-9_]*)['\"](?! aggreg)", field)) - {"help", "choices", "sequence"}
    assert named == set(method.losses)
