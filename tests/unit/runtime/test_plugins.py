"""What accelerate may be told beside lorashard."""

from __future__ import annotations

import os

import pytest

from lorashard.errors import ConfigError
from lorashard.runtime import join as joining
from lorashard.runtime.plugins import refuse_plugins


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed .*leave out --use_deepspeed.*multi-GPU"),
        ("ACCELERATE_USE_FSDP", "True", "FSDP .*leave out --use_fsdp.*multi-GPU"),
        ("ACCELERATE_USE_MEGATRON_LM", "1", "Megatron-LM .*leave out --use_megatron_lm"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "leave out --use_parallelism_config"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "torch_compile"),
    ],
)
def test_a_plugin_that_wants_the_whole_model_is_refused(monkeypatch, variable, value, message):
    """Catches a base that is sharded twice, and a message that leaves a person to guess which switch it was."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{message}") as caught:
        refuse_plugins(os.environ)
    assert variable in str(caught.value) and value in str(caught.value)
    with pytest.raises(ConfigError, match=message):
        joining.join_launch()


def test_plain_launches_pass():
    """Catches the values that `accelerate launch` sets where everything is off."""
    refuse_plugins({"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_CPU": "true"})
    refuse_plugins({})
