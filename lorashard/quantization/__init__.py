"""Quantized formats of a frozen base: how numbers become bytes and back, on torch and the engine's `Packing`."""
