"""Rows are read with their places, recognized by their columns, and refused with a reason."""

import json
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.data import CHATML, chat, make_tokenizer, write_jsonl

from lorashard.config.data_options import DataOptions
from lorashard.data.formats import detect_format
from lorashard.data.prepare import prepare
from lorashard.data.sources import BadRow, HubSource, open_source
from lorashard.errors import DataError

PAIRS = [{"prompt": f"{number} + {number}\n", "completion": f"{2 * number}"} for number in range(1, 6)]


def read(path: object, split: str = "train") -> list[tuple[str, object]]:
    rows = open_source(str(path), split, None, None).read()
    return [(row.place, row.value.reason if isinstance(row.value, BadRow) else row.value) for row in rows]


def test_jsonl_rows_keep_their_line_numbers(tmp_path: Path) -> None:
    """Catches numbers that count rows instead of lines, and a broken or latin-1 line that hides the rows after it."""
    lines = ["\ufeff" + json.dumps(PAIRS[0]), "", '{"prompt": "x", ', "[1]"]
    latin = b'{"text": "caf\xe9"}\n'
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + b"\n" + latin + json.dumps(PAIRS[1]).encode())
    assert read(tmp_path / "a.jsonl") == [
        ("a.jsonl line 1", PAIRS[0]),
        ("a.jsonl line 3", "broken JSON"),
        ("a.jsonl line 4", "wrong type"),
        ("a.jsonl line 5", "broken JSON"),
        ("a.jsonl line 6", PAIRS[1]),
    ]


def test_json_list_is_read_row_by_row(tmp_path: Path) -> None:
    """Catches a list taken for JSON lines because of what stands before it, and items without a number."""
    path = tmp_path / "a.json"
    path.write_text("\ufeff \n" + json.dumps([*PAIRS, 5], indent=2), encoding="utf-8")
    assert read(path) == [*((f"a.json row {n}", row) for n, row in enumerate(PAIRS, 1)), ("a.json row 6", "wrong type")]


@pytest.mark.parametrize("end", ["", '{"text": "b"', '{"text": "b"} {"text": "c"}]', '{"text": "b" "c"}', '"b'])
def test_broken_json_list_names_the_line(tmp_path: Path, end: str) -> None:
    """Catches the rows after the damage left out in silence."""
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n' + end)
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.where == "a.json, line 2"


def test_csv_rows(tmp_path: Path) -> None:
    """Catches cells under the wrong column, long cells refused, and a row counted by its lines of text."""
    path = tmp_path / "a.csv"
    long = "x" * 200_000
    path.write_text(f'question,answer\n"a\nb",1\nonly one\n{long},"2, ""3"""\n', encoding="utf-8")
    assert read(path) == [
        ("a.csv row 1", {"question": "a\nb", "answer": "1"}),
        ("a.csv row 2", "broken CSV"),
        ("a.csv row 3", {"question": long, "answer": '2, "3"'}),
    ]


def test_parquet_rows_equal_jsonl_rows(tmp_path: Path) -> None:
    """Catches rows lost between batches, and values that Arrow gives keys of other rows with."""
    messages = [[*chat("Hi", "Hello")], [*chat("Bye"), {"role": "assistant", "content": "Bye", "name": "x"}]] * 300
    pq.write_table(pa.table({"messages": messages}), tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet")
    assert [place for place, _ in rows] == [f"a.parquet row {number}" for number in range(1, 601)]
    shows_every_key = "{% generation %}{{ messages }}{% endgeneration %}"
    jsonl = write_jsonl(tmp_path / "a.jsonl", [{"messages": row} for row in messages])
    from_parquet, from_jsonl = (
        prepare(DataOptions(dataset=path), make_tokenizer(shows_every_key), tmp_path / "cache").train[:]
        for path in (str(tmp_path / "a.parquet"), jsonl)
    )
    assert from_parquet == from_jsonl


def test_parquet_of_mixed_objects_is_decoded(tmp_path: Path) -> None:
    """Catches tool arguments that the datasets library stored as JSON text and that stay text."""
    rows = [{"messages": [{"role": "user", "content": {"a": 1}}]}, {"messages": [{"role": "user", "content": "b"}]}]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(tmp_path / "a.parquet")
    assert [value for _, value in read(tmp_path / "a.parquet")] == rows


def test_folder_splits_are_told_from_file_names(tmp_path: Path) -> None:
    """Catches a folder's test files trained on, and files passed over without a word."""
    for name, text in {"train-1.jsonl": "a", "sub/train-2.jsonl": "b", "test.jsonl": "c"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [{"text": text}])
    (tmp_path / "train-3.txt").write_text("d")
    (tmp_path / ".hidden").write_text("e")
    assert sorted(row["text"] for _, row in read(tmp_path)) == ["a", "b"]
    assert read(tmp_path, "test") == [("test.jsonl line 1", {"text": "c"})]
    assert open_source(str(tmp_path), "train", None, None).ignored == ("train-3.txt",)
    with pytest.raises(DataError, match="test, train") as caught:
        read(tmp_path, "validation")
    assert caught.value.found == "'validation'"


def test_folder_without_split_names_is_all_train(tmp_path: Path) -> None:
    """Catches a folder of plainly named files that cannot be read, and JSON lines refused because they are in .json."""
    write_jsonl(tmp_path / "b.json", PAIRS[:1])
    (tmp_path / "a.json").write_text(json.dumps(PAIRS[1:]))
    assert [place for place, _ in read(tmp_path)] == [*(f"a.json row {n}" for n in range(1, 5)), "b.json line 1"]


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        ("missing.jsonl", "no such file"),
        ("./missing", "no such file"),
        ("notes.txt", ".jsonl, .json, .csv, .parquet, found .txt"),
        ("empty", ".jsonl"),
    ],
)
def test_a_dataset_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mentions: str
) -> None:
    """Catches a misspelled path looked up on the hub, or a library's traceback for a file that is not what it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=mentions) as caught:
        read(name)
    assert name in caught.value.where


def test_hub_options_are_refused_for_files(tmp_path: Path) -> None:
    """Catches a revision that is asked for and silently not used."""
    with pytest.raises(DataError) as caught:
        open_source(write_jsonl(tmp_path / "a.jsonl", PAIRS), "train", None, "main")
    assert caught.value.option == "dataset_revision"


def test_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a split, configuration or revision that does not reach the datasets library, and rows without a place."""
    asked = []

    def load(*arguments: object, **options: object) -> datasets.Dataset:
        asked.append((arguments, options))
        return datasets.Dataset.from_list(PAIRS * 60)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source("org/name", "test", "main", "abc")
    assert isinstance(source, HubSource)
    rows = list(source.read())
    assert asked == [(("org/name", "main"), {"revision": "abc", "split": "test"})]
    assert [row.value for row in rows] == PAIRS * 60
    assert rows[-1].place == "org/name [test] row 300"


