"""The Hugging Face side of sharding: units found in a transformers model, loading them, adapters, patches, profiling.

Knows transformers and PEFT, but neither data nor a trainer. Files become bytes in `weights`, and bytes become
unsharded units in `engine`.
"""
