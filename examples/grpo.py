"""Reinforcement learning from a function that rewards answers with TRL's GRPOTrainer, on a sharded base.

    accelerate launch --multi_gpu --num_processes 4 examples/grpo.py --model meta-llama/Llama-3.1-8B-Instruct \
        --data questions.jsonl --output_dir runs/grpo --num_generations 8 --max_completion_length 256

Every option of TRL's GRPOConfig is an option of this script, but use_vllm and use_transformers_continuous_batching,
which want the whole weights on one device. Answers are generated in training, by all ranks together: one whose answers
have ended continues for the others' sake.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer, TrlParser

import lorashard


@dataclass
class ScriptArguments:
    model: str = str(Path(__file__).parent / "demo/base")
    data: str | None = None  # jsonl with question and answer, or prompt and chosen; an answer ends with its number


def load_rows(path: str | None) -> Dataset:
    if path is None:
        return Dataset.from_list([make_row(f"What is {a} and {b}?", f"{a + b}") for a in range(10) for b in range(10)])
    rows = load_dataset("json", data_files=path, split="train")
    question, answer = ("question", "answer") if "question" in rows.column_names else ("prompt", "chosen")
    return rows.map(lambda row: make_row(row[question], row[answer]), remove_columns=rows.column_names)


def make_row(question: str, answer: str) -> dict:
    return {"prompt": [{"role": "user", "content": question}], "number": find_last_number(answer)}


def find_last_number(text: str) -> str | None:
    return next(reversed(re.findall(r"-?\d+", text.replace(",", ""))), None)


def reward_right_number(completions: list, number: list, **kwargs) -> list[float]:
    """1 for an answer that ends with the right number."""
    found = [find_last_number(messages[0]["content"]) for messages in completions]
    return [float(given is not None and given == right) for given, right in zip(found, number, strict=True)]


def reward_brevity(completion_ids: list, **kwargs) -> list[float]:
    """A little less for each token."""
    return [-0.01 * len(token_ids) for token_ids in completion_ids]


def main() -> None:
    script, args = TrlParser((ScriptArguments, GRPOConfig)).parse_args_and_config()
    if args.use_vllm:  # TRL would start vLLM, with a copy of the whole model, before lorashard can refuse
        raise SystemExit("use_vllm wants the whole weights, and the base rests sharded: leave it out")
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    set_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32  # TRL's default is bf16
    # was: base = AutoModelForCausalLM.from_pretrained(script.model, dtype=dtype)
    # was: model = get_peft_model(base, lora)
    model = lorashard.load(script.model, lora, dtype=dtype)

    rewards = [reward_right_number, reward_brevity]
    trainer = GRPOTrainer(model=model, args=args, reward_funcs=rewards, train_dataset=load_rows(script.data))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # a plain PEFT adapter
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(lorashard.stats(model))


if __name__ == "__main__":
    main()
