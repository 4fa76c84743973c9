"""nf4, int8 and fp8: their bytes and values equal bitsandbytes', or formulas that are independent of the code."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lorashard.config.quantization_options import Quantization
from lorashard.quantization.chunks import iterate_chunks
from lorashard.quantization.format import Quantizer, make_quantizer
from lorashard.quantization.nf4 import Nf4
from lorashard.quantization.nf4_tables import NF4_CODE, Tables, make_dynamic_map
from lorashard.quantization.rowwise import Fp8, Int8
from lorashard.runtime.output import leave_out_notices

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Complete blocks, tails, odd sizes, less than a block, several chunks, experts.
SHAPES = ((64, 64), (33, 65), (7, 9), (1, 3), (300, 1000), (512, 1088), (3, 5, 64))
FORMATS = {"nf4": Nf4(), "nf4 nested": Nf4(True), "nf4 of 4096": Nf4(True, 4096), "int8": Int8(), "fp8": Fp8()}
EVERY_FORMAT = pytest.mark.parametrize("quantizer", FORMATS.values(), ids=FORMATS.keys())


@pytest.fixture(scope="module")
def bitsandbytes():
    module = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes", exc_type=ImportError)
    with torch.compiler.set_stance("force_eager"):  # it compiles some of its operations, for minutes
        yield module


def make_values(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return values distributed as in weights, with a few outliers, zeros, and rows that are tiny or zero."""
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * 0.02
    flat = values.view(-1)
    flat[::97] *= 30
    flat[::53] = 0
    if values.shape[0] > 4:
        values[1], values[2] = 0, values[2] * 1e-6
    return values.to(dtype)


def quantize(quantizer: Quantizer, values: torch.Tensor) -> list[torch.Tensor]:
    packed, scales = quantizer.quantize(values.reshape(-1), values.shape)
    parts = quantizer.parts(values.shape)
    found = [packed.view(parts[0].dtype).view(parts[0].shape), *quantizer.keep_scales(scales)]
    found[1:] = [part.view(like.shape) for part, like in zip(found[1:], parts[1:], strict=True)]
    assert [(part.dtype, tuple(part.shape)) for part in found] == [(like.dtype, like.shape) for like in parts]
    return found


