"""The folder of a merged model, which several ranks write: complete under its name, or not there at all."""

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
from ..runtime.atomic_folder import make_empty, name_partial, publish_folder, remove_abandoned
from ..runtime.disk import describe_fault, show_bytes


def check_target(out: Path) -> None:
    """Refuse a target that holds something.

    Raises:
        ConfigError: `out` is a file or a folder that is not empty.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            where=out,
            expected="a folder that does not exist or is empty",
            found="a folder that holds something" if out.is_dir() else "a file",
            fix="give another target, or remove it first",
        )
    if out.is_mount():
        raise ConfigError(
            "a folder cannot be renamed to a mount point",
            where=out,
            found="a mount point",
            fix="give a folder inside it",
        )


@contextmanager
def publish(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield one folder for all ranks to fill, which becomes `out` if the block ends well on all of them.

    If it ends in any other way, SIGTERM and KeyboardInterrupt included, nothing is left.

    Args:
        num_bytes: what all ranks together will write.

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
        make_empty(partial)

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
            f"the merged model of {show_bytes(num_bytes)} could not be written ({describe_fault(error, place)}), and "
            "nothing of it is left",
            where=out,
            fix="make room or give another target",
        ) from error


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, unless there is a handler already."""
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
            "the merged model does not fit on the disk",
            where=out,
            expected=f"{show_bytes(num_bytes)} free in {place}",
            found=show_bytes(free_bytes),
            fix="make room or give another target",
        )
