"""From a dataset's files to the tokens and labels that TRL's SFTTrainer trains on.

Read in this order: `options` (what can be chosen), `sources` (rows with their places), `formats` (what the columns
mean), `chat` (templates and assistant turns), `encode` (tokens and labels), `report` (what became of the rows),
`prepare` (once per machine, cached), `preview`; beside them `tokenizer`. Nothing is imported here: `options` must stay
importable without transformers, for the command line.
"""
