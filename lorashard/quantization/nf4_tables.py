"""The constants of NF4 and of its quantized scales, and lookups in them."""

from __future__ import annotations

import torch

# QLoRA (Dettmers et al., 2023), appendix E, with bitsandbytes' digits.
NF4_CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Cells from 0 to 1, so many that no cell holds two midpoints between codes.
_CELLS = 64


class Tables:
    """NF4's lookup tables on one device.

    Memory: 4 KiB.

    Attributes:
        nf4_code: the 16 values (float32).
        scale_code: the 256 values of quantized scales (float32).
    """

    @torch.inference_mode(False)  # tensors created in that mode cannot be saved for backward
    def __init__(self, device: torch.device) -> None:
        code = torch.tensor(NF4_CODE, dtype=torch.float32, device="cpu")
        # Two float32 values for each byte, moved as one float64: the lookup dominates the cost of unpacking.
        pairs = torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1)
        midpoints = (code[:-1] + code[1:]) / 2
        cells = _find_cells(midpoints).long()
        in_cell = torch.bincount(cells, minlength=2 * _CELLS + 1)
        bounds = torch.full((2 * _CELLS + 1,), torch.inf, dtype=torch.float32, device="cpu")
        bounds[cells] = midpoints
        scales = make_dynamic_map()
        self.nf4_code = code.to(device)
        self.scale_code = scales.to(device)
        self._pairs = pairs.view(torch.float64).view(-1).to(device)
        self._below = (in_cell.cumsum(0) - in_cell).to(torch.uint8).to(device)
        self._bounds = bounds.to(device)
        self._scale_bounds = ((scales[:-1] + scales[1:]) / 2).to(device)

    def look_up(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the two codes of each byte (float32, flat); the first is in the high half."""
        return self._pairs.index_select(0, packed.int()).view(torch.float32)

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the index of the nearest code of each value (uint8): the lower one of a tie, the last one for NaN.

        Args:
            scaled: float32, flat, from -1 to 1; overwritten.
        """
        scaled = scaled.nan_to_num_(1.0)
        # The midpoints below a value are those in the cells before its own, and perhaps the one in its own.
        cells = _find_cells(scaled)
        is_above = scaled > self._bounds.index_select(0, cells)
        return self._below.index_select(0, cells).add_(is_above.view(torch.uint8))

    def look_up_scales(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the values of the dynamic map (float32)."""
        return self.scale_code.index_select(0, codes.int())

    def round_scales(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the index of the nearest value of the dynamic map for each (uint8): the lower one of a tie."""
        return torch.bucketize(scaled, self._scale_bounds, out_int32=True).to(torch.uint8)


def make_dynamic_map() -> torch.Tensor:
    """Return the 256 values of quantized scales in ascending order, from -0.993 to 1 (float32, on the CPU).

    The signed dynamic data type of "8-Bit Approximations for Parallelism in Deep Learning" (Dettmers, 2015), as
    in bitsandbytes' `create_dynamic_map`: seven decades, each divided into twice as many parts as the one below it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        means = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def _find_cells(scaled: torch.Tensor) -> torch.Tensor:
    return (scaled * _CELLS).add_(_CELLS).int()
