"""A part of a file that is copied from as host memory is, but read only when its bytes are wanted."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError


class OpenFile:
    """A file that stays open while something refers to this, so that its bytes stay those of one file.

    Attributes:
        num_bytes: when it was opened.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot be opened ({error.strerror})", where=path) from error
        weakref.finalize(self, os.close, self.descriptor)
        self.num_bytes = os.fstat(self.descriptor).st_size


@dataclass(frozen=True)
class FileRange:
    """Consecutive bytes of a file; like a tensor of uint8 it has a length and is sliced.

    Memory: none; what is read stays in the kernel's page cache, which it may evict.
    """

    file: OpenFile
    begin_byte: int
    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes

    def __getitem__(self, part: slice) -> FileRange:
        begin, end, _ = part.indices(self.num_bytes)
        return FileRange(self.file, self.begin_byte + begin, end - begin)

    def read_into(self, out: torch.Tensor) -> None:
        """Read the bytes into `out` (uint8, [num_bytes], contiguous, on the host); other threads run meanwhile.

        Raises:
            CheckpointError: the file has become shorter, or its disk fails.

        Ranks: local.
        """
        view = memoryview((ctypes.c_char * self.num_bytes).from_address(out.data_ptr()))
        if read_at(self.file.descriptor, self.file.path, self.begin_byte, view) < self.num_bytes:
            raise CheckpointError(
                "changed or truncated after it was opened",
                where=self.file.path,
                expected=f"{self.file.num_bytes} bytes",
                found=f"{os.fstat(self.file.descriptor).st_size} bytes",
                fix="start again with the complete file",
            )


def read_at(descriptor: int, path: Path, begin_byte: int, out: memoryview) -> int:
    """Read bytes of a file until `out` is full or the file ends; return how many came.

    Raises:
        CheckpointError: a disk or a network file system fails.
    """
    done = 0
    while done < len(out):  # one call reads at most 2 GiB on Linux
        try:
            num_read = os.preadv(descriptor, [out[done:]], begin_byte + done)
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", where=path) from error
        if num_read == 0:
            break
        done += num_read
    return done


HostBytes = torch.Tensor | FileRange  # a tensor is of uint8, [bytes], contiguous
