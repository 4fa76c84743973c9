"""A trained adapter used: load it with its tokenizer, generate, chat, evaluate, on any placement and number of ranks.

Nothing here trains or writes a model.
"""
