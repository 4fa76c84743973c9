"""Is this machine, this run, this adapter right? `doctor`, `env`, `validate` and `verify`.

Each reports and changes nothing.
"""
