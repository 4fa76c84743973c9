"""Learning from answers that are marked good or bad with TRL's KTOTrainer, on a base that is sharded over the ranks.

    accelerate launch --multi_gpu --num_processes 4 examples/kto.py --model meta-llama/Llama-3.1-8B-Instruct \
        --data answers.jsonl --output_dir runs/kto --per_device_train_batch_size 4 --max_length 1024

Every option of TRL's KTOConfig is an option of this script. As with DPO, the reference is a frozen copy of the adapter.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import set_seed
from trl import KTOConfig, KTOTrainer, TrlParser, unpair_preference_dataset

import lorashard


@dataclass
class ScriptArguments:
    model: str = str(Path(__file__).parent / "demo/base")
    data: str | None = None  # jsonl with prompt, completion and label, or with prompt, chosen and rejected


def load_rows(path: str | None) -> Dataset:
    if path is None:
        sums = [(a, b) for a in range(10) for b in range(10)]
        return Dataset.from_list([make_answer(a, b, is_good=(a + b) % 3 > 0) for a, b in sums])
    rows = load_dataset("json", data_files=path, split="train")
    return unpair_preference_dataset(rows) if "chosen" in rows.column_names else rows


def make_answer(a: int, b: int, is_good: bool) -> dict:
    answer = f"It is {a + b}." if is_good else f"I think that it may be {a + b + 1}."
    return {
        "prompt": [{"role": "user", "content": f"What is {a} and {b}?"}],
        "completion": [{"role": "assistant", "content": answer}],
        "label": is_good,
    }


def main() -> None:
    script, args = TrlParser((ScriptArguments, KTOConfig)).parse_args_and_config()
    rows = load_rows(script.data).train_test_split(test_size=8, seed=0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    set_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32  # TRL's default is bf16
    # was: base = AutoModelForCausalLM.from_pretrained(script.model, dtype=dtype)
    # was: model = get_peft_model(base, lora)
    model = lorashard.load(script.model, lora, dtype=dtype)

    trainer = KTOTrainer(model=model, args=args, train_dataset=rows["train"], eval_dataset=rows["test"])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # a plain PEFT adapter
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(lorashard.stats(model))


if __name__ == "__main__":
    main()
