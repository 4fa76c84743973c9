"""Which arguments and results of a layer are split and joined, along which dimension; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lorashard.errors import ConfigError
from lorashard.model.batch_split import BatchSplit, PackedSplit, find_mask_starts, find_position_starts
from lorashard.model.micro_batching import split_layers


class Toy(GradientCheckpointingLayer):
    """A layer that gives back a tuple, and runs whatever it is handed."""

    def __init__(self, run: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.run = run
        self.num_runs = 0

    def forward(self, hidden, attention_mask=None, past_key_values=None, extra=None, **kwargs):
        self.num_runs += 1
        return self.run(hidden, extra) if self.run else (torch.tanh(self.linear(hidden)), None)


def split_toy(rows: int = 2, **options: Any) -> Toy:
    toy = Toy(**options)
    split_layers([toy], rows)
    return toy


def test_arguments_come_by_position_or_by_name_and_tuples_come_back():
    """A layer called with keywords alone, or with a mask by position, and one that returns a tuple; a single row with
    padding, whose positions say that it packs sequences, and whose mask does not keep them apart."""
    hidden, mask = torch.randn(5, 3, 4), torch.zeros(5, 1, 3, 3)
    toy = split_toy()
    expected = torch.tanh(toy.linear(hidden))
    for call in (lambda: toy(hidden, mask), lambda: toy(hidden=hidden, attention_mask=mask)):
        found, nothing = call()
        torch.testing.assert_close(found, expected)
        assert nothing is None
    assert toy.num_runs == 2 * 3
    toy = split_toy(1)
    toy(torch.randn(1, 4, 4), attention_mask=torch.ones(1, 4), position_ids=torch.tensor([[1, 0, 1, 2]]))
    assert toy.num_runs == 1


def test_what_cannot_be_split_is_refused():
    """A tensor, container or mask without a known batch dimension would silently be split or shared wrongly."""
    hidden, row = torch.randn(4, 4, 4), torch.randn(1, 6, 4)
    packed = dict(position_ids=torch.tensor([[0, 1, 0, 1, 0, 1]]))
    block_mask = type("BlockMask", (), {})()
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    for message, arguments in (
        (r"'extra' .*\[4\]", dict(hidden=hidden, extra=torch.zeros(4))),
        (r"'extra' .*\[4, 4\]", dict(hidden=hidden, extra=torch.zeros(4, 4))),
        (r"'extra' .*\[8, 1, 4\]", dict(hidden=hidden, extra=torch.zeros(8, 1, 4))),
        (r"'extra' \(a dict\)", dict(hidden=hidden, extra={})),
        (r"'attention_mask' .a BlockMask.*attn_implementation='sdpa'", dict(hidden=hidden, attention_mask=block_mask)),
        (r"'attention_mask' .a BlockMask", dict(hidden=row, attention_mask=block_mask, **packed)),
        (r"'position_ids' .*\[4, 4, 3\]", dict(hidden=hidden, position_ids=torch.zeros(4, 4, 3))),
        (r"'alibi' .*\[4, 1, 4\]", dict(hidden=hidden, alibi=torch.zeros(4, 1, 4))),
        (r"\[batch, tokens, hidden\] .*\[4, 4\]", dict(hidden=hidden[0])),
        (r"packs 3 sequences", dict(hidden=row, **packed)),
        (r"'extra' .*\[6\]", dict(hidden=row, attention_mask=block_diagonal(2, 2, 2), extra=torch.zeros(6))),
        (r"cu_seq_lens_q .*0 to 6", dict(hidden=row, cu_seq_lens_q=torch.tensor([0, 2, 5]))),
        (r"not their own", dict(hidden=row, cu_seq_lens_q=torch.tensor([0, 2, 4, 6]), attention_mask=mask)),
    ):
        with pytest.raises(ConfigError, match=message):
            split_toy(1)(**arguments)


def test_outputs_that_cannot_be_joined_are_refused():
    """A sum over the batch, or one that broadcasts to it again, would be concatenated into nonsense."""
    hidden = torch.randn(4, 3, 4)
    for run, message in (
        (lambda hidden, extra: (hidden, hidden.sum()), r"shape \[\]"),
        (lambda hidden, extra: (hidden, hidden.sum(1)), r"shape \[1, 4\]"),
        (lambda hidden, extra: hidden.expand(4, 3, 4), r"shape \[4, 3, 4\]"),
        (lambda hidden, extra: {"hidden": hidden}, "a dict"),
    ):
        with pytest.raises(ConfigError, match=f"output .*{message}"):
            split_toy(1, run=run)(hidden)


def test_layers_are_split_once_and_by_a_positive_size():
    """Splitting pieces again, or another's wrapper lost, would go unnoticed."""
    toy = split_toy()
    with pytest.raises(ConfigError, match="Toy .*forward"):
        split_layers([toy], 2)
    with pytest.raises(ConfigError, match="found 0"):
        split_layers([Toy()], 0)


