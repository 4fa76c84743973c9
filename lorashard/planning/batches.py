"""How many prompts are answered in one batch, and by which rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedConfig

from .inference import count_cache_bytes

# Activations of the widest part of a layer while a prompt is read: for each token, vectors of the hidden and MLP width.
_HIDDEN_COPIES = 8
_MLP_COPIES = 3
# A logit in float32, its sorted copy with its index, its probability and their sum.
_LOGIT_BYTES = 24


def count_row_bytes(config: PreTrainedConfig, dtype: torch.dtype, prompt_tokens: int, max_new_tokens: int) -> int:
    """Return the bytes that a sequence of a batch takes while it is answered: cache, activations, mask and logits."""
    text = config.get_text_config()
    mlp_width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    token_bytes = (_HIDDEN_COPIES * text.hidden_size + _MLP_COPIES * mlp_width) * dtype.itemsize
    # A padded batch has a mask for each sequence; eager attention keeps each head's weights, too.
    heads = text.num_attention_heads if getattr(text, "_attn_implementation", None) == "eager" else 0
    mask_bytes = prompt_tokens**2 * (1 + dtype.itemsize + heads * (4 + dtype.itemsize))
    # The cache of a layer grows by being copied.
    num_layers = text.num_hidden_layers
    cache_bytes = count_cache_bytes(config, dtype) * (prompt_tokens + max_new_tokens) * (num_layers + 1) // num_layers
    return cache_bytes + prompt_tokens * token_bytes + mask_bytes + text.vocab_size * _LOGIT_BYTES


def plan_batches(lengths: Sequence[int], num_ranks: int, count_rows: Callable[[int], int]) -> list[list[list[int]]]:
    """Put prompts of similar length into batches, the longest first, and share each batch evenly among the ranks.

    Args:
        lengths: tokens of each prompt.
        count_rows: how many prompts of at most that length a rank takes at once, 1 or more.

    Returns:
        For each batch, for each rank, the indices of its prompts; some ranks may have none in the last batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches = []
    while order:
        num_rows = num_ranks * count_rows(lengths[order[0]])
        taken, order = order[:num_rows], order[num_rows:]
        batches.append([taken[rank::num_ranks] for rank in range(num_ranks)])
    return batches
