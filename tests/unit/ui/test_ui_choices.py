"""What the form offers: files of the folders that may be read, recipes, and ids of a Hub that may not answer."""

from __future__ import annotations

import os

import pytest

from lorashard_ui.form import choices, hub_search
from lorashard_ui.form.choices import Choices
from lorashard_ui.form.form import read_yaml_file
from lorashard_ui.form.hub_search import HubSearch
from lorashard_ui.form.paths import Allowed


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder where a server was started: two datasets and a model that are seen, and others that are not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choices.constants, "HF_HUB_CACHE", str(tmp_path / "no-cache"))
    files = ["data/rows.jsonl", "top.csv", "base/config.json", "base/model.safetensors", "base/tokenizer.json"]
    files += [".hidden/rows.jsonl", "data/.rows.jsonl", "data/notes.txt", "old/status.json", "old/metrics.jsonl"]
    for name in [*files, "runs/.uploads/1/sent.jsonl", "runs/first/rows.jsonl", "a/b/c/d/e/f/g/deep.jsonl"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "out").symlink_to(tmp_path / ".hidden")
    return tmp_path


def test_files_of_the_folders_that_may_be_read_are_offered(place):
    """Catches an empty list, hidden files, files of runs and of models among the data, and a walk through a link."""
    offers = Choices(place / "runs", Allowed(place / "runs", start=place))
    assert offers.datasets() == ["runs/.uploads/1/sent.jsonl", "top.csv", "data/rows.jsonl"]
    assert offers.models() == ["base"]
    assert Choices(place / "runs", Allowed(place / "runs", [place / "data"])).datasets()[1:] == ["data/rows.jsonl"]


def test_a_path_is_completed_as_it_is_typed(place):
    """Catches a deep folder that cannot be reached by typing, and a list of a folder that may not be read."""
    offers = Choices(place / "runs", Allowed(place / "runs", start=place))
    assert offers.complete("a/b/c/d/e/f/g/d", is_model=False) == ["a/b/c/d/e/f/g/deep.jsonl"]
    assert offers.complete("./a/b/", is_model=True) == ["./a/b/c/"]
    assert offers.complete("data/", is_model=True) == []
    for typed in ("/etc/", "../", "out/", ".hidden/", "data/../.hidden/", "no/", "x"):
        assert offers.complete(typed, is_model=False) == []


def test_a_walk_ends(place, monkeypatch):
    """Catches a page that waits for a walk through millions of files."""
    monkeypatch.setattr(choices, "MAX_ENTRIES", 40)
    for number in range(100):
        (place / f"folder-{number}/inner").mkdir(parents=True)
    listed: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(str(folder)) or scan(folder))
    Choices(place / "runs", Allowed(place / "runs", start=place)).datasets()
    assert str(place) in listed and len(listed) < 10


def test_every_recipe_fills_in_the_form(place):
    """Catches a recipe that the form refuses, or that says nothing of itself."""
    offers = Choices(place / "runs", Allowed(place / "runs", start=place))
    recipes = choices.list_recipes()
    assert "lora" in recipes and "demo" not in recipes
    for path in recipes.values():
        assert read_yaml_file(path)
    shown = dict((value, label) for label, value in offers.sources())
    assert shown["recipe:lora"] == "Recipe lora: A first run, with the defaults written out"
    (place / "examples/demo").mkdir(parents=True)
    (place / "examples/demo/demo.yaml").write_text("# The demo's run; more\n")
    assert offers.sources()[0] == ("Recipe demo: The demo's run", "recipe:demo")


def test_the_hub_is_asked_for_ids_alone_and_left_alone_once_it_does_not_answer(place, monkeypatch):
    """Catches a path of this machine that is sent to the Hub, a question in spite of HF_HUB_OFFLINE, and a form that
    asks at every key what was not answered."""
    asked: list[str] = []

    class Hub:
        is_up = True

        def list_models(self, search, sort, limit):
            asked.append(search)
            if not self.is_up:
                raise OSError("no network")
            return [type("Found", (), {"id": "org/llama"})()]

    monkeypatch.setattr(hub_search, "HfApi", Hub)
    monkeypatch.setattr(hub_search.constants, "HF_HUB_OFFLINE", False)
    hub = HubSearch()
    assert hub.find("models", "llama") == ["org/llama"] and hub.why_off == ""
    for typed in ("/home/me", "./llama", "data/ro", "~/llama", "ll", "a/b/c", "C:\\x", ""):
        assert hub.find("models", typed) == []
    assert asked == ["llama"]
    Hub.is_up = False
    assert hub.find("models", "mistral") == [] and "does not answer" in hub.why_off
    assert hub.find("models", "mistral-7b") == [] and asked == ["llama", "mistral"]
    monkeypatch.setattr(hub_search.constants, "HF_HUB_OFFLINE", True)
    offline = HubSearch()
    assert offline.find("models", "qwen") == [] and "HF_HUB_OFFLINE" in offline.why_off and "qwen" not in asked
