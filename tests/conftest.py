"""The environment of every test and of the processes it starts, set before anything imports torch or transformers."""

import os

os.environ.update(
    OMP_NUM_THREADS="1",  # a process that used more OpenMP threads hangs the ranks it forks
    TOKENIZERS_PARALLELISM="false",  # likewise, a tokenizer's threads do not survive a fork
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
)
