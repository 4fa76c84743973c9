"""`lorashard finetune` on a quantized base, against TRL on plain PEFT over the dequantized model: step by step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from datasets import load_dataset
from helpers import warm
from helpers.bases import DEMO_BASE, write_small_base
from helpers.finetune import read_losses
from helpers.forked_ranks import run_ranks
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from lorashard.config.methods import METHODS
from lorashard.config.quantization_options import Quantization, QuantizationOptions
from lorashard.quantization.format import make_quantizer

LORASHARD = [str(Path(sys.executable).with_name("lorashard"))]
DEMO_ROWS = DEMO_BASE.parent / "test.jsonl"
STEPS, SAVE_STEPS = 6, 3
TRAINING = {
    "max_steps": STEPS,
    "save_steps": SAVE_STEPS,
    "logging_steps": 1,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 4,
    "report_to": "none",
}
DOUBLE = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
CASES = [
    ("sft", {"quantization": "nf4"}),
    ("sft", {"quantization": "int8", "include_input_output_embeddings": True}),
    ("dpo", DOUBLE),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with rows for each method."""
    folder = tmp_path_factory.mktemp("task")
    write_small_base(folder / "base")
    sums = [{"prompt": f"{a} plus {b} is ", "right": f"{a + b}", "wrong": "many"} for a in range(8) for b in range(8)]
    columns = {"sft": {"completion": "right"}, "dpo": {"chosen": "right", "rejected": "wrong"}}
    for method, named in columns.items():
        rows = [{"prompt": row["prompt"]} | {name: row[of] for name, of in named.items()} for row in sums]
        (folder / f"{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def finetune(task: Path, method: str, out: str, **options) -> subprocess.CompletedProcess:
    """Run the command on two CPU ranks."""
    values = {
        "method": method,
        "model": "base",
        "dataset": f"{method}.jsonl",
        "output_dir": out,
        "cpu": 2,
        "dtype": "float32",
        "placement": "shard",
        "lora_r": 4,
    }
    words = [word for name, value in (values | TRAINING | options).items() for word in (f"--{name}", str(value))]
    return warm.run([*LORASHARD, "finetune", *words], cwd=task, env=make_env(task), capture_output=True, text=True)


def make_env(task: Path) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {k: v for k, v in os.environ.items() if k not in names} | {"HF_HOME": str(task / "hf")}


def dequantize_base(task: Path, folder: Path, quantization: Quantization) -> Path:
    """Write the base with the numbers that its quantized weights stand for: each weight in one piece."""
    quantizer = make_quantizer(quantization)
    model = AutoModelForCausalLM.from_pretrained(task / "base", dtype=torch.float32)
    kinds = (nn.Linear, nn.Embedding) if quantization.has_vocabulary else nn.Linear
    places = model if quantization.has_vocabulary else model.model.layers
    for weight in {module.weight for module in places.modules() if isinstance(module, kinds)}:
        packed, scales = quantizer.quantize(weight.detach().view(-1), weight.shape)
        numbers = quantizer.parts(weight.shape)[0]
        parts = [packed.view(numbers.dtype).view(numbers.shape), *quantizer.keep_scales(scales)]
        quantizer.unpack(parts, weight.data)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task / "base").save_pretrained(folder)
    return folder


def train_plainly(rank: int, task: Path, base: Path, name: str) -> list[dict]:
    """Train with TRL on plain PEFT; return what was logged, and leave rank 0's adapter beside the base."""
    method = METHODS[name]
    arguments = getattr(trl, method.config_class)(
        output_dir=str(base / "out"),
        use_cpu=True,
        bf16=False,
        ddp_find_unused_parameters=False,
        **TRAINING | {"save_strategy": "no"},
    )
    set_seed(arguments.seed)
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    rows = load_dataset("json", data_files=str(task / f"{name}.jsonl"), split="train", cache_dir=str(task / "cache"))
    trainer = getattr(trl, method.trainer_class)(
        model=model, args=arguments, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(base)
    )
    trainer.train()
    if rank == 0:
        torch.save(get_peft_model_state_dict(model, save_embedding_layers=False), base / "adapter.pt")
    return trainer.state.log_history


def check_answers(task: Path, run: Path) -> None:
    """Compare what the adapter says on its quantized base with what plain transformers says with the merged model."""
    rows = DEMO_ROWS.read_text().splitlines()[:4]
    prompts = [json.loads(row)["messages"][:1] for row in rows]
    (task / "prompts.jsonl").write_text("".join(json.dumps({"messages": prompt}) + "\n" for prompt in prompts))
    merged, answers = run.parent / "merged", run.parent / "answers.jsonl"
    generate = ["generate", run, "--prompts", task / "prompts.jsonl", "--out", answers, "--max_new_tokens", 8]
    for words in ([*generate, "--dtype", "float32"], ["merge", run, merged, "--dtype", "float32"]):
        command = [*LORASHARD, *map(str, words), "--cpu", "2"]
        result = warm.run(command, cwd=task, env=make_env(task), capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    is_anything_said = False
    for prompt, line in zip(prompts, answers.read_text().splitlines(), strict=True):
        tokens = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        found = model.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens["input_ids"].shape[1] :]
        said = tokenizer.decode(found, skip_special_tokens=True)
        assert said == json.loads(line)["completion"]
        is_anything_said |= bool(said)
    assert is_anything_said


def is_same_adapter(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "asked"), CASES)
def test_a_run_on_a_quantized_base_is_plain_trl_on_the_dequantized_one(task, tmp_path, method, asked):
    """An option that is lost on its way to the base, a rank that unpacks other numbers, a reference that is not the
    quantized base, and, for the first, a checkpoint that goes on with another base, and answers or a merged model that
    are those of another."""
    quantization = QuantizationOptions(**asked).resolve_quantization()
    base = dequantize_base(task, tmp_path / "base", quantization)
    logged = run_ranks(train_plainly, 2, task, base, method)[0]
    adapter = torch.load(base / "adapter.pt")
    out = tmp_path / "run"
    result = finetune(task, method, out, **asked)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = list(read_losses(out).values())
    assert losses == [line["loss"] for line in logged if "loss" in line] and losses[-1] < losses[0]
    assert is_same_adapter(load_file(out / "adapter_model.safetensors"), adapter)
    assert f"GiB of frozen base, quantized to {quantization.format}" in result.stdout
    assert f"quantization: {quantization.format}\n" in (out / "config.yaml").read_text()
    if method != "sft" or quantization.format != "nf4":
        return
    check_answers(task, out)
    checkpoint = f"{out}/checkpoint-{SAVE_STEPS}"
    refused = finetune(task, method, tmp_path / "other", resume_from_checkpoint=checkpoint)
    assert refused.returncode == 2 and "quantized to nf4" in refused.stderr
    shutil.rmtree(out / f"checkpoint-{STEPS}")  # as a run that was killed leaves its folder
    resumed = finetune(task, method, out, resume_from_checkpoint=True, placement="replicate", **asked)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert list(read_losses(out).values()) == losses
    assert is_same_adapter(load_file(out / "adapter_model.safetensors"), adapter)