def test_unreachable_hub_dataset_is_a_data_error() -> None:
    """Catches a traceback, or endless waiting, when the hub cannot be reached."""
    source = open_source("nobody/nothing", "train", None, None)
    with pytest.raises(DataError, match="'nobody/nothing'"):
        source.identify()


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_reading_takes_the_memory_of_a_row(tmp_path: Path, name: str) -> None:
    """Catches a reader that holds all rows: files may be larger than memory."""
    line = json.dumps({"text": "x" * 1000}) if name == "a.jsonl" else "x" * 1000
    (tmp_path / name).write_text("text\n" * (name == "a.csv") + f"{line}\n" * 3000)
    tracemalloc.start()
    assert sum(1 for _ in open_source(str(tmp_path / name), "train", None, None).read()) == 3000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize(
    ("columns", "has_chat_template", "name"),
    [
        ("id prompt messages", True, "messages"),
        ("conversations system", True, "conversations"),
        ("prompt completion source", False, "prompt/completion"),
        ("instruction input output text", False, "instruction/output"),
        ("question answer", True, "question/answer"),
        ("meta text", False, "text"),
    ],
)
def test_format_is_recognized_by_its_columns(columns: str, has_chat_template: bool, name: str) -> None:
    """Catches a format taken for another because of a column more."""
    rows = [{columns.split()[0]: "x"}, dict.fromkeys(columns.split(), "x")]  # the first row lacks columns
    assert detect_format(rows, has_chat_template).name == name
    rows.append({"story": "c"} | rows[1])  # an explicit dataset_text_field goes before all
    assert detect_format(rows, has_chat_template, "story").convert(rows[-1]).body == "c"


@pytest.mark.parametrize("columns", ["prompt chosen rejected", "question image answer", "story"])
def test_unknown_columns_are_refused(columns: str) -> None:
    """Catches a guess, or an error that does not say what was found and what is recognized."""
    with pytest.raises(DataError) as caught:
        detect_format([dict.fromkeys(columns.split(), "x")], True, name="a.jsonl")
    expected = ("text", "image") if "image" in columns else ("messages", columns.replace(" ", ", "))
    assert expected[0] in caught.value.expected and expected[1] in caught.value.found
    assert "a.jsonl" in caught.value.where


GOOD = {
    "messages": {"messages": chat("a", "b")},
    "conversations": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "pairs": {"prompt": "a", "completion": "b"},
    "chat pairs": {"prompt": chat("a"), "completion": chat("a", "b")[1:]},
    "alpaca": {"instruction": "a", "output": "b"},
    "question": {"question": "a", "answer": "b"},
    "text": {"text": "a b"},
}


