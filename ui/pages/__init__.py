"""The pages: each builds its own Gradio components and events, from one context.

Nothing here reads a file or starts a process; that is in `reading` and `running`.
"""
