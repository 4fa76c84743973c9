"""The web UI, driven in a real browser. A package, so that its fixtures of package scope end with its last test."""
