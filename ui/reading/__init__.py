"""Runs as their folders tell of them. Nothing is written here, and torch is not imported."""
