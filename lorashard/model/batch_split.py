"""How the batch of one call of a decoder layer is split into pieces, and the pieces' outputs are joined again.

Note [What is split]
    Only what says which of its dimensions is the batch, or the tokens: the hidden states; position ids and position
    embeddings, whose last dimensions are known; masks, which begin with the batch; and whatever else is
    [batch, tokens, ...]. A batch of 1, a single value and `cache_position` go to every piece as they are. All else is
    refused: a tensor that has the batch's size by chance would silently give wrong values.

Note [Packed sequences]
    A padding-free batch is a single row that packs many sequences. It is split between sequences that cannot see each
    other, and nowhere else: masks, positions and hidden states along their tokens, `cu_seq_lens` so that each piece
    begins at 0. `max_length` stays as it is, an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class BatchSplit:
    """A batch in pieces of a few sequences. See [What is split].

    Args:
        hidden_name: the argument that is [batch, tokens, hidden].
        sizes: sequences of each piece.
    """

    hidden_name: str
    num_sequences: int
    num_tokens: int
    sizes: Sequence[int]

    def split(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Return each piece's part of an argument, or None where its batch dimension is unknown."""
        dims = self._find_batch_dims(name, tensor)
        if dims is None or len(dims) > 1:
            return None
        return list(tensor.split(self.sizes, dims[0])) if dims else [tensor] * len(self.sizes)

    def _find_batch_dims(self, name: str, tensor: torch.Tensor) -> list[int] | None:
        if name == self.hidden_name:
            return [0]
        if tensor.numel() == 1 or name == "cache_position":
            return []
        num_trailing = _count_trailing_dims(name)
        if num_trailing is not None:
            return [dim for dim, size in enumerate(tensor.shape[:-num_trailing]) if size == self.num_sequences]
        if tensor.shape[0] == 1:
            return []
        has_tokens = tensor.shape[1:2] == (self.num_tokens,)
        is_square = tensor.ndim == 2 and self.num_sequences == self.num_tokens  # [tokens, tokens] or [batch, tokens]
        is_known = tensor.ndim > 1 if name.endswith("mask") else has_tokens and not is_square
        return [0] if is_known and tensor.shape[0] == self.num_sequences else None

    def joint_dim(self, values: Sequence[torch.Tensor]) -> int | None:
        """Return the dimension to join the pieces' outputs along: they are [batch, ...] or [batch x tokens, n]."""
        num_each = self.num_tokens if values[0].ndim == 2 else 1
        is_joint = [value.shape[:1] for value in values] == [(size * num_each,) for size in self.sizes]
        return 0 if is_joint else None


@dataclass(frozen=True)
class PackedSplit:
    """A single row of packed sequences in pieces of a few sequences. See [Packed sequences].

    Args:
        hidden_name: the argument that is [1, tokens, hidden].
        starts: the token at which each sequence begins.
        num_each: sequences in each piece; the last may have fewer.
    """

    hidden_name: str
    num_tokens: int
    starts: Sequence[int]
    num_each: int

    @property
    def sizes(self) -> list[int]:
        """Tokens of each piece."""
        begins = [*self.starts[:: self.num_each], self.num_tokens]
        return [end - begin for begin, end in pairwise(begins)]

    def split(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Return each piece's part of an argument, or None where its dimension over tokens is unknown."""
        sizes = self.sizes
        if name.startswith("cu_seq_lens") and tensor.shape == (len(self.starts) + 1,):
            firsts = range(0, len(self.starts), self.num_each)
            return [tensor[first : first + self.num_each + 1] - tensor[first] for first in firsts]
        dims = self._find_token_dims(name, tensor)
        if dims is None or any(tensor.shape[dim] not in (1, self.num_tokens) for dim in dims):
            return None
        dims = [dim for dim in dims if tensor.shape[dim] > 1]
        if not dims:
            return [tensor] * len(sizes)
        # One split for all pieces: a slice for each would make a gradient of the full length for each.
        pieces = list(tensor.split(sizes, dims[0]))
        begins = self.starts[:: self.num_each]
        for dim in dims[1:]:
            pieces = [piece.narrow(dim, begin, size) for piece, begin, size in zip(pieces, begins, sizes, strict=True)]
        return pieces

    def _find_token_dims(self, name: str, tensor: torch.Tensor) -> list[int] | None:
        if tensor.numel() == 1:
            return []
        if name == "cache_position":
            return [0]
        num_trailing = _count_trailing_dims(name)
        if num_trailing is not None:
            return [tensor.ndim - num_trailing] if tensor.ndim >= num_trailing else None
        if tensor.ndim < 2 or tensor.shape[0] != 1:
            return None
        return list(range(max(tensor.ndim - 2, 1), tensor.ndim)) if name.endswith("mask") else [1]

    def joint_dim(self, values: Sequence[torch.Tensor]) -> int | None:
        """Return the dimension to join the pieces' outputs along: they are [1, tokens, ...] or [tokens, ...]."""
        if [value.shape[:2] for value in values] == [(1, size) for size in self.sizes]:
            return 1
        return 0 if [value.shape[:1] for value in values] == [(size,) for size in self.sizes] else None


def _count_trailing_dims(name: str) -> int | None:
    """Return how many dimensions follow the batch's, the one over tokens included, in positions of any kind."""
    if name.endswith("position_ids"):
        return 1
    return 2 if name.startswith("position_embeddings") else None


class Starts:
    """Where packed sequences begin.

    Shared by a stack of layers, which all get the same tensors: the device is read once a pass, not once a layer.
    """

    def __init__(self) -> None:
        self._found = WeakTensorKeyDictionary()

    def of(self, tensor: torch.Tensor, find: Callable[[torch.Tensor], list[int]]) -> list[int]:
        """Return `find(tensor)`, cached for as long as the tensor is not changed."""
        if tensor.is_inference():  # has no version
            return find(tensor)
        version, starts = self._found.get(tensor, (None, []))
        if version != tensor._version:
            version, starts = tensor._version, find(tensor)
            self._found[tensor] = (version, starts)
        return starts


def find_position_starts(position_ids: torch.Tensor) -> list[int]:
    """Return where positions begin again, which is how flash attention finds packed sequences."""
    flat = position_ids.reshape(-1)
    is_start = flat == flat.min()
    is_start[0] = True
    return is_start.nonzero().flatten().tolist()


def find_mask_starts(mask: torch.Tensor) -> list[int]:
    """Return every token before which the batch may be split, since no token sees one on the other side.

    Args:
        mask: [..., tokens, tokens], true where a query (row) sees a key (column); or 0 there, and the lowest value
            elsewhere.
    """
    sees = mask > torch.finfo(mask.dtype).min if mask.is_floating_point() else mask.bool()
    sees = sees.flatten(0, -3).any(0) if sees.shape[:-2].numel() > 1 else sees.reshape(sees.shape[-2:])
    index = torch.arange(len(sees), device=sees.device)
    can_split = (_find_earliest(sees) >= index) & (_find_earliest(sees.T) >= index)
    can_split[0] = True
    return can_split.nonzero().flatten().tolist()


def _find_earliest(sees: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the first column that it or a later row sees; one that sees nothing joins the last."""
    index = torch.arange(len(sees), device=sees.device)
    first = torch.where(sees.any(-1), sees.to(torch.uint8).argmax(-1), index - 1)
    return first.flip(0).cummin(0).values.flip(0)
