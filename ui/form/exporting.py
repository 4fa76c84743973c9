"""Check the options of a merge, a verification or an upload as the command line does, before a job starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from lorashard.config.use_options import MergeOptions, VerifyOptions
from lorashard.errors import ConfigError
from lorashard.runs.root import find_place

from ..running.packing import find_adapter_run

# Which base weights an adapter is merged into that was trained on a quantized base; the first is the default.
AS_TRAINED = "as in training, dequantized"
MERGED_BASES = {
    AS_TRAINED: [],
    "the original values": ["--quantization", "none"],
    "as in training, merged and quantized to nf4 again": ["--requantize", "nf4"],
    "as in training, merged and quantized to int8 again": ["--requantize", "int8"],
}

_REPO = "the id of a repo of yours, org/name"


@dataclass(frozen=True)
class Merge:
    """A merge that may start: where the adapter is, where the model goes, and the options beside these."""

    run_folder: Path
    out: Path
    options: list[str]


def check_merge(
    root: Path,
    name: str | None,
    out_name: str,
    dtype: str,
    device_words: Sequence[str],
    repo: str,
    is_private: bool,
    base_words: Sequence[str] = (),
    checkpoint: str = "",
) -> Merge:
    """Return what to merge and where to.

    Args:
        base_words: such as those of `MERGED_BASES`.
        checkpoint: whose adapter is merged; empty: the run's last.

    Raises:
        ConfigError: something is wrong with a field.
    """
    folder = find_adapter_run(root, name, checkpoint)
    try:
        out = find_place(root, out_name.strip())
    except ConfigError as error:
        error.option = "out"
        raise
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            option="out", expected="a new or empty folder", found=out, fix="choose another name, or remove it first"
        )
    options = ["--dtype", dtype, *base_words, *device_words]
    if repo.strip():
        options += ["--push_to_hub", check_repo(repo), "--hub_private_repo", str(is_private).lower()]
    MergeOptions.read([str(folder), str(out), *options])
    return Merge(folder, out, options)


def check_verify(
    root: Path, name: str | None, merged_name: str | None, device_words: Sequence[str], checkpoint: str = ""
) -> tuple[Path, list[str]]:
    """Return the run to verify, and the options.

    Raises:
        ConfigError: something is wrong with a field.
    """
    folder = find_adapter_run(root, name, checkpoint)
    options = ["--merged", str(find_place(root, merged_name))] if merged_name else []
    options += device_words
    VerifyOptions.read([str(folder), *options])
    return folder, options


def check_repo(repo: str) -> str:
    """Return the id of a repo of the hub that can be written to from here.

    Raises:
        ConfigError: it is no id, or nobody is logged in.
    """
    repo = repo.strip()
    if "://" in repo:  # it may hold a password, so it is not repeated
        raise ConfigError(option="repo", expected=_REPO, found="an address with '://'")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(str(error) if repo else "", option="repo", expected=_REPO, found=repr(repo)) from error
    if "/" not in repo:
        raise ConfigError(option="repo", expected=_REPO, found=repr(repo))
    if not is_logged_in():
        raise ConfigError(
            "nobody is logged in to the Hugging Face Hub here", option="repo", fix="run `hf auth login` in a terminal"
        )
    return repo


def is_logged_in() -> bool:
    """Tell whether there is a token of the hub, whatever it may do."""
    return get_token() is not None
