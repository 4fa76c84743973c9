"""Triton's unpacking kernels give the bits of torch's operations, and those that do not are refused."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import with_triton

from lorashard.quantization.kernels import Unpack, try_kernel
from lorashard.quantization.rowwise import Int8

CPU = torch.device("cpu")


class Rounded(Int8):
    """Its kernel rounds to bfloat16 first, which shows in float32 alone."""

    def load_kernel(self, device: torch.device) -> Unpack:
        def unpack(parts, out):
            self.unpack_in_chunks(parts, out)
            out.copy_(out.bfloat16())

        return unpack


class Missing(Int8):
    def load_kernel(self, device: torch.device) -> Unpack:
        raise ModuleNotFoundError("No module named 'triton'\nmore")


def test_kernels_give_the_bits_of_torch_in_the_interpreter():
    """Catches another order of products, a rounding that is not to even, and a tail that reads or writes too far."""
    assert with_triton.run("helpers.unpacking_by_triton", interpret=True).endswith("equal\n")


@pytest.mark.slow
def test_kernels_compile_for_gpus_to_the_operations_of_torch(tmp_path):
    """Catches what the interpreter alone accepts, fused multiply-adds, zeros for tiny values, and a second launch."""
    found = with_triton.run("helpers.unpacking_by_triton", interpret=False, cache=tmp_path)
    assert found.endswith("compiled\n")


@pytest.mark.parametrize(("quantizer", "reason"), ((Rounded(), "its values differ"), (Missing(), "named 'triton'")))
def test_a_kernel_that_cannot_be_used_is_given_up_with_a_line(quantizer, reason, caplog):
    """Catches values that differ from those of other ranks, and a slow path that nobody hears of."""
    with caplog.at_level(logging.WARNING):
        assert try_kernel(quantizer, CPU, torch.bfloat16) is None
    [message] = caplog.messages
    assert reason in message and "int8 in bfloat16" in message and "slower" in message and "\n" not in message
