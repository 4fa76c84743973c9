"""Mistakes in a line, each of which some test must notice: what is changed, and what that breaks.

A mistake is found by the text of its line, so code may move within its file; a file that moves changes one path here.
The tests named are short ones: `run.py` leaves out those marked slow.
"""

from __future__ import annotations

from dataclasses import dataclass

LADDER = ("tests/distributed/engine/test_exactness.py", "-k", "quick")
COSTS = ("tests/distributed/engine/test_costs.py", "-k", "gathers or collectives or reduced")
LIFECYCLE = ("tests/distributed/engine/test_lifecycle.py",)


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
        "return Handle(slot.owner, tensor.dtype,",
        "return Handle(next(iter(pool)).owner or slot.owner, tensor.dtype,",
        "backward gets the weight of another layer",
    ),
    "no handle": Mutant(
        "lorashard/engine/autograd.py",
        "if slot is not None and slot.owner is not None:",
        "if slot is not None and slot.owner is not None and tensor.dim() > 1:",
        "a norm's weight is read from the slot as it is by then",
    ),
    "resharded too early": Mutant(
        "lorashard/engine/engine.py",
        "            if not visit.holds:\n                visit.unit.reshard",
        "            if True:\n                visit.unit.reshard",
        "the head is gone when a fused loss reads it",
    ),
    "wrong victim": Mutant(
        "lorashard/engine/schedule.py",
        "if distance > best_distance:",
        "if best_key is None or distance < best_distance:",
        "the unit that is needed next is evicted",
        COSTS,
    ),
    "skipped hook": Mutant(
        "lorashard/engine/engine.py",
        "if visit.has_backward and torch.is_grad_enabled():",
        "if False and torch.is_grad_enabled():",
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
        "lorashard/model/runs.py",
        "pieces.append(Run(run.stored, run.begin + offset, numel))",
        "pieces.append(Run(run.stored, run.begin, numel))",
        "a rank reads the beginning of a stored tensor in place of its own part",
    ),
    "wrong row of scales": Mutant(
        "lorashard/quantization/int8.py",
        "values = numbers[first:last].float().mul_(scales[first:last]).mul_(_STEP)",
        "values = numbers[first:last].float().mul_(scales[first:last].roll(1, 0)).mul_(_STEP)",
        "a row is scaled by its neighbor's scale",
    ),
    "scales of another expert": Mutant(
        "lorashard/quantization/nf4.py",
        "self._unpack_scales(parts[1:], first, last)]",
        "self._unpack_scales(parts[1:], 0, last - first)]",
        "every expert is scaled as the first",
        ("tests/unit/quantization/test_packed.py", "tests/unit/quantization/test_quantization_formats.py"),
    ),
    "workspace given away": Mutant(
        "lorashard/engine/packed.py",
        "return value.clone() if any(workspace.holds(value) for workspace in workspaces) else value",
        "return value",
        "a view of unpacked numbers outlives the operation, and the next weight appears there",
        ("tests/unit/quantization/test_packed.py",),
    ),
    "adapter not broadcast": Mutant(
        "lorashard/api.py",
        "    share_adapters(model)\n    return model",
        "    return model",
        "each rank trains an adapter that it has drawn for itself",
    ),
    "dropout moved": Mutant(
        "lorashard/engine/engine.py",
        "        unit.wait(self._stream)\n\n    def _start_gather",
        "        unit.wait(self._stream)\n        torch.rand(1)\n\n    def _start_gather",
        "dropout draws other masks than without sharding",
    ),
    "other rank's part": Mutant(
        "lorashard/dist.py",
        "            get_rank() % size,",
        "            (get_rank() + 1) % size,",
        "ranks of a group put one another's parts at the wrong places",
    ),
    "groups across nodes": Mutant(
        "lorashard/dist.py",
        "ranks = list(range(begin, begin + size))",
        "ranks = list(range(begin // size, get_world_size(), get_world_size() // size))",
        "the ranks that share a base are those of different nodes",
        ("tests/distributed/engine/test_costs.py", "-k", "hybrid"),
    ),
    "hash not compared": Mutant(
        "lorashard/engine/engine.py",
        "[check, self._group.num_gathers, self._hash],",
        "[check, self._group.num_gathers, 0],",
        "ranks that gathered other units go on",
        LIFECYCLE,
    ),
    "floor too high": Mutant(
        "lorashard/model/backward.py",
        "if getattr(self, _INDEX_ATTRIBUTE) >= floor.lowest:",
        "if getattr(self, _INDEX_ATTRIBUTE) > floor.lowest:",
        "the lowest layer with an adapter gets no gradient",
    ),
    "head not quantized": Mutant(
        "lorashard/model/quantizing.py",
        'for name in ("base_layer", "original_module"):',
        'for name in ("base_layer",):',
        "a head beside a copy that trains is left as it was",
        ("tests/distributed/engine/test_exactness.py", "-k", "others"),
    ),
    "later adapter not broadcast": Mutant(
        "lorashard/model/adding.py",
        "    check_frozen(model)\n    share_adapters(model, known)",
        "    check_frozen(model)",
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
}
