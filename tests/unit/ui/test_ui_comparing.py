"""What several runs were told differently, and nothing else."""

import json

from helpers.ui_runs import make_run

from lorashard_ui.reading.comparing import differences
from lorashard_ui.reading.runs import Runs


def compare(tmp_path, *texts, versions=()):
    runs = Runs(tmp_path)
    names = []
    for number, text in enumerate(texts):
        name = f"run{number}"
        folder = make_run(tmp_path, name, steps=1, num_ranks=0)
        (folder / "config.yaml").write_text(text)
        if versions:
            (folder / "versions.json").write_text(json.dumps(versions[number]))
        names.append(name)
    return differences([runs.get(name) for name in names])


def test_only_what_differs_is_told(tmp_path):
    """Eighty options that are the same hide the one that is not."""
    one = "learning_rate: 0.0002\nlora_r: 16\ndataset: a\noutput_dir: runs/one\npacking: true\n"
    two = "learning_rate: 0.0002\nlora_r: 32\ndataset: a\noutput_dir: runs/two\npacking: false\n"
    assert compare(tmp_path, one, two) == [("lora_r", ["16", "32"]), ("packing", ["true", "false"])]


def test_an_option_that_one_run_has_not_is_told(tmp_path):
    """An option that only one run was given is the difference that matters most."""
    assert compare(tmp_path, "a: 1\n", "a: 1\nmax_steps: 5\n", "a: 1\nmax_steps: null\n") == [
        ("max_steps", ["(not given)", "5", "null"])
    ]


def test_the_same_number_in_other_letters_is_no_difference(tmp_path):
    """YAML takes 5e-3 for a text: runs that are the same would seem to differ."""
    assert compare(tmp_path, "learning_rate: 5e-3\nepochs: 1\n", "learning_rate: 0.005\nepochs: 1.0\n") == []


def test_versions_that_differ_come_last(tmp_path):
    """The same options with another torch are not the same run."""
    versions = [{"torch": "2.9.0", "peft": "0.21"}, {"torch": "2.13.0", "peft": "0.21"}]
    found = compare(tmp_path, "b: 1\n", "b: 2\n", versions=versions)
    assert found == [("b", ["1", "2"]), ("version of torch", ["2.9.0", "2.13.0"])]


def test_one_run_and_unreadable_ones_are_no_crash(tmp_path):
    """The page is open while the person still chooses."""
    assert compare(tmp_path, "a: 1\n") == [] == differences([])
    assert compare(tmp_path / "more", "a: [", "\x00", "- list\n") == []
