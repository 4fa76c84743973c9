"""`lorashard finetune` with PiSSA on a quantized base: stopped, and resumed where the derived base is gone."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers.finetune import LORASHARD, STEPS, make_options, read_lines, run
from safetensors.torch import load_file

PISSA = {
    "cpu": 2,
    "init_lora_weights": "pissa_niter_4",
    "quantization": "nf4",
    "save_strategy": "steps",
    "lr_scheduler_type": "constant",
}


@pytest.mark.slow
def test_a_run_goes_on_when_its_derived_base_was_deleted(task):
    """A base that is made anew with other random numbers, or from another state, is another one: the run would be lost,
    or would go on with an adapter that does not belong to it."""

    def call(*words: str) -> str:
        result = run([*LORASHARD, *words], task)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    half = STEPS // 2
    assert "pissa_niter_4 keeps" in call("validate", *make_options(task, "none", **PISSA))
    told = call("finetune", *make_options(task, "whole", save_steps=half, **PISSA))
    assert "derived from" in told and "made now" in told
    call("finetune", *make_options(task, "part", save_steps=half, max_steps=half, **PISSA))
    (derived,) = (folder for folder in (task / "hf/lorashard/derived").iterdir() if folder.is_dir())
    shutil.rmtree(derived)
    call("finetune", *make_options(task, "part", save_steps=half, resume_from_checkpoint="auto", **PISSA))
    assert derived.is_dir()
    whole, part = (load_file(task / out / "adapter_model.safetensors") for out in ("whole", "part"))
    assert whole.keys() == part.keys() and all(torch.equal(whole[name], part[name]) for name in whole)
    assert len(read_lines(task / "part/metrics.jsonl")) >= STEPS
