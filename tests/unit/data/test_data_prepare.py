"""Datasets are prepared once, whole or not at all, and every row is accounted for."""

import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from helpers.data import CHATML, make_tokenizer, write_jsonl

from lorashard.config.data_options import DataOptions
from lorashard.data import prepare as prepare_module
from lorashard.data.prepare import prepare
from lorashard.data.sources import open_source
from lorashard.errors import ConfigError, DataError
from lorashard.runtime.atomic_folder import list_partials, name_partial

ROWS = [{"prompt": f"{number} + {number}\n", "completion": f"{2 * number}"} for number in range(1, 301)]


def wait_for(*paths: Path, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline_s, f"{paths} never appeared"
        time.sleep(0.02)


def prepare_slowly(name: str, dataset: str, folder: Path) -> None:
    """Prepare in a process: "stuck" takes its time, and never gets to give the result its name."""
    encode_source = prepare_module.encode_source

    def encode(*arguments):
        (folder / f"built-by-{name}").touch()
        encoder, results = encode_source(*arguments)
        return encoder, slow_down(results) if name == "stuck" else results

    def slow_down(results: Iterator) -> Iterator:
        yield next(results)
        time.sleep(1)  # until the rest is told of
        yield from results

    def hang(*_) -> None:
        (folder / "stuck").touch()
        time.sleep(60)

    def tell(done: int, total: int | None, unit: str) -> None:
        (folder / f"told-{name}-{done}-{total}-{unit}").touch()

    prepare_module.encode_source = encode
    if name == "stuck":
        os.rename = hang
    prepared = prepare(DataOptions(dataset=dataset), make_tokenizer(), folder / "cache", progress=tell)
    (folder / f"result-{name}").write_text(f"{prepared.path.name} {len(prepared.train)}")


def test_killed_process_leaves_the_work_to_one_of_those_that_wait(tmp_path: Path) -> None:
    """Catches a half result taken for whole after kill -9, a lock that outlives its owner, and more than one build.

    Who waits hears how far the other is.
    """
    dataset = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    context = multiprocessing.get_context("fork")

    def start(name: str) -> BaseProcess:
        process = context.Process(target=prepare_slowly, args=(name, dataset, tmp_path), daemon=True)
        process.start()
        return process

    stuck = start("stuck")
    wait_for(tmp_path / "stuck")  # it has written everything but the name
    others = [start("a"), start("b")]
    try:
        wait_for(*(tmp_path / f"told-{name}-2-300-rows" for name in "ab"))
        assert not list(tmp_path.glob("built-by-[ab]"))
        assert stuck.pid is not None
        os.kill(stuck.pid, signal.SIGKILL)
        for process in others:
            process.join(60)
    finally:
        for process in (stuck, *others):
            process.kill()
            process.join()
    assert [process.exitcode for process in (stuck, *others)] == [-signal.SIGKILL, 0, 0]
    results = [(tmp_path / f"result-{name}").read_text() for name in "ab"]
    assert results[0] == results[1] and results[0].endswith(" 300")
    assert len(list(tmp_path.glob("built-by-[ab]"))) == 1
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {"", ".lock"}


def leave_half(path: Path) -> None:
    path.rename(name_partial(path))
    (name_partial(path) / "eval.json").write_text("{")


def test_leftovers_of_a_killed_process_do_no_harm(tmp_path: Path) -> None:
    """Catches files of an earlier attempt mixed into the result."""
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", ROWS))
    path = prepare(options, make_tokenizer(), tmp_path / "cache").path
    expected = {file.name: file.read_bytes() for file in path.iterdir()}
    left = multiprocessing.get_context("fork").Process(target=leave_half, args=(path,))
    left.start()
    left.join()
    assert len(list_partials(path)) == 1
    assert prepare(options, make_tokenizer(), tmp_path / "cache").path == path
    assert list_partials(path) == []
    assert {file.name: file.read_bytes() for file in path.iterdir()} == expected


def test_same_inputs_are_prepared_once(tmp_path: Path) -> None:
    """Catches a key that hangs on what does not matter: padding that a call left behind in the tokenizer, or the seed
    of a job of a sweep where nothing is shuffled."""
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", ROWS), shuffle_dataset=True)
    tokenizer = make_tokenizer()
    first = prepare(options, tokenizer, tmp_path / "cache")
    inode = first.path.stat().st_ino
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    second = prepare(options, tokenizer, tmp_path / "cache")
    assert (first.train[:], first.report, first.path) == (second.train[:], second.report, second.path)
    assert second.path.stat().st_ino == inode
    for is_shuffled in (True, False):
        seeds = (options.model_copy(update={"seed": seed, "shuffle_dataset": is_shuffled}) for seed in (1, 2))
        paths = {prepare(one, tokenizer, tmp_path / "cache").path for one in seeds}
        assert len(paths) == 1 + is_shuffled


def test_each_input_counts(tmp_path: Path) -> None:
    """Catches a stale result after a change of the file, an option, the tokenizer or its chat template."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    cases = [
        (DataOptions(dataset=path), make_tokenizer()),
        (DataOptions(dataset=path, max_length=512), make_tokenizer()),
        (DataOptions(dataset=path), make_tokenizer(CHATML)),
        (DataOptions(dataset=path), make_tokenizer(kind="metaspace")),
        (DataOptions(dataset=path), make_tokenizer(eos_token="<|im_end|>")),
    ]
    assert len({prepare(*case, tmp_path / "cache").path for case in cases}) == len(cases)
    status = os.stat(path)
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "a", "answer": "c"}])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert "c" in make_tokenizer().decode(prepare(*cases[0], tmp_path / "cache").train[0]["input_ids"])


def test_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches half of an old and half of a new file kept under the old one's name."""
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    encode_source = prepare_module.encode_source

    def encode_and_append(*arguments: object) -> object:
        write_jsonl(tmp_path / "rows.jsonl", ROWS * 2)
        return encode_source(*arguments)

    monkeypatch.setattr(prepare_module, "encode_source", encode_and_append)
    with pytest.raises(DataError, match="changed while"):
        prepare(DataOptions(dataset=path), make_tokenizer(), tmp_path / "cache")


BAD_ROWS = [
    *ROWS[:3],
    '{"prompt": ',
    {"prompt": "a", "completion": ""},
    {"prompt": "a"},
    *({"prompt": "x " * 100, "completion": "y"} for _ in range(7)),
    ROWS[3],
]


def test_error_names_the_first_bad_rows_and_counts_all(tmp_path: Path) -> None:
    """Catches bad rows trained on or dropped by default, an error without their places, and a result of a failure."""
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", BAD_ROWS), max_length=40)
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            prepare(options, make_tokenizer(), tmp_path / "cache")
        assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]
    message = str(caught.value)
    assert "\n" not in message
    counts = ("10 of 14 rows", "1 broken JSON", "1 empty completion", "1 missing field", "7 nothing supervised")
    places = (
        "line 4: Expecting value",
        "column 11",
        "line 5: `completion`",
        "line 7: max_length 40",
        "--on_bad_row skip",
    )
    assert [part for part in (*counts, *places) if part not in message] == []


