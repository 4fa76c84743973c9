"""Two adapters that train together on one base: each by TRL's SFTTrainer, on each visit of the base.

    accelerate launch --multi_gpu --num_processes 4 examples/sweep_trainer.py --model meta-llama/Llama-3.1-8B-Instruct \
        --data rows.jsonl --output_dir runs/sweep --max_length 2048

Every option of TRL's SFTConfig is an option of this script, and is for both; each adapter, with its trainer's
checkpoints, lies in a folder of its own.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig
from sft import load_rows
from transformers import set_seed
from trl import SFTConfig, SFTTrainer, TrlParser

import lorashard


@dataclass
class ScriptArguments:
    model: str = str(Path(__file__).parent / "demo/base")
    data: str | None = None  # jsonl with messages, prompt and completion, question and answer, or text


ADAPTERS = {
    "small": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    "large": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
}


def main() -> None:
    script, args = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config()
    rows = load_rows(script.data).train_test_split(test_size=8, seed=0)
    set_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32  # TRL's default is bf16
    models = lorashard.load(script.model, adapters=ADAPTERS, dtype=dtype)

    trainers = {}
    for name, model in models.items():
        own = replace(args, output_dir=f"{args.output_dir}/{name}")
        trainers[name] = SFTTrainer(model=model, args=own, train_dataset=rows["train"], eval_dataset=rows["test"])
    lorashard.SweepTrainer(trainers).train()
    for trainer in trainers.values():
        trainer.save_model()  # a plain PEFT adapter
        trainer.save_state()
    if trainer.is_world_process_zero():
        print(lorashard.stats(models["small"]))


if __name__ == "__main__":
    main()
