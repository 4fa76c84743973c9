"""What is done with a model to compare a sharded one with a plain one: each returns every gradient, and more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from helpers.tiny import disturb, make_batch, take_gradients

Results = dict[str, torch.Tensor]
Scenario = Callable[[PeftModel], Results]


def one_step(model: PeftModel) -> Results:
    loss = model(**make_batch()).loss
    loss.backward()
    return take_gradients(model) | {"loss": loss.detach()}


def accumulation(model: PeftModel) -> Results:
    for microbatch in range(3):
        (model(**make_batch(seed=microbatch)).loss / 3).backward()
    return take_gradients(model)


def reference_pass(model: PeftModel) -> Results:
    """As DPO without a reference model does: the base alone is evaluated between forward and backward."""
    logits = model(**make_batch()).logits
    with torch.no_grad(), model.disable_adapter():
        reference = model(**make_batch()).logits
    (logits - reference).square().mean().backward()
    return take_gradients(model) | {"reference": reference}


def evaluation_between(model: PeftModel) -> Results:
    first = one_step(model)
    model.eval()
    with torch.no_grad():
        logits = model(**make_batch(seed=9)).logits
    model.train()
    return {f"first {k}": v for k, v in first.items()} | one_step(model) | {"logits": logits}


def two_forwards(model: PeftModel) -> Results:
    first = model(**make_batch(seed=4)).loss
    second = model(**make_batch(seed=5)).loss
    second.backward()
    first.backward()
    return take_gradients(model)


def two_forwards_in_order(model: PeftModel) -> Results:
    first = model(**make_batch(seed=4)).loss
    second = model(**make_batch(seed=5)).loss
    first.backward()
    second.backward()
    return take_gradients(model)


def joint_backward(model: PeftModel) -> Results:
    losses = [model(**make_batch(seed=seed)).loss for seed in range(3)]
    sum(losses).backward()
    return take_gradients(model)


def fused_head(model: PeftModel) -> Results:
    """TRL's trainers read `lm_head.weight` outside of the LM head's forward."""
    if not hasattr(model, "fused"):
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))
        model.fused = True
    first = -model(**make_batch(seed=6), fused_lm_head=True).log_probs.sum()
    second = -model(**make_batch(seed=7), fused_lm_head=True).log_probs.sum()
    (first + second).backward()
    return take_gradients(model) | {"loss": first.detach()}


def generation(model: PeftModel) -> Results:
    model.eval()
    tokens = model.generate(make_batch()["input_ids"], max_new_tokens=4, do_sample=False)
    model.train()
    return one_step(model) | {"tokens": tokens}


def retained_graph(model: PeftModel) -> Results:
    loss = model(**make_batch()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return take_gradients(model)


def interrupted(model: PeftModel) -> Results:
    """Ctrl-C in the last layer; then all goes on."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    layers = [module for name, module in model.named_modules() if name.rpartition(".")[0].endswith("layers")]
    handle = layers[-1].register_forward_pre_hook(interrupt)
    try:
        model(**make_batch())
    except KeyboardInterrupt:
        handle.remove()
    return one_step(model)


def packed(model: PeftModel) -> Results:
    """One row of several sequences, as TRL's collator makes it without padding."""
    tokens = make_batch(rows=1, tokens=20)["input_ids"][0].tolist()
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collate([{"input_ids": tokens, "seq_lengths": [3, 7, 1, 5, 4]}])
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return take_gradients(model) | {"loss": loss.detach()}


# -- adapters that are put on later ------------------------------------------------------------------------------------


def make_lora(**options: object) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options)


def add(model: PeftModel, name: str, **options: object) -> None:
    torch.manual_seed(9)
    model.add_adapter(name, make_lora(**options))
    disturb(model, name)


def step_with(model: PeftModel, name: str) -> Results:
    """Train with one of the adapters."""
    model.set_adapter(name)
    loss = model(**make_batch()).loss
    loss.backward()
    # PEFT goes on training the whole modules of an adapter that is not active, which get no gradient.
    found = {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    assert found and all(name in key for key in found)
    model.zero_grad()
    return {f"{name} {key}": value for key, value in (found | {"loss": loss.detach()}).items()}


def take_logits(model: PeftModel, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=make_batch()["input_ids"], **options).logits


def switching(model: PeftModel) -> Results:
    add(model, "second", r=2, use_rslora=True, layers_to_transform=[2, 3])
    return step_with(model, "default") | step_with(model, "second") | step_with(model, "default")


def other_modules(model: PeftModel) -> Results:
    """What the first adapter does not touch: its names change, and DDP must go on ignoring the base's."""
    add(model, "elsewhere", target_modules=["k_proj", "embed_tokens"])
    if hasattr(model, "_ddp_params_and_buffers_to_ignore"):
        names = {n for n, p in model.named_parameters() if not any(name in n for name in model.peft_config)}
        assert names <= set(model._ddp_params_and_buffers_to_ignore)
    return step_with(model, "elsewhere") | step_with(model, "default")


def reading_the_base(model: PeftModel) -> Results:
    add(model, "dora", use_dora=True)
    add(model, "saved", modules_to_save=["lm_head", "input_layernorm", "up_proj"])
    return step_with(model, "dora") | step_with(model, "saved") | {"default": take_logits(model)}


def switched_off(model: PeftModel) -> Results:
    add(model, "third")
    with model.disable_adapter():
        off = take_logits(model)
    return {"off": off, "on": take_logits(model)} | step_with(model, "third")


def mixed_batch(model: PeftModel) -> Results:
    model.eval()
    mixed = take_logits(model, adapter_names=["third", "__base__"])
    model.train()
    return {"mixed": mixed}


def weighted(model: PeftModel) -> Results:
    for kind in ("linear", "cat", "svd"):
        model.add_weighted_adapter(["default", "third"], [0.7, 0.3], kind, combination_type=kind)
    found = step_with(model, "linear") | step_with(model, "cat")
    model.set_adapter("svd")
    return found | {"svd": take_logits(model)}


def loaded_later(folder: Path) -> Scenario:
    """Return the scenario of loading the adapters in `folder`, whose names are theirs."""

    def loaded(model: PeftModel) -> Results:
        found: Results = {}
        for path in sorted(folder.iterdir()):
            model.load_adapter(str(path), path.name, is_trainable=True)
            found |= step_with(model, path.name)
        return found | step_with(model, "default")

    return loaded


def deleted(model: PeftModel) -> Results:
    model.set_adapter("third")
    model.delete_adapter("default")
    return step_with(model, "third")


# By the ladder's axis. Scenarios of a group follow one another on one model.
SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "steps": (one_step, accumulation, generation),
    "passes": (reference_pass, evaluation_between),
    "fused": (fused_head, one_step),
    "several": (two_forwards, two_forwards_in_order, joint_backward),
    "again": (retained_graph, interrupted, evaluation_between),
    "packed": (packed, one_step),
}


def run_scenario(scenario: Scenario, model: PeftModel) -> Results:
    torch.manual_seed(5)
    return scenario(model)
