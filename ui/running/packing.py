"""An adapter as one file to download: the files of PEFT and the tokenizer, and nothing else of a run's folder."""

from __future__ import annotations

import os
import secrets
import zipfile
from pathlib import Path

from lorashard.errors import ConfigError
from lorashard.runs.checkpoints import find_newest, list_checkpoints
from lorashard.runs.root import find_run, is_job

_WAIT = "wait for its first checkpoint, or save one now"
_NEEDED = ("adapter_config.json", "adapter_model.safetensors")
_MORE = (
    "README.md",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)


def has_adapter(folder: Path) -> bool:
    """Return whether a run's folder has an adapter: the final one, or one in a checkpoint."""
    return (folder / "adapter_config.json").is_file() or bool(list_checkpoints(folder))


def list_checkpoint_names(folder: Path) -> list[str]:
    """Return a run's checkpoints whose adapter is there, the newest first."""
    return [path.name for path in list_checkpoints(folder) if not path.is_symlink() and _is_complete(path)]


def list_merged(root: Path) -> list[str]:
    """Return the names of the folders beside the runs that hold a whole model, and no adapter."""
    found = [
        path.parent.name
        for path in root.glob("*/config.json")
        if any(path.parent.glob("model*.safetensors")) and not has_adapter(path.parent)
    ]
    return sorted(found)


def find_adapter_run(root: Path, name: str | None, checkpoint: str = "") -> Path:
    """Return the folder of a run that has an adapter, or that of one of its checkpoints.

    Raises:
        ConfigError: there is none of that name, or it has no adapter, or no such checkpoint.
    """
    if not name:
        raise ConfigError("no run is chosen", fix="choose one")
    folder = find_run(root, name)
    if not folder.is_dir():
        raise ConfigError(f"there is no run {name!r}")
    if not has_adapter(folder):
        raise ConfigError(f"{name} has no adapter yet", fix=_WAIT)
    if not checkpoint:
        return folder
    names = list_checkpoint_names(folder)
    if checkpoint not in names:
        found = f"{checkpoint!r:.80}"
        raise ConfigError(option="checkpoint", expected=", ".join(names) or "none, as there are none", found=found)
    return folder / checkpoint


def list_adapter_files(run_folder: Path) -> list[Path]:
    """Return the files of a run's adapter: the final one, or that of the newest complete checkpoint.

    Raises:
        ConfigError: it has none.
    """
    folder: Path | None = run_folder
    if not _is_complete(run_folder):
        folder = find_newest(run_folder)
    if folder is None or not _is_complete(folder):
        raise ConfigError(f"{run_folder.name} has no adapter yet", fix=_WAIT)
    return [folder / name for name in (*_NEEDED, *_MORE) if _is_plain(folder / name)]


def pack_adapter(run_folder: Path, folder: Path, checkpoint: str = "") -> Path:
    """Return a zip in `folder` of the adapter of a run or of a checkpoint; write it again if the adapter has changed.

    Raises:
        ConfigError: it has no adapter.
    """
    files = list_adapter_files(run_folder / checkpoint)
    parts = (run_folder.parent.name, run_folder.name) if is_job(run_folder) else (run_folder.name,)
    stem = "-".join(filter(None, (*parts, checkpoint, "adapter")))
    folder = folder.joinpath(*parts)  # a run may be named like another's checkpoint
    out = folder / f"{stem}.zip"
    newest_ns = max(path.stat().st_mtime_ns for path in files)
    if out.is_file() and out.stat().st_mtime_ns == newest_ns:
        return out
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{out.name}.{secrets.token_hex(4)}.partial"  # two tabs may pack at the same time
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as packed:  # weights do not get smaller
            for path in files:
                packed.write(path, f"{stem}/{path.name}")
        os.utime(partial, ns=(newest_ns, newest_ns))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return out


def _is_complete(folder: Path) -> bool:
    return all(_is_plain(folder / name) for name in _NEEDED)


def _is_plain(path: Path) -> bool:
    """Return whether it is a regular file and not a link, which may lead out of the folder."""
    return path.is_file() and not path.is_symlink()
