"""PEFT's options of `lorashard finetune`: LoRA+ against TRL on plain PEFT, and what TRL refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from datasets import load_dataset
from helpers import warm
from helpers.bases import write_small_base
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_base
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from lorashard.errors import ConfigError
from lorashard.training.loraplus import make_loraplus_optimizer

LORASHARD = [str(Path(sys.executable).with_name("lorashard"))]
STEPS, SAVE_STEPS, RATIO = 4, 2, 16.0
TRAINING = {
    "max_steps": STEPS,
    "save_steps": SAVE_STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.95,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "report_to": "none",
}
LAYERS = [1]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_small_base(folder / "base")
    rows = [
        {"prompt": f"{a} plus {b} is ", "chosen": f"{a + b}", "rejected": f"{abs(a - b)}, or so"}
        for a in range(6)
        for b in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.jsonl").write_text('{"text": "1 plus 2 is 3"}\n' * 8)
    return folder


def finetune(task: Path, out: str, **options) -> subprocess.CompletedProcess:
    values = {
        "method": "dpo",
        "model": "base",
        "dataset": "rows.jsonl",
        "output_dir": out,
        "cpu": 2,
        "dtype": "float32",
        "placement": "shard",
        "lora_r": 4,
        "lora_target_modules": "q_proj,v_proj",
        "layers_to_transform": ",".join(map(str, LAYERS)) + ",",
    }
    words = [word for key, value in (values | TRAINING | options).items() for word in (f"--{key}", str(value))]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {k: v for k, v in os.environ.items() if k not in names} | {"HF_HOME": str(task / "hf")}
    return warm.run([*LORASHARD, "finetune", *words], cwd=task, env=env, capture_output=True, text=True)


def train_plainly(rank: int, task: Path) -> list[dict]:
    """Train with TRL on plain PEFT; rank 0 returns what was logged, and leaves the adapter in `task`."""
    arguments = trl.DPOConfig(
        output_dir=str(task / "plain"),
        use_cpu=True,
        bf16=False,
        ddp_find_unused_parameters=False,
        **TRAINING | {"save_strategy": "no"},
    )
    set_seed(arguments.seed)
    lora = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=LAYERS,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(task / "base", dtype=torch.float32), lora)
    optimizer = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        loraplus_lr_ratio=RATIO,
        lr=arguments.learning_rate,
        loraplus_weight_decay=arguments.weight_decay,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=arguments.optim == "adamw_torch_fused",
    )
    rows = load_dataset("json", data_files=str(task / "rows.jsonl"), split="train", cache_dir=str(task / "cache"))
    trainer = trl.DPOTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(task / "base"),
        optimizers=(optimizer, None),
    )
    trainer.train()
    if rank == 0:
        torch.save(get_peft_model_state_dict(model, save_embedding_layers=False), task / "plain.pt")
    return trainer.state.log_history


@pytest.mark.slow
def test_loraplus_equals_trl_with_pefts_optimizer(task):
    """Groups that the scheduler, DDP or a resume mixes up train with one learning rate; the losses look healthy."""
    expected = [line for line in run_ranks(train_plainly, 2, task)[0] if "loss" in line]
    result = finetune(task, "out", loraplus_lr_ratio=RATIO)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (task / "out/metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "loss" in line]
    names = ("loss", "grad_norm", "learning_rate")
    assert [[line[n] for n in names] for line in found] == [[line[n] for n in names] for line in expected]
    plain = torch.load(task / "plain.pt")
    adapter = load_file(task / "out/adapter_model.safetensors")
    assert adapter.keys() == plain.keys() and all(torch.equal(adapter[n], plain[n]) for n in plain)

    result = finetune(
        task, "resumed", loraplus_lr_ratio=RATIO, resume_from_checkpoint=task / f"out/checkpoint-{SAVE_STEPS}"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    resumed = load_file(task / "resumed/adapter_model.safetensors")
    assert all(torch.equal(resumed[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_lora_on_the_head_is_refused_in_trls_words(task):
    """TRL's loss reads the head's weight beside its adapter: it would never train, and the run would look healthy."""
    options = {"method": "sft", "dataset": "text.jsonl", "lora_target_modules": "q_proj,lm_head"}
    result = finetune(task, "head", cpu=1, layers_to_transform="null", **options)
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "lm_head" in line]
    assert "Applying a PEFT adapter to `lm_head` is not supported" in line and "Traceback" not in result.stderr


def test_the_optimizer_is_the_one_that_was_asked_for(tmp_path):
    """LoRA+ with another optimizer than `optim`, or with weight decay or momentum of its own."""
    model = get_peft_model(build_base(), LoraConfig(target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"))
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, optim="adagrad", learning_rate=0.5, weight_decay=0.25
    )
    optimizer = make_loraplus_optimizer(model, arguments, 8.0)
    assert isinstance(optimizer, torch.optim.Adagrad)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        (part, group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
        for part in ("lora_A", "lora_B", "lora_embedding")
        if part in names[parameter]
    }
    assert found == {("lora_A", 0.5, 0.25), ("lora_B", 4.0, 0.25), ("lora_embedding", 1e-6, 0.25)}
    grouped = sum(len(group["params"]) for group in optimizer.param_groups)
    assert grouped == sum(parameter.requires_grad for parameter in model.parameters())


def test_an_optimizer_with_groups_of_its_own_is_refused(tmp_path):
    """It would drop the ratio in silence."""
    arguments = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, optim="adalomo")
    model = get_peft_model(build_base(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match="optim"):
        make_loraplus_optimizer(model, arguments, 8.0)
