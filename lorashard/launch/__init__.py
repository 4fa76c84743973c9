"""Start the ranks of a command, watch them, mirror rank 0's output, stop them, start them again, queue for devices.

Runs in the launcher's process. What a rank does with its signals is in `runtime`.
"""
