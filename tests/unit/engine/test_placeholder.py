"""What a module holds for a sharded weight: true in everything but the values, which it refuses to return."""

from __future__ import annotations

import copy
import io
import pickle
import re
import weakref
from collections.abc import Callable

import numpy
import pytest
import safetensors.torch
import torch
from helpers.engine import CPU
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lorashard.engine import Placeholder
from lorashard.errors import ShardError

NAME = "model.layers.3.mlp.up_proj.weight"
SHAPE = (4, 6)
ATTRIBUTES = ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "nbytes", "itemsize", "layout", "grad")
METHODS = ("numel", "stride", "dim", "size", "storage_offset", "is_contiguous", "is_floating_point", "element_size")


def make_placeholder(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> Placeholder:
    return Placeholder(NAME, shape, dtype, CPU)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    (
        (torch.float32, SHAPE),
        (torch.bfloat16, (7,)),
        (torch.float8_e4m3fn, (0, 3)),
        (torch.int8, ()),
        (torch.bfloat16, (2, 3, 4)),
    ),
)
def test_it_looks_like_the_weight(dtype, shape):
    """Parameter counts, memory estimates and the bookkeeping of trainers come from these."""
    weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    placeholder = make_placeholder(dtype, shape)
    assert isinstance(placeholder, nn.Parameter) and isinstance(placeholder, torch.Tensor)
    for fact in ATTRIBUTES:
        assert getattr(placeholder, fact) == getattr(weight, fact), fact
    for fact in METHODS:
        assert getattr(placeholder, fact)() == getattr(weight, fact)(), fact


def test_it_takes_no_memory():
    """A placeholder of a 70B model's largest weight must cost nothing; one with a storage would be allocated here."""
    placeholder = make_placeholder(torch.bfloat16, (1 << 24, 1 << 24))
    assert placeholder.nbytes == 1 << 49 and placeholder.data_ptr() == 0


def hold_placeholder() -> tuple[nn.Linear, Placeholder]:
    module, placeholder = nn.Linear(6, 4, bias=False), make_placeholder()
    module.register_parameter("weight", placeholder)
    return module, placeholder


def test_a_module_takes_it_for_a_parameter():
    """`named_parameters`, `state_dict` and `requires_grad_` of the modules that hold it must still work."""
    module, placeholder = hold_placeholder()
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert module.weight is placeholder
    assert isinstance(module.state_dict()["weight"], Placeholder)
    module.requires_grad_(False).eval().zero_grad()
    assert repr(module) and NAME in repr(placeholder) and NAME in f"{placeholder}"


HARMLESS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "to nothing": lambda weight: weight.to(),
    "to the same device": lambda weight: weight.to("cpu"),
    "to the same device by index": lambda weight: weight.to(torch.device("cpu", 0)),
    "to the same dtype": lambda weight: weight.to(torch.float32),
    "to both": lambda weight: weight.to("cpu", torch.float32, non_blocking=True),
    "cpu": lambda weight: weight.cpu(),
    "float": lambda weight: weight.float(),
    "contiguous": lambda weight: weight.contiguous(),
    "parameter": lambda weight: nn.Parameter(weight, requires_grad=False),
    "as_tensor": lambda weight: torch.as_tensor(weight),
    "module moved": lambda weight: nn.ParameterList([weight]).to("cpu", torch.float32)[0],
    "state_dict": lambda weight: nn.ParameterList([weight]).state_dict()["0"],
}


