"""Mistakes in a line, each of which some test must notice: what is changed, and what that breaks.

A mistake is found by the text of its line, so code may move within its file; a file that moves changes one path here.
The tests named are short ones: `run.py` leaves out those marked slow.
"""

from __future__ import annotations

from dataclasses import dataclass

LADDER = ("tests/distributed/engine/test_exactness.py", "-k", "quick")
ORDER = ("tests/unit/engine/test_device_order.py",)
SEQUENCES = ("tests/distributed/model/test_sequence_parallel.py", "-k", "every_gradient")
JOBS = ("tests/distributed/engine/test_jobs.py", "-k", "own_run")
COSTS = ("tests/distributed/engine/test_costs.py", "-k", "gathers or collectives or reduced")


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        file: where the line is.
        old: what is there, once.
        new: what it becomes.
        breaks: what goes wrong then.
        tests: what pytest is given besides `-m "not slow"`, and must fail.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...] = LADDER


MUTANTS: dict[str, Mutant] = {
    # The engine, and what it gathers
    "no wait": Mutant(
        "lorashard/engine/unit.py",
        "stream.wait(self._work)",
        "pass",
        "a unit is computed with before its bytes have come",
    ),
    "other unit's slot": Mutant(
        "lorashard/engine/autograd.py",
        "return Handle(slot.owner, (tensor.dtype,",
        "return Handle(next(iter(pool)).owner or slot.owner, (tensor.dtype,",
        "backward gets the weight of another layer",
    ),
    "no handle": Mutant(
        "lorashard/engine/autograd.py",
        "if slot is not None and slot.owner is not None:",
        "if slot is not None and slot.owner is not None and tensor.dim() > 1:",
        "a norm's weight is read from the slot as it is by then",
    ),
    "released too early": Mutant(
        "lorashard/engine/engine.py",
        "            if not scheduled.holds and is_last:\n                scheduled.unit.release",
        "            if True:\n                scheduled.unit.release",
        "the head is gone when a fused loss reads it",
    ),
    "wrong victim": Mutant(
        "lorashard/engine/schedule.py",
        "            if distance > farthest:",
        "            if farthest < 0 or distance < farthest:",
        "the unit that is needed next is resharded",
        COSTS,
    ),
    "skipped hook": Mutant(
        "lorashard/engine/engine.py",
        "elif scheduled.has_backward and torch.is_grad_enabled():",
        "elif False and torch.is_grad_enabled():",
        "backward prefetches nothing, and holds what it should have given back",
        COSTS,
    ),
    "wrong offset in a shard": Mutant(
        "lorashard/engine/layout.py",
        "end - field.begin_byte, begin - shard_begin)",
        "end - field.begin_byte, max(0, begin - shard_begin - 256))",
        "a tensor rests 256 bytes before its place",
    ),
    "unaligned": Mutant(
        "lorashard/engine/layout.py",
        "tuple(shape), round_up(end_byte, ALIGNMENT_BYTES))",
        "tuple(shape), round_up(end_byte, 4))",
        "layouts and the plan's sums differ, and kernels take other paths",
        ("tests/unit/engine/test_layout.py",),
    ),
    "wrong stretch of a file": Mutant(
        "lorashard/weights/segments.py",
        "found.append(Segment(segment.stored, segment.begin + offset, numel))",
        "found.append(Segment(segment.stored, segment.begin, numel))",
        "a rank reads the beginning of a stored tensor in place of its own part",
    ),
    "wrong row of scales": Mutant(
        "lorashard/quantization/rowwise.py",
        "out.copy_(codes.float().mul_(scales).mul_(_INT8_STEP))",
        "out.copy_(codes.float().mul_(scales.roll(1, 0)).mul_(_INT8_STEP))",
        "a row is scaled by its neighbor's scale",
    ),
    "scales of another expert": Mutant(
        "lorashard/quantization/nf4.py",
        "self._unpack_scales(parts[1:], first, last)]",
        "self._unpack_scales(parts[1:], 0, last - first)]",
        "every expert is scaled as the first",
        ("tests/unit/quantization/test_quantized_weight.py", "tests/unit/quantization/test_quantization_formats.py"),
    ),
    "workspace given away": Mutant(
        "lorashard/engine/placeholder.py",
        "return value.clone() if _find_address(value) in reused else value",
        "return value",
        "a view of unpacked values outlives the operation, and the next weight appears there",
        ("tests/unit/quantization/test_quantized_weight.py",),
    ),
    "adapter not broadcast": Mutant(
        "lorashard/api.py",
        "    share_adapters(model)\n    return model",
        "    return model",
        "each rank trains an adapter that it has drawn for itself",
    ),
    "dropout moved": Mutant(
        "lorashard/engine/engine.py",
        "        unit.wait(self._stream)\n\n    def _start_unshard",
        "        unit.wait(self._stream)\n        torch.rand(1)\n\n    def _start_unshard",
        "dropout draws other masks than without sharding",
    ),
    "other rank's part": Mutant(
        "lorashard/runtime/dist.py",
        "            get_rank() % size,",
        "            (get_rank() + 1) % size,",
        "ranks of a group put one another's parts at the wrong places",
    ),
    "groups across nodes": Mutant(
        "lorashard/runtime/shared_groups.py",
        "ranks = list(range(begin, begin + size))",
        "ranks = list(range(begin // size, dist.get_world_size(), dist.get_world_size() // size))",
        "the ranks that share a base are those of different nodes",
        ("tests/distributed/engine/test_costs.py", "-k", "hybrid"),
    ),
    "hash not compared": Mutant(
        "lorashard/engine/agreement.py",
        "hash((rolling_hash, *sorted(jobs)))",
        "hash((*sorted(jobs),))",
        "ranks that gathered other units continue",
        ("tests/unit/engine/test_gathers.py", "-k", "distinguished"),
    ),
    "floor too high": Mutant(
        "lorashard/model/backward.py",
        "if floor.index_of.get(self, len(floor.index_of)) >= floor.lowest:",
        "if floor.index_of.get(self, len(floor.index_of)) > floor.lowest:",
        "the lowest layer with an adapter gets no gradient",
    ),
    "head not quantized": Mutant(
        "lorashard/model/quantizing.py",
        'for name in ("base_layer", "original_module"):',
        'for name in ("base_layer",):',
        "a head beside a copy that trains is left as it was",
        ("tests/unit/model/test_quantizing.py",),
    ),
    "later adapter not broadcast": Mutant(
        "lorashard/model/added_adapters.py",
        "        check_frozen(model)\n        share_adapters(model, known)",
        "        check_frozen(model)",
        "each rank trains an adapter, added later, that it has drawn for itself",
        ("tests/distributed/model/test_peft_adding.py",),
    ),
    "freed too late": Mutant(
        "lorashard/engine/engine.py",
        "slots = self.pool.of_class(unit.size_class)",
        "slots = self.pool.of_class(unit.size_class)[-1:]",
        "of all slots one is used: every layer is gathered again and again",
        COSTS,
    ),
    # The checkpoint writer
    "size not compared": Mutant(
        "lorashard/runs/checkpoints.py",
        "if found != size:",
        "if found is None:",
        "a checkpoint whose file was cut short counts as complete",
        ("tests/unit/runs/test_checkpoints.py",),
    ),
    "deleted in place": Mutant(
        "lorashard/runs/checkpoints.py",
        "os.rename(checkpoint, going)",
        "going = checkpoint",
        "a kill while it is deleted leaves half a checkpoint under its name",
        ("tests/unit/runs/test_checkpoints.py",),
    ),
    "best rotated away": Mutant(
        "lorashard/runs/checkpoints.py",
        "kept = {published, *(path for path in checkpoints if best and path.name == Path(best).name)}",
        "kept = {published}",
        "the best adapter is gone at the end of the training",
        ("tests/unit/runs/test_checkpoints.py",),
    ),
    "best that is not there": Mutant(
        "lorashard/training/trainer.py",
        "self.state.best_metric, self.state.best_global_step, self.state.best_model_checkpoint = self._best",
        "pass",
        "an evaluation whose save failed is the best one ever after",
        ("tests/unit/training/test_trainer.py",),
    ),
    "asked for without an optimizer": Mutant(
        "lorashard/training/trainer.py",
        "return not self.args.save_only_model or bool(self._stop_signal) or self._saves_now",
        "return not self.args.save_only_model or bool(self._stop_signal)",
        "no run resumes from a checkpoint that a person has asked for",
        ("tests/unit/training/test_trainer.py",),
    ),
    "step twice": Mutant(
        "lorashard/runtime/disk.py",
        "_read_step(line) > last_step:",
        "_read_step(line) > last_step + 1:",
        "a step after the checkpoint is there twice in what a resumed run has written",
        ("tests/unit/runs/test_folder.py",),
    ),
    "number given again": Mutant(
        "lorashard/runs/lock.py",
        "is_same = process.create_time() <= at_s + _CLOCK_STEP_S",
        "is_same = True",
        "a signal goes to the process that has got a dead run's number",
        ("tests/unit/runs/test_lock.py",),
    ),
    "oldest checkpoint": Mutant(
        "lorashard/training/resume.py",
        "for step in sorted(set().union(*filter(None, everyone)), reverse=True):",
        "for step in sorted(set().union(*filter(None, everyone))):",
        "a run resumes from the oldest checkpoint, and does its steps again",
        ("tests/unit/training/test_resume.py",),
    ),
    "finished adapter lost": Mutant(
        "lorashard/training/resume_request.py",
        'if (folder / "adapter_config.json").exists() and not config.overwrite_output_dir:',
        'if (folder / "adapter_config.json").exists() and config.overwrite_output_dir:',
        "a start afresh deletes a finished adapter",
        ("tests/unit/training/test_resume.py",),
    ),
    # The launcher
    "mistake repeated": Mutant(
        "lorashard/launch/launcher.py",
        "if not failure.is_crash or restarts == config.max_restarts or signals.stop_signal is not None:",
        "if restarts == config.max_restarts or signals.stop_signal is not None:",
        "a user's mistake is started again and again",
        ("tests/e2e/launch/test_restarts.py",),
    ),
    "overwritten by a restart": Mutant(
        "lorashard/launch/launcher.py",
        'return config.model_copy(update={"resume_from_checkpoint": resume, "overwrite_output_dir": False})',
        'return config.model_copy(update={"resume_from_checkpoint": resume})',
        "a run that is started again deletes what it has saved",
        ("tests/e2e/launch/test_restarts.py",),
    ),
    "orphan": Mutant(
        "lorashard/launch/elastic.py",
        "child.kill()",
        "pass",
        "what a dead rank has started stays behind, with the GPU's memory",
        ("tests/e2e/launch/test_launch.py", "-k", "dead or behind"),
    ),
    "end at once not heard": Mutant(
        "lorashard/launch/elastic.py",
        "is_first = asked not in self._asked and not (asked == signal.SIGINT and self._asked)",
        "is_first = True",
        "a second Ctrl-C does not end a run that hangs while it saves",
        ("tests/e2e/launch/test_stop.py", "-k", "second"),
    ),
    "asked for in each step": Mutant(
        "lorashard/runtime/signals.py",
        "is_asked, self._is_save_asked = self._is_save_asked, False",
        "is_asked = self._is_save_asked",
        "each step after a request saves a checkpoint",
        ("tests/unit/runtime/test_signals.py",),
    ),
    "ended rank missed": Mutant(
        "lorashard/runtime/heartbeat.py",
        'is_quiet = word == self._words.get(rank) and word != "{}"',
        "is_quiet = word == self._words.get(rank)",
        "a rank that was done before the others is blamed for its silence",
        ("tests/unit/runtime/test_heartbeat.py",),
    ),
    "last failure blamed": Mutant(
        "lorashard/runtime/failures.py",
        "rank = min(recorded,",
        "rank = max(recorded,",
        "the rank that lost its peer is blamed in place of the one that failed",
        ("tests/unit/runtime/test_failures.py",),
    ),
    "log shown again": Mutant(
        "lorashard/launch/log_mirror.py",
        "self._file.seek(self._offset)",
        "self._file.seek(0)",
        "a resumed run shows the log of all that was before",
        ("tests/e2e/launch/test_restarts.py",),
    ),
    "end said by who knows less": Mutant(
        "lorashard/runs/status.py",
        "if status.place[0] not in _ENDS:",
        "if True:",
        "the step at which a rank has saved is overwritten by the process around it",
        ("tests/unit/runs/test_status.py",),
    ),
    # The loader
    "cast from the beginning": Mutant(
        "lorashard/weights/weights.py",
        "offset = segment.begin + first",
        "offset = first",
        "a rank casts the beginning of a stored tensor in place of its own part",
        ("tests/unit/weights/test_weights.py", "-k", "cast"),
    ),
    "tied in name alone": Mutant(
        "lorashard/weights/weights.py",
        "if not self._is_equal(stored[0], name):",
        "if self.shape(stored[0]) != self.shape(name):",
        "a model whose head differs from its embedding is loaded with one for both",
        ("tests/unit/weights/test_weights.py", "-k", "tied"),
    ),
    "first part of a fused weight": Mutant(
        "lorashard/weights/segments.py",
        "self.slice((end - size) * row_numel, end * row_numel)",
        "self.slice(0, size * row_numel)",
        "what a fused tensor is split into begins with the same rows",
        ("tests/unit/weights/test_weight_conversions.py", "-k", "conversion"),
    ),
    "values for scales": Mutant(
        "lorashard/model/sources.py",
        "source.fill(weight, begin, end, staging, part)",
        "source.fill(weight, begin, end, staging)",
        "of a base that is stored quantized the values are taken for scales too",
        ("tests/distributed/weights/test_stored_bases.py",),
    ),
    "commit not compared": Mutant(
        "lorashard/model/loading.py",
        "_check_commit(folder)\n",
        "\n",
        "ranks load two commits of a model whose branch has moved",
        ("tests/distributed/weights/test_loading.py", "-k", "commit"),
    ),
    "short read": Mutant(
        "lorashard/engine/file_range.py",
        "while done < len(out):",
        "for _ in range(1):",
        "of a tensor of more than 2 GiB the rest stays unread",
        ("tests/unit/weights/test_safetensors_files.py",),
    ),
    # What a GPU runs beside the computation
    "order: gather overtakes readers": Mutant(
        "lorashard/engine/streams.py",
        "            if event is not None:\n                queues.wait(event)",
        "            if event is None:\n                queues.wait(event)",
        "a gather overwrites a slot that is still computed with",
        ORDER,
    ),
    "order: marked before the readers": Mutant(
        "lorashard/engine/unit.py",
        "self.slot.readers_done = stream.mark()\n            self.state = State.CACHED",
        "self.slot.readers_done = self.slot.readers_done or stream.mark()\n            self.state = State.CACHED",
        "a slot is filled again behind its first reader, not its last",
        ORDER,
    ),
    "order: evicted in flight": Mutant(
        "lorashard/engine/unit.py",
        "overtake this one.\n            self.slot.readers_done = stream.mark()",
        "overtake this one.",
        "a slot's next filling overtakes one that nobody waited for",
        ORDER,
    ),
    "order: gather of what is not there": Mutant(
        "lorashard/engine/home.py",
        "        copied.wait()  # on",
        "        # on",
        "a rank sends its shard before it has been copied",
        ORDER,
    ),
    "order: ring ahead of readers": Mutant(
        "lorashard/engine/copies.py",
        "            self._queues.wait(ready)\n",
        "            pass\n",
        "copies from files overwrite a slot that is still computed with",
        ORDER,
    ),
    "order: ring filled too early": Mutant(
        "lorashard/engine/copies.py",
        "            event.synchronize()  # the",
        "            pass  # the",
        "a ring buffer is filled again before the device has read it",
        ORDER,
    ),
    "order: event before its copy": Mutant(
        "lorashard/engine/copies.py",
        "    self._queues.copy(target, buffer)\n                self._events[index] = self._queues.record()",
        "    self._events[index] = self._queues.record()\n                self._queues.copy(target, buffer)",
        "a ring buffer is taken to be read before it is",
        ORDER,
    ),
    "order: side stream waits": Mutant(
        "lorashard/engine/unit.py",
        "            self._work = self.home.unshard_into(slot.wire)",
        "            self.home.unshard_into(slot.wire).wait()",
        "the side stream waits for a gather, and the computation does not",
        ORDER,
    ),
    "order: ring not waited for": Mutant(
        "lorashard/engine/copies.py",
        "self._queues.wait(last.result())",
        "last.result()",
        "the host waits until copies are started, and the device computes with what is not there",
        ORDER,
    ),
    "order: pinned copy not waited for": Mutant(
        "lorashard/engine/copies.py",
        "return _Copies(partial(self._queues.wait, self._queues.record()))",
        "return _Copies()",
        "a layer is computed with before it has come from pinned memory",
        ORDER,
    ),
    "order: first gather not ordered": Mutant(
        "lorashard/engine/engine.py",
        "            slot.readers_done = self._stream.mark()",
        "            slot.readers_done = None",
        "the first gather overtakes the filling of the shards, or what an exception cut short",
        ORDER,
    ),
    "order: recovery waits for nothing": Mutant(
        "lorashard/engine/unit.py",
        "            self._settle(stream)\n            self._put(self._placeholders",
        "            self._work = None\n            self._put(self._placeholders",
        "after an exception a slot is filled twice at once",
        ORDER,
    ),
    "order: event of another queue": Mutant(
        "lorashard/engine/streams.py",
        "        with queues.on(queue):\n            if",
        "        with contextlib.nullcontext():\n            if",
        "gathers run on the compute stream: beside nothing",
        ORDER,
    ),
    "order: written while it is read": Mutant(
        "lorashard/engine/home.py",
        "        self._copies.finish()  # the",
        "        # the",
        "the host writes a checkpoint's weights to pinned memory that the device still copies",
        ORDER,
    ),
    "order: ranks prefetch otherwise": Mutant(
        "lorashard/engine/engine.py",
        "ahead[: self._prefetch]",
        "ahead[: self._prefetch + self._group.rank]",
        "one rank starts a gather before an all-reduce, and another behind it",
        ("tests/distributed/engine/test_collective_order.py",),
    ),
    # Several jobs on one base
    "jobs: random numbers shared": Mutant(
        "lorashard/engine/turns.py",
        "        self._write_torch(job.torch_state)",
        "",
        "a job's dropout depends on the jobs beside it",
        JOBS,
    ),
    "jobs: passes one by one": Mutant(
        "lorashard/engine/turns.py",
        "group = at[_Place.PASS]\n",
        "group = at[_Place.PASS][:1]\n",
        "each unit is gathered once for each job",
        JOBS,
    ),
    "jobs: graphs not linked": Mutant(
        "lorashard/engine/engine.py",
        "linked = self.turns.links.link(output, lambda: self._enter_backward(scheduled.unit))",
        "linked = None",
        "the jobs' backwards visit units in orders of their own, and gather each once more",
        JOBS,
    ),
    "jobs: not compared": Mutant(
        "lorashard/engine/agreement.py",
        "hash((rolling_hash, *sorted(jobs)))",
        "rolling_hash",
        "gradients of other jobs are added up, where each rank has lost another one",
        ("tests/distributed/engine/test_jobs.py", "-k", "lost"),
    ),
    "jobs: ends not compared": Mutant(
        "lorashard/training/jobs.py",
        "        if found[:2] != [-value for value in found[2:]]:",
        "        if False:",
        "gradients of other jobs are added up, where a rank has lost one and no gather tells",
        ("tests/distributed/model/test_sweep_trainer.py", "-k", "loses"),
    ),
    "sweep: begun one by one": Mutant(
        "lorashard/training/sweep.py",
        "            self._turns.wait_until(lambda: not self._preparing)\n",
        "            pass\n",
        "a job goes on from the checkpoints that it was to overwrite, after a kill",
        ("tests/unit/training/test_sweep_parts.py",),
    ),
    "sweep: losers written down late": Mutant(
        "lorashard/training/sweep.py",
        "        file.give_up(losers)\n",
        "",
        "a job that halving has given up trains on, after a kill",
        ("tests/unit/training/test_sweep_parts.py",),
    ),
    "jobs: one state of accelerate": Mutant(
        "lorashard/training/jobs.py",
        "    GradientState._shared_state = ThreadLocalSharedDict()\n",
        "",
        "a trainer's step is left out where another accumulates",
        ("tests/distributed/model/test_sweep_trainer.py",),
    ),
    # Rows that ranks share
    "sequence: labels cut unshifted": Mutant(
        "lorashard/model/sequence_rows.py",
        "shifted = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), _IGNORED)], 1)",
        "shifted = labels",
        "a token is trained to predict itself",
        SEQUENCES,
    ),
    "sequence: positions of the first slice": Mutant(
        "lorashard/model/sequence_rows.py",
        'cut |= {"position_ids": self._slice(positions),',
        'cut |= {"position_ids": self._slice(positions) - self._slice(positions)[:, :1],',
        "every slice begins at position 0",
        SEQUENCES,
    ),
    "sequence: one mask": Mutant(
        "lorashard/model/sequence_attention.py",
        'mask = rows.find_mask(config, query, options.get("sliding_window") is not None)',
        "mask = rows.find_mask(config, query, False)",
        "a sliding window is forgotten",
        SEQUENCES,
    ),
    "sequence: heads in another order": Mutant(
        "lorashard/model/sequence_attention.py",
        "key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)",
        "key, value = key.repeat(1, repeats, 1, 1), value.repeat(1, repeats, 1, 1)",
        "queries meet the keys of other heads",
        SEQUENCES,
    ),
    "sequence: a copy's gradient alone": Mutant(
        "lorashard/model/sequence_collectives.py",
        "return ctx.group.sum(grads[0]), None",
        "return grads[0], None",
        "gradients are divided by the ranks that share a row",
        SEQUENCES,
    ),
    "sequence: rows divided over all": Mutant(
        "lorashard/model/loader_groups.py",
        'kwargs["process_index"] //= size',
        'kwargs["process_index"] %= kwargs["num_processes"]',
        "other ranks than those of a group get the same rows",
        ("tests/distributed/model/test_sequence_trainers.py", "-k", "groups"),
    ),
    "sequence: ranks counted for groups": Mutant(
        "lorashard/training/resume.py",
        "num_groups = arguments.world_size // num_sequence_ranks",
        "num_groups = arguments.world_size",
        "a run cannot be resumed with another number of ranks a row",
        ("tests/e2e/training/test_sequence_run.py", "-k", "goes_on"),
    ),
}
