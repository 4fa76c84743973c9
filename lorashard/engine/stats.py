"""What an engine has gathered, copied, waited for and holds on this rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """What the engine has done so far on this rank.

    Attributes:
        num_gathers: all-gathers of base units.
        gathered_bytes: bytes that they unsharded (each of W ranks received (W-1)/W of them).
        num_copies: units, or shards of units, copied from host memory or files into slots.
        copied_bytes: bytes of these copies.
        peak_unsharded_bytes: the most that was unsharded in slots at once.
        num_slots: buffers in the pool.
        slot_bytes: bytes of the pool.
        num_resident: units that stay unsharded for the whole run.
        bytes_at_rest: bytes of the base that rest on this rank's device: shards, and what is resident.
        host_bytes_at_rest: bytes that rest in this rank's own host memory. Mapped files are nobody's own.
        wait_s: seconds that the computation waited for gathers.
        workspace_bytes: what quantized weights are unpacked to, one at a time, as large as it had to be so far.
    """

    num_gathers: int
    gathered_bytes: int
    num_copies: int
    copied_bytes: int
    peak_unsharded_bytes: int
    num_slots: int
    slot_bytes: int
    num_resident: int
    bytes_at_rest: int
    host_bytes_at_rest: int
    wait_s: float
    workspace_bytes: int
