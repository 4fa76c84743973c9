"""Tokens and passwords: no option takes them, and no message repeats them."""

import pytest

from lorashard.config.run_config import RunConfig
from lorashard.config.use_options import ChatOptions, EvalOptions, GenerateOptions, MergeOptions, VerifyOptions
from lorashard.errors import ConfigError

RUN = {"model_name_or_path": "m", "dataset": "d.jsonl", "output_dir": "o"}
SECRET = "hf_abcdefghijklmnop"


@pytest.mark.parametrize("name", ["hub_token", "push_to_hub_token", "use_auth_token"])
def test_tokens_are_no_options(tmp_path, name):
    """The token would be in config.yaml, and in the list of processes."""
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: {SECRET}\n")
    for overrides, path in (([f"--{name}", SECRET], None), ([], file)):
        with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
            RunConfig.resolve(path, [*(word for k, v in RUN.items() for word in (f"--{k}", v)), *overrides])
        assert SECRET not in str(caught.value) and "hf auth login" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "given", "name"),
    [
        *((RunConfig, RUN, name) for name in ("model_name_or_path", "dataset", "eval_dataset", "output_dir")),
        *((RunConfig, RUN, name) for name in ("chat_template_path", "resume_from_checkpoint")),
        (RunConfig, RUN | {"method": "grpo"}, "reward_model_name_or_path"),
        (MergeOptions, {"adapter": "a", "out": "o"}, "adapter"),
        (MergeOptions, {"adapter": "a", "out": "o"}, "push_to_hub"),
        (GenerateOptions, {"adapter": "a", "prompts": "p", "out": "o"}, "prompts"),
        (ChatOptions, {"adapter": "a"}, "base"),
        (EvalOptions, {"adapter": "a", "dataset": "d"}, "dataset"),
        (VerifyOptions, {"adapter": "a"}, "merged"),
    ],
)
def test_an_address_is_refused_and_not_repeated(options, given, name):
    """https://user:password@host would be written into config.yaml, status.json and the logs."""
    with pytest.raises(ConfigError, match=f"{name}: ") as caught:
        options(**given | {name: "https://user:hunter2@example.com/org/name"})
    assert "hunter2" not in str(caught.value)
    if options is RunConfig and name != "reward_model_name_or_path":
        assert options(**given | {name: "org/name"})
