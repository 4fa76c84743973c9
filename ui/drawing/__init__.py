"""Appearance: charts, markup, style, and the formatting of values."""
