"""The web interface's package, installed as `lorashard_ui`; it is empty in this release."""
