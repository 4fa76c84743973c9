"""Previews show what prepared rows hold; tokenizers are loaded ready to train with."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.data import CHATML, LLAMA3, chat, find_supervised, make_tokenizer, write_jsonl
from helpers.paths import ROOT

from lorashard.config.data_options import DataOptions
from lorashard.config.run_config import RunConfig
from lorashard.data.prepare import prepare
from lorashard.data.preview import preview, preview_run, render_preview, split_text
from lorashard.data.tokenizer import load_tokenizer
from lorashard.data.visible import show_unseen
from lorashard.errors import CheckpointError, ConfigError

ROWS = [{"messages": chat("How many?", "72 🦙 clips.", "And in May?", "24 \x1b[2J")}, {"messages": chat("a")}]


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_token_texts_join_to_the_decoded_whole(kind: str) -> None:
    """Catches spaces lost between tokens, and characters of several tokens shown as question marks."""
    tokenizer = make_tokenizer(kind=kind)
    ids = tokenizer("<s>The capital of France, naïve 🦙🦙 你好\n\n The end. </s>")["input_ids"]
    pieces = split_text(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert split_text([], tokenizer) == []
    assert len(split_text(ids[:20], tokenizer)) == 20  # cut within a character


def test_preview_marks_what_is_supervised(tmp_path: Path) -> None:
    """Catches a preview that shows other marks than training has, and a bad row left out of it."""
    tokenizer = make_tokenizer(CHATML)
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", ROWS), on_bad_row="skip")
    first, second = preview(options, tokenizer, 5)
    row = prepare(options, tokenizer, tmp_path / "cache").train[0]
    (sequence,) = first.sequences
    assert sequence.num_tokens == len(row["input_ids"])
    assert sequence.num_supervised_tokens == sum(label != -100 for label in row["labels"])
    marked = [f"⟦{text}⟧" if is_supervised else text for text, is_supervised in sequence.tokens]
    shown = "".join(marked).replace("⟧⟦", "")
    assert [part.split("⟧")[0] for part in shown.split("⟦")[1:]] == find_supervised(row, tokenizer)
    assert second.sequences == [] and second.problem is not None and second.problem.startswith("nothing supervised")
    assert json.loads(json.dumps(asdict(first)))["place"] == "rows.jsonl line 1"


def test_rendered_preview(tmp_path: Path) -> None:
    """Catches marks that vanish without colors, and a dataset's control characters that steer the terminal.

    And a preview that hides what truncation takes away.
    """
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", ROWS))
    rows = preview(options, make_tokenizer(CHATML), 2)
    plain = render_preview(rows)
    assert "How many?<|im_end|>\n<|im_start|>assistant\n⟦72 🦙 clips.<|im_end|>\n⟧<|im_start|>user" in plain
    assert "rows.jsonl line 1 · messages · " in plain
    assert "supervised: assistant turns (incremental rendering)" in plain
    assert "nothing supervised" in plain.partition("rows.jsonl line 2 · messages · ")[2]
    assert "\x1b" not in plain and "␛[2J" in plain
    assert show_unseen(f"a\u202eb\u200b é🦙\n{chr(0xD800)}\u3164") == "a⟨U+202E⟩b⟨U+200B⟩ é🦙\n⟨U+D800⟩⟨U+3164⟩"
    colored = render_preview(rows, color=True)
    assert "\x1b[32m72 🦙 clips.<|im_end|>\n\x1b[0m" in colored
    assert "\x1b[2J" not in colored
    path = write_jsonl(tmp_path / "long.jsonl", [{"text": "x " * 100}])
    [row] = preview(DataOptions(dataset=path, max_length=10), make_tokenizer(), 1)
    num_tokens = len(make_tokenizer()("x " * 100 + "</s>")["input_ids"])
    assert f"10 tokens, truncated from {num_tokens}, " in render_preview([row])


def test_a_sweep_shows_examples_of_all_its_data(tmp_path: Path) -> None:
    """Catches a preview that asks for the dataset of the sweep, which its jobs have, or shows that of one job alone."""
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {row}"} for row in range(9)]) for name in ("a", "b")
    ]
    jobs = [{"name": f"j{number}", "dataset": path} for number, path in enumerate([*paths, paths[0]])]
    config = RunConfig(model=str(ROOT / "examples/demo/base"), trainer={"max_steps": 1}, sweep={"jobs": jobs})

    def list_places(config: RunConfig, num_rows: int) -> list[str]:
        return [row.place for row in preview_run(config, num_rows)]

    expected = ["a.jsonl line 1, job j0", "a.jsonl line 2, job j0", "b.jsonl line 1, job j1"]
    assert list_places(config, 3) == expected and list_places(config, 1) == ["a.jsonl line 1"]
    alone = config.model_copy(update={"sweep": None, "dataset": paths[1]})
    assert list_places(alone, 2) == ["b.jsonl line 1", "b.jsonl line 2"]


def test_the_middle_of_a_long_sequence_is_left_out(tmp_path: Path) -> None:
    """Catches a row of 300,000 tokens that is decoded and sent whole, and one whose end, the answer, is not shown."""
    options = DataOptions(
        dataset=write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "so " * 500, "completion": "END"}]), max_length=None
    )
    (whole,) = preview(options, make_tokenizer(), 1)[0].sequences
    (short,) = preview(options, make_tokenizer(), 1, max_tokens=40)[0].sequences
    assert (short.num_tokens, short.num_supervised_tokens) == (whole.num_tokens, whole.num_supervised_tokens)
    assert len(short.tokens) == 40 and short.num_left_out == whole.num_tokens - 40 and whole.num_left_out == 0
    assert short.tokens[:20] == whole.tokens[:20] and short.tokens[-5:] == whole.tokens[-5:]


def save(folder: Path, **options: object) -> str:
    make_tokenizer(**options).save_pretrained(folder)
    return str(folder)


def test_padding_token_is_the_end_token_if_there_is_none(tmp_path: Path) -> None:
    """Catches a tokenizer that fails at the first batch, or whose own padding token is overwritten."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "a")
    assert load_tokenizer(str(tmp_path / "a")).pad_token == "</s>"
    assert load_tokenizer(save(tmp_path / "b")).pad_token == "<pad>"
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "c")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(tmp_path / "c"))
    assert caught.value.option == "eos_token"
    assert load_tokenizer(str(tmp_path / "c"), eos_token="<|im_end|>").pad_token == "<|im_end|>"


