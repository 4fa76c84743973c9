"""Names of runs that come from a browser: none leads out of the folder of runs."""

import pytest

from lorashard.errors import ConfigError
from lorashard.runs.root import find_run


@pytest.mark.parametrize("name", ["first", "2026-11-21 llama r=16", "a.b_c+d@e", "läuft", "a", "x" * 255])
def test_plain_names_are_folders_of_the_root(tmp_path, name):
    """A rule so strict that a person cannot name a run."""
    assert find_run(tmp_path, name) == tmp_path.resolve() / name
    (tmp_path / name).mkdir()
    assert find_run(tmp_path, name) == tmp_path.resolve() / name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a/../../x", "/etc", "a\\b", "~", "~root", ".hidden", "-rf", " a", "a ", "a\n"]
    + ["a\0b", "a\tb", "a\u202eb", "C:x", "a:b", "$HOME", "a*", "x" * 256, "ä" * 128, "%2e%2e", "a\ud800"],
)
def test_other_names_are_refused(tmp_path, name):
    """`..`, an absolute path, a hidden folder, or a name that a shell or a terminal reads in its own way."""
    with pytest.raises(ConfigError, match="name of") as caught:
        find_run(tmp_path, name)
    assert str(caught.value).isprintable()


def test_a_link_is_no_run(tmp_path):
    """A link that somebody placed among the runs would show, and delete, a folder elsewhere."""
    root = tmp_path / "runs"
    (root / "real").mkdir(parents=True)
    (tmp_path / "private").mkdir()
    (root / "out").symlink_to(tmp_path / "private")
    (root / "in").symlink_to(root / "real")
    (root / "gone").symlink_to(tmp_path / "nowhere")
    for name in ("out", "in", "gone"):
        with pytest.raises(ConfigError, match="found a link"):
            find_run(root, name)


def test_the_root_may_be_a_link(tmp_path):
    """People keep runs on another disk, and the person who starts the server chose the root."""
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    assert find_run(tmp_path / "runs", "run") == (tmp_path / "disk" / "run").resolve()
