"""What a run writes for others: the saved adapter, a merged model, and bases that are derived for PiSSA and OLoRA.

Works from files, a unit at a time. How a base's files are read is in `weights`.
"""
