"""Files that are used where they are: all processes of a machine share their bytes in the kernel's page cache."""

from __future__ import annotations

import logging
import mmap
import warnings
from pathlib import Path

import psutil
import torch

from ..engine import FileRange, HostBytes, OpenFile

_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.sshfs", "glusterfs"}

_logger = logging.getLogger(__name__)


class WeightFiles:
    """Gives parts of files that nobody copies into memory of a process's own: mapped, or to be read when wanted.

    Note [Files that shrink]
        Reading a mapped page that is no longer in the file ends the process by SIGBUS; nothing can catch that. The
        sizes were checked when the headers were read. What is read instead is an error. Either way a file that is
        replaced by renaming leaves the one that was opened as it was.

    Memory: none of its own; the kernel loads and drops pages. One descriptor for each file that is not mapped.
    """

    def __init__(self, is_mapped: bool) -> None:
        self._is_mapped = is_mapped
        self._maps: dict[Path, mmap.mmap] = {}
        self._files: dict[Path, OpenFile] = {}
        self._folders: set[Path] = set()

    def find(self, file: Path, begin_byte: int, num_bytes: int) -> HostBytes:
        """Return bytes of a file, mapped as a uint8 tensor that must not be written to, or as a range.

        The mapping or the open file lives as long as what is returned.

        Raises:
            CheckpointError: the file cannot be opened to be read.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        self._warn_once(file.resolve().parent)
        if not self._is_mapped:
            if file not in self._files:
                self._files[file] = OpenFile(file)
            return FileRange(self._files[file], begin_byte, num_bytes)
        if file not in self._maps:
            self._maps[file] = _map(file)
        with warnings.catch_warnings():  # torch warns of tensors that it cannot keep from being written to
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(self._maps[file], dtype=torch.uint8, count=num_bytes, offset=begin_byte)

    def _warn_once(self, folder: Path) -> None:
        if folder not in self._folders:
            self._folders.add(folder)
            _warn_of_remote(folder)


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


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
