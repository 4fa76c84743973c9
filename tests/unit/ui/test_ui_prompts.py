"""Prompts that the chat offers: what users ask in a run's data, from files that may be read."""

from __future__ import annotations

import json

import pytest

from lorashard.errors import ConfigError
from lorashard_ui.reading.prompts import list_prompts


def allow(path: str, option: str) -> None:
    pass


def refuse(path: str, option: str) -> None:
    raise ConfigError("outside", option=option)


ROWS = [
    {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a"}]},
    {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "-"}]},
    {"prompt": "c", "completion": "-"},
    {"prompt": [{"role": "user", "content": "d"}], "chosen": "-"},
    {"instruction": "e", "input": "f", "output": "-"},
    {"question": "g", "answer": "-"},
    {"text": "no question"},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_questions_of_the_dataset_are_offered(tmp_path, suffix):
    """Catches answers or system messages offered as questions, and a format that silently has none."""
    path, rows, asked = tmp_path / f"rows{suffix}", ROWS, ["a", "b", "c", "d", "e\n\nf", "g"]
    if suffix in (".csv", ".parquet"):
        rows, asked = [{"question": "g", "answer": "-"}], ["g"]
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prompt": "half')
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pandas = pytest.importorskip("pandas")
        table = pandas.DataFrame(rows)
        table.to_csv(path, index=False) if suffix == ".csv" else table.to_parquet(path)
    assert list_prompts({"dataset": str(path)}, allow) == asked
    options = {"sample_prompts": ["s", "s"], "eval_dataset": str(path), "dataset": str(tmp_path / "gone.jsonl")}
    assert list_prompts(options, allow) == ["s", *asked]
    assert list_prompts({"dataset": str(path)}, refuse) == []


def test_what_is_no_file_of_rows_offers_nothing(tmp_path):
    """A page that fails because of a dataset of the hub, a damaged file, or options of another shape."""
    (tmp_path / "bad.json").write_text("[[1], {")
    (tmp_path / "bad.parquet").write_text("no")
    (tmp_path / "long.csv").write_text("question\n" + 150_000 * "x")  # the csv module refuses such a field
    files = [str(tmp_path / name) for name in ("bad.json", "bad.parquet", "long.csv")]
    for place in ("org/data", str(tmp_path), *files, 3, None):
        assert list_prompts({"dataset": place, "sample_prompts": "text"}, allow) == []
