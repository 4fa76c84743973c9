"""From a dataset's files to the tokens and labels that TRL's SFTTrainer trains on.

Read in this order: `sources` (rows with their places), `formats` (the meaning of the columns), `chat` (templates and
assistant turns), `encode` (tokens and labels), `trl_rows` (rows that TRL's other trainers tokenize), `report` (rows
counted), `prepare` (once per machine, cached), `trl_tokens` (what TRL's trainers make of their rows), `visible`,
`preview`; beside them `tokenizer`, `prompts` and `peek`. The options are in `lorashard.config.data_options`, which the
command line reads without transformers.
"""
