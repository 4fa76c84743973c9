"""What an epoch consists of: the same whether it is estimated, prepared, or held by TRL's trainer."""

import csv
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.data import CHATML, chat, make_tokenizer, write_jsonl
from helpers.paths import ROOT

from lorashard.config.data_options import DataOptions
from lorashard.config.methods import METHODS
from lorashard.config.run_config import RunConfig
from lorashard.data.prepare import prepare
from lorashard.data.sources import FileSource
from lorashard.data.survey import Survey, survey, survey_prepared, survey_run
from lorashard.data.trl_tokens import fill_trainer_options
from lorashard.errors import DataError

CHATS = [{"messages": chat("How many?", "clips " * number)} for number in range(1, 13)]
PAIRS = [
    {"prompt": "1 + 1 is " * (1 if number else 40), "chosen": "2 " * number + "!", "rejected": "3"}
    for number in range(12)
]


def count(folder: Path, rows: list[dict], method: str = "sft", trainer: dict | None = None, **options: Any):
    """Return the survey of a sample, and that of everything, as `validate` makes it."""
    given = {"reward_funcs": "think_format_reward"} if method == "grpo" else {}
    config = RunConfig(method=method, model="m", dataset="d", output_dir="o", **given, trainer=trainer or {})
    data = DataOptions(dataset=write_jsonl(folder / "rows.jsonl", rows), **options)
    tokenizer, filled = make_tokenizer(CHATML), fill_trainer_options(config)
    prepared = prepare(data, tokenizer, folder / "cache", METHODS[method])
    everything = survey_prepared(prepared, tokenizer, METHODS[method], filled)
    return survey(data, tokenizer, METHODS[method], filled, longest_s=60), everything


@pytest.mark.parametrize(
    ("method", "rows", "trainer", "options", "num_examples"),
    [
        ("sft", CHATS, {}, {}, 12),
        ("sft", CHATS, {}, {"packing": True, "max_length": 64}, 12),
        ("sft", [*CHATS, {"messages": chat("a")}], {}, {"max_train_samples": 13, "on_bad_row": "skip"}, 12),
        ("dpo", PAIRS, {"max_length": 40}, {}, 11),  # TRL leaves out the first, whose prompt fills max_length
        ("kto", PAIRS, {}, {}, 24),
        ("reward", PAIRS, {}, {"max_train_samples": 5}, 5),
        ("grpo", PAIRS, {}, {}, 12),
    ],
)
def test_a_small_dataset_is_counted_whole(tmp_path, method, rows, trainer, options, num_examples):
    """Catches a survey that counts what is not trained on, or that differs from what the run prepares."""
    found, everything = count(tmp_path, rows, method, trainer, **options)
    assert found.is_complete and found.num_examples == num_examples
    assert replace(found, lengths=()) == replace(everything, lengths=())
    assert sorted(found.lengths) == sorted(everything.lengths) and len(found.lengths) == found.num_sequences
    assert (found.num_sequences < found.num_examples) == bool(options.get("packing"))
    assert (found.num_supervised_tokens is None) == (method in ("reward", "grpo"))
    assert found.num_tokens == sum(found.lengths) or method in ("dpo", "reward")


def test_a_large_dataset_is_counted_in_some_rows_that_are_spread_over_it(tmp_path):
    """Catches a form that reads all of a large file, and a sample of the first rows, which may be the short ones."""
    rows = [{"text": "clips " * (1 + number // 200)} for number in range(2000)]
    found, everything = count(tmp_path, rows)
    assert not found.is_complete and 100 < found.num_counted <= 500
    assert found.num_examples == everything.num_examples == 2000
    assert found.num_supervised_tokens == pytest.approx(everything.num_supervised_tokens, rel=0.02)


def test_rows_that_cannot_be_counted_in_time_are_not_guessed(tmp_path):
    """Catches a wait for a huge file, and a number of examples that is made up."""
    path = tmp_path / "rows.csv"
    with path.open("w") as file:
        csv.writer(file).writerows([["text"], *([f"clips {number}"] for number in range(2000))])
    data, method = DataOptions(dataset=str(path)), METHODS["sft"]
    found = survey(data, make_tokenizer(), method, {}, longest_s=0)
    assert isinstance(found, Survey) and found.num_counted >= 1
    assert found.num_examples is found.num_sequences is found.num_supervised_tokens is None
    assert survey(data, make_tokenizer(), method, {}, longest_s=60).num_examples == 2000


def test_counting_leaves_time_for_reading(tmp_path, monkeypatch):
    """Catches a dataset that is judged by its first row, since counting its rows has taken all of the time."""

    def count_in_vain(source, most, end_s):
        time.sleep(max(0.0, end_s - time.monotonic()))
        return most

    data = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", [{"text": "clips"}] * 50))
    monkeypatch.setattr(FileSource, "count_rows", count_in_vain)
    assert survey(data, make_tokenizer(), METHODS["sft"], {}, longest_s=4).num_counted > 1


def test_a_sweep_is_counted_in_its_longest_data(tmp_path):
    """Catches figures of the first job alone, whose data may be the shortest; data that is counted once for each job;
    and a mistake in one job's data that does not say whose it is."""
    rows = {name: [{"text": text}] * count for name, text, count in (("short", "a", 9), ("long", "a b c d e", 4))}
    paths = {name: write_jsonl(tmp_path / f"{name}.jsonl", found) for name, found in rows.items()}
    base = {"model": str(ROOT / "examples/demo/base"), "trainer": {"max_steps": 5}}

    def count_jobs(*datasets: str, **options: Any) -> Survey:
        jobs = [{"name": f"j{number}", "dataset": name, "seed": number} for number, name in enumerate(datasets)]
        return survey_run(RunConfig(**base, sweep={"jobs": jobs}, **options), longest_s=60)

    found = count_jobs(paths["short"], paths["long"], paths["long"])
    assert (found.num_examples, found.job, found.num_datasets) == (4, "j1", 2)
    shared = count_jobs(paths["short"], paths["short"])
    assert (shared.num_examples, shared.job, shared.num_datasets) == (9, "", 1)
    assert shared == survey_run(RunConfig(**base, dataset=paths["short"]), longest_s=60)
    with pytest.raises(DataError, match="job j1.*nowhere|nowhere.*job j1"):
        count_jobs(paths["short"], str(tmp_path / "nowhere.jsonl"))


def test_rows_that_all_are_left_out_are_an_error(tmp_path):
    """Catches a check that passes where TRL would train on nothing."""
    with pytest.raises(DataError, match="leaves out every row, since max_length is 3"):
        count(tmp_path, PAIRS[1:], "reward", {"max_length": 3})
