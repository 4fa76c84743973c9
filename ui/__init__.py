"""The web UI: it reads run folders, and starts and signals `lorashard` processes. Needs the extra `ui` (Gradio).

No training depends on it: a run is a process of its own, which outlives the browser and this server.
"""