@pytest.mark.parametrize(
    ("kind", "row", "reason", "detail"),
    [
        ("question", {"question": "a"}, "missing field", "`answer` is missing"),
        ("question", {"question": "a", "answer": None}, "null field", "`answer` is null"),
        ("question", {"question": "a", "answer": 72}, "wrong type", "found a number"),
        ("question", {"question": "a", "answer": " \n"}, "empty completion", "`answer` is empty"),
        ("question", {"question": "", "answer": "b"}, "empty field", "`question` is empty"),
        ("text", {"text": "  "}, "empty field", "`text` is empty"),
        ("alpaca", {"instruction": "a", "output": ""}, "empty completion", "`output` is empty"),
        ("alpaca", {"instruction": "a", "output": "b", "input": []}, None, None),
        ("alpaca", {"instruction": "a", "output": "b", "input": [1]}, "wrong type", "`input`"),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "unsupported field", "`history`"),
        ("pairs", {"prompt": "", "completion": "b"}, None, None),
        ("pairs", {"prompt": "a", "completion": ""}, "empty completion", "`completion` is empty"),
        ("pairs", {"prompt": "a", "completion": chat("b")}, "wrong type", "found a list"),
        ("chat pairs", {"prompt": "a", "completion": "b"}, "wrong type", "found a string"),
        ("chat pairs", {"prompt": chat("a"), "completion": chat("b")}, "empty completion", "no assistant message"),
        ("chat pairs", {"prompt": chat("a"), "completion": []}, "empty completion", "`completion` holds no message"),
        ("messages", {"messages": []}, "empty field", "`messages` holds no message"),
        ("messages", {"messages": chat("a", "")}, "empty completion", "message 2"),
        ("messages", {"messages": ["a"]}, "wrong type", "message 1"),
        ("messages", {"messages": [{"role": "boss", "content": "a"}]}, "unknown role", "message 1 has the role 'boss'"),
        ("messages", {"messages": [{"content": "a"}]}, "missing field", "message 1 has no role"),
        ("messages", {"messages": [{"role": "user"}]}, "missing field", "message 1 has no content"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "wrong type", "found a number"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "wrong type", "not text"),
        ("messages", {"messages": [{"role": "user", "content": "b", "weight": 0}]}, "unsupported field", "weight 0"),
        ("messages", {"messages": chat("a")}, "nothing supervised", "7 tokens"),
        ("messages", {"messages": chat("a", "b"), "tools": "{"}, "wrong type", "`tools`"),
        ("messages", {"messages": chat("a", "b"), "tools": {"a": 1}}, "wrong type", "`tools`"),
        ("messages", {"messages": chat("a", "b"), "chat_template_kwargs": "a"}, "wrong type", "object"),
        ("conversations", {"conversations": [{"from": "boss", "value": "a"}]}, "unknown role", "'boss'"),
        ("conversations", {"conversations": [{"from": None, "value": "a"}]}, "missing field", "no role"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, kind: str, row: dict, reason: str | None, detail: str | None) -> None:
    """Catches each way in which a row can be unfit and is trained on, or crashes, or is reported without its place."""
    tokenizer = make_tokenizer(CHATML if "messages" in row or "conversations" in row or kind == "chat pairs" else None)
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD[kind], row])
    report = prepare(DataOptions(dataset=path, on_bad_row="skip"), tokenizer, tmp_path / "cache").report
    if reason is None:
        assert report.rows_kept == 2
        return
    assert list(report.rows_skipped) == [reason]
    assert report.rows_skipped[reason].first[0].startswith("a.jsonl line 2: ")
    assert detail in report.rows_skipped[reason].first[0]


def test_text_parts_become_one_string(tmp_path: Path) -> None:
    """Catches a list of parts printed into the prompt as Python writes it."""
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    rows = [
        {"messages": [{"role": "user", "content": parts}, *chat("", "72")[1:]]},
        {"messages": chat("How many?", "72")},
    ]
    prepared = prepare(DataOptions(dataset=write_jsonl(tmp_path / "a.jsonl", rows)), make_tokenizer(CHATML), tmp_path)
    assert prepared.train[0] == prepared.train[1]


def test_empty_tools_are_no_tools(tmp_path: Path) -> None:
    """Catches a template that announces tools for the empty list of a row that has none."""
    rows = [{"messages": chat("How many?", "72"), "tools": tools} for tools in ([], "[]", None)]
    template = "{%- if tools is not none %}{{- 'tools' }}{%- endif %}" + CHATML
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    prepared = prepare(DataOptions(dataset=path), make_tokenizer(template), tmp_path / "cache")
    assert prepared.train[0] == prepared.train[1] == prepared.train[2]


def test_system_column_is_the_first_message(tmp_path: Path) -> None:
    """Catches a `system` column that is lost, or put before a system message that is already there."""
    rows = [
        {"system": "Be short.", "messages": chat("How many?", "72")},
        {"system": "Be long.", "messages": chat("How many?", "72", system="Be short.")},
    ]
    prepared = prepare(DataOptions(dataset=write_jsonl(tmp_path / "a.jsonl", rows)), make_tokenizer(CHATML), tmp_path)
    assert prepared.train[0] == prepared.train[1]
    assert "Be short." in make_tokenizer().decode(prepared.train[0]["input_ids"])
