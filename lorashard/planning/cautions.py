"""What a run does, but not as one would wish: said by a plan, so by whoever shows one, before the run starts."""

from __future__ import annotations

from ..runtime.devices import count_cores
from .hardware import Cluster
from .size import ModelSize


def find_cautions(
    size: ModelSize, cluster: Cluster, longest_tokens: int | None, max_positions: int | None
) -> tuple[str, ...]:
    """Return a sentence for each thing that a person should know, each with the option that decides it.

    Args:
        longest_tokens: of the sequences, where it is known.
        max_positions: tokens of the longest sequences that the model was made for, where its config tells.
    """
    found = []
    if size.adapter_parameters > size.num_parameters:
        found.append(
            f"lora_r: the adapter has {size.adapter_parameters:,} parameters, more than its base of "
            f"{size.num_parameters:,}; a smaller one is trained, saved and loaded faster"
        )
    if longest_tokens is not None and max_positions is not None and longest_tokens > max_positions:
        found.append(
            f"max_length: sequences of up to {longest_tokens:,} tokens, and the model was made for {max_positions:,}"
        )
    cores = count_cores()
    if cluster.hardware.device_type == "cpu" and cluster.ranks_per_node > cores:
        found.append(
            f"cpu: {cluster.ranks_per_node} ranks share {cores} core{'s' if cores > 1 else ''}, and wait for one "
            f"another; cpu: {cores} is faster"
        )
    return tuple(found)
