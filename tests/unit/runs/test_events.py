"""events.jsonl: its kinds are those of the documents, and processes share the file."""

from __future__ import annotations

import ast
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

from lorashard.runs.events import EventLog, read_events

REPOSITORY = Path(__file__).parents[3]


def find_emitted() -> Iterator[tuple[str, set[str] | None]]:
    """Find the kind of each `emit("kind", ...)` of the sources, and its fields, None where they are handed on."""
    for path in (REPOSITORY / "lorashard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            if (getattr(node.func, "attr", "") or getattr(node.func, "id", "")).lstrip("_") == "emit":
                names = {keyword.arg for keyword in node.keywords}
                yield str(node.args[0].value), None if None in names else {str(name) for name in names} - {"step"}


def test_every_kind_is_documented_with_its_fields():
    """Catches an event that scripts cannot know of, and a documented one that nobody records."""
    document = (REPOSITORY / "docs/reliability.md").read_text()
    cells = [line.split(" | ") for line in document.splitlines() if line.startswith("| `") and line.count(" | ") == 2]
    documented = {kind.strip("| `"): set(fields.replace("`", "").split(", ")) for kind, fields, _ in cells}
    emitted = dict(find_emitted())
    assert emitted.keys() <= documented.keys(), "kinds that the table lacks"
    assert documented.keys() - emitted.keys() == set(), "kinds that nobody records"
    for kind, fields in emitted.items():
        assert fields is None or fields == documented[kind], kind


def append(folder: Path, rank: int) -> None:
    events = EventLog(folder, rank, print)
    for number in range(200):
        events.emit("nonfinite", step=number, losses=["nan"] * 50, rows=[], grad_norm=1.0, is_skipped=True)


def test_processes_append_without_tearing_lines(tmp_path):
    """Catches a line that two ranks have written into each other, and one that repairing another's has cut off."""
    (tmp_path / "events.jsonl").write_text('{"kind": "ha')  # left by a kill
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=append, args=(tmp_path, rank)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 600
    for rank in range(3):
        assert [event["step"] for event in read_events(tmp_path) if event["rank"] == rank] == list(range(200))
