"""A training loop of one's own with accelerate, which can be resumed, on a base that is sharded over the ranks.

    accelerate launch --multi_gpu --num_processes 4 --mixed_precision bf16 examples/accelerate_loop.py \
        --model meta-llama/Llama-3.1-8B-Instruct --data rows.jsonl --output_dir runs/loop --max_steps 100
"""

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, get_cosine_schedule_with_warmup

import lorashard


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(Path(__file__).parent / "demo/base"))
    parser.add_argument("--data", type=Path, help="jsonl with question and answer")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--resume", type=Path, help="a folder that save_state wrote")
    return parser.parse_args()


def load_texts(path: Path | None) -> list[str]:
    if path is None:
        return [f"What is {a} and {b}? It is {a + b}." for a in range(10) for b in range(10)]
    rows = (json.loads(line) for line in path.open())
    return [f"{row['question']} {row['answer']}" for row in rows]


@dataclass
class Progress:
    """How far the run is: JSON, since accelerate loads what is registered with it as a pickle, which may run code."""

    num_batches: int = 0
    steps: list[dict[str, float]] = field(default_factory=list)


def main() -> None:
    args = parse_arguments()
    sampling = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=sampling)
    set_seed(0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    # was: base = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    # was: model = get_peft_model(base, lora)
    model = lorashard.load(args.model, lora, dtype=dtype)
    model.train().gradient_checkpointing_enable()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [tokenizer(text, truncation=True, max_length=512) for text in load_texts(args.data)]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batches = DataLoader(rows, batch_size=2, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, args.max_steps * accelerator.num_processes)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    progress = Progress()
    if args.resume:
        accelerator.load_state(args.resume)
        progress = Progress(**json.loads((args.resume / "progress.json").read_text()))

    while len(progress.steps) < args.max_steps:
        epoch, num_seen = divmod(progress.num_batches, len(batches))
        batches.set_epoch(epoch)
        loss_sum = torch.zeros((), device=accelerator.device)
        for batch in accelerator.skip_first_batches(batches, num_seen):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.num_batches += 1
            loss_sum += loss.detach().float()
            if not accelerator.sync_gradients:
                continue
            step = len(progress.steps) + 1
            mean = accelerator.reduce(loss_sum, "mean").item() / accelerator.gradient_accumulation_steps
            loss_sum.zero_()
            progress.steps.append({"step": step, "loss": mean, "grad_norm": grad_norm.item()})
            accelerator.print(progress.steps[-1])
            if step % args.save_steps == 0:
                checkpoint = args.output_dir / f"checkpoint-{step}"
                accelerator.save_state(checkpoint)
                if accelerator.is_main_process:
                    (checkpoint / "progress.json").write_text(json.dumps(asdict(progress)))
            if step == args.max_steps:
                break

    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)  # a plain PEFT adapter
        (args.output_dir / "steps.json").write_text(json.dumps(progress.steps))
        print(lorashard.stats(model))
    del model  # before the group of its ranks: torch can wait for ever where DDP is the last to let go of it
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
