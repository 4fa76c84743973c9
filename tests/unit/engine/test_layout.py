"""Where the tensors of a unit sit, and which bytes of them each rank holds."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.engine import as_bytes, cut_shards

from lorashard.engine import Layout, plan_layout
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
SEEDS = range(25)


def draw_tensors(seed: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return up to eight tensors of any dtype and shape, scalars and empty ones among them."""
    rng = random.Random(seed)
    return [
        (f"weight{i}", rng.choice(DTYPES), tuple(rng.choice((0, 1, 3, 7, 40, 129)) for _ in range(rng.randint(0, 2))))
        for i in range(rng.randint(1, 8))
    ]


def draw_layout(seed: int) -> Layout:
    return plan_layout(draw_tensors(seed), num_shards=random.Random(seed).randint(1, 9))


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors_are_aligned_and_do_not_overlap(seed):
    """A kernel takes another path for an unaligned tensor, and the result then differs from the unsharded one's."""
    layout = draw_layout(seed)
    end_byte = 0
    for field, (name, dtype, shape) in zip(layout.fields, draw_tensors(seed), strict=True):
        assert (field.name, field.dtype, field.shape) == (name, dtype, shape)
        assert field.num_bytes == torch.empty(shape, dtype=dtype).nbytes
        assert field.begin_byte % ALIGNMENT_BYTES == 0
        assert end_byte <= field.begin_byte < end_byte + ALIGNMENT_BYTES
        end_byte = field.end_byte
    assert layout.used_bytes == end_byte


@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_cover_every_byte_once(seed):
    """A byte that no rank's shard holds would be gathered as rubbish; one in two places would be read twice."""
    layout = draw_layout(seed)
    seen = {field.name: torch.zeros(field.num_bytes, dtype=torch.int64) for field in layout.fields}
    for rank in range(layout.num_shards):
        taken = torch.zeros(layout.shard_bytes, dtype=torch.int64)
        for piece in layout.pieces(rank):
            num_bytes = piece.end_byte - piece.begin_byte
            assert num_bytes > 0 and piece.shard_byte + num_bytes <= layout.shard_bytes
            seen[piece.field.name][piece.begin_byte : piece.end_byte] += 1
            taken[piece.shard_byte : piece.shard_byte + num_bytes] += 1
        assert bool((taken <= 1).all())
    assert all(bool((count == 1).all()) for count in seen.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_gathered_shards_hold_every_tensor_at_its_place(seed):
    """A piece that starts at the wrong shard byte would shift the rest of its tensor."""
    layout = draw_layout(seed)
    generator = torch.Generator().manual_seed(seed)
    contents = [torch.randint(0, 256, (f.num_bytes,), dtype=torch.uint8, generator=generator) for f in layout.fields]
    whole = torch.cat(cut_shards(layout, contents))
    assert whole.numel() == layout.total_bytes
    for field, content in zip(layout.fields, contents, strict=True):
        assert torch.equal(as_bytes(whole[field.begin_byte : field.end_byte]), content)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_padding_depends_on_the_number_of_shards(seed):
    """A place that moved with the world size would align tensors otherwise, and change bits from 2 ranks to 4."""
    tensors = draw_tensors(seed)
    alone = plan_layout(tensors, num_shards=1)
    for num_shards in (2, 3, 4, 8, 64):
        layout = plan_layout(tensors, num_shards)
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


def test_more_shards_than_bytes_leave_the_last_ranks_empty():
    """Every rank takes part in the gather with a shard of the same size, whether or not it holds anything."""
    layout = plan_layout([("a", torch.float32, (2,))], num_shards=4)
    assert layout.shard_bytes == ALIGNMENT_BYTES
    assert [len(list(layout.pieces(rank))) for rank in range(4)] == [1, 0, 0, 0]


def test_no_tensors_take_no_bytes():
    """A unit whose only weights went elsewhere (tied ones) must not break the arithmetic."""
    layout = plan_layout([], num_shards=2)
    assert (layout.used_bytes, layout.shard_bytes, layout.total_bytes) == (0, 0, 0)
    assert list(layout.pieces(0)) == []
