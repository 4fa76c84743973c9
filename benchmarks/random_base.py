"""Llamas of known shapes with random weights, written as checkpoints, and a tokenizer of made-up words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from contenders import ModelSize
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LORA_R = 16
FILE_BYTES = 4 * 2**30
WEIGHTS_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """A Llama, and the batches (rows, tokens of a row) that it is measured with, those that a bar needs first."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    batches: tuple[tuple[int, int], ...]

    def make_config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            use_cache=False,
        )

    def size(self, rows: int, tokens: int) -> ModelSize:
        return ModelSize(self.layers, self.hidden, self.intermediate, self.vocab, LORA_R, rows, tokens)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a decoder layer in bf16, without its norms."""
        kv_size = self.hidden // self.heads * self.kv_heads
        return 2 * self.hidden * (2 * self.hidden + 2 * kv_size + 3 * self.intermediate)


BATCHES = ((1, 512), (4, 4096), (1, 4096))
SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128256, BATCHES),
    "1b": Shape(2048, 8192, 16, 32, 8, 128256, BATCHES),
    "tiny": Shape(64, 128, 4, 4, 2, 256, ((1, 16), (4, 32), (1, 32))),
}


def write_base(config: LlamaConfig, folder: Path, device: torch.device) -> None:
    """Write a checkpoint of random weights, made a tensor at a time; one that is complete is left as it is.

    Memory: a file's tensors on the host, one tensor on the device.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(config.vocab_size, folder)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    last = list(shapes)[-1]
    for name, shape in shapes.items():
        tensor = torch.ones(shape, dtype=torch.bfloat16, device=device)
        if len(shape) > 1:  # norms stay at one
            tensor.normal_(0, WEIGHTS_STD, generator=generator)
        tensors[name] = tensor.cpu()
        if name == last or sum(tensor.nbytes for tensor in tensors.values()) >= FILE_BYTES:
            file = f"model-{len(set(files.values())) + 1:05}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(tensors, file)
            tensors = {}
    num_bytes = sum(2 * shape.numel() for shape in shapes.values())
    # Last: a folder that has it is complete.
    index.write_text(json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": files}))


def name_word(token_id: int) -> str:
    """Return the word that `write_tokenizer` gives a token."""
    return f"w{token_id}"


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write a tokenizer that has a word for each token; the last one ends a text, and pads."""
    end = name_word(vocab_size - 1)
    words = Tokenizer(models.WordLevel({name_word(i): i for i in range(vocab_size)}, unk_token=end))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end).save_pretrained(folder)