def test_rows_cut_off_name_the_length_that_keeps_them(tmp_path: Path) -> None:
    """Catches an error after which one has to guess a `max_length`, row by row, or to look for the option to go on."""
    rows = [*ROWS, *({"prompt": "x " * count, "completion": "y"} for count in (60, 100, 80))]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError) as caught:
        prepare(DataOptions(dataset=path, max_length=40), make_tokenizer(), tmp_path / "cache")
    message = str(caught.value)
    assert f"3 of the {len(rows)} rows" in message and "--on_bad_row skip" in message
    length = int(re.search(r"--max_length (\d+)", message)[1])
    for max_length, num_truncated in ((length, 0), (length - 1, 1)):
        options = DataOptions(dataset=path, max_length=max_length)
        assert prepare(options, make_tokenizer(), tmp_path / "cache").report.num_truncated == num_truncated


@pytest.mark.parametrize("packing", [False, True])
def test_skipped_rows_are_reported(tmp_path: Path, packing: bool) -> None:
    """Catches rows that are neither kept nor reported; packing too leaves out rows with nothing to learn."""
    path = write_jsonl(tmp_path / "rows.jsonl", BAD_ROWS)
    options = DataOptions(dataset=path, max_length=40, packing=packing, on_bad_row="skip")
    prepared = prepare(options, make_tokenizer(), tmp_path / "cache")
    report = prepared.report
    assert (report.rows_read, report.rows_kept, report.num_skipped) == (14, 4, 10)
    assert {reason: skipped.count for reason, skipped in report.rows_skipped.items()} == {
        "broken JSON": 1,
        "empty completion": 1,
        "missing field": 1,
        "nothing supervised": 7,
    }
    assert len(report.rows_skipped["nothing supervised"].first) == 5
    lengths = prepared.train["seq_lengths"] if packing else [[len(ids)] for ids in prepared.train["input_ids"]]
    assert sum(map(len, lengths)) == 4
    assert report.num_tokens == sum(map(sum, lengths))
    assert report.num_packed == (len(prepared.train) if packing else None)
    assert report.num_supervised_tokens == sum(label != -100 for row in prepared.train["labels"] for label in row)


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        # A loss of tokens that nobody is told of.
        ({"text": "x " * 100}, {"max_length": 40}, {"num_truncated": 1, "longest_tokens": 40}),
        # The prompt's last token is another once the completion follows.
        ({"prompt": "capital of Fran", "completion": "ce"}, {}, {"num_prompt_drifts": 1, "num_truncated": 0}),
        # A completion beyond max_length called lost where packing does not cut it off.
        *(
            (
                {"prompt": "x " * 100, "completion": "y"},
                {"max_length": 40, "packing": True, "packing_strategy": strategy},
                {"rows_kept": 1, "num_truncated": 0, "num_supervised_tokens": 2},
            )
            for strategy in ("bfd_split", "wrapped")
        ),
    ],
)
def test_what_happens_to_rows_is_counted(tmp_path: Path, row: dict, options: dict, expected: dict) -> None:
    """Catches silence about what stands above each case."""
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    report = prepare(DataOptions(dataset=path, **options), make_tokenizer(), tmp_path / "cache").report
    assert {name: getattr(report, name) for name in expected} == expected


