"""Other tools' spellings of options, and options that cannot be chosen here, each with the reason."""

from __future__ import annotations

from typing import Any

# Other tools' spellings (axolotl, LLaMA-Factory, TRL's scripts, PEFT, older transformers), where they mean the same.
ALIASES = {
    "stage": "method",
    "rl": "method",
    "model": "model_name_or_path",
    "base_model": "model_name_or_path",
    "resume": "resume_from_checkpoint",
    "revision_of_model": "model_revision",
    "torch_dtype": "dtype",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_dataset_split",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "sample_packing": "packing",
    "eval_sample_packing": "eval_packing",
    "r": "lora_r",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "lora_layers_to_transform": "layers_to_transform",
    "peft_init_lora_weights": "init_lora_weights",
    "additional_target": "lora_modules_to_save",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
    "double_quantization": "bnb_4bit_use_double_quant",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "lora_task_type": "task_type",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "evaluation_strategy": "eval_strategy",
    "context_parallel_size": "sequence_parallel_size",
    "sp_size": "sequence_parallel_size",
}

VALUE_ALIASES = {"dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}, "method": {"rm": "reward"}}

_QUANTIZES_ITSELF = "give quantization: nf4, int8 or fp8, and bnb_4bit_use_double_quant, by their own names"

_SCALES_ROWS = "quantization: int8 has a scale for each row, and no outliers that are treated apart: leave it out"

_SHARDS_ITSELF = "lorashard shards the frozen base itself: choose with placement"

_KEEPS_NO_SECRETS = "a run writes its options to a file: log in with `hf auth login`, or set HF_TOKEN"

_PREPARES_ITSELF = "lorashard prepares the data itself, once, before the ranks form a group"

REFUSED_OPTIONS = {
    "fsdp": _SHARDS_ITSELF,
    "fsdp_config": _SHARDS_ITSELF,
    "fsdp_transformer_layer_cls_to_wrap": _SHARDS_ITSELF,
    "fsdp_min_num_params": _SHARDS_ITSELF,
    "deepspeed": _SHARDS_ITSELF,
    "parallelism_config": _SHARDS_ITSELF,
    "model_init_kwargs": "give dtype, attn_implementation, model_revision, trust_remote_code and quantization by their "
    "own names",
    "pad_token": "TRL has deprecated it: the tokenizer's padding token is used",
    "use_cpu": "give --cpu N, the number of ranks",
    "local_rank": "the launcher sets it",
    "hub_token": _KEEPS_NO_SECRETS,
    "push_to_hub_token": _KEEPS_NO_SECRETS,
    "use_auth_token": _KEEPS_NO_SECRETS,
}

# How to do what other tools have an option for.
HINTS = {
    "config": "give its options themselves: only a command line names a file of them",
    "peft_config": "give its options themselves, such as lora_r and lora_target_modules",
    "lora_config": "give its options themselves, such as lora_r and lora_target_modules",
    "warmup_ratio": "give the ratio as warmup_steps, a number below 1",
    "datasets": "give one dataset: a file, a folder or a hub id",
    "max_prompt_length": "TRL cuts no prompts: shorten them in the data",
    "pref_beta": "give beta",
    "pref_loss": "give loss_type",
    "template": "give chat_template_path, or nothing for the model's own template",
    "flash_attn": "give attn_implementation: flash_attention_2",
    "flash_attention": "give attn_implementation: flash_attention_2",
    "adapter": "every run trains LoRA; for qlora give quantization: nf4",
    "quantization_bit": "give quantization: nf4 for 4 bits, int8 or fp8 for 8",
    "quantization_method": "give quantization: nf4, int8 or fp8",
    "quantization_type": "give quantization: nf4, int8 or fp8",
    "quantization_config": _QUANTIZES_ITSELF,
    "bnb_config_kwargs": _QUANTIZES_ITSELF,
    "bnb_4bit_quant_type": "quantization: nf4 is the only 4-bit format here: leave it out",
    "bnb_4bit_compute_dtype": "the computation has dtype: give that, or nothing for what suits the device",
    "bnb_4bit_quant_storage": "quantized weights are sharded as bytes: leave it out",
    "llm_int8_threshold": _SCALES_ROWS,
    "llm_int8_has_fp16_weight": _SCALES_ROWS,
    "llm_int8_skip_modules": "norms, biases, routers, embedding and LM head are skipped: leave it out",
    "llm_int8_enable_fp32_cpu_offload": "give placement: host",
}

# Options whose one workable value is set by lorashard: giving that value is fine.
PINNED_OPTIONS: dict[str, tuple[Any, str]] = {
    "ddp_find_unused_parameters": (False, "every adapter parameter is used in each step, and searching costs time"),
    "dataset_kwargs": ({"skip_prepare_dataset": True}, _PREPARES_ITSELF),
    "do_train": (True, "finetune trains"),
    "do_predict": (False, "finetune does not predict"),
    "enable_jit_checkpoint": (False, "on SIGTERM a run saves a checkpoint by itself, once all ranks have agreed on it"),
}
