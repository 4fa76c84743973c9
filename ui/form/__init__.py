"""The form of a new run: its fields, its YAML, its command line, and which paths and code a browser may use.

No Gradio and no processes. The components are in `pages`, and starting the run is in `running`.
"""
