"""What a run hangs on TRL's trainer: what is logged is written down, steps are counted, a few are profiled."""

from __future__ import annotations

import time

from peft import PeftModel
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from ..config.run_config import RunConfig
from ..inference.generation import SampleCallback
from ..model.profiling import StepProfiler
from ..model.sharding import engine_of
from ..runs.folder import Run
from .console import Console, StepLines
from .meter import RankMeter
from .trackers import drop_refused_trackers


def add_callbacks(
    trainer: Trainer,
    config: RunConfig,
    run: Run,
    meter: RankMeter,
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples_chat: bool,
    console: Console,
) -> None:
    """Give a trainer the callbacks that a run's options ask for.

    Args:
        samples_chat: whether `sample_prompts` are turns of a conversation.
        console: what shows lines to the person, on one rank.
    """
    callbacks = trainer.callback_handler.callbacks
    StepLines.take_over(trainer, console)
    # First, so that trackers and the person see what it adds to a log line.
    callbacks.insert(0, RunCallback(run, meter))
    drop_refused_trackers(callbacks, trainer.args.report_to, run.folder, console.log)
    if config.profile_range is not None:
        profiler = StepProfiler(run.folder / "profile", engine_of(model), *config.profile_range)
        trainer.add_callback(ProfileCallback(profiler))
    if config.early_stopping_patience is not None:
        trainer.add_callback(EarlyStopping(config.early_stopping_patience, config.early_stopping_threshold))
    if config.sample_prompts is not None:
        sampler = SampleCallback(model, tokenizer, config.sample_prompts, run.folder, as_chat=samples_chat)
        callbacks.insert(0, sampler)  # before the run's own, which leaves the pause out


class ProfileCallback(TrainerCallback):
    """Tells a profiler of the trainer's steps, which a resumed run continues to count."""

    def __init__(self, profiler: StepProfiler) -> None:
        self._profiler = profiler

    def on_step_begin(self, args, state, control, **kwargs):
        self._profiler.begin_step(state.global_step + 1)

    def on_step_end(self, args, state, control, **kwargs):
        self._profiler.end_step(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self._profiler.close()


class EarlyStopping(EarlyStoppingCallback):
    """Goes on counting evaluations without improvement where the checkpoint's run had come to."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.get(type(self).__name__, {"attributes": {}})["attributes"]
        self.early_stopping_patience_counter = saved.get("early_stopping_patience_counter", 0)
        control.should_training_stop = self.early_stopping_patience_counter >= self.early_stopping_patience


class RunCallback(TrainerCallback):
    """Adds tokens per second to what the trainer logs, writes it down, and says which steps and batches are done."""

    def __init__(self, run: Run, meter: RankMeter) -> None:
        self._run = run
        self._meter = meter
        self._last: tuple[float, float] | None = None
        self._step_end_s = 0.0
        self._num_batches = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._last = (time.perf_counter(), 0.0)
        self._meter.begin_training()
        self._run.note_step(state.global_step, state.max_steps)

    def on_step_begin(self, args, state, control, **kwargs):
        self._run.note_step(state.global_step, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self._run.note_step(state.global_step, state.max_steps)
        self._step_end_s = time.perf_counter()

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        self._num_batches += 1
        total = len(eval_dataloader) if has_length(eval_dataloader) else None
        self._run.status.advance(self._num_batches, total, "batches")

    def on_evaluate(self, args, state, control, **kwargs):
        self._num_batches = 0
        self._leave_out_pause()

    def on_save(self, args, state, control, **kwargs):
        self._leave_out_pause()

    def _leave_out_pause(self) -> None:
        now_s = time.perf_counter()
        if self._last is not None:
            last_s, num_tokens = self._last
            self._last = (last_s + now_s - self._step_end_s, num_tokens)
        self._step_end_s = now_s

    def on_log(self, args, state, control, logs=None, **kwargs):
        now_s = time.perf_counter()
        if "loss" in logs and "num_tokens" in logs and self._last is not None:
            last_s, last_tokens = self._last
            num_tokens = logs["num_tokens"]
            logs["tokens_per_s"] = round((num_tokens - last_tokens) / (now_s - last_s), 1)
            self._last = (now_s, num_tokens)
        self._run.add_metrics({"step": state.global_step, "time": time.time()} | logs)
        self._run.add_rank_line({"step": state.global_step} | self._meter.read())
