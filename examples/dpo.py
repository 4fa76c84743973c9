"""Learning from preferences with TRL's DPOTrainer, on a base that is sharded over the ranks.

    accelerate launch --multi_gpu --num_processes 4 examples/dpo.py --model meta-llama/Llama-3.1-8B-Instruct \
        --data pairs.jsonl --output_dir runs/dpo --beta 0.1 --max_length 1024

Every option of TRL's DPOConfig is an option of this script. The reference model is the base that is there already: TRL
puts a frozen copy of the adapter as it was at first, "ref", beside the one that trains.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import set_seed
from trl import DPOConfig, DPOTrainer, TrlParser

import lorashard


@dataclass
class ScriptArguments:
    model: str = str(Path(__file__).parent / "demo/base")
    data: str | None = None  # jsonl with prompt, chosen and rejected: texts, or messages


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
    script, args = TrlParser((ScriptArguments, DPOConfig)).parse_args_and_config()
    rows = load_rows(script.data).train_test_split(test_size=8, seed=0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    set_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32  # TRL's default is bf16
    # was: base = AutoModelForCausalLM.from_pretrained(script.model, dtype=dtype)
    # was: model = get_peft_model(base, lora)
    model = lorashard.load(script.model, lora, dtype=dtype)

    trainer = DPOTrainer(model=model, args=args, train_dataset=rows["train"], eval_dataset=rows["test"])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # a plain PEFT adapter
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(lorashard.stats(model))


if __name__ == "__main__":
    main()
