"""Which GPU a process computes on, and that the engine computes there: shown without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.fake_gpu import fake_gpus
from helpers.tiny import build_base, make_batch
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensorMode

import lorashard
from lorashard import api
from lorashard.engine import Placeholder
from lorashard.engine.slots import Slot
from lorashard.errors import ShardError
from lorashard.runtime import join as joining

CUDA = torch.device("cuda")


@pytest.fixture
def current(monkeypatch) -> list[int]:
    """The index of the current GPU, which torch is made to answer with."""
    index = [0]

    def exchange(to: int) -> int:
        before, index[0] = index[0], to
        return before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: index[0])
    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    return index


def test_a_device_is_given_the_index_that_its_tensors_will_have(monkeypatch, current):
    """Catches a base that cannot be loaded by a script that no launcher has started: accelerate says `cuda` there."""
    current[0] = 3
    alone = SimpleNamespace(num_processes=1, device=CUDA, distributed_type="NO")
    monkeypatch.setattr(joining, "PartialState", lambda cpu, backend: alone)
    assert joining.join_launch() == joining.with_index(CUDA) == torch.device("cuda", 3)
    assert joining.with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert joining.with_index(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("num_gpus", "distributed_type", "will_train", "warns"),
    ((2, "NO", True, True), (1, "NO", True, False), (2, "MULTI_GPU", True, False), (2, "NO", False, False)),
)
def test_several_gpus_without_a_launcher_are_told_of(
    monkeypatch, caplog, current, num_gpus, distributed_type, will_train, warns
):
    """Catches a script whose Trainer ends somewhere in nn.DataParallel, and a warning to those who do not train."""
    state = SimpleNamespace(num_processes=1, device=CUDA, distributed_type=distributed_type)
    monkeypatch.setattr(joining, "PartialState", lambda cpu, backend: state)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert joining.join_launch(will_train=will_train) == torch.device("cuda", 0)
    assert [record.args for record in caplog.records] == [(num_gpus, torch.device("cuda", 0))] * warns


def test_the_device_argument_is_given_its_index_too(monkeypatch, current):
    """Catches `load(device=torch.device("cuda"))`, which fails on one GPU although there is no other."""

    def load_sharded(name: str, lora: LoraConfig, placement: object, device: torch.device, *_, **__) -> None:
        raise FileNotFoundError(str(device))

    monkeypatch.setattr(api, "load_sharded", load_sharded)
    with pytest.raises(FileNotFoundError, match="cuda:0"):
        api.load("a/base", LoraConfig(), "replicate", device=CUDA, dtype=torch.float32)


def test_a_placeholder_moves_to_the_device_that_it_is_on(current):
    """Catches `model.to(device)`, to which torch adds the index, taken for a move of a sharded weight."""
    to_copy, first = torch.ops.aten._to_copy.default, torch.device("cuda", 0)
    placeholder = Placeholder("w", (2, 2), torch.float32, joining.with_index(CUDA))
    assert to_copy(placeholder, device=first).device == first
    without_index = Placeholder("w", (2, 2), torch.float32, CUDA)
    with pytest.raises(ShardError):  # it cannot tell: the current device may be another by now
        to_copy(without_index, device=first)


def test_slots_of_a_gpu_that_is_not_the_current_one(monkeypatch, current):
    """Catches `load(device=torch.device("cuda", 1))` in a script: torch exports only tensors of the current GPU."""

    def export(tensor: torch.Tensor) -> torch.Tensor:
        tensor.__dlpack__(stream=-1)  # torch's own check
        return tensor

    monkeypatch.setattr(torch, "from_dlpack", export)
    with FakeTensorMode():
        assert Slot(16, torch.device("cuda", 1)).buffer.device == torch.device("cuda", 1)
    assert current == [0]


@pytest.mark.parametrize(
    ("placement", "index"), (("replicate", None), ("replicate", 0), ("replicate", 1), ("host", 1), ("file", None))
)
def test_all_of_a_model_is_on_the_gpu_that_was_asked_for(placement, index, tmp_path):
    """Catches a tensor that is left on the CPU or on the first GPU: nothing would run."""
    build_base(num_hidden_layers=2).save_pretrained(tmp_path)
    device = CUDA if index is None else torch.device("cuda", index)
    expected = torch.device("cuda", index or 0)
    with fake_gpus():
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = lorashard.load(str(tmp_path), lora, placement, device=device, dtype=torch.float32)
        batch = {name: tensor.to(expected) for name, tensor in make_batch().items()}
        with torch.set_grad_enabled(placement == "replicate"):  # a slot cannot be told among fake tensors
            output = model(**batch, use_cache=False)
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers(), *output.values())} == {expected}
        num_copies = lorashard.stats(model).num_copies
    assert output.loss.requires_grad == (placement == "replicate") and (num_copies > 0) == (placement != "replicate")
