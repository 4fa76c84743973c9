"""The demo: teach a tiny model, on two CPU ranks, a task that it cannot do. About a minute; `make demo` runs it.

python examples/demo/run.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "examples/demo"
RUN = REPOSITORY / "runs/demo"
FINETUNE = "finetune --config examples/demo/demo.yaml --output_dir runs/demo --overwrite_output_dir"
NUM_SAMPLES = 3


def main() -> None:
    """Measure, fine-tune, measure again, show."""
    begin_s = time.monotonic()
    test_rows = [json.loads(line)["messages"] for line in (DEMO / "test.jsonl").read_text("utf-8").splitlines()]
    questions = [user["content"] for user, _ in test_rows]
    expected = [assistant["content"] for _, assistant in test_rows]
    base_bytes = 2 * (DEMO / "base/model.safetensors").stat().st_size  # in float32, from a file in bfloat16
    print(
        f"The base is a Llama of {base_bytes / 1e6:.1f} MB that knows a small world of people, days and places, and\n"
        "answers in plain English. It shall learn to turn a request for an appointment into one line of JSON.\n"
        f"Held out: {len(test_rows)} requests, none of which is in the training file.\n"
    )

    before = answer(questions, adapter=None)
    score_before = score(before, expected)
    print(f"Exact match before: {score_before:.1%}\n\n$ lorashard {FINETUNE}", flush=True)
    subprocess.run([sys.executable, "-m", "lorashard", *FINETUNE.split()], cwd=REPOSITORY, check=True)
    after = answer(questions, adapter=RUN)
    score_after = score(after, expected)

    print(f"\nThree of the {len(test_rows)} held-out requests:")
    for i in range(NUM_SAMPLES):
        print(
            f"\n  request   {questions[i]}\n  expected  {expected[i]}\n  before    {before[i]}\n  after     {after[i]}"
        )
    print(f"\nExact match on held-out requests: {score_before:.1%} before, {score_after:.1%} after.")
    print_ranks()
    print(
        f"\nThe adapter in runs/demo is plain PEFT. It took {time.monotonic() - begin_s:.0f} s. A real model, on two "
        "GPUs:\n\n"
        "  lorashard finetune --model meta-llama/Llama-3.1-8B --dataset your.jsonl --output_dir runs/first --gpus 2"
    )
    if score_before >= 0.1 or score_after <= 0.9:
        sys.exit(
            f"The demo failed: expected under 10% before and over 90% after, got {score_before:.1%}, {score_after:.1%}."
        )


def answer(questions: list[str], adapter: Path | None) -> list[str]:
    """Return the model's greedy answers, made with transformers and PEFT alone, without lorashard."""
    from lorashard.runtime.importing import quick_imports
    from lorashard.runtime.output import leave_out_notices

    leave_out_notices()  # which importing and using PEFT brings up, and which are not about this
    with quick_imports():  # here, because it takes seconds and the reader should know by then what is going on
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # for so small a model, more threads cost more than they bring
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**prompts, max_new_tokens=64, do_sample=False)  # [questions, tokens]
    return tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


def score(answers: list[str], expected: list[str]) -> float:
    """Return the share of answers that are right to the last character."""
    return sum(a == e for a, e in zip(answers, expected, strict=True)) / len(expected)


def print_ranks() -> None:
    """Print the last line that each rank wrote of itself."""
    print("\nWhat each rank held, in MB:\n\n  rank   whole base   its shard   slots   gathers   gathered   waited")
    for rank in range(2):
        line = json.loads((RUN / f"ranks/rank_{rank}.jsonl").read_text("utf-8").splitlines()[-1])
        print(
            f"  {rank:4}   {line['base_bytes'] / 1e6:10.2f}   {line['bytes_at_rest'] / 1e6:9.2f}"
            f"   {line['slot_bytes'] / 1e6:5.2f}   {line['gathers']:7}   {line['gathered_bytes'] / 1e6:8.0f}"
            f"   {line['wait_s']:4.1f} s"
        )


if __name__ == "__main__":
    main()
