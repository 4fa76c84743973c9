"""A language model of one's own, that keeps its blocks in unusual places."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

NUM_BLOCKS = 4


class OddConfig(PreTrainedConfig):
    """`keeping` is one of: attributes, pairs, sequence, dict, shared."""

    model_type = "lorashard-odd"

    def __init__(self, keeping: str = "attributes", **options: Any) -> None:
        super().__init__(**options)
        self.keeping, self.vocab_size, self.hidden_size, self.num_hidden_layers = keeping, 97, 16, NUM_BLOCKS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(self.norm(hidden)).relu())


class OddForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((16,), 1.5))  # on the module that is the whole forward
        self.embed = nn.Embedding(97, 16)
        blocks = [Block() for _ in range(NUM_BLOCKS)]
        if config.keeping == "attributes":
            for index, block in enumerate(blocks):
                self.add_module(f"block_{index}", block)
        elif config.keeping == "pairs":
            self.blocks = nn.ModuleList(nn.ModuleList(blocks[i : i + 2]) for i in range(0, NUM_BLOCKS, 2))
        elif config.keeping == "sequence":
            self.blocks = nn.Sequential(*blocks)
        elif config.keeping == "dict":
            self.parts = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "norm": nn.LayerNorm(16)})
        else:
            self.blocks = nn.ModuleList(_Around(block, blocks[0]) for block in blocks[1:])
        if config.keeping != "dict":
            self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 97, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> CausalLMOutput:
        hidden = self.embed(input_ids) * self.scale
        for block in self._in_order():
            hidden = block(hidden)
        logits = self.head((self.parts["norm"] if self.config.keeping == "dict" else self.norm)(hidden))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def _in_order(self) -> list[nn.Module]:
        if self.config.keeping == "attributes":
            return [getattr(self, f"block_{index}") for index in range(NUM_BLOCKS)]
        if self.config.keeping == "dict":
            return list(self.parts["blocks"])
        blocks = list(self.blocks)
        return [block for pair in blocks for block in pair] if self.config.keeping == "pairs" else blocks


class _Around(nn.Module):
    """A layer that runs a block of its own, then one that all layers share."""

    def __init__(self, own: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = own, shared

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.shared(self.own(hidden))


def register_odd() -> None:
    """Let the auto classes know the model."""
    AutoConfig.register(OddConfig.model_type, OddConfig, exist_ok=True)
    AutoModelForCausalLM.register(OddConfig, OddForCausalLM, exist_ok=True)
