"""The server: its options, its login, and the guard that every request passes.

Knows no run. What is shown is in `pages`.
"""
