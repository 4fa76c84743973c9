"""Datasets are prepared once, whole or not at all, and every row is accounted for."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from helpers.data import CHATML, make_tokenizer, write_jsonl
from helpers.paths import ROOT
from pydantic import ValidationError

from lorashard.config.data_options import DataOptions
from lorashard.data import prepare as prepare_module
from lorashard.data import sources
from lorashard.data.prepare import prepare
from lorashard.errors import ConfigError, DataError

ROWS = [{"prompt": f"{number} + {number}\n", "completion": f"{2 * number}"} for number in range(1, 301)]

# Prepares argv[1] in argv[2] as argv[3]; "stuck" goes first, and never gets to give the result its name.
PROCESS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from helpers.data import make_tokenizer
from lorashard.data import prepare as module
from lorashard.config.data_options import DataOptions

name, folder = sys.argv[3], Path(sys.argv[2])
tokenizer, build = make_tokenizer(), module._build

def count_build(*arguments):
    (folder / f"built-by-{name}").touch()
    build(*arguments)

def hang(*arguments):
    (folder / "stuck").touch()
    time.sleep(60)

module._build = count_build
if name == "stuck":
    module.os.rename = hang
else:
    while not (folder / "stuck").exists():
        time.sleep(0.02)
(folder / f"ready-{name}").touch()
prepared = module.prepare(DataOptions(dataset=sys.argv[1]), tokenizer, folder / "cache")
print(prepared.path.name, len(prepared.train))
"""


def wait_for(*paths: Path, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline_s, f"{paths} never appeared"
        time.sleep(0.02)


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    builds: list[object] = []
    build = prepare_module._build
    monkeypatch.setattr(prepare_module, "_build", lambda *arguments: (builds.append(arguments), build(*arguments)))
    return builds


def test_killed_process_leaves_the_work_to_one_of_those_that_wait(tmp_path: Path) -> None:
    """Catches a half result taken for whole after kill -9, a lock that outlives its owner, and more than one build."""
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)

    def start(name: str) -> subprocess.Popen:
        command = [sys.executable, "-c", PROCESS, path, str(tmp_path), name, str(ROOT / "tests")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    processes = [start("stuck"), start("a"), start("b")]
    try:
        wait_for(tmp_path / "ready-a", tmp_path / "ready-b")  # "stuck" has written everything but the name
        time.sleep(0.3)
        assert not list(tmp_path.glob("built-by-[ab]"))
        os.kill(processes[0].pid, signal.SIGKILL)
        outputs = [process.communicate(timeout=60) for process in processes[1:]]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].endswith(" 300\n")
    assert len(list(tmp_path.glob("built-by-[ab]"))) == 1
    assert not list((tmp_path / "cache").glob("*.unfinished"))


def test_leftovers_of_a_killed_process_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches files of an earlier attempt mixed into the result."""
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", ROWS))
    path = prepare(options, make_tokenizer(), tmp_path / "cache").path
    expected = {file.name: file.read_bytes() for file in path.iterdir()}
    path.rename(path.with_suffix(".unfinished"))
    (path.with_suffix(".unfinished") / "eval.json").write_text("{")
    assert prepare(options, make_tokenizer(), tmp_path / "cache").path == path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == expected


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    """Catches a result that a failed preparation leaves for the next one to find."""
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "a"}]))
    for _ in range(2):
        with pytest.raises(DataError):
            prepare(options, make_tokenizer(), tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_same_inputs_are_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a key that hangs on what does not matter: padding that a call left behind in the tokenizer."""
    builds = count_builds(monkeypatch)
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", ROWS), shuffle_dataset=True)
    tokenizer = make_tokenizer()
    first = prepare(options, tokenizer, tmp_path / "cache")
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    second = prepare(options, tokenizer, tmp_path / "cache")
    assert len(builds) == 1
    assert (first.train[:], first.report, first.path) == (second.train[:], second.report, second.path)


def test_each_input_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stale result after a change of the file, an option, the tokenizer or its chat template."""
    builds = count_builds(monkeypatch)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    cases = [
        (DataOptions(dataset=path), make_tokenizer()),
        (DataOptions(dataset=path, max_length=512), make_tokenizer()),
        (DataOptions(dataset=path), make_tokenizer(CHATML)),
        (DataOptions(dataset=path), make_tokenizer(kind="metaspace")),
        (DataOptions(dataset=path), make_tokenizer(eos_token="<|im_end|>")),
    ]
    assert len({prepare(*case, tmp_path / "cache").path for case in cases}) == len(builds) == len(cases)
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
    with pytest.raises(DataError, match="changed while it was being read"):
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
    """Catches bad rows trained on or dropped by default, and an error that one cannot find the rows by."""
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", BAD_ROWS), max_length=40)
    with pytest.raises(DataError) as caught:
        prepare(options, make_tokenizer(), tmp_path / "cache")
    message = str(caught.value)
    assert "10 of 14 rows cannot be trained on" in message
    assert "1 broken JSON, 1 empty completion, 1 missing field, 7 nothing supervised" in message
    assert "rows.jsonl line 4: Expecting value at column 11; rows.jsonl line 5: `completion` is empty;" in message
    assert "rows.jsonl line 7: max_length 40 cuts off all 2 tokens to learn of" in message
    assert "on_bad_row: skip" in message
    assert "\n" not in message


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


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_rows_that_packing_goes_on_with_are_kept(tmp_path: Path, strategy: str) -> None:
    """Catches a completion beyond max_length called lost where packing does not cut it off."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "x " * 100, "completion": "y"}])
    options = DataOptions(dataset=path, max_length=40, packing=True, packing_strategy=strategy)
    report = prepare(options, make_tokenizer(), tmp_path / "cache").report
    assert (report.rows_kept, report.num_truncated, report.num_supervised_tokens) == (1, 0, 2)


