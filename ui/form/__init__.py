"""The options of a new run as a person gives them: fields, YAML, the same command, and what a browser may name."""
