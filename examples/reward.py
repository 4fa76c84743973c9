"""A reward model from preferences with TRL's RewardTrainer, on a base that is sharded over the ranks.

    accelerate launch --multi_gpu --num_processes 4 examples/reward.py --model meta-llama/Llama-3.1-8B-Instruct \
        --data pairs.jsonl --output_dir runs/reward --max_length 1024

Every option of TRL's RewardConfig is an option of this script. The head, `score`, is new and trains with the adapter.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import set_seed
from trl import RewardConfig, RewardTrainer, TrlParser

import lorashard


@dataclass
class ScriptArguments:
    model: str = str(Path(__file__).parent / "demo/base")
    data: str | None = None  # jsonl with chosen and rejected, and prompt if they resume from one: texts, or messages


def load_rows(path: str | None) -> Dataset:
    if path is not None:
        return load_dataset("json", data_files=path, split="train")
    sums = [(a, b) for a in range(10) for b in range(10)]
    return Dataset.from_list([make_pair(a, b) for a, b in sums])


def make_pair(a: int, b: int) -> dict:
    return {
        "prompt": [{"role": "user", "content": f"What is {a} and {b}?"}],
        "chosen": [{"role": "assistant", "content": f"It is {a + b}."}],
        "rejected": [{"role": "assistant", "content": f"I think that it may be {a + b + 1}."}],
    }


def main() -> None:
    script, args = TrlParser((ScriptArguments, RewardConfig)).parse_args_and_config()
    rows = load_rows(script.data).train_test_split(test_size=8, seed=0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["score"])
    set_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32  # TRL's default is bf16
    # was: base = AutoModelForSequenceClassification.from_pretrained(script.model, num_labels=1, dtype=dtype)
    # was: model = get_peft_model(base, lora)
    model = lorashard.load(script.model, lora, num_labels=1, dtype=dtype)

    trainer = RewardTrainer(model=model, args=args, train_dataset=rows["train"], eval_dataset=rows["test"])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # a plain PEFT adapter
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(lorashard.stats(model))


if __name__ == "__main__":
    main()
