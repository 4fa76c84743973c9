"""Processes that the server starts and signals: runs, jobs, chats and workers. No Gradio, no torch."""
