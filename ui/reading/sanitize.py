"""Text of a run made fit to be shown: as a terminal would leave it, and without secrets."""

from __future__ import annotations

import re
from typing import Any

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\|$)|[@-Z\\^_])")
# Also what turns the direction of writing, with which a line can show other words than it has.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_HIDDEN = "***"
_SECRETS = (
    # Tokens that say themselves what they are: of Hugging Face, GitHub, GitLab, OpenAI and its kin, AWS, Slack, JWT.
    (re.compile(r"\b(hf_|gh[pousr]_|github_pat_|glpat-|sk-|AKIA|xox[abpr]-)[A-Za-z0-9_-]{8,}"), rf"\1{_HIDDEN}"),
    (re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"), _HIDDEN),
    (re.compile(r"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?\w+\s+)[^\s'\"]+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{16,}"), rf"\1{_HIDDEN}"),
    (re.compile(r"(://)[^\s/@:'\"]*:[^\s/@'\"]+@|(://)[^\s/@'\"]{8,}@"), rf"\1\2{_HIDDEN}@"),
    (
        re.compile(r"(?i)([?&](?:[\w-]*(?:token|key|signature|secret|credential|password)|sig|auth)=)[^&\s'\"]+"),
        rf"\1{_HIDDEN}",
    ),
    # HF_TOKEN=..., "WANDB_API_KEY": "..."; in small letters only names that hold nothing else, unlike eos_token.
    (re.compile(r"\b([A-Z][A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD)['\"]?\s*[=:]\s*['\"]?)[^\s'\",}]+"), rf"\1{_HIDDEN}"),
    (
        re.compile(
            r"(?i)\b((?:hf|hub|push_to_hub|use_auth|auth|access|api)_token|\w*api_?key|\w*secret\w*|password)"
            r"(['\"]?\s*[=:]\s*['\"]?)(?!(?:null|none|true|false)\b)[^\s'\",}]+"
        ),
        rf"\1\2{_HIDDEN}",
    ),
)


def tame(text: str) -> str:
    """Return lines as a terminal leaves them: without colors, with what `\\r` overwrites gone, and nothing unseen."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\r" in text:
        text = "\n".join(map(_overwrite, text.split("\n")))
    return _CONTROLS.sub("", text)


def mask_secrets(text: str) -> str:
    """Return a text with tokens, passwords and keys hidden. Tame it first: a color inside of a token would hide it."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def show_safely(text: str) -> str:
    """Return a text of a run that may be shown."""
    return mask_secrets(tame(text))


def hide_secrets(value: Any, name: str = "") -> Any:
    """Return a value of YAML with the secrets in its texts hidden; its name may tell that it is one."""
    if isinstance(value, str):
        label = f"{name}: "
        return show_safely(label + value).removeprefix(label)
    if isinstance(value, dict):
        return {key: hide_secrets(inner, str(key)) for key, inner in value.items()}
    return [hide_secrets(inner, name) for inner in value] if isinstance(value, list) else value


def _overwrite(line: str) -> str:
    shown = ""
    for piece in line.split("\r"):
        shown = piece + shown[len(piece) :]
    return shown.rstrip()
