"""What leaves a run as files: the saved adapter, a merged model, and bases that are derived for PiSSA and OLoRA.

Reads files and live models a unit at a time. Which files a base has is in `weights`.
"""
