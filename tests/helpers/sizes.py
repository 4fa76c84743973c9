"""Tiny sizes of families, by the options of their configurations."""

from __future__ import annotations

from typing import Any

Sizes = dict[str, Any]
SMALL: Sizes = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LLAMA: Sizes = SMALL | dict(num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64)
GPT2: Sizes = dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
EXPERTS: Sizes = LLAMA | dict(num_experts_per_tok=2)
# Twelve experts: sorted as text, expert 10 would come before expert 2.
MIXTRAL: Sizes = EXPERTS | dict(num_local_experts=12)
QWEN_MOE: Sizes = EXPERTS | dict(moe_intermediate_size=24, num_experts=12, head_dim=8)
GPT_OSS: Sizes = EXPERTS | dict(num_local_experts=4, head_dim=8)
DEEPSEEK: Sizes = EXPERTS | dict(num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=12, n_group=2)
DEEPSEEK |= dict(n_shared_experts=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16)
DEEPSEEK |= dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
