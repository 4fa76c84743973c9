"""Heavy libraries, imported in two thirds of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage while modules are imported in this block, and never look at what they have made.

    torch, transformers, peft and datasets make a million objects that stay, and each collection in between looks at
    most of them once more: over a third of the processor's time, in every rank. They are left out of later ones too.

    For a process of this project's own, such as a rank: a program that imports lorashard decides for itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
