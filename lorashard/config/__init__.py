"""The options of every command: their names, defaults and checks, read from YAML files and command lines.

Imports no torch, so that help and mistakes are answered at once. What an option does is in the package that it is for.
"""
