"""A shard group that is all of its ranks at once, and a small sharded model on it: the engine in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.tiny import find_differences, take_gradients
from lorashard.engine import DeviceHome, Engine, Owner, Placeholder, ScheduleEntry, Unit, Weight, plan_layout
from lorashard.runtime.dist import ShardGroup

CPU = torch.device("cpu")
GARBAGE_BYTE = 0xFF  # not a number, in every floating dtype


class DelayedWork:
    """A gather that spoils its buffer at once, and fills it no earlier than it is waited for.

    It refers to its buffer for ever, as the threads of a backend may.
    """

    def __init__(self, unsharded: torch.Tensor, source: torch.Tensor) -> None:
        self._unsharded, self._source = unsharded, source
        self.address = unsharded.data_ptr()
        self.is_done = False
        unsharded.fill_(GARBAGE_BYTE)

    def wait(self) -> None:
        assert not self.is_done, "waited for twice"
        self._unsharded.copy_(self._source)
        self.is_done = True


class StandInGroup(ShardGroup):
    """Rank 0 of `size` ranks, whose shards it knows all.

    `gathers` has an entry for every gather, in order: the address of the shard that was given, and the work. The one
    with the number `broken` raises as it is started.
    """

    def __init__(self, size: int = 2) -> None:
        super().__init__(rank=0, size=size)
        self.gathers: list[tuple[int, DelayedWork]] = []
        self.compared: list[list[int]] = []
        self.broken: int | None = None
        self._unsharded: dict[int, torch.Tensor] = {}

    def fill(self, home: DeviceHome, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank its pieces of `tensors`, and `home` rank 0's."""
        shards = cut_shards(home.layout, tensors)
        home.shard.copy_(shards[0])
        self._unsharded[home.shard.data_ptr()] = torch.cat(shards)

    def all_gather(self, unsharded: torch.Tensor, shard: torch.Tensor) -> DelayedWork:
        if self.num_gathers == self.broken:
            self.broken = None
            raise KeyboardInterrupt
        arriving = {work.address for _, work in self.gathers if not work.is_done}
        assert unsharded.data_ptr() not in arriving, "an earlier gather would arrive in this buffer later"
        self.num_gathers += 1
        self.gathered_bytes += unsharded.numel()
        work = DelayedWork(unsharded, self._unsharded[shard.data_ptr()])
        self.gathers.append((shard.data_ptr(), work))
        return work

    def compare(self, values: Sequence[int], deed: str) -> None:
        self.compared.append(list(values))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, [num_bytes] of uint8."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def cut_shards(layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the shard of every rank, filled by its own pieces; what no piece fills is garbage."""
    contents = {field.name: as_bytes(tensor) for field, tensor in zip(layout.fields, tensors, strict=True)}
    shards = []
    for rank in range(layout.num_shards):
        shard = torch.full((layout.shard_bytes,), GARBAGE_BYTE, dtype=torch.uint8)
        for piece in layout.pieces(rank):
            source = contents[piece.field.name][piece.begin_byte : piece.end_byte]
            shard[piece.shard_byte : piece.shard_byte + source.numel()] = source
        shards.append(shard)
    return shards


def build_unit(
    name: str,
    modules: Sequence[nn.Module],
    group: StandInGroup,
    index: int = 0,
    size_class: str = "layer",
) -> Unit:
    """Shard every frozen parameter of `modules`, in place; a parameter that several of them share is one weight."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    for module in modules:
        for part in module.modules():
            for attribute, parameter in part.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    owners.setdefault(parameter, []).append(Owner(part, attribute))
    layout = plan_layout([(f"{name}.{i}", p.dtype, p.shape) for i, p in enumerate(owners)], group.size)
    home = DeviceHome(layout, group, CPU)
    group.fill(home, list(owners))
    weights = [
        Weight(Placeholder(field.name, field.shape, field.dtype, CPU), places)
        for field, places in zip(layout.fields, owners.values(), strict=True)
    ]
    return Unit(name, index, size_class, weights, home)


class Layer(nn.Module):
    """A frozen linear with a bias, a frozen scale of another dtype, and a trainable low-rank pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(width).add(0.5).bfloat16(), requires_grad=False)
        self.lora_a, self.lora_b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden) * self.scale + self.lora_b(self.lora_a(hidden)))


