"""Quantized formats of a frozen base: how values become bytes and back, on torch and the engine's `Packing`."""
