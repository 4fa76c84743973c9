"""The processes that the server starts, signals and ends: runs, jobs, chats and workers.

No Gradio, and torch only inside of a worker's process. What a process has written is read in `reading`.
"""