@pytest.mark.parametrize("use", HARMLESS.values(), ids=HARMLESS)
def test_what_copies_no_value_is_allowed(use):
    """Trainers move and detach every parameter; a refusal there would make a sharded model useless to them."""
    found = use(make_placeholder())
    assert isinstance(found, Placeholder)
    assert (found.full_name, found.shape, found.dtype, found.device) == (NAME, SHAPE, torch.float32, CPU)


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda weight: weight + 1,
    "add from the right": lambda weight: torch.ones(SHAPE) + weight,
    "linear": lambda weight: torch.nn.functional.linear(torch.ones(2, 6), weight),
    "matmul": lambda weight: torch.ones(2, 4) @ weight,
    "embedding": lambda weight: torch.nn.functional.embedding(torch.tensor([1]), weight),
    "sum": lambda weight: weight.sum(),
    "norm": lambda weight: torch.linalg.norm(weight),
    "isnan": lambda weight: weight.isnan(),
    "index": lambda weight: weight[0],
    "iterate": lambda weight: list(weight),
    "view": lambda weight: weight.view(-1),
    "bytes": lambda weight: weight.view(torch.uint8),
    "transpose": lambda weight: weight.T,
    "clone": lambda weight: weight.clone(),
    "cast": lambda weight: weight.to(torch.float16),
    "cast a module": lambda weight: nn.ParameterList([weight]).half(),
    "move": lambda weight: weight.to("meta"),
    "equal": lambda weight: torch.equal(weight, weight),
    "compare": lambda weight: weight == weight,
    "stack": lambda weight: torch.stack([weight, weight]),
    "copy into another": lambda weight: torch.empty(SHAPE).copy_(weight),
    "make alike": lambda weight: torch.empty_like(weight),
    "vmap": lambda weight: torch.vmap(lambda row: row + 1)(weight),
    "as a plain tensor": lambda weight: weight.as_subclass(torch.Tensor) + 1,
    "after data": lambda weight: weight.data + 1,
    "a number": lambda weight: weight.view(-1)[0].item(),
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.numpy(),
    "numpy by force": lambda weight: weight.numpy(force=True),
    "asarray": lambda weight: numpy.asarray(weight),
    "dlpack": lambda weight: torch.from_dlpack(weight),
    "storage": lambda weight: weight.untyped_storage(),
    "safetensors": lambda weight: safetensors.torch.save({"weight": weight}),
    "deepcopy": lambda weight: copy.deepcopy(weight),
    "deepcopy a module": lambda weight: copy.deepcopy(nn.ParameterList([weight])),
}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "zero_": lambda weight: weight.zero_(),
    "copy_": lambda weight: weight.copy_(torch.ones(SHAPE)),
    "add_": lambda weight: weight.add_(1),
    "data add": lambda weight: weight.data.add_(torch.ones(SHAPE)),
    "set an item": lambda weight: weight.__setitem__(0, 1.0),
    "out": lambda weight: torch.add(torch.ones(SHAPE), 1, out=weight),
    "init": lambda weight: nn.init.normal_(weight),
    "resize": lambda weight: weight.resize_(2),
    "set_": lambda weight: weight.set_(torch.ones(SHAPE)),
    "many at once": lambda weight: get_ema_multi_avg_fn()([weight], [torch.ones(SHAPE)], 1),
}
STORES: dict[str, Callable[[torch.Tensor], object]] = {
    "pickle": lambda weight: pickle.dumps(weight),
    "torch.save": lambda weight: torch.save({"weight": weight}, io.BytesIO()),
    "copy.copy": lambda weight: copy.copy(weight),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("use", (READS | WRITES | STORES).values(), ids=READS | WRITES | STORES)
def test_everything_else_is_refused_by_name(use):
    """Whatever slipped through would compute with, or save, values that are not there."""
    with pytest.raises(ShardError) as caught:
        use(make_placeholder())
    assert NAME in caught.value.where
    assert "save_pretrained" in caught.value.fix and "placement='replicate'" in caught.value.fix


def test_a_state_dict_cannot_be_loaded_into_it():
    """Loading base weights into a sharded model must not look as if it had worked."""
    module, _ = hold_placeholder()
    with pytest.raises(RuntimeError, match=re.escape(NAME)):
        module.load_state_dict({"weight": torch.ones(SHAPE)})


def test_what_is_no_operation_of_torch_is_refused_too():
    """Merging in place writes `weight.data = merged`: the values go nowhere, the next forward uses the old ones.
    numpy.from_dlpack and the like would read address zero: the process dies without a word."""
    placeholder = make_placeholder()
    for other in (torch.ones(SHAPE), Placeholder("model.embed_tokens.weight", SHAPE, torch.float32, CPU)):
        with pytest.raises(ShardError, match=re.escape(NAME)):
            placeholder.data = other
    with pytest.raises(ShardError, match=re.escape(NAME)):
        placeholder.__dlpack__()


class Source:
    """Reads a weight's values, and knows which of those it returned are still alive."""

    def __init__(self) -> None:
        self.values = torch.arange(24.0).reshape(SHAPE)
        self.given: list[weakref.ref] = []

    def __call__(self) -> torch.Tensor:
        assert not any(given() is not None for given in self.given), "a second copy while the first is alive"
        copied = self.values.clone()
        self.given.append(weakref.ref(copied))
        return copied


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def readable(source) -> Placeholder:
    placeholder = make_placeholder()
    placeholder.reader = source
    return placeholder


def test_a_reader_returns_the_numbers_one_tensor_at_a_time(readable, source):
    """Adapters initialized from the base read it before it is sharded; keeping what was read fills the rank."""
    values = source.values
    assert torch.equal(readable + 1, values + 1) and torch.equal(torch.empty(SHAPE).copy_(readable), values)
    assert torch.equal(readable.data.sum(dim=0), values.sum(dim=0))
    assert torch.equal(torch.nn.functional.linear(torch.ones(2, 6), readable), values.sum(dim=1).expand(2, 4))
    assert torch.equal(readable.to(torch.float64), values.double())
    assert torch.equal(readable.norm(dim=1), values.norm(dim=1))
    assert readable.tolist() == values.tolist()
    assert torch.equal(torch.ones(2, 4) @ readable, torch.ones(2, 4) @ values)
    assert len(source.given) == 8 and all(given() is None for given in source.given)


def test_what_was_read_belongs_to_the_reader_of_it(readable, source):
    """A copy of a base weight (`modules_to_save`) becomes an ordinary tensor, which may train."""
    for copied in (readable.clone(), copy.deepcopy(readable), torch.from_numpy(readable.numpy().copy())):
        assert not isinstance(copied, Placeholder) and torch.equal(copied, source.values)
        copied.data.zero_()
        assert source.values.any()
        del copied
    copied = copy.deepcopy(nn.ParameterList([readable]))
    assert type(copied[0]) is nn.Parameter and torch.equal(copied[0], source.values)


@pytest.mark.parametrize("name", WRITES | STORES)
def test_a_reader_does_not_make_it_writable(name, readable):
    """A write into what was read for one operation would be lost without a word."""
    with pytest.raises(ShardError, match=re.escape(NAME)):
        (WRITES | STORES)[name](readable)


def test_without_its_reader_it_refuses_again(readable):
    """The source is closed once the base is sharded."""
    twin = readable.detach()
    assert twin.reader is readable.reader
    readable.reader = None
    with pytest.raises(ShardError, match=re.escape(NAME)):
        readable.sum()
