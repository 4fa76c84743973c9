"""`lorashard verify`: is a saved adapter what it should be, and does sharding change a gradient on this machine?

Read in this order: `verdicts` (what is found, and how ranks agree on it), `rows` (what is compared on), `memory` (how
much of a model fits), `adapter`, `differences`, `gradients`.
"""

from __future__ import annotations

from ...config.use_options import VerifyOptions

__all__ = ["verify"]


def verify(options: VerifyOptions) -> None:
    """Check an adapter, and a model that it was merged into; or a model's gradients, sharded against unsharded.

    Raises:
        VerificationError: a check failed; on all ranks.
        UserError: there is nothing that could be checked.

    Ranks: run by every rank.
    """
    if options.model_name_or_path is not None:
        from .gradients import verify_gradients

        verify_gradients(options)
    else:
        from .adapter import verify_adapter

        verify_adapter(options)