def test_truncated_rows_are_counted(tmp_path: Path) -> None:
    """Catches a loss of tokens that nobody is told of."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "x " * 100}, {"text": "y"}])
    report = prepare(DataOptions(dataset=path, max_length=40), make_tokenizer(), tmp_path / "cache").report
    assert (report.num_truncated, report.longest_tokens, report.num_tokens) == (1, 40, 43)


def test_prompts_that_drift_are_counted(tmp_path: Path) -> None:
    """Catches silence where the prompt's last token is another once the completion follows."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "capital of Fran", "completion": "ce"}, ROWS[0]])
    assert prepare(DataOptions(dataset=path), make_tokenizer(), tmp_path / "cache").report.num_prompt_drifts == 1


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
    with pytest.raises(DataError, match="holds no rows|no row can be read|no row is left to train on"):
        prepare(DataOptions(dataset=path, on_bad_row="skip"), make_tokenizer(), tmp_path / "cache")


def test_losses_that_do_not_suit_the_rows_are_refused(tmp_path: Path) -> None:
    """Catches TRL's silence about completion_only_loss on rows without completions."""
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "a b"}])
    with pytest.raises(ConfigError, match="completion_only_loss needs rows with a prompt"):
        prepare(DataOptions(dataset=text, completion_only_loss=True), make_tokenizer(), tmp_path)
    with pytest.raises(ConfigError, match="assistant_only_loss needs conversations, found text"):
        prepare(DataOptions(dataset=text, assistant_only_loss=True), make_tokenizer(), tmp_path)
    with pytest.raises(ConfigError, match="end-of-sequence token, but the tokenizer has none"):
        prepare(DataOptions(dataset=text), make_tokenizer(eos_token=None), tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"packing": True, "max_length": None}, {"packing": True, "truncation_mode": "keep_end"}, {"max_lenght": 5}],
)
def test_options_that_cannot_work_are_refused(options: dict) -> None:
    """Catches a misspelt option, and packing options that TRL ignores or fails on late."""
    with pytest.raises(ValidationError):
        DataOptions(dataset="a.jsonl", **options)


def test_options_need_no_heavy_library() -> None:
    """Catches an import that makes `--help` wait for transformers."""
    code = "import sys, lorashard.config.data_options; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_rows_are_counted_for_whoever_waits(tmp_path, monkeypatch):
    """A phase without progress because another rank, or another run, had taken the lock first."""
    monkeypatch.setattr(prepare_module, "_INTERVAL_S", 0.02)
    told: list[tuple[int, int | None, str]] = []
    file = tmp_path / "data.progress"
    first = FileLock(tmp_path / "data.lock")
    first.acquire()
    file.write_text("[5, 9]")

    def wait() -> None:
        counter = prepare_module._Counter(file, lambda *progress: told.append(progress))
        with counter.wait_for(FileLock(tmp_path / "data.lock")):
            counter.expect(1)
            time.sleep(0.03)
            counter.add()

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not told:
        time.sleep(0.01)
    first.release()
    waiter.join(30)
    assert told[0] == (5, 9, "rows") and told[-1] == (1, 1, "rows") and not file.exists()


def test_how_many_rows_there_are_is_told_before_they_are_read(tmp_path):
    """A progress without an end for the commonest files, or one that ends at another number."""
    told: list[tuple[int, int | None, str]] = []
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    for options, expected in (({}, 2 * len(ROWS)), ({"max_train_samples": 10}, 10 + len(ROWS))):
        monkeypatch = pytest.MonkeyPatch()
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, "_INTERVAL_S", 0.0)
            wanted = DataOptions(dataset=str(rows), eval_dataset=str(rows), eval_dataset_split="train", **options)
            prepare(wanted, make_tokenizer(), tmp_path / "cache", progress=lambda *progress: told.append(progress))
        assert told[-1] == (expected, expected, "rows")


def test_no_more_rows_are_counted_than_are_wanted(tmp_path, monkeypatch):
    """A hundred rows of a file of 100 GB, all of which is read first to count them."""
    monkeypatch.setattr(sources, "_COUNT_CHUNK_BYTES", 64)
    read = []
    count_lines = sources._count_lines
    monkeypatch.setattr(sources, "_count_lines", lambda path: (read.append(n) or n for n in count_lines(path)))
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n" * 10_000)
    for most, expected, num_reads in ((None, 10_000, 469), (100, 100, 5), (20_000, 10_000, 469)):
        read.clear()
        assert sources.open_source(str(file), "train", None, None).count_rows(most) == expected
        assert len(read) == num_reads
    csv = tmp_path / "rows.csv"
    csv.write_text("text\na\n")
    assert sources.open_source(str(csv), "train", None, None).count_rows() is None
