"""What an error carries, and the one sentence that is made of it."""

from __future__ import annotations

import pickle

import pytest

from lorashard.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConfigError("no room"), "no room"),
        (ConfigError(option="seed", expected="a number", found="'x'"), "seed: expected a number, found 'x'"),
        (DataError("no text", where="a.jsonl:3", fix="add one"), "a.jsonl:3: no text; add one"),
        (ConfigError("twice", option="seed", found=0, fix=None), "seed: twice: found 0"),
    ],
)
def test_the_sentence_says_every_field_once(error, sentence):
    """Catches a field that is lost or said twice, and a found value that is false and left out."""
    assert str(error) == sentence
    assert str(error.to_json()["type"]) == type(error).__name__


def test_fields_survive_the_way_between_ranks():
    """Catches an error of another rank that arrives as a bare sentence, or not at all."""
    error = pickle.loads(pickle.dumps(ConfigError("twice", option="seed", where="run.yaml", found=0)))
    assert "lambda" in pickle.loads(pickle.dumps(ConfigError(found=lambda: 0))).found

    assert error.to_json() == {
        "type": "ConfigError", "problem": "twice", "option": "seed", "found": "0", "where": "run.yaml"
    }  # fmt: skip
