"""From a checkpoint's files to bytes: safetensors ranges, names and conversion, stored formats, hashes, caches.

Knows transformers' configs and file layouts, and no module of a model. What the bytes fill is in `model`.
"""
