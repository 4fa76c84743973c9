"""Quantized formats of a frozen base: how values become bytes and back, and what a module holds for such a weight.

Stands on torch and the engine, whose `WeightFormat` it implements.
"""
