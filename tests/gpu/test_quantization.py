"""Quantizing and unpacking on one GPU: the same bytes and numbers as on the CPU, whatever unpacks them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers.gpu import DEVICE, NEEDS_GPU, train
from helpers.tiny import build_model, find_differences

import lorashard
from lorashard.quantization.format import Quantizer
from lorashard.quantization.kernels import try_kernel
from lorashard.quantization.nf4 import Nf4
from lorashard.quantization.nf4_kernel import find_kernel
from lorashard.quantization.nf4_tables import Tables
from lorashard.quantization.rowwise import Fp8, Int8

pytestmark = NEEDS_GPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((64, 64), (33, 65), (7, 9), (300, 1000), (3, 5, 64), (1024, 8256))
FORMATS = {"nf4": Nf4(), "nf4 nested": Nf4(True), "nf4 of 4096": Nf4(True, 4096), "int8": Int8(), "fp8": Fp8()}
EVERY_FORMAT = pytest.mark.parametrize("quantizer", FORMATS.values(), ids=FORMATS.keys())


def make_values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)) * 0.02
    values.view(-1)[::53] = 0
    return values.to(dtype)


def quantize(quantizer: Quantizer, values: torch.Tensor) -> list[torch.Tensor]:
    packed, scales = quantizer.quantize(values.view(-1), values.shape)
    parts = quantizer.parts(values.shape)
    found = [packed.view(parts[0].dtype), *quantizer.keep_scales(scales)]
    return [part.view(like.shape) for part, like in zip(found, parts, strict=True)]


def unpack(quantizer: Quantizer, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, math.nan, device=parts[0].device)
    quantizer.unpack(parts, out)
    return out


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_and_numbers_are_those_of_the_cpu(quantizer, dtype):
    """Catches a rounding, a lookup or a kernel that differs from the CPU's, so that ranks and restarts would."""
    for shape in SHAPES:
        values = make_values(shape, dtype)
        expected, found = quantize(quantizer, values), quantize(quantizer, values.to(DEVICE))
        for here, there in zip(expected, found, strict=True):
            assert torch.equal(here.view(-1).view(torch.uint8), there.cpu().view(-1).view(torch.uint8)), shape
        assert torch.equal(unpack(quantizer, found, values).cpu(), unpack(quantizer, expected, values)), shape
        one = quantizer.select(found, shape, 1)
        if one is not None:
            assert torch.equal(unpack(quantizer, one, values[1]).cpu(), unpack(quantizer, expected, values)[1])


@pytest.mark.parametrize("block_size", (32, 64, 128, 1024, 4096))
def test_the_kernel_of_bitsandbytes_gives_the_numbers_of_torch(block_size):
    """Catches a kernel that is given up silently, one that differs, and one that a slice's alignment upsets."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    tables = Tables(DEVICE)
    kernel = find_kernel(tables, block_size, DEVICE)
    assert kernel is not None
    packed = torch.randint(0, 256, (block_size * 50 + 1,), dtype=torch.uint8, device=DEVICE)[1:]
    scales = torch.rand(101, device=DEVICE)[1:]
    for dtype in DTYPES:
        out = torch.empty(block_size * 100 + 1, dtype=dtype, device=DEVICE)[1:]
        kernel.unpack(packed, scales, block_size, out)
        expected = (tables.look_up(packed).view(100, -1) * scales.unsqueeze(1)).to(dtype)
        assert torch.equal(out.view(100, -1), expected)


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_of_triton_gives_the_numbers_of_torch(quantizer, dtype, monkeypatch):
    """Catches what the interpreter cannot: a compiler that rounds otherwise, and one that an odd address upsets."""
    pytest.importorskip("triton", reason="needs Triton, which torch's CUDA build brings")
    alone = replace(quantizer)  # without bitsandbytes, whose kernel flushes the sample's tiny values to zero
    with monkeypatch.context() as patch:
        patch.setattr("lorashard.quantization.nf4.find_kernel", lambda *_: None)
        kernel = try_kernel(alone, DEVICE, dtype)
    assert kernel is not None
    for shape in SHAPES:
        values = make_values(shape, dtype)
        parts = quantize(quantizer, values.to(DEVICE))
        expected = torch.empty(shape, dtype=dtype, device=DEVICE)
        alone.unpack_in_chunks(parts, expected)
        found = torch.zeros(values.numel() + 2, dtype=dtype, device=DEVICE)
        kernel(parts, found[1:-1].view(shape))
        assert torch.equal(found[1:-1].view(shape), expected), shape
        assert torch.equal(unpack(quantizer, parts, values.to(DEVICE)), expected), shape  # bitsandbytes', if installed
        assert not found[0] and not found[-1], shape


@EVERY_FORMAT
def test_unpacking_takes_a_bounded_piece(quantizer):
    """Catches a float32 copy of the weight, which is twice what the workspace holds."""
    values = make_values((4096, 8192), torch.bfloat16).to(DEVICE)
    parts = quantize(quantizer, values)
    quantizer.unpack(parts, values)  # what is made once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantizer.unpack(parts, values)
    assert torch.cuda.max_memory_allocated() - before <= 40 * 2**20


@pytest.mark.parametrize("format_", ("nf4", "int8", "fp8"))
@pytest.mark.parametrize("checkpointing", ("off", "non-reentrant", "reentrant"))
def test_a_sharded_base_gives_the_gradients_of_the_dequantized_one(format_, checkpointing):
    """Catches a workspace that is written while a kernel on the same stream still reads the last weight there."""
    quantizer = {"nf4": Nf4(), "int8": Int8(), "fp8": Fp8()}[format_]
    case = {"checkpointing": checkpointing, "dtype": torch.bfloat16}
    plain = build_model(**case).to(DEVICE)
    for name, module in plain.named_modules():
        is_base = isinstance(module, torch.nn.Linear) and ".layers." in name and "lora_" not in name
        if is_base:
            weight = module.weight.data
            quantizer.unpack(quantize(quantizer, weight), weight)
    for placement in ("replicate", "host"):
        sharded = lorashard.shard(build_model(**case), placement, device=DEVICE, quantization=format_)
        assert find_differences(train(sharded), train(plain)) == []
