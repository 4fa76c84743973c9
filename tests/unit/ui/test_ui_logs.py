"""Logs as a person reads them: their end, what matches, no escape codes, no secrets, however large they are."""

import os

import pytest
from helpers.ui_runs import make_run

from lorashard.errors import ConfigError
from lorashard_ui.reading.logs import list_logs, read_backwards, read_log
from lorashard_ui.reading.sanitize import show_safely, tame


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path, num_ranks=1)


def write_log(folder, text, rank=0):
    (folder / f"logs/rank_{rank}.log").write_bytes(text if isinstance(text, bytes) else text.encode())


def test_the_end_of_a_log_comes_in_order(folder):
    """The first lines of a log, or lines upside down, tell nothing of why a run ended."""
    write_log(folder, "".join(f"line {number}\n" for number in range(1000)))
    assert read_log(folder, 0, max_lines=3) == "line 997\nline 998\nline 999"
    assert read_log(folder, 0, max_lines=5000).count("\n") == 999
    write_log(folder, "whole\nhalf")
    assert read_log(folder, 0) == "whole\nhalf"
    write_log(folder, "")
    assert read_log(folder, 0) == ""


@pytest.mark.parametrize("text", ["a\n\nbcd\néü\n\n", "\n", "a", "\na\nb"])
def test_blocks_do_not_show(folder, text):
    """A line, an empty line or a letter of several bytes that lies across two blocks is lost or doubled."""
    write_log(folder, text)
    expected = [line.encode() for line in reversed(text.removesuffix("\n").split("\n"))]
    for block_bytes in (1, 2, 3, 7, 64):
        assert list(read_backwards(folder / "logs/rank_0.log", block_bytes)) == expected


def test_a_log_of_gigabytes_is_read_from_its_end(folder, monkeypatch):
    """The server reads, and holds, the whole file each two seconds."""
    path = folder / "logs/rank_0.log"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # holes
        file.seek(0, 2)
        file.write(b"\nthe end\n")
    num_read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: num_read.append(len(found := pread(*args))) or found)
    assert next(iter(read_backwards(path))) == b"the end"
    assert sum(num_read) < 1 << 20
    write_log(folder, "needle\n" + "hay\n" * 500_000)
    said = read_log(folder, 0, "needle", most_bytes=1 << 20)
    assert "1.9 MiB" in said and "1.0 MiB" in said and "needle" not in said


def test_a_progress_bar_is_what_a_terminal_shows(folder):
    """A bar that was drawn a thousand times is a thousand bars in a browser; and of a line of 10 MB the end counts."""
    bars = "".join(f"\r{step:>6}/9999 steps" for step in range(10_000))
    write_log(folder, f"start\n{bars}\r{{'loss': 1.0}}\nx\n")
    assert read_log(folder, 0) == "start\n{'loss': 1.0}teps\nx"  # the bar is longer than what overwrites it
    write_log(folder, "".join(f"\r{step:>9}/9999999 steps and more" for step in range(300_000)))
    assert read_log(folder, 0) == "   299999/9999999 steps and more"


def test_colors_and_control_characters_are_gone():
    """An escape code can hide text, name a link or move the cursor; a turned line shows other words than it has."""
    text = "\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]0;title\x1b\\ a\x08\x00b \x9b31m \u202egnp.exe\u202c\ttab"
    assert tame(text) == "red link ab 31m gnp.exe\ttab"


@pytest.mark.parametrize(
    "text, secret",
    [
        ("using hf_AbCdEfGhIjKlMnOpQrSt now", "AbCdEfGh"),
        ("\x1b[1mhf_Ab\x1b[0mCdEfGhIjKlMnOpQrSt", "CdEfGh"),
        ("HF_TOKEN=abc123def", "abc123"),
        ("export WANDB_API_KEY='0123456789abcdef'", "01234567"),
        ('{"MY_SECRET": "xyzzy123"}', "xyzzy"),
        ("AWS_SECRET_ACCESS_KEY: wJalrXUtnFEMI/K7", "wJalr"),
        ("https://user:pa55word@host/x", "pa55word"),
        ("https://ghp_0123456789abcdefghij@github.com/x", "0123456789"),
        ("GET https://host/file?X-Amz-Signature=deadbeef0123&y=1", "deadbeef"),
        ("https://host/data?token=abcdef123456", "abcdef"),
        ("Authorization: Bearer abc.def.ghi-jkl", "abc.def"),
        ("hub_token: whatever123", "whatever"),
        ("password='hunter2hunter2'", "hunter2"),
        ("sk-proj-0123456789abcdefXYZ", "0123456789"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3", "dozjg"),
    ],
)
def test_secrets_are_not_shown(text, secret):
    """A library that prints its request, or a shell its environment, shows a token to whoever sees the page."""
    shown = show_safely(f"before {text} after")
    assert secret not in shown and "***" in shown and shown.startswith("before") and shown.endswith("after")


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': '0.47', 'num_tokens': '1.703e+04', 'tokens_per_s': '2840', 'mean_token_accuracy': '0.85'}",
        "eos_token: </s>, pad_token='<pad>', hub_token: null, hf_token=None",
        "see https://huggingface.co/org/model/tree/main?x=1 and user@host",
        "model.layers.0.self_attn.q_proj.lora_A: torch.Size([16, 64])",
        "basic training, the key is: more data",
        "commit aec634696d2ffaff4612c4e9552e37b017a1c12e",
    ],
)
def test_what_is_no_secret_stays(text):
    """A log full of stars hides the numbers that it is read for."""
    assert show_safely(text) == text


def test_a_search_finds_words(folder):
    """The one line that matters is among a million."""
    write_log(folder, "".join(f"step {number} Loss {number % 7}\n" for number in range(10_000)))
    assert read_log(folder, 0, "STEP 4321 loss") == "step 4321 Loss 2"
    assert read_log(folder, 0, "9 loss 0", max_lines=2) == "step 9919 Loss 0\nstep 9989 Loss 0"
    assert read_log(folder, 0, r"step 99\d\d") == ""
    assert read_log(folder, 0, "nowhere") == ""


def test_a_secret_cannot_be_found_out_by_searching(folder):
    """A hidden token that a search still matches is told letter by letter."""
    write_log(folder, "token hf_AbCdEfGhIjKlMnOpQrSt\n")
    assert read_log(folder, 0, "hf_AbC") == ""
    assert read_log(folder, 0, "token") == "token hf_***"


def test_only_logs_of_the_run_are_read(folder, tmp_path):
    """Names come from a browser."""
    (tmp_path / "secret").write_text("secret")
    (folder / "logs/rank_3.log").symlink_to(tmp_path / "secret")
    (folder / "logs/launcher.log").write_text("hello")
    assert list_logs(folder) == ["launcher", 0, 3] and read_log(folder, "launcher") == "hello"
    for rank in (1, -1, True, "0", "../../secret", None, 3):
        with pytest.raises(ConfigError):
            read_log(folder, rank)
