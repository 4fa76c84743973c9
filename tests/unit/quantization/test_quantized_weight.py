"""A quantized weight in a module: every operation sees its numbers, none keeps the memory that they are unpacked to."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lorashard.engine import Part
from lorashard.errors import ShardError
from lorashard.quantization.quantized_weight import QuantizedWeight, StoredWeight, Workspace

DTYPE = torch.bfloat16
CPU = torch.device("cpu")


class Halves:
    """A packing for these tests: numbers as int8, in steps of a half; it counts what it unpacks."""

    name = "halves"

    def __init__(self) -> None:
        self.unpacked_shapes: list[tuple[int, ...]] = []

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        return (Part("", torch.int8, tuple(shape)),)

    def unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        assert out.is_contiguous()
        self.unpacked_shapes.append(tuple(out.shape))
        out.copy_(parts[0].to(out.dtype) / 2)

    def select(self, parts: Sequence[torch.Tensor], shape: Sequence[int], index: int) -> list[torch.Tensor] | None:
        return [parts[0][index]]


def pack(
    shape: tuple[int, ...], workspace: Workspace | None = None, seed: int = 0
) -> tuple[QuantizedWeight, torch.Tensor]:
    """Return a packed weight and its numbers."""
    numbers = torch.randint(-9, 10, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    stored = StoredWeight("layers.0.proj", shape, DTYPE, Halves(), [numbers], workspace or Workspace())
    return QuantizedWeight(stored), numbers.to(DTYPE) / 2


def under_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return functional.linear(x, w)


def in_inference_mode(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return functional.linear(x, w.detach()).clone()


X = torch.arange(-6, 6).view(3, 4).to(DTYPE)
ROWS = torch.tensor([4, 0, 4])
# Of a weight [6, 4].
READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda w: functional.linear(X, w),
    "linear with bias": lambda w: functional.linear(X[None], w, torch.ones(6, dtype=DTYPE)),
    "matmul of the transposed": lambda w: X @ w.T,
    "itself twice": lambda w: w @ w.t(),
    "cat": lambda w: torch.cat([w, w[1:3]]),
    "embedding": lambda w: functional.embedding(ROWS, w),
    "rows by a tensor": lambda w: w[ROWS],
    "a row": lambda w: w[-1],
    "strided": lambda w: w[1:, ::2],
    "float": lambda w: w.float(),
    "clone": lambda w: w.clone(),
    "contiguous": lambda w: w.mT.contiguous(),
    "reshape of the transposed": lambda w: w.T.reshape(-1),
    "flatten": lambda w: w.flatten(),
    "other dtype's view": lambda w: w.view(torch.int16),
    "narrow": lambda w: w.narrow(0, 1, 2),
    "expand": lambda w: w.unsqueeze(0).expand(2, 6, 4),
    "squeeze": lambda w: w[None].squeeze(0),
    "squeeze of all": lambda w: w[None].squeeze(),
    "split": lambda w: w.split(4)[1],
    "split with sizes": lambda w: w.split([1, 3], dim=-1)[1],
    "chunk": lambda w: w.chunk(2, dim=1)[1],
    "unbind": lambda w: w.unbind(1)[3],
    "diagonal": lambda w: w.diagonal(),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 1), 3),
    "unfold": lambda w: w.unfold(0, 2, 2),
    "equal": lambda w: w == 1,
    "norm": lambda w: torch.linalg.norm(w, dim=1),
    "vmap": lambda w: torch.vmap(lambda row: row.sum())(w),
    "out of another": lambda w: torch.add(w, 1, out=torch.empty(6, 4, dtype=DTYPE)),
    "dlpack": lambda w: torch.from_dlpack(w),
    "autocast": lambda w: under_autocast(X, w),
    "inference mode": lambda w: in_inference_mode(X, w),
    "parameter": lambda w: nn.Parameter(w, requires_grad=False) * 1,
    "deepcopy": lambda w: copy.deepcopy(w),
    "functional_call": lambda w: torch.func.functional_call(nn.Linear(4, 6, bias=False), {"weight": w}, (X,)),
}
# Of experts [3, 6, 4].
EXPERT_READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bmm": lambda w: torch.bmm(X.expand(3, 3, 4), w.mT),
    "grouped_mm": lambda w: functional.grouped_mm(
        torch.ones(8, 8, dtype=DTYPE), nn.functional.pad(w, (0, 4, 0, 2)).mT, offs=torch.tensor([2, 5, 8]).int()
    ),
    "einsum": lambda w: torch.einsum("eoi,bi->beo", w, X),
    "one": lambda w: functional.linear(X, w[1]),
    "the last": lambda w: functional.linear(X, w[-1]),
    "one transposed": lambda w: X @ w[2].T,
    "one of transposed": lambda w: X @ w.transpose(1, 2)[0],
    "loop": lambda w: torch.stack([expert.sum() for expert in w]),
    "some": lambda w: w[torch.tensor([2, 0])],
    "permuted": lambda w: w.permute(2, 0, 1),
    "moved": lambda w: w.movedim(0, 1),
}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda w: w.add_(1),
    "+=": lambda w: w.__iadd__(1),
    "copy_": lambda w: w.copy_(torch.zeros(6, 4)),
    "a view": lambda w: w.t()[1].zero_(),
    "item": lambda w: w.__setitem__(0, 1),
    "out=": lambda w: torch.add(torch.ones(6, 4, dtype=DTYPE), 1, out=w),
    "init": lambda w: nn.init.normal_(w),
    "foreach": lambda w: get_ema_multi_avg_fn()([w], [torch.ones(6, 4, dtype=DTYPE)], 1),
    "a part of split": lambda w: w.split(2)[1].zero_(),
    "a chunk": lambda w: w.chunk(3, dim=1)[0].zero_(),
    "one of unbound": lambda w: w.unbind(-1)[0].zero_(),
    "squeezed": lambda w: w[None].squeeze().zero_(),
    "another's memory": lambda w: torch.zeros(6, 4, dtype=DTYPE).set_(w),
    "resize": lambda w: w.resize_(3),
    "data": lambda w: setattr(w, "data", torch.zeros(6, 4)),
    "another weight's data": lambda w: setattr(w, "data", pack((6, 4), seed=1)[0]),
    "apply_": lambda w: w.apply_(abs),
    "save": lambda w: torch.save(w, io.BytesIO()),
}


def check(read: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
    workspace = Workspace()
    packed, plain = pack(shape, workspace)
    other, _ = pack((50, 50), workspace, seed=1)
    torch.cat([other, other])  # so that the workspace need not grow afterward
    found, expected = read(packed), read(plain)
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.device == expected.device
    assert found.stride() == expected.stride() or not isinstance(found, QuantizedWeight)
    torch.cat([other, other])  # the workspace's next numbers
    assert torch.equal(found.unpack() if isinstance(found, QuantizedWeight) else found, expected)


@pytest.mark.parametrize("name", READS)
def test_a_read_gives_the_numbers_and_outlives_the_workspace(name):
    """Catches a result that is a view of the workspace, a view taken in another order, and a mode that goes lost."""
    check(READS[name], (6, 4))


@pytest.mark.parametrize("name", EXPERT_READS)
def test_experts_are_read_as_plain_ones(name):
    """Catches an expert that is taken from the wrong place, and a view of it that is applied before it is taken."""
    check(EXPERT_READS[name], (3, 6, 4))


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_refused(name):
    """Catches a write that goes to the workspace and is lost, silently."""
    packed, plain = pack((6, 4))
    with pytest.raises(ShardError, match="layers.0.proj.*quantized.*read-only"):
        WRITES[name](packed)
    assert torch.equal(packed.clone(), plain)


def test_its_address_is_not_given_away():
    """Catches a kernel that is handed address 0, which on a GPU ends the process."""
    with pytest.raises(ShardError, match="layers.0.proj.*no address"):
        pack((6, 4))[0].data_ptr()


def test_it_has_no_storage():
    """Catches the storage of a copy: TRL's offloading remembers weights by their storages' addresses, and would leave
    on the device whatever comes to lie where that copy was."""
    packed, _ = pack((6, 4))
    with pytest.raises(RuntimeError, match="layers.0.proj.*storage"):
        packed.untyped_storage()
    assert packed.stored.quantizer.unpacked_shapes == []


def test_one_expert_alone_is_unpacked():
    """Catches all experts being unpacked for one, which takes their memory and time."""
    workspace = Workspace()
    packed, _ = pack((3, 6, 4), workspace)
    functional.linear(X, packed[1])
    X @ packed[-2].t()
    for expert in packed:
        functional.linear(X, expert)
    functional.linear(X, packed[torch.tensor(1)])
    assert packed.stored.quantizer.unpacked_shapes == [(6, 4)] * 6
    assert workspace.num_bytes == 6 * 4 * DTYPE.itemsize


def test_the_workspace_is_as_large_as_the_largest_weight():
    """Catches a workspace that grows with each weight, or with the number of operations."""
    workspace = Workspace()
    weights = [pack(shape, workspace)[0] for shape in ((6, 4), (40, 4), (12, 4))]
    for weight in weights * 2:
        functional.linear(X, weight)
    assert workspace.num_bytes == 40 * 4 * DTYPE.itemsize
    weights[0] @ weights[0].t()
    assert workspace.num_bytes == (40 * 4 + 6 * 4) * DTYPE.itemsize


def test_looking_unpacks_nothing():
    """Catches bookkeeping, as nn.Module and PEFT do it at every step, that costs an unpacking."""
    packed, _ = pack((6, 4))
    module = nn.Linear(4, 6, bias=False)
    module.register_parameter("weight", packed)
    assert isinstance(module.weight, nn.Parameter) and isinstance(packed, torch.Tensor)
    assert not packed.requires_grad and packed.is_contiguous() and packed.t().shape == (4, 6) and len(packed) == 6
    assert packed.detach() is not packed and packed.data.shape == (6, 4) and packed.numel() == 24 == packed.nbytes // 2
    module.to(DTYPE), module.to("cpu"), module.requires_grad_(False), module.eval()
    assert module.weight.dtype is DTYPE and isinstance(module.state_dict()["weight"], QuantizedWeight)
    assert "layers.0.proj" in repr(packed) and "halves" in str(module.weight) and hash(packed) == hash(packed)
    assert packed.stored.quantizer.unpacked_shapes == []


def test_backward_gives_the_gradients_of_plain_weights():
    """Catches a saved tensor that is a view of the workspace: backward would read the next weight's numbers."""
    workspace = Workspace()
    layers = [pack((4, 4), workspace, seed) for seed in range(3)]
    found = []
    for weights in zip(*layers, strict=True):
        x = X.float().to(DTYPE).requires_grad_()
        y = x
        for weight in weights:
            y = functional.linear(y, weight).tanh()
        y.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found) and found[0].abs().sum() > 0


def test_what_inference_mode_made_can_be_trained_with():
    """Catches a weight that a generation has put into the modules, and that the next step cannot save."""
    x = X.clone().requires_grad_()
    with torch.inference_mode():
        packed, plain = pack((6, 4))
        views = [packed, packed.detach(), packed.t().t()]
    for view in views:
        assert not view.is_inference()
        (found,) = torch.autograd.grad(functional.linear(x, view).sum(), x)
        assert torch.equal(found, torch.autograd.grad(functional.linear(x, plain.clone()).sum(), x)[0])


def test_a_parametrization_reads_the_numbers():
    """Catches PEFT's and torch's parametrizations, which set a weight to itself, being taken for a write."""

    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    packed, plain = pack((6, 4))
    module = nn.Linear(4, 6, bias=False)
    module.register_parameter("weight", packed)
    nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    assert torch.equal(module(X), functional.linear(X, plain * 2))