def block_diagonal(*lengths: int) -> torch.Tensor:
    return torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None, None]


def test_sequences_are_found_in_masks_and_positions():
    """A split inside a sequence, or at every padding token, which nothing sees and which sees nothing."""
    for mask, expected in (
        (block_diagonal(3, 1, 2), [0, 3, 4]),
        (torch.ones(5, 5).tril().bool()[None, None], [0]),
        (torch.ones(5, 5).triu().bool()[None, None], [0]),
        (torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()[None, None], [0]),  # the last sees the first alone
        (torch.ones(6, 6).tril().triu(-2).bool()[None, None], [0]),  # a sliding window
        (torch.block_diag(torch.zeros(3, 3), torch.ones(2, 2)).bool()[None, None], [0, 3]),  # padding on the left
        (torch.cat([block_diagonal(2, 1, 2), block_diagonal(2, 3)], 1), [0, 2]),  # heads that differ
    ):
        additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        assert find_mask_starts(mask) == find_mask_starts(additive) == find_mask_starts(additive * 2) == expected
    assert find_position_starts(torch.tensor([[4, 5, 0, 1, 2, 0]])) == [0, 2, 5]  # the first begins with the row


def test_each_argument_is_split_along_its_own_dimension():
    """Dimensions by name and shape, where sizes coincide: 4 rows of 4 tokens, and 3 rows beside 3 axes of positions."""
    batch, packed = BatchSplit("hidden_states", 4, 4, (2, 2)), PackedSplit("hidden_states", 4, [0, 1, 3], 2)
    whole = None
    for name, shape, by_batch, by_tokens in (
        ("position_ids", (4, 4), 0, 1),
        ("position_ids", (4,), whole, 0),
        ("position_ids", (3, 4, 4), 1, 2),
        ("position_embeddings", (4, 4, 8), 0, 1),
        ("position_embeddings_global", (1, 4, 8), whole, 1),
        ("position_embeddings", (4, 8), whole, 0),
        ("position_embeddings", (3, 4, 4, 8), 1, 2),
        ("cache_position", (4,), whole, 0),
        ("num_items_in_batch", (), whole, whole),
        ("num_items_in_batch", (1,), whole, whole),
        ("per_layer_input", (4, 4, 8), 0, "refused"),
        ("per_layer_input", (1, 4, 8), whole, 1),
        ("per_layer_input", (1, 5, 8), whole, "refused"),
        ("attention_mask", (1, 1, 4, 5), whole, "refused"),
        ("attention_mask", (4, 4), 0, "refused"),
        ("attention_mask", (1, 4), whole, 1),
    ):
        tensor = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape)
        for cut, dim in ((batch, by_batch), (packed, by_tokens)):
            found = cut.split(name, tensor)
            if dim == "refused":
                assert found is None, (name, shape)
                continue
            expected = [tensor] * 2 if dim is whole else tensor.split(cut.sizes, dim)
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), (name, shape, dim)
    assert BatchSplit("hidden_states", 3, 5, (2, 1)).split("position_embeddings", torch.zeros(3, 3, 5, 8)) is None
    ends = packed.split("cu_seq_lens_q", torch.tensor([0, 1, 3, 4]))
    assert [end.tolist() for end in ends] == [[0, 1, 3], [0, 1]]
