"""A folder that several ranks write: it appears under its name when all of it is there, or not at all."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError, ConfigError
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..runtime.atomic_folder import name_partial, publish_folder, remove_abandoned
from ..runtime.disk import describe_fault, show_bytes


def check_target(out: Path) -> None:
    """Refuse a target that holds something.

    Raises:
        ConfigError: `out` is a file or a folder that is not empty.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder: give another target, or remove it first")
    if out.is_mount():
        raise ConfigError(f"{out} is a mount point, which a folder cannot be renamed to: give a folder inside it")


@contextmanager
def publish(out: Path, num_bytes: int) -> Iterator[Path]:
    """Give all ranks one folder to fill, which becomes `out` if the block ends well on all of them.

    If it ends in any other way, SIGTERM and KeyboardInterrupt included, nothing is left.

    Args:
        num_bytes: what will be written, by all ranks.

    Raises:
        ConfigError: `out` holds something.
        CheckpointError: there is no room, or writing failed.

    Ranks: collective over all ranks.
    """
    out = out.resolve()
    partial = dist.broadcast_object(name_partial(out))

    def prepare() -> None:
        check_target(out)
        remove_abandoned(out)
        _check_room(partial.parent, num_bytes, out)
        partial.mkdir()

    with _exit_on_sigterm(), _explained(out, partial.parent, num_bytes):
        try:
            raise_on_all_ranks(prepare, on_rank=0)
            yield partial
            raise_on_all_ranks(lambda: publish_folder(partial, out), on_rank=0)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _explained(out: Path, place: Path, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written: it takes {show_bytes(num_bytes)} ({describe_fault(error, place)}); make room "
            "or give another target; nothing of it is left"
        ) from error


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, unless somebody handles it already."""
    is_ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if is_ours:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _check_room(place: Path, num_bytes: int, out: Path) -> None:
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < num_bytes:
        raise CheckpointError(
            f"{out} will take {show_bytes(num_bytes)}, and {show_bytes(free_bytes)} are free in {place}: make room or "
            "give another target"
        )
