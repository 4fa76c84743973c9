"""What rank 0 shows the person of a run: one compact line for a logged step, never a dict."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, ProgressCallback, TrainerState

from lorashard.runtime import progress
from lorashard.runtime.output import leave_out_notices
from lorashard.training.console import Console, StepLines, describe_log, show_seconds

SFT = {
    "loss": 1.3044,
    "grad_norm": 0.5,
    "learning_rate": 2e-4,
    "num_tokens": 21560.0,
    "tokens_per_s": 812.4,
    "epoch": 0.1,
}
DPO = {"loss": 0.69, "rewards/margins": 0.0021, "rewards/accuracies": 0.75, "logps/chosen": -105.6}
GRPO = {
    "loss": 0.1,
    "reward": -53.69,
    "rewards/brevity/mean": -53.69,
    "completions/mean_length": 12.94,
    "step_time": 0.7,
}


class _Trainer:
    """As much of a trainer as callbacks are hung on."""

    def __init__(self) -> None:
        self.callbacks: list = [ProgressCallback(), PrinterCallback()]

    def remove_callback(self, kind: type) -> None:
        self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, kind)]

    def add_callback(self, callback: object) -> None:
        self.callbacks.append(callback)


def test_a_line_names_what_matters_and_nothing_else():
    """Catches a metric that is missed, a dict's worth of them, and the names of another method's in SFT's."""
    words = describe_log(SFT, 80.2)
    assert words.split("  ") == ["loss 1.304", "lr 0.0002", "812 tokens/s", "1 min 20 s left"]
    assert {"accuracy 0.75", "margin 0.0021"} <= set(describe_log(SFT | DPO, None).split("  "))
    assert {"reward -53.69", "answer length 12.94"} <= set(describe_log(SFT | GRPO, None).split("  "))
    evaluated = describe_log({f"eval_{name}": value for name, value in (DPO | {"runtime": 95.0}).items()}, None)
    assert evaluated.startswith("evaluation loss 0.69  ") and evaluated.endswith("in 1 min 35 s")
    ended = describe_log({"train_runtime": 9.457, "train_loss": 1.304, "entropy": 0.79}, None)
    assert "9.5 s" in ended and "1.304" in ended and "entropy" not in ended
    for logs in (SFT, SFT | DPO, SFT | GRPO):
        assert len(describe_log(logs, 3600.0 * 30)) < 110


def test_odd_numbers_are_shown_as_they_are():
    """Catches a loss that is NaN, or a tracker's text, ending the run at its console line."""
    assert "loss nan" in describe_log(SFT | {"loss": float("nan"), "learning_rate": None}, None)
    assert "loss NaN" in describe_log({"loss": "NaN"}, None)
    assert describe_log({"epoch": 1.0}, 5.0) == ""


def test_steps_are_printed_as_plain_lines(tmp_path: Path, capsys):
    """Catches transformers' bar or dict beside the lines, lines on other ranks, and a save that was refused."""
    state = TrainerState(max_steps=300)
    arguments = SimpleNamespace(output_dir=str(tmp_path))
    for rank in (0, 1):
        trainer = _Trainer()
        StepLines.take_over(trainer, Console(rank))  # type: ignore[arg-type]
        (callback,) = trainer.callbacks
        state.global_step = 0
        callback.on_train_begin(arguments, state, None)
        state.global_step = 25
        callback.on_log(arguments, state, None, logs=dict(SFT))
        callback.on_save(arguments, state, None)
        (tmp_path / "checkpoint-25").mkdir(exist_ok=True)
        callback.on_save(arguments, state, None)
        printed = capsys.readouterr().out
        if rank == 1:
            assert printed == ""
            continue
        step, saved = printed.splitlines()
        assert step.startswith("step  25/300  loss 1.304") and step.endswith(" left")
        assert saved.split() == ["step", "25/300", "saved", "checkpoint-25"]
        assert "\r" not in printed and "{" not in printed
        (tmp_path / "checkpoint-25").rmdir()


def test_what_the_launcher_draws_is_not_told_on_lines_too(monkeypatch, capsys):
    """Catches "loading: 3 of 24 units" above a bar that says the same, and a log without it where there is no bar."""
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    for has_bar, expected in ((True, ""), (False, "lorashard: loading: 3 of 24 units\n")):
        console = Console(0)
        for done in (1, 3):
            counts = {"done": done, "total": 24, "unit": "units"}
            console.show({"phase": "load", "progress": counts, "has_bar": has_bar})
            now_s[0] += 3
        assert capsys.readouterr().out == expected


def test_durations_are_short():
    """Catches seconds of a day-long training."""
    shown = [show_seconds(seconds) for seconds in (1.25, 59.6, 80, 3 * 3600 + 299, 100 * 3600)]
    assert shown == ["1.2 s", "1 min 0 s", "1 min 20 s", "3 h 4 min", "4 d 4 h"]


def test_what_peft_and_trl_ask_for_by_old_names_is_no_warning():
    """Catches transformers' FutureWarnings in each run of each user, and a filter that hides other warnings too."""
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        leave_out_notices()
        model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing
        model.gradient_checkpointing_disable()
        warnings.warn("`gradient_accumulation` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["`gradient_accumulation` is deprecated"]
