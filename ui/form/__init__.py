"""The options of a new run: fields, YAML, the command, and which paths and code a browser may use."""
