"""Checkpoints whose files are quantized: bitsandbytes' bytes are the base, others are dequantized, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.stored import save_stored
from helpers.tiny import build_base, fill_lora_b
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

import lorashard
from lorashard.api import engine_of
from lorashard.errors import ConfigError
from lorashard.weights.computed_tensors import QuantizedTensor
from lorashard.weights.safetensors_files import Checkpoint

# Whole blocks in each row: bitsandbytes' CPU kernel takes the wrong scales for others.
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2)
NF4: dict[str, Any] = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
FORMATS: dict[str, dict[str, Any]] = {
    "nf4": NF4 | dict(llm_int8_skip_modules=["k_proj", "lm_head"]),
    "nf4 twice": NF4 | dict(bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=torch.bfloat16),
    "int8": dict(load_in_8bit=True),
}
# bitsandbytes multiplies with quantized activations in int8, and adds up in another order in nf4.
LOGITS_TOLERANCE = {"nf4": 0.02, "nf4 twice": 0.02, "int8": 0.1}
IDS = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
LORA: dict[str, Any] = dict(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

Reference = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference, torch.Tensor]]:
    """Return, for each format, a checkpoint, its weights and logits by transformers and bitsandbytes themselves."""
    pytest.importorskip("bitsandbytes")
    plain = tmp_path_factory.mktemp("plain")
    build_base(dtype=torch.bfloat16, **SIZES).save_pretrained(plain)
    found = {}
    for name, options in FORMATS.items():
        folder = tmp_path_factory.mktemp("stored")
        config = BitsAndBytesConfig(**options)
        AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, quantization_config=config).save_pretrained(
            folder
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        weights = {
            f"{path}.weight": dequantize_bnb_weight(module.weight, getattr(module, "state", None)).to(torch.bfloat16)
            for path, module in model.named_modules()
            if hasattr(module, "weight")
        }
        model.train()  # in eval bitsandbytes repacks the weights for some CPUs, with scales in bfloat16
        with torch.no_grad():
            found[name] = (folder, weights, model(input_ids=IDS).logits)
    return found


def train(model: PeftModel) -> dict[str, torch.Tensor]:
    fill_lora_b(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def use(rank: int, folder: Path, weights: Reference, logits: torch.Tensor, tolerance: float, placement: str) -> int:
    """Compare a loaded base with bitsandbytes' and with plain PEFT on the same values; return the bytes read."""
    bytes_read = 0
    read_bytes = Checkpoint.read_bytes

    def count(self: Checkpoint, tensor: Any, begin: int, end: int, out: torch.Tensor) -> None:
        nonlocal bytes_read
        bytes_read += end - begin
        read_bytes(self, tensor, begin, end, out)

    def refuse(*args: Any) -> None:
        raise AssertionError("a stored weight was dequantized while it was read")

    Checkpoint.read_bytes, QuantizedTensor.compute = count, refuse  # type: ignore[method-assign]
    torch.manual_seed(3)
    model = lorashard.load(str(folder), LoraConfig(**LORA), placement, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert not hasattr(model.config, "quantization_config")
    with engine_of(model).reader.readable():
        for name, expected in weights.items():
            owner = model.get_base_model().get_submodule(name.rpartition(".")[0])
            found = getattr(owner, "base_layer", owner).weight.detach().clone()
            assert torch.equal(found, expected), name
    with torch.no_grad(), model.disable_adapter():
        found = model(input_ids=IDS).logits
    assert (found - logits).abs().max() <= tolerance * logits.abs().max()

    base = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    base.load_state_dict(weights, strict=True)
    torch.manual_seed(3)
    plain = get_peft_model(base, LoraConfig(**LORA))
    gradients, expected_gradients = train(model), train(plain)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[name]), name
    return bytes_read


@pytest.mark.parametrize("world_size, placement", [(2, "shard"), slow(2, "file"), slow(1, "replicate")])
def test_stored_bytes_are_the_base(checkpoints, world_size, placement, own_cache):
    """Quantizing again would change values by a level, a wrong byte of a scale 64 of them; a rank that read everything
    would show in the bytes; a file home that converted would not map the files."""
    for name, (folder, weights, logits) in checkpoints.items():
        read = run_ranks(use, world_size, folder, weights, logits, LOGITS_TOLERANCE[name], placement)
        stored = load_file(folder / "model.safetensors")
        whole = sum(tensor.nbytes for tensor in stored.values())
        # What describes the weights is read by each rank, and nothing else twice; what is mapped is not read.
        described = sum(t.nbytes for key, t in stored.items() if "quant_" in key or key.endswith("weight_format"))
        assert sum(read) <= (whole if placement != "file" else 0) + 2 * world_size * described
        assert not list(own_cache.rglob("converted/*"))


def test_another_format_is_refused(checkpoints):
    """Quantized from int8 to nf4 the base would be worse than either, and nobody would know."""
    folder = checkpoints["int8"][0]
    with pytest.raises(ConfigError) as caught:
        lorashard.load(str(folder), LoraConfig(**LORA), "replicate", device=torch.device("cpu"), quantization="nf4")
    assert caught.value.option == "quantization" and "int8" in caught.value.expected


def train_shared(rank: int, folder: Path, quantization: str | None) -> dict[str, Any]:
    torch.manual_seed(3)
    lora = LoraConfig(**LORA, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    options = dict(dtype=torch.bfloat16, device=torch.device("cpu"), quantization=quantization)
    model = lorashard.load(str(folder), lora, "shard", **options)
    return {name: gradient.numpy() for name, gradient in train(model).items()}


@pytest.mark.parametrize("quantization", ["nf4", slow(None)])
def test_an_mxfp4_base_trains_as_its_dequantized_copy(quantization, tmp_path):
    """The copy is what plain transformers makes of it. A rank has ranges of experts that are stored transposed, and
    quantizes them anew from there."""
    stored, plain = save_stored(tmp_path / "stored", "GPT-OSS"), tmp_path / "plain"
    model = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.bfloat16)
    vars(model.config).pop("quantization_config", None)
    copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(plain)
    found, expected = (run_ranks(train_shared, 2, folder, quantization) for folder in (stored, plain))
    assert len(expected[0]) > 8
    for rank in range(2):
        assert found[rank].keys() == expected[rank].keys()
        assert all((found[rank][name] == gradient).all() for name, gradient in expected[rank].items())
