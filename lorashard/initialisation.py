"""Which of PEFT's initialisations rewrite the base. Imports no torch."""

from __future__ import annotations

_REWRITING = ("pissa", "olora", "corda", "loftq", "lora_ga")


def explain_rewriting(init_lora_weights: object) -> str | None:
    """Return why an `init_lora_weights` cannot be had on a base that is read-only, or None where it can."""
    wanted = str(init_lora_weights).lower()
    if not wanted.startswith(_REWRITING):
        return None
    return (
        f"init_lora_weights: '{wanted}' rewrites the base when PEFT makes or loads the adapter, and lorashard reads "
        "the base as it is: expected true, false, 'gaussian' or 'orthogonal'; or let PEFT make the adapter in "
        "memory and give it to lorashard.shard; a saved adapter is converted once by PEFT's "
        "save_pretrained(path_initial_model_for_weight_conversion=...)"
    )
