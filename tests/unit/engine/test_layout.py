"""Where the tensors of a unit sit, and which bytes of them each rank holds."""

from __future__ import annotations

import itertools
import random

import torch
from helpers.engine import GARBAGE_BYTE, as_bytes, cut_shards

from lorashard.engine import plan_layout
from lorashard.engine.layout import ALIGNMENT_BYTES

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def draw_tensors(seed: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return up to eight tensors of any dtype and shape, scalars and empty ones among them."""
    rng = random.Random(seed)
    return [
        (f"weight{i}", rng.choice(DTYPES), tuple(rng.choice((0, 1, 3, 7, 40, 129)) for _ in range(rng.randint(0, 2))))
        for i in range(rng.randint(1, 8))
    ]


def test_any_tensors_are_cut_and_put_together_again():
    """Catches a tensor that is not aligned, for which a kernel takes another path than for the unsharded one, two that
    overlap, a byte that no rank's shard holds or that two do, and a piece at another shard's place."""
    for seed in range(25):
        tensors, generator = draw_tensors(seed), torch.Generator().manual_seed(seed)
        layout = plan_layout(tensors, num_shards=random.Random(seed).randint(1, 9))
        end_byte = 0
        for field, (name, dtype, shape) in zip(layout.fields, tensors, strict=True):
            assert (field.name, field.dtype, field.shape) == (name, dtype, shape)
            assert field.num_bytes == torch.empty(shape, dtype=dtype).nbytes
            assert field.begin_byte % ALIGNMENT_BYTES == 0
            assert end_byte <= field.begin_byte < end_byte + ALIGNMENT_BYTES
            end_byte = field.end_byte
        assert layout.used_bytes == end_byte
        # No byte is the one that fills where nothing was put.
        contents = [
            torch.randint(0, 255, (f.num_bytes,), dtype=torch.uint8, generator=generator) for f in layout.fields
        ]
        shards = cut_shards(layout, contents)
        unsharded = torch.cat(shards)
        assert unsharded.numel() == layout.total_bytes
        for field, content in zip(layout.fields, contents, strict=True):
            assert torch.equal(as_bytes(unsharded[field.begin_byte : field.end_byte]), content)
        assert int((unsharded != GARBAGE_BYTE).sum()) == sum(field.num_bytes for field in layout.fields)
        pieces = [piece for rank in range(layout.num_shards) for piece in layout.pieces(rank)]
        assert all(piece.begin_byte < piece.end_byte for piece in pieces)
        assert sum(piece.end_byte - piece.begin_byte for piece in pieces) == sum(f.num_bytes for f in layout.fields)


def test_only_padding_depends_on_the_number_of_shards():
    """A place that moved with the world size would align tensors otherwise, and change bits from 2 ranks to 4."""
    for seed, num_shards in itertools.product(range(25), (2, 3, 4, 8, 64)):
        tensors = draw_tensors(seed)
        alone, layout = plan_layout(tensors, num_shards=1), plan_layout(tensors, num_shards)
        assert layout.fields == alone.fields and layout.used_bytes == alone.used_bytes
        assert layout.shard_bytes % ALIGNMENT_BYTES == 0
        assert layout.total_bytes == layout.shard_bytes * num_shards
        assert 0 <= layout.total_bytes - layout.used_bytes < num_shards * ALIGNMENT_BYTES


def test_padding_is_what_is_stated():
    """Pins the arithmetic to numbers done by hand: the other tests could share a mistake with the code."""
    layout = plan_layout([("a", torch.bfloat16, (100,)), ("b", torch.float32, (65,)), ("c", torch.int8, ())], 2)
    assert [field.begin_byte for field in layout.fields] == [0, 256, 768]
    assert (layout.used_bytes, layout.shard_bytes, layout.total_bytes) == (769, 512, 1024)
    found = [
        [(piece.field.name, piece.begin_byte, piece.end_byte, piece.shard_byte) for piece in layout.pieces(rank)]
        for rank in range(2)
    ]
    assert found == [[("a", 0, 200, 0), ("b", 0, 256, 256)], [("b", 256, 260, 0), ("c", 0, 1, 256)]]


def test_there_may_be_less_than_there_are_ranks():
    """Every rank takes part in the gather with a shard of the same size, whether or not it holds anything; and a unit
    whose only weights went elsewhere (tied ones) holds nothing on any."""
    layout = plan_layout([("a", torch.float32, (2,))], num_shards=4)
    assert layout.shard_bytes == ALIGNMENT_BYTES
    assert [len(list(layout.pieces(rank))) for rank in range(4)] == [1, 0, 0, 0]
    layout = plan_layout([], num_shards=2)
    assert (layout.used_bytes, layout.shard_bytes, layout.total_bytes) == (0, 0, 0)
    assert list(layout.pieces(0)) == []
