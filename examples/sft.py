"""Supervised fine-tuning with TRL's SFTTrainer, on a base that is sharded over the ranks.

    accelerate launch --multi_gpu --num_processes 4 examples/sft.py --model meta-llama/Llama-3.1-8B-Instruct \
        --data rows.jsonl --output_dir runs/sft --packing --max_length 2048

Every option of TRL's SFTConfig is an option of this script: --packing, --assistant_only_loss, --max_length, ...
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig, SFTTrainer, TrlParser

import lorashard


@dataclass
class ScriptArguments:
    model: str = str(Path(__file__).parent / "demo/base")
    data: str | None = None  # jsonl with messages, prompt and completion, question and answer, or text


def load_rows(path: str | None) -> Dataset:
    if path is None:
        sums = [(a, b) for a in range(10) for b in range(10)]
        return Dataset.from_list([make_messages(f"What is {a} and {b}?", f"It is {a + b}.") for a, b in sums])
    rows = load_dataset("json", data_files=path, split="train")
    if "question" in rows.column_names:
        rows = rows.map(lambda row: make_messages(row["question"], row["answer"]), remove_columns=rows.column_names)
    return rows


def make_messages(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main() -> None:
    script, args = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config()
    rows = load_rows(script.data).train_test_split(test_size=8, seed=0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    set_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32  # TRL's default is bf16
    # was: base = AutoModelForCausalLM.from_pretrained(script.model, dtype=dtype)
    # was: model = get_peft_model(base, lora)
    model = lorashard.load(script.model, lora, dtype=dtype)

    trainer = SFTTrainer(model=model, args=args, train_dataset=rows["train"], eval_dataset=rows["test"])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # a plain PEFT adapter
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(lorashard.stats(model))


if __name__ == "__main__":
    main()