def unpack(quantizer: Quantizer, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, math.nan)
    quantizer.unpack(parts, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nf4_has_the_bytes_and_values_of_bitsandbytes(bitsandbytes, dtype):
    """Catches another codebook, rounding, packing order, block or product, in whole blocks and in tails."""
    for shape in SHAPES:
        for block_size in (64, 32, 256, 4096):
            values = make_values(shape, dtype)
            packed, state = bitsandbytes.quantize_4bit(values.view(-1), blocksize=block_size, quant_type="nf4")
            parts = quantize(Nf4(block_size=block_size), values)
            case = (shape, block_size)
            assert torch.equal(parts[0], packed.view(-1)), case
            # bitsandbytes' CPU alone gives a tail of zeros the smallest scale instead of 0.
            assert torch.equal(parts[1], torch.where(state.absmax == 1e-38, 0.0, state.absmax)), case
            for out_dtype in DTYPES:
                state.dtype = out_dtype
                expected = bitsandbytes.dequantize_4bit(packed, state).view(-1).view(shape)
                assert torch.equal(unpack(Nf4(block_size=block_size), parts, expected), expected), (*case, out_dtype)


def test_nf4_rounds_as_the_definition_says():
    """Catches a lookup that is off at, or an ulp beside, the middle of two codes, and codes that are not themselves."""
    code = torch.tensor(NF4_CODE)
    middles = (code[:-1] + code[1:]) / 2
    scaled = torch.cat((code, middles, *(torch.nextafter(middles, torch.tensor(end)) for end in (-2.0, 2.0))))
    scaled = torch.cat((scaled, torch.linspace(-1, 1, 4001)))
    expected = (scaled.unsqueeze(1) > middles).sum(1)
    assert torch.equal(Tables(CPU).round(scaled.clone()).long(), expected)
    assert Tables(CPU).round(torch.tensor([math.nan])).tolist() == [15]


def test_quantized_scales_are_those_of_bitsandbytes(bitsandbytes):
    """Catches another map, offset, block or rounding of the scales, and a sum that depends on who sums."""
    assert torch.equal(make_dynamic_map(), bitsandbytes.create_dynamic_map())
    for num_scales in (1, 7, 256, 300, 4096):
        scales = make_values((num_scales,), torch.float32, num_scales).abs()
        offset = scales.mean()
        numbers, nested, kept = Nf4(True).quantize_scales(scales, offset)
        theirs, state = bitsandbytes.quantize_blockwise(scales - offset, make_dynamic_map(), blocksize=256)
        blocks = (scales - offset).split(256)
        expected_nested = torch.stack([block.abs().max() for block in blocks])
        divided = torch.cat(
            [block / most.clamp(min=1e-38) for block, most in zip(blocks, expected_nested, strict=True)]
        )
        same = numbers == (divided.unsqueeze(1) - make_dynamic_map()).abs().argmin(1)
        # The CPU's own kernel takes the second nearest value now and then; CUDA's does not.
        assert (numbers == theirs).float().mean() > 0.9 or num_scales == 1  # zero, which it takes for another
        assert torch.equal(state.absmax, expected_nested), num_scales
        # A last block that is not whole is divided there, and multiplied with the reciprocal here and on CUDA.
        assert same[: num_scales // 256 * 256].all() and same.float().mean() > 0.99, num_scales
        assert torch.equal(nested.clamp(min=1e-38), expected_nested.clamp(min=1e-38)) and kept == offset
        own = Nf4(True).keep_scales(scales)[2]
        assert abs(own - offset) <= 4 * torch.finfo(torch.float32).eps * offset
        assert torch.equal(own, Nf4(True).keep_scales(scales.flip(0))[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nested_nf4_unpacks_to_the_values_of_bitsandbytes(bitsandbytes, dtype):
    """Catches a product or sum in another order or precision, and a piece that takes its neighbor's scales."""
    for shape in SHAPES:
        for block_size in (32, 64, 4096):
            values = make_values(shape, dtype)
            packed, state = bitsandbytes.quantize_4bit(
                values.view(-1), blocksize=block_size, quant_type="nf4", compress_statistics=True
            )
            parts = [packed.view(-1), state.absmax, state.state2.absmax, state.offset.view(1)]
            expected = bitsandbytes.dequantize_4bit(packed, state).view(-1).view(shape)
            assert torch.equal(unpack(Nf4(True, block_size), parts, expected), expected), (shape, block_size)
    other = Nf4(True, 64, 64)
    values = make_values((300, 1000))
    found = unpack(other, quantize(other, values), values)
    assert (found - values).abs().max() < 0.2 * values.abs().max()


def test_a_file_of_bitsandbytes_gives_the_same_bytes_with_its_default_modules(bitsandbytes):
    """Catches parts under names, types or shapes that bitsandbytes' checkpoints do not have."""
    from bitsandbytes.nn import Linear4bit

    values = make_values((96, 128))
    for double_quant in (False, True):
        layer = Linear4bit(128, 96, bias=False, compress_statistics=double_quant, quant_type="nf4")
        layer.load_state_dict({"weight": values})
        stored = layer.to("cpu").state_dict()
        quantizer = Nf4(double_quant)
        for like, part in zip(quantizer.parts(values.shape), quantize(quantizer, values), strict=True):
            if like.name == "nested_offset":  # there it is in the JSON that describes the weight
                continue
            theirs = stored["weight" if not like.name else f"weight.{like.name}"]
            assert theirs.dtype == like.dtype and torch.equal(theirs.view(like.shape), part), like.name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_has_the_bytes_and_values_of_bitsandbytes(bitsandbytes, dtype):
    """Catches a product in another order, a scale divided first, and rows of experts that are taken together."""
    for shape in ((64, 64), (300, 1000), (7, 9), (512, 1088), (3, 5, 64)):
        values = make_values(shape, dtype)
        numbers, scales = quantize(Int8(), values)
        rows = values.view(-1, shape[-1])
        expected, expected_scales, _ = bitsandbytes.int8_vectorwise_quant(rows.clone())
        assert torch.equal(numbers.view(rows.shape), expected) and torch.equal(scales.view(-1), expected_scales), shape
        expected = bitsandbytes.int8_vectorwise_dequant(expected, expected_scales).to(dtype)
        assert torch.equal(unpack(Int8(), [numbers, scales], values).view(rows.shape), expected), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_the_nearest_of_all_256_values(dtype):
    """Catches a conversion that does not round to the nearest even, another scale, and a lookup in another order."""
    finite = [math.ldexp(code & 7 | (8 if code > 7 else 0), max(code >> 3, 1) - 10) for code in range(127)]
    magnitudes = torch.tensor(finite, dtype=torch.float64)
    for shape in ((64, 64), (7, 9), (30, 1000)):
        values = make_values(shape, dtype)
        parts = quantize(Fp8(), values)
        scales = (values.float().abs().amax(dim=-1) / 448).clamp(min=torch.finfo(torch.float32).tiny)
        assert torch.equal(parts[1], scales)
        codes = parts[0].view(torch.uint8).long()
        distances = ((values.float() / scales.unsqueeze(-1)).abs().double().unsqueeze(-1) - magnitudes).abs()
        nearest = distances == distances.amin(dim=-1, keepdim=True)
        index = codes & 127
        assert nearest.gather(-1, index.unsqueeze(-1)).all()
        assert not (index % 2 == 1)[nearest.sum(dim=-1) > 1].any()  # ties go to the even code
        assert torch.equal(codes > 127, values.signbit())
        signed = torch.where(codes > 127, -magnitudes[index], magnitudes[index]).float()
        assert torch.equal(unpack(Fp8(), parts, values), (signed * scales.unsqueeze(-1)).to(dtype))


@EVERY_FORMAT
def test_quantizing_range_by_range_changes_nothing(quantizer):
    """Catches a scale that depends on where a rank's range begins."""
    values = make_values((96, 4096))
    whole = quantizer.quantize(values.view(-1), values.shape)
    step = 2 * quantizer.block_numel(values.shape)
    ranges = [quantizer.quantize(values.view(-1)[i : i + step], values.shape) for i in range(0, values.numel(), step)]
    for number, expected in enumerate(whole):
        assert torch.equal(torch.cat([range_[number] for range_ in ranges]), expected)


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zero_and_values_that_are_not_finite_show(quantizer, dtype):
    """Catches 0/0, a scale that overflows or vanishes, and a NaN that becomes a finite value."""
    values = make_values((8, 4096), dtype)
    values[0] = 0
    values[3, :] = torch.finfo(dtype).smallest_normal / 8
    values[4] = torch.finfo(dtype).max / 128  # bitsandbytes multiplies int8's scale by up to 127 first
    found = unpack(quantizer, quantize(quantizer, values), values.float())
    is_nested = quantizer == Nf4(True) or quantizer == Nf4(True, 4096)
    assert not found[0].any() or is_nested
    assert found.isfinite().all()
    if not is_nested:  # 255 codes for scales that are 70 decades apart are too few
        assert torch.allclose(found[4], values[4].float(), rtol=1e-2)
        assert (found[3] - values[3].float()).abs().max() <= 1e-38
    for what in (math.nan, math.inf, -math.inf):
        values[5, 3] = what
        found = unpack(quantizer, quantize(quantizer, values), values.float())
        assert not found[5, :64].isfinite().any()
        assert is_nested or found[6].isfinite().all()


@EVERY_FORMAT
def test_one_expert_equals_its_slice_of_the_weight(quantizer):
    """Catches an expert with its neighbor's scales, and one selected although it shares a block with another."""
    for shape in ((5, 96, 64), (3, 64, 128), (4, 5, 9)):
        values = make_values(shape)
        parts = quantize(quantizer, values)
        whole = unpack(quantizer, parts, values)
        for index in range(shape[0]):
            selected = quantizer.select(parts, shape, index)
            blocks_are_its_own = shape[1] * shape[2] % quantizer.block_numel(shape) == 0
            assert (selected is not None) is blocks_are_its_own, shape
            if selected is not None:
                assert torch.equal(unpack(quantizer, selected, values[index]), whole[index]), shape


@EVERY_FORMAT
def test_unpacking_takes_little_memory_and_reads_mapped_bytes(quantizer, tmp_path: Path):
    """Catches a copy of the weight on the way, and a view that is refused because it does not own its bytes."""
    values = make_values((2048, 4096))
    parts = quantize(quantizer, values)
    expected = unpack(quantizer, parts, values)
    mapped = []
    for number, part in enumerate(parts):
        file = tmp_path / str(number)
        file.write_bytes(bytes(64) + bytes(part.contiguous().view(-1).view(torch.uint8).tolist()))
        raw = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        mapped.append(raw[64:].view(part.dtype).view(part.shape))
    slot = torch.empty(values.numel() * 2 + 256, dtype=torch.uint8)
    out = slot[256:].view(torch.bfloat16).view(values.shape)
    with torch.profiler.profile(profile_memory=True) as profile:
        quantizer.unpack(mapped, out)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert torch.equal(out, expected)
    pieces = list(iterate_chunks(2048, 4096, CPU))
    assert len(pieces) == 32 and taken / len(pieces) < 4 * 2**20


def test_an_option_means_a_format_that_compares_by_what_it_is():
    """Catches a format that is another one for each weight, and tables that count when two are compared."""
    for format_, double_quant, expected in (("nf4", False, Nf4()), ("nf4", True, Nf4(True)), ("int8", False, Int8())):
        made = make_quantizer(Quantization(format_, double_quant))
        quantize(made, make_values((4, 64)))
        assert made == expected and hash(made) == hash(expected)
    assert Nf4() != Nf4(True) != Nf4(True, 128) and Nf4(block_size=128).block_numel((4, 64)) == 128


def test_a_notice_about_kernels_that_are_never_called_is_left_out(capfd, monkeypatch):
    """Catches every rank of every command asking for a package that lorashard does not use, and a blanket silence."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "handlers", [handler := logging.StreamHandler()])
    for _ in range(2):
        leave_out_notices()
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "No module named 'kernels'")
    logger.warning("another")
    handler.flush()
    assert len(logger.filters) == 1 and capfd.readouterr().err == "another\n"
