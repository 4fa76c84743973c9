"""Compare Triton's unpacking kernels with torch's operations, bit for bit; or compile them for GPUs, without one.

A program for `helpers.with_triton.run`: what it does depends on whether Triton interprets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from lorashard.quantization.kernels import try_kernel
from lorashard.quantization.nf4 import Nf4
from lorashard.quantization.rowwise import Fp8, Int8

Format = Nf4 | Int8 | Fp8
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = (Nf4(), Nf4(True), Nf4(True, 32, 64), Nf4(True, 4096), Int8(), Fp8())
# Complete blocks, tails, odd sizes, less than a block, more columns than a program has, experts.
SHAPES = ((64, 64), (33, 65), (7, 9), (1, 3), (5, 1100), (3, 5, 64))


def count_differences(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many bytes differ; every NaN counts as the same."""
    one, other = (torch.where(each.isnan(), math.nan, each).view(-1).view(torch.uint8) for each in (found, expected))
    return int((one != other).sum())


def compare(
    quantizer: Nf4 | Int8 | Fp8, parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Unpack into a slot: what is beside the weight must stay, and its address may be odd."""
    numel = math.prod(shape)
    slot, expected = torch.full((numel + 10,), 7, dtype=dtype), torch.empty(tuple(shape), dtype=dtype)
    quantizer.unpack(parts, expected)
    quantizer.load_kernel(CPU)(parts, slot[3 : 3 + numel].view(expected.shape))
    assert count_differences(slot[3 : 3 + numel], expected.view(-1)) == 0, (quantizer, shape, dtype)
    assert slot[:3].eq(7).all() and slot[3 + numel :].eq(7).all(), (quantizer, shape, dtype)


def compare_shapes() -> None:
    for quantizer, shape in product(FORMATS, SHAPES):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
        packed, scales = quantizer.quantize(values.view(-1), shape)
        like = quantizer.parts(shape)
        parts = [packed.view(like[0].dtype), *quantizer.keep_scales(scales)]
        parts = [part.view(other.shape) for part, other in zip(parts, like, strict=True)]
        one = quantizer.select(parts, shape, shape[0] - 1)
        for dtype in DTYPES:
            compare(quantizer, parts, shape, dtype)
            if one is not None:
                compare(quantizer, one, shape[1:], dtype)


def compare_roundings() -> None:
    """Round every bfloat16 and half a step more, and a little less and more than that: code 15 is 1."""
    quantizer = Nf4(block_size=2)
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        scales = (high | low).view(torch.float32)
        out = torch.empty(2 * len(scales), dtype=torch.bfloat16)
        packed = torch.full((len(scales),), 255, dtype=torch.uint8)
        quantizer.load_kernel(CPU)([packed, scales], out)
        assert count_differences(out, scales.repeat_interleave(2).to(torch.bfloat16)) == 0, low


def compile_for(capability: int) -> None:
    """Compile what is launched for a weight: once, with float32 neither fused nor flushed to zero."""
    launched: list[str] = []

    def compile_only(self: JITFunction, *args: object, warmup: bool, **kwargs: object) -> None:
        launched.append(run(self, *args, warmup=True, **kwargs).asm["ptx"])

    run, target = JITFunction.run, GPUTarget("cuda", capability, 32)
    zero = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    driver.set_active(zero)
    with patch.object(JITFunction, "run", compile_only):
        for quantizer, dtype in product(FORMATS, DTYPES):
            parts, shape = quantizer.make_sample(CPU)
            quantizer.load_kernel(CPU)(parts, torch.empty(shape, dtype=dtype))
            [code] = launched
            launched.clear()
            assert "mul.rn.f32" in code and not re.search(r"fma\.|\.ftz", code), (quantizer, dtype, capability)


if __name__ == "__main__":
    if knobs.runtime.interpret:
        compare_shapes()
        compare_roundings()
        for each in FORMATS:
            for kind in DTYPES:
                assert try_kernel(each, CPU, kind) is not None, (each, kind)
    else:
        for number in (75, 90):
            compile_for(number)
    print("equal" if knobs.runtime.interpret else "compiled")
