"""Sizes of models, speeds and times as a person reads them."""

from __future__ import annotations


def show_speed(tokens_per_s: float) -> str:
    """Return a speed as a person reads it: never as zero tokens/s."""
    if tokens_per_s >= 10:
        return f"{tokens_per_s:,.0f} tokens/s"
    return f"{tokens_per_s:.1f} tokens/s" if tokens_per_s >= 1 else f"{show_time(1 / tokens_per_s)} for a token"


def show_parameters(count: int) -> str:
    """Return a number of parameters in the unit that suits it."""
    return f"{count / 1e9:.2f} B parameters" if count >= 1e8 else f"{count / 1e6:.2f} M parameters"


def show_time(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
