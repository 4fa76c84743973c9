"""One run of `lorashard finetune` as each rank lives it: trainer, callbacks, checkpoints, resuming, non-finite steps.

TRL's trainers do the steps. Starting and stopping the ranks is in `launch`; what lies in the folder is in `runs`.
"""