def test_chat_template_is_taken_from_a_file_or_a_tokenizer(tmp_path: Path) -> None:
    """Catches a template that is not applied, and one whose special tokens the model does not have."""
    base = save(tmp_path / "base")
    (tmp_path / "chat.jinja").write_text(CHATML)
    assert load_tokenizer(base, chat_template_path=str(tmp_path / "chat.jinja")).chat_template == CHATML
    source = save(tmp_path / "source", chat_template=LLAMA3)
    assert load_tokenizer(base, chat_template_path=source).chat_template == LLAMA3

    foreign = make_tokenizer(CHATML.replace("<|im_end|>", "<|foreign|>"))
    foreign.add_tokens(["<|foreign|>"], special_tokens=True)
    foreign.save_pretrained(tmp_path / "foreign")
    for path, mentioned in {str(tmp_path / "foreign"): "<|foreign|>", base: base, "missing.jinja": "No such"}.items():
        with pytest.raises(ConfigError, match=re.escape(mentioned)) as caught:
            load_tokenizer(base, chat_template_path=path)
        assert caught.value.option == "chat_template_path"


def test_missing_tokenizer_or_token(tmp_path: Path) -> None:
    """Catches a traceback of the tokenizer libraries where the model's name is wrong."""
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        load_tokenizer(str(tmp_path))
    with pytest.raises(CheckpointError, match="'nobody/nothing'"):
        load_tokenizer("nobody/nothing")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(save(tmp_path / "a"), eos_token="stop!")
    assert (caught.value.option, caught.value.found) == ("eos_token", "'stop!'")
