"""What is done with a model to compare a sharded one with a plain one: each returns every gradient, and more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import PeftModel
from tiny import make_batch, take_gradients
from trl.trainer.utils import add_fused_lm_head

Results = dict[str, torch.Tensor]


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


SCENARIOS: tuple[Callable[[PeftModel], Results], ...] = (
    one_step,
    accumulation,
    reference_pass,
    evaluation_between,
    two_forwards,
    two_forwards_in_order,
    joint_backward,
    fused_head,
    generation,
)


def run_scenario(scenario: Callable[[PeftModel], Results], model: PeftModel) -> Results:
    torch.manual_seed(5)
    return scenario(model)
