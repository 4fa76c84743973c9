"""Paths as a page shows them."""

from __future__ import annotations

import pytest

from lorashard_ui.reading.places import show_paths, write_path


@pytest.fixture(autouse=True)
def start_folder(tmp_path, monkeypatch):
    """Have the server be started in a folder of somebody's home."""
    folder = tmp_path / "ada" / "work"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HERE/runs/first: 38 tensors", "runs/first: 38 tensors"),
        ("38 tensors in HERE/base.", "38 tensors in base."),
        ("no folder 'HERE': give another", "no folder '.': give another"),
        ("in HERE.", "in ~/work."),  # not "in .."
        ("HOME/models/a and HOME", "~/models/a and ~"),
        ("HOME/workshop/a", "~/workshop/a"),
        ("/mntHERE/runs", "/mntHERE/runs"),
        ("/data/rows.jsonl of org/model", "/data/rows.jsonl of org/model"),
    ],
)
def test_a_path_is_shown_from_where_the_server_was_started(start_folder, text, shown):
    """Catches tables full of a machine's folders, and a path that is cut in the middle of a name and leads nowhere."""
    places = (("HERE", str(start_folder)), ("HOME", str(start_folder.parent)))
    for word, folder in places:
        text, shown = text.replace(word, folder), shown.replace(word, folder)
    assert show_paths(text) == shown


def test_a_path_of_a_command_leads_there_in_quotes_too(start_folder):
    """A shell does not expand a `~` in quotes, and `lorashard` would make a folder of that name."""
    assert write_path(f"{start_folder}/runs/first") == "runs/first"
    assert write_path(f"{start_folder.parent}/runs") == f"{start_folder.parent}/runs"


def test_a_server_that_was_started_at_the_root_shortens_nothing(monkeypatch):
    """Every path begins with /."""
    monkeypatch.chdir("/")
    assert show_paths("/data/rows.jsonl") == "/data/rows.jsonl"