class Stack(nn.Module):
    """Embedding, layers, head: all frozen but the layers' low-rank pairs.

    `order` says which layers run, None being each once; `is_apart` puts an operation between them, so that one's
    output is not the next one's input; `is_checkpointed` recomputes each in backward.
    """

    layer_class: type[Layer] = Layer

    def __init__(self, num_layers: int, width: int = 8, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width).requires_grad_(False)
        self.layers = nn.ModuleList(self.layer_class(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 11, bias=False).requires_grad_(False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.order: Sequence[int] | None = None
        self.is_apart = False
        self.is_checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for i in self.order if self.order is not None else range(len(self.layers)):
            hidden = self.run(self.layers[i], hidden)
            hidden = hidden * 1.25 if self.is_apart else hidden
        return self.head(hidden)

    def run(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, hidden, use_reentrant=False) if self.is_checkpointed else layer(hidden)


@dataclass
class Rig:
    """A sharded Stack, and the same Stack untouched."""

    plain: Stack
    model: Stack
    engine: Engine
    group: StandInGroup

    @property
    def gathered(self) -> list[str]:
        """The units that were gathered, in order."""
        return [self._names[address] for address, _ in self.group.gathers]

    @property
    def arriving(self) -> list[str]:
        """The units whose gathers were started, and not waited for."""
        return [self._names[address] for address, work in self.group.gathers if not work.is_done]

    @property
    def unsharded(self) -> list[str]:
        """The units whose weights the modules hold; all of its modules hold a unit's weights, or none of them does."""
        found = []
        for unit in self.engine.units:
            places = [getattr(owner.module, owner.attribute) for weight in unit.weights for owner in weight.owners]
            are_unsharded = {not isinstance(tensor, Placeholder) for tensor in places}
            assert len(are_unsharded) == 1
            found += [unit.name] if are_unsharded.pop() else []
        return found

    @property
    def _names(self) -> dict[int, str]:
        return {unit.home.shard.data_ptr(): unit.name for unit in self.engine.units}

    def find_differences(self, body: Callable[[nn.Module], dict[str, torch.Tensor]]) -> list[str]:
        """Return the names of what `body` gives for the sharded model, and not so for the plain one."""
        return find_differences(body(self.model), body(self.plain))


def build_rig(
    num_layers: int = 5,
    size: int = 2,
    prefetch: int = 1,
    is_tied: bool = False,
    seed: int = 0,
    stack: type[Stack] = Stack,
) -> Rig:
    """Shard a seeded `stack` over a stand-in group of `size` ranks."""
    torch.manual_seed(seed)
    plain = stack(num_layers, is_tied=is_tied)
    model = copy.deepcopy(plain)
    group = StandInGroup(size)
    layers = [
        ScheduleEntry(build_unit(f"layers.{i}", [layer], group, index=i), (layer,))
        for i, layer in enumerate(model.layers)
    ]
    if is_tied:
        vocabulary = build_unit("head", [model.embedding, model.head], group, num_layers, "vocabulary")
        first = ScheduleEntry(vocabulary, (model.embedding,), has_backward=False)
        last = ScheduleEntry(vocabulary, (model.head,), holds=True)
    else:
        embedding = build_unit("embedding", [model.embedding], group, num_layers, "vocabulary")
        head = build_unit("head", [model.head], group, num_layers + 1, "vocabulary")
        first = ScheduleEntry(embedding, (model.embedding,), has_backward=False)
        last = ScheduleEntry(head, (model.head,), holds=True)
    return Rig(plain, model, Engine([first, *layers, last], [model], group, CPU, prefetch), group)


def make_tokens(seed: int = 0, rows: int = 3) -> torch.Tensor:
    """Return seeded token ids, [rows, 4]."""
    return torch.randint(0, 11, (rows, 4), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Run a step of squared logits, and return the gradients."""
    model(make_tokens(seed)).square().sum().backward()
    return take_gradients(model)
