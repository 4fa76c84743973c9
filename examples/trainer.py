"""transformers' Trainer on a base that is sharded over the ranks.

    torchrun --nproc_per_node 4 examples/trainer.py --model meta-llama/Llama-3.1-8B-Instruct --data rows.jsonl \
        --output_dir runs/trainer --bf16 --gradient_checkpointing --eval_strategy steps --eval_steps 50 --save_steps 50

Every option of TrainingArguments is an option of this script; --resume_from_checkpoint takes up a run that was stopped.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

import lorashard


@dataclass
class ScriptArguments:
    model: str = str(Path(__file__).parent / "demo/base")
    data: str | None = None  # jsonl with question and answer
    max_length: int = 512


def load_rows(path: str | None) -> Dataset:
    if path is None:
        sums = [(a, b) for a in range(10) for b in range(10)]
        return Dataset.from_list([{"question": f"What is {a} and {b}?", "answer": f"It is {a + b}."} for a, b in sums])
    return load_dataset("json", data_files=path, split="train")


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    with args.main_process_first():  # the others find the tokens in the cache
        rows = load_rows(script.data)
        rows = rows.map(
            lambda row: tokenizer(f"{row['question']} {row['answer']}", truncation=True, max_length=script.max_length),
            remove_columns=rows.column_names,
        ).train_test_split(test_size=8, seed=0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    set_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    # was: base = AutoModelForCausalLM.from_pretrained(script.model, dtype=dtype)
    # was: model = get_peft_model(base, lora)
    model = lorashard.load(script.model, lora, dtype=dtype)

    trainer = Trainer(
        model=model,
        args=args,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # a plain PEFT adapter
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(lorashard.stats(model))


if __name__ == "__main__":
    main()
