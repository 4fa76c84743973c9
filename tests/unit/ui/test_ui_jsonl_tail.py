"""Files that grow, are cut and are replaced: each line once."""

import os

import pytest
from helpers.ui_runs import write_lines

from lorashard_ui.reading.jsonl_tail import JsonLines, read_last_rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lines.jsonl"


def read_steps(lines):
    return [row["step"] for row in lines.read()]


def test_each_line_comes_once(path):
    """A reader that begins at the front each time takes longer with each step of a run."""
    lines = JsonLines(path)
    assert lines.read() == [] and not lines.was_replaced
    write_lines(path, [{"step": 1}, {"step": 2}])
    assert read_steps(lines) == [1, 2]
    assert read_steps(lines) == []
    write_lines(path, [{"step": 3}])
    assert read_steps(lines) == [3] and not lines.was_replaced


def test_half_a_line_waits_for_its_end(path):
    """A line that is read while it is written is lost, or taken for a bad one."""
    path.write_text('{"step": 1}\n{"st')
    lines = JsonLines(path)
    assert read_steps(lines) == [1]
    assert read_steps(lines) == []
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert read_steps(lines) == [2]


def test_a_cut_file_is_read_anew_and_says_so(path):
    """A resumed run cuts its metrics: a chart keeps points of steps that are run again."""
    write_lines(path, [{"step": step} for step in range(9)])
    lines = JsonLines(path)
    lines.read()
    os.truncate(path, 2 * len('{"step": 0}\n'))
    assert read_steps(lines) == [0, 1] and lines.was_replaced
    assert read_steps(lines) == [] and not lines.was_replaced


def test_a_file_that_was_cut_and_has_outgrown_its_old_length_is_read_anew(path):
    """Its length alone does not tell: between two looks a run may be resumed and write more than was cut."""
    write_lines(path, [{"step": step, "try": 1} for step in range(9)])
    lines = JsonLines(path)
    lines.read()
    os.truncate(path, 2 * len('{"step": 0, "try": 1}\n'))
    write_lines(path, [{"step": step, "try": 2} for step in range(2, 20)])
    assert [row["try"] for row in lines.read()] == [1] * 2 + [2] * 18 and lines.was_replaced


def test_a_file_that_another_has_replaced_is_read_anew(path, tmp_path):
    """A run that is begun anew in the same folder writes new files of the old names."""
    write_lines(path, [{"step": 1}])
    lines = JsonLines(path)
    lines.read()
    write_lines(tmp_path / "other", [{"step": 1}, {"step": 7}])
    os.replace(tmp_path / "other", path)
    assert read_steps(lines) == [1, 7] and lines.was_replaced
    path.unlink()
    assert lines.read() == [] and lines.was_replaced


def test_lines_that_are_no_json_objects_are_left_out(path):
    """One broken line, as a machine that lost power leaves it, hides a whole run."""
    path.write_bytes(b'{"step": 1}\nnonsense\n[2]\n\x00\x00\x00\n\n{"step": NaN}\n{"step": 3}\n')
    lines = JsonLines(path)
    rows = lines.read()
    assert [row["step"] for row in rows][::2] == [1, 3] and len(rows) == 3


def test_lines_longer_than_a_block_arrive(path):
    """A reader that looks for the end of a line in one block hangs at, or skips, a longer one."""
    write_lines(path, [{"step": 1}, {"step": 2, "text": "x" * (5 << 20)}, {"step": 3}])
    batches = list(JsonLines(path).read_batches())
    assert [row["step"] for batch in batches for row in batch] == [1, 2, 3] and len(batches) > 1


def test_a_reader_that_stops_in_the_middle_goes_on_there(path):
    """What was left of a long file is taken for read, until the file changes again."""
    write_lines(path, [{"step": step, "text": "x" * (1 << 18)} for step in range(12)])
    lines = JsonLines(path)
    first = [row["step"] for row in next(iter(lines.read_batches()))]
    assert len(first) < 12 and first + read_steps(lines) == list(range(12))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_empty(path):
    """One unreadable folder takes the table of all runs away."""
    write_lines(path, [{"step": 1}])
    path.chmod(0)
    assert JsonLines(path).read() == [] and read_last_rows(path) == []


def test_the_last_rows_are_whole_lines(path):
    """The first of the bytes at a file's end are mostly the middle of a line."""
    write_lines(path, [{"step": step} for step in range(100)])
    with path.open("a") as file:
        file.write('{"step": 1')
    assert [row["step"] for row in read_last_rows(path, 50)] == [97, 98, 99]
    assert len(read_last_rows(path)) == 100
    assert read_last_rows(path.with_name("none")) == []