def test_evaluation_rows(tmp_path: Path) -> None:
    """Catches evaluation rows packed, counted or limited as the training rows are, or read from the wrong split."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS)
    write_jsonl(folder / "test.jsonl", [{"text": f"test {number}"} for number in range(20)])
    limits = {"max_train_samples": 30, "max_eval_samples": 10}
    options = DataOptions(dataset=str(folder), eval_dataset=str(folder), packing=True, **limits)
    tokenizer = make_tokenizer()
    prepared = prepare(options, tokenizer, tmp_path / "cache")
    assert prepared.eval is not None and prepared.eval_report is not None
    assert (prepared.report.format, prepared.report.rows_read) == ("prompt/completion", 30)
    assert (prepared.eval_report.format, prepared.eval_report.rows_read) == ("text", 10)
    assert "test 9" in tokenizer.decode(prepared.eval["input_ids"][-1])
    assert prepared.eval_report.num_packed == len(prepared.eval) < 10
    unpacked = prepare(options.model_copy(update={"eval_packing": False}), tokenizer, tmp_path / "cache")
    assert unpacked.eval is not None and len(unpacked.eval) == 10
    assert unpacked.train[:] == prepared.train[:]


@pytest.mark.parametrize("rows", [[], ["{"], [{"prompt": "a", "completion": ""}, {"prompt": "b", "completion": None}]])
def test_nothing_to_train_on_is_an_error(tmp_path: Path, rows: list) -> None:
    """Catches a training run over no rows at all, also when bad rows are skipped."""
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="no row"):
        prepare(DataOptions(dataset=path, on_bad_row="skip"), make_tokenizer(), tmp_path / "cache")


def test_losses_that_do_not_suit_the_rows_are_refused(tmp_path: Path) -> None:
    """Catches TRL's silence about completion_only_loss on rows without completions."""
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "a b"}])
    for option in ("completion_only_loss", "assistant_only_loss"):
        with pytest.raises(ConfigError) as caught:
            prepare(DataOptions(dataset=text, **{option: True}), make_tokenizer(), tmp_path)
        assert caught.value.option == option
    with pytest.raises(ConfigError) as caught:
        prepare(DataOptions(dataset=text), make_tokenizer(eos_token=None), tmp_path)
    assert caught.value.option == "eos_token"


def test_how_many_rows_there_are_is_told_before_they_are_read(tmp_path, monkeypatch):
    """A progress without an end for the commonest files, or one that ends at another number."""
    told: list[tuple[int, int | None, str]] = []
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)  # each row takes a second
    for options, expected in (({}, 2 * len(ROWS)), ({"max_train_samples": 10}, 10 + len(ROWS))):
        wanted = DataOptions(dataset=rows, eval_dataset=rows, eval_dataset_split="train", **options)
        prepare(wanted, make_tokenizer(), tmp_path / "cache", progress=lambda *progress: told.append(progress))
        assert told[-1] == (expected, expected, "rows")


def test_no_more_rows_are_counted_than_are_wanted(tmp_path):
    """A hundred rows of a file of 100 GB, all of which is read first to count them."""
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n" * 10_000)
    counts = [open_source(str(file), "train", None, None).count_rows(most) for most in (None, 100, 20_000)]
    assert counts == [10_000, 100, 10_000]
    os.truncate(file, 2**33)  # it ends in a hole
    before = psutil.Process().io_counters().read_chars
    assert open_source(str(file), "train", None, None).count_rows(100) == 100
    assert psutil.Process().io_counters().read_chars - before < 2**24
    csv = tmp_path / "rows.csv"
    csv.write_text("text\na\n")
    assert open_source(str(csv), "train", None, None).count_rows() is None
