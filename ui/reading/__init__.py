"""Runs as their folders show them: status, metrics, logs, checkpoints, alerts.

Writes nothing, signals nothing, and imports neither torch nor Gradio.
"""
