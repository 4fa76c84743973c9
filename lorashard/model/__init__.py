"""The Hugging Face side: finding units in a model, reading checkpoints by byte ranges, adapters."""
