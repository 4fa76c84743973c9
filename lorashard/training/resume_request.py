"""What `resume_from_checkpoint` asks for, looked at before any work is done for it. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

from ..config.run_config import RunConfig
from ..errors import ConfigError
from ..runs.checkpoints import find_newest, list_checkpoints


def check_wanted(config: RunConfig) -> None:
    """Refuse a checkpoint that is not there before any work is done for it.

    Raises:
        ConfigError: there is none, and the run is not to start afresh then.
    """
    wanted = config.resume_from_checkpoint
    if isinstance(wanted, str) and wanted != "auto":
        read_progress(Path(wanted))
    elif wanted and not list_checkpoints(Path(config.output_dir)):
        check_afresh(config)


def read_progress(checkpoint: Path) -> int:
    """Return the step that a checkpoint has come to, whatever its folder is called.

    Raises:
        ConfigError: it is no checkpoint.
    """
    path = checkpoint / "trainer_state.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))["global_step"]
    except OSError:
        found = "one without" if checkpoint.is_dir() else "nothing at"
        raise ConfigError(
            option="resume_from_checkpoint",
            expected=f"a checkpoint's folder, with {path.name}",
            found=f"{found} {path}",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"damaged: {error}", option="resume_from_checkpoint", where=path) from error


def check_afresh(config: RunConfig) -> None:
    """Refuse to start afresh where nobody has asked for that, or where it would cost a finished adapter.

    To be called where there is no complete checkpoint to resume from.

    Raises:
        ConfigError: the option is `true`, or the folder holds an adapter and is not to be overwritten.
    """
    folder = Path(config.output_dir)
    missing = {"option": "resume_from_checkpoint", "expected": f"a complete checkpoint in {folder}"}
    if config.resume_from_checkpoint is True:
        raise ConfigError(
            **missing,
            found="none",
            fix="leave the option out to start anew, or give auto, which starts afresh where there is none",
        )
    if (folder / "adapter_config.json").exists() and not config.overwrite_output_dir:
        raise ConfigError(
            **missing,
            found="a finished adapter, which starting afresh would delete",
            fix="choose another folder, or start anew with --overwrite_output_dir",
        )


def resumes_in_place(config: RunConfig) -> bool:
    """Tell whether the run resumes the run in its own folder, rather than starts anew or from another's checkpoint."""
    checkpoint = config.resume_from_checkpoint
    if checkpoint == "auto":
        return find_newest(Path(config.output_dir)) is not None
    if isinstance(checkpoint, str):
        return Path(checkpoint).resolve().parent == Path(config.output_dir).resolve()
    return bool(checkpoint)
