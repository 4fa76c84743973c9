"""Files mapped into memory: bytes that all processes of a machine share through the kernel's page cache."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import psutil
import torch

_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.sshfs", "glusterfs"}

_logger = logging.getLogger(__name__)


class MappedFiles:
    """Maps files privately: a write to the memory would never reach a file.

    Note [Files that shrink]
        Reading a mapped page that is no longer in the file ends the process by SIGBUS; nothing can catch that. The
        sizes were checked when the headers were read; the mapping of a file that is replaced by renaming is unchanged.

    Memory: none of its own; the kernel loads and drops pages.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._folders: set[Path] = set()

    def view(self, file: Path, begin_byte: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of a file as a uint8 tensor without a copy. The mapping lives as long as the tensor."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if file not in self._maps:
            folder = file.resolve().parent
            if folder not in self._folders:
                self._folders.add(folder)
                _warn_of_remote(folder)
            self._maps[file] = _map(file)
        return torch.frombuffer(self._maps[file], dtype=torch.uint8, count=num_bytes, offset=begin_byte)


def _map(file: Path) -> mmap.mmap:
    # Writable but private, so that torch treats it as ordinary memory; without reserving memory, so that the kernel
    # maps a file that is larger than the machine's memory.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _warn_of_remote(folder: Path) -> None:
    """Warn if a folder, links resolved, is on a network file system, which may have to send every page again."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[path] for path in (folder, *folder.parents) if path in mounts), "")
    if kind in _REMOTE:
        _logger.warning(
            "%s is on a network file system (%s): placement 'file' reads the base from there whenever the kernel has "
            "dropped pages, and a server that goes away stops the run; a local copy is safer and faster",
            folder,
            kind,
        )
