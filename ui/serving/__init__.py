"""The server: its options, who may come in, what may be asked of it."""
