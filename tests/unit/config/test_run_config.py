"""Options: their names, types, sources and order of precedence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lorashard.config.base_options import RankOptions
from lorashard.config.bounds import TRAINER_BOUNDS
from lorashard.config.methods import METHODS
from lorashard.config.options import Option, find_nearest, read_trainer_options, read_yaml_options
from lorashard.config.placement import read_placement, resolve_placement
from lorashard.config.quantization_options import Quantization
from lorashard.config.run_config import ALIASES, HINTS, PINNED_OPTIONS, REFUSED_OPTIONS, RunConfig, read_known_options
from lorashard.config.trackers import TRACKERS, check_trackers
from lorashard.config.use_options import ChatOptions
from lorashard.errors import ConfigError

REQUIRED = ["--model_name_or_path", "org/model", "--dataset", "rows.jsonl", "--output_dir", "out"]


def resolve(*words: str) -> RunConfig:
    return RunConfig.resolve(None, [*REQUIRED, *words])


def resolve_yaml(tmp_path: Path, text: str, *words: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text("model: org/model\ndataset: rows.jsonl\noutput_dir: out\n" + text)
    return RunConfig.resolve(path, words)


def test_tables_name_real_options() -> None:
    """Catches an alias of nothing, and a table entry that hides an option lorashard has."""
    known = read_known_options()
    assert set(ALIASES.values()) <= set(known)
    assert set(PINNED_OPTIONS) <= set(read_trainer_options())
    assert not set(HINTS) & (set(known) | set(ALIASES))
    assert not set(REFUSED_OPTIONS) & set(RunConfig.model_fields)
    spelled_anew = {"gradient_checkpointing", "gradient_checkpointing_kwargs"}
    assert not (set(ALIASES) - spelled_anew) & set(known)


def test_what_is_suggested_may_be_given() -> None:
    """Catches a suggestion that is refused in its turn, and one of other letters for two that are swapped."""
    offered = {
        "fsdp_confg": None,
        "lr_schedular_type": "lr_scheduler_type",
        "peft_config": "lora_r",
        "config": "options",
    }
    for name, expected in offered.items():
        with pytest.raises(ConfigError) as error:
            resolve(f"--{name}", "1")
        said = str(error.value)
        assert not any(f"'{refused}'" in said for refused in REFUSED_OPTIONS) and (expected or "") in said, said
    assert find_nearest("prot", ["root", "port"]) == "port"


def test_options_reach_those_that_they_are_for() -> None:
    """Catches a data option that is lost on its way, and a name that PEFT does not know."""
    from peft import LoraConfig

    words = "--max_seq_length 77 --packing --seed 3 --lora_rank 4 --lora_target_modules q_proj v_proj"
    config = resolve(*words.split())
    data = config.data_options()
    assert (data.max_length, data.packing, data.seed, config.trainer_options["seed"]) == (77, True, 3, 3)
    lora = LoraConfig(**config.lora_options())
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (4, 32, {"q_proj", "v_proj"})


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (["--learning-rate", "1e-5"], "learning_rate", 1e-5),
        (["--learning_rate=3"], "learning_rate", 3),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--eval_on_start"], "eval_on_start", True),
        (["--eval_on_start", "no"], "eval_on_start", False),
        (["--eval_on_start", "0"], "eval_on_start", False),
        (["--save_strategy", "no"], "save_strategy", "no"),
        (["--report_to", "tensorboard", "wandb"], "report_to", ["tensorboard", "wandb"]),
        (["--report_to", "tensorboard,wandb"], "report_to", ["tensorboard", "wandb"]),
        (["--report_to", "none"], "report_to", "none"),
        (["--save_total_limit", "null"], "save_total_limit", None),
        (["--lr_scheduler_kwargs", '{"num_cycles": 2}'], "lr_scheduler_kwargs", {"num_cycles": 2}),
        (["--run_name", "007"], "run_name", "007"),
        (["--run_name=--odd"], "run_name", "--odd"),
        (["--optim_args", "a=1,b=2"], "optim_args", "a=1,b=2"),
        (["--label_names", "labels"], "label_names", ["labels"]),
    ],
)
def test_command_line_values_take_their_options_type(words: list[str], name: str, expected: object) -> None:
    """Catches text that reaches the trainer as text, or a value changed by a guess at its type."""
    found = resolve(*words).trainer_options[name]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (["--gpus", "4"], "gpus", 4),
        (["--gpus", "0,2"], "gpus", [0, 2]),
        (["--gpus", "2,"], "gpus", [2]),
        (["--lora_target_modules", "all-linear"], "lora_target_modules", "all-linear"),
        (["--lora_target_modules", "q_proj,v_proj"], "lora_target_modules", ["q_proj", "v_proj"]),
        (["--lora_target_modules", "q_proj"], "lora_target_modules", ["q_proj"]),
        (["--lora_target_modules", r".*\.(q|v)_proj$"], "lora_target_modules", r".*\.(q|v)_proj$"),
        (["--lora_modules_to_save", "lm_head"], "lora_modules_to_save", ["lm_head"]),
        (["--eos_token", "\n"], "eos_token", "\n"),
        (["--max_length", "none"], "max_length", None),
        (["--resume_from_checkpoint"], "resume_from_checkpoint", True),
        (["--resume_from_checkpoint", "out/checkpoint-3"], "resume_from_checkpoint", "out/checkpoint-3"),
        (["--fp16"], "dtype", "float16"),
        (["--gradient-checkpointing", "false"], "activation_checkpointing", False),
    ],
)
def test_own_options_take_their_type(words: list[str], name: str, expected: object) -> None:
    """Catches the same for lorashard's own options, and an alias that leads elsewhere."""
    assert getattr(resolve(*words), name) == expected


def test_yaml_values_mean_what_the_option_says(tmp_path: Path) -> None:
    """Catches YAML 1.1: `no` read as false, `2e-4` as text, `1:30` and `007` as numbers, a date as a date."""
    text = "save_strategy: no\nlearning_rate: 2e-5\nrun_name: 2024-01-01\nproject: 007\npacking: yes\n"
    config = resolve_yaml(
        tmp_path,
        text + "lr_scheduler_kwargs:\n  num_cycles: 2\n  mode: no\n  scale: 1e-3\nmax_grad_norm: 1\nhub_revision:\n",
    )
    assert config.packing is True
    assert config.trainer == {
        "save_strategy": "no",
        "learning_rate": 2e-5,
        "run_name": "2024-01-01",
        "project": "007",
        "lr_scheduler_kwargs": {"num_cycles": 2, "mode": "no", "scale": 1e-3},
        "max_grad_norm": 1,
        "hub_revision": None,
    }


def test_command_line_wins_over_yaml_over_defaults(tmp_path: Path) -> None:
    """Catches a wrong order of precedence, also where the two use different spellings."""
    config = resolve_yaml(tmp_path, "lora_rank: 4\nlora_alpha: 8\nlr: 1e-3\n", "--r", "2", "--learning_rate", "1e-2")
    assert (config.lora_r, config.lora_alpha, config.lora_dropout) == (2, 8, 0.0)
    assert config.trainer_options["learning_rate"] == 1e-2


def test_resolved_yaml_reads_back_to_the_same_run(tmp_path: Path) -> None:
    """Catches a value that cannot be written, or is read back as something else."""
    words = ["--save_strategy", "no", "--gpus", "0,2", "--run_name", "null-and-void", "--fp16", "--eval_dataset", "e"]
    config = resolve(*words, "--lora_target_modules", "q", "v", "--lr_scheduler_kwargs", '{"a": [1, 2.5e-7, "no"]}')
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml())
    again = RunConfig.resolve(path, [])
    assert again.trainer_options == config.trainer_options
    assert again.model_dump(exclude={"trainer"}) == config.model_dump(exclude={"trainer"})
    assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize(
    "words",
    [
        ["--quantization", "nf4", "--bnb_4bit_use_double_quant"],
        ["--load_in_4bit", "--use_bnb_nested_quant", "true"],
        ["--quantization", "nf4", "--load-in-4bit", "--double_quantization"],
    ],
)
def test_a_quantized_base_by_any_name_is_resolved_to_one(tmp_path: Path, words: list[str]) -> None:
    """Catches an alias that leads nowhere, and a resolved configuration that says none where it was 4 bits."""
    config = resolve(*words)
    assert config.resolve_quantization() == Quantization("nf4", double_quant=True)
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml())
    again = RunConfig.resolve(path, [])
    assert (again.quantization, again.load_in_4bit) == ("nf4", False)
    assert again.resolve_quantization() == config.resolve_quantization()
    assert resolve().resolve_quantization() is None


def test_ranks_that_share_sequences_are_as_many_as_are_said(tmp_path: Path) -> None:
    """Catches an alias that one way of giving options does not know, and steps of fewer sequences than were asked for:
    ranks that share each sequence have it once."""
    for name in ("sequence_parallel_size", "context_parallel_size", "sp_size"):
        assert resolve(f"--{name}", "4").sequence_parallel_size == 4
        assert resolve_yaml(tmp_path, f"{name}: 4\n").sequence_parallel_size == 4
        resolved = resolve_placement(read_placement(placement="shard", **{name: 4}), 8, None)
        assert resolved.sequence_parallel_size == 4
    assert resolve_placement(read_placement(), 8, None).sequence_parallel_size == 1
    words = ["--global_batch_size", "8", "--per_device_train_batch_size", "2"]
    for size, num_ranks, expected in (("auto", 4, 1), ("4", 4, 4), ("2", 4, 2), ("2", 2, 4), ("8", 64, None)):
        config = resolve("--sp_size", size, *words)
        if expected is not None:
            assert config.count_accumulation(num_ranks) == {"gradient_accumulation_steps": expected}
            continue
        with pytest.raises(ConfigError, match="8 groups of 8 ranks have .*expected a multiple of 16, found 8"):
            config.count_accumulation(num_ranks)
    assert resolve("--sp_size", "2").count_accumulation(4) == {}
    for refuse in (
        lambda: resolve("--sp_size", "3").count_accumulation(8),
        lambda: resolve_placement(read_placement(sp_size=3), 8, None),
    ):
        with pytest.raises(ConfigError, match="a divisor of the 8 ranks, found 3; 8 is the largest that works"):
            refuse()
    with pytest.raises(ConfigError, match="by the name sp_size too"):
        read_placement(sequence_parallel_size=2, sp_size=2)
    with pytest.raises(ConfigError, match="sequence_parallel_size: precompute_ref_log_probs gathers rows"):
        resolve("--sp_size", "2", "--method", "dpo", "--precompute_ref_log_probs", "true")
    with pytest.raises(ConfigError, match="in training alone"):
        ChatOptions.read(["adapter", "--sp_size", "2"])
    open_by = {"auto": True, "1": False}
    for asked, is_open in open_by.items():
        assert resolve("--placement", "shard", "--sp_size", asked).is_placement_open == is_open
    assert not resolve("--placement", "shard").is_placement_open and resolve("--sp_size", "2").is_placement_open


def test_home_is_expanded_as_the_trainer_does() -> None:
    """Catches logs in a folder named `~`, with the checkpoints elsewhere."""
    config = RunConfig(model="m", dataset="d", output_dir="~/run")
    assert config.output_dir == str(Path.home() / "run")


def test_defaults_are_those_that_work_for_lora() -> None:
    """Catches a default that drifts, one that TRL refuses, and an option of another version of transformers."""
    from trl import SFTConfig

    config = resolve()
    assert (config.lora_r, config.lora_alpha, config.lora_target_modules) == (16, 32, "all-linear")
    assert (config.placement, config.dtype, config.activation_checkpointing) == ("auto", "auto", True)
    assert config.trainer_options["report_to"] == "none"
    assert "eval_strategy" not in config.trainer_options
    words = ["--activation_checkpointing_kwargs", '{"use_reentrant": false}', "--gradient_checkpointing", "--cpu", "1"]
    config = resolve(*words, "--eval_dataset", "e.jsonl", "--max_steps", "3").with_dtype("bfloat16")
    built = SFTConfig(output_dir="out", use_cpu=True, **config.trainer_options)
    assert (built.learning_rate, built.lr_scheduler_type, built.eval_strategy) == (2e-4, "cosine", "epoch")
    assert (built.max_steps, built.bf16, built.fp16) == (3, True, False)
    assert (built.gradient_checkpointing, built.gradient_checkpointing_kwargs) == (True, {"use_reentrant": False})


GRPO = "--method grpo --reward_funcs a.b"
EVALUATED = "--eval_dataset e --eval_strategy steps --eval_steps 2"
BEST = f"{EVALUATED} --save_steps 2 --load_best_model_at_end"


@pytest.mark.parametrize(
    ("words", "option", "mentions"),
    [
        # Names
        ("--learning_rat 1", "learning_rat", "learning_rate"),
        ("--lora_rnk 1", "lora_rnk", "lora_r"),
        ("--zzzzzz 1", "zzzzzz", "--help"),
        ("--trainer x", "trainer", "unknown"),
        ("--quantizations nf4", "quantizations", "'quantization'"),
        ("-gpus 4", None, "'-gpus'"),
        ("--lora_r 8 --lora_rank 9", "lora_rank", "lora_r 8 9"),
        ("--lora_r 8 --lora_r 9", "lora_r", "8 9"),
        ("--activation_checkpointing --gradient_checkpointing no", "gradient_checkpointing", "True False"),
        # Values
        ("--sequence_parallel_size 0", "sequence_parallel_size", "1 or more 0"),
        ("--sp_size 2 --context_parallel_size 4", "context_parallel_size", "sp_size 2 4"),
        (f"{GRPO} --sp_size 2", "sequence_parallel_size", "grpo sft, dpo, kto auto 2"),
        ("--method reward --sp_size 2", "sequence_parallel_size", "reward sft, dpo, kto auto 2"),
        ("--learning_rate fast", "learning_rate", "number 'fast'"),
        ("--learning_rate", "learning_rate", "no value"),
        ("--learning_rate nan", "learning_rate", "number"),
        ("--lora_r 16.5", "lora_r", "whole 16.5"),
        ("--lora_r 8 9", "lora_r", "whole"),
        ("--lora_r 0", "lora_r", "1 0"),
        ("--packing maybe", "packing", "'maybe'"),
        ("--lr_scheduler_type cosin", "lr_scheduler_type", "'cosine'"),
        ("--placement hos", "placement", "'auto' 'host'"),
        ("--quantization fp4", "quantization", "'none' 'nf4' 'int8' 'fp8'"),
        ("--resident_layers -1", "resident_layers", "0 -1"),
        ("--gpus 0", "gpus", "count 0"),
        ("--gpus 1,1", "gpus", "ids"),
        ("--cpu 0", "cpu", "0"),
        ("--method dop", "method", "'dpo'"),
        # Options that cannot be chosen
        ("--fsdp full_shard", "fsdp", "placement"),
        ("--deepspeed zero3.json", "deepspeed", "placement"),
        ("--ddp_find_unused_parameters true", "ddp_find_unused_parameters", "False True"),
        ('--dataset_kwargs {"skip_prepare_dataset":false}', "dataset_kwargs", "False True"),
        ("--warmup_ratio 0.1", "warmup_ratio", "warmup_steps"),
        ("--bnb_4bit_quant_type nf4", "bnb_4bit_quant_type", "nf4"),
        ("--llm_int8_threshold 6", "llm_int8_threshold", "int8"),
        ("--quantization_bit 4", "quantization_bit", "quantization: nf4"),
        ("--dataset_num_proc 2", "dataset_num_proc", "data"),
        # Options that contradict each other
        ("--placement file --shard_group_size 2", "shard_group_size", "file"),
        ("--activation_checkpointing_layers auto --activation_checkpointing_kwargs {every_n_layers: 2}",
         "activation_checkpointing_layers", "every_n_layers"),
        ("--activation_checkpointing_layers 2 --activation_checkpointing no", "activation_checkpointing_layers", "off"),
        ("--activation_checkpointing_layers auto --activation_offloading", "activation_checkpointing_layers",
         "activation_offloading"),
        ("--sharding_strategy SHARD_GRAD_OP --cpu_offload", "placement", "host replicate"),
        ("--sharding_strategy NO_SHARD --cpu_offload", "cpu_offload", "host replicate"),
        ("--sharding_strategy NO_SHARD --placement shard", "sharding_strategy", "replicate shard"),
        ("--gpus 1 --cpu 1", "gpus", "cpu"),
        ("--fp16 --bf16", "bf16", "fp16"),
        ("--bf16 --dtype float32", "bf16", "float32"),
        ("--fp16 no --dtype float16", "fp16", "float16"),
        ("--fp16 --cpu 1", "dtype", "float16 GPU"),
        ("--packing --max_length null", "max_length", "packing"),
        ("--packing --truncation_mode keep_end", "truncation_mode", "packing keep_start"),
        ("--eval_strategy steps", "eval_strategy", "eval_dataset"),
        ("--quantization int8 --load_in_4bit", "quantization", "int8 nf4"),
        ("--quantization none --load_in_4bit", "load_in_4bit", "quantization: none"),
        ("--quantization int8 --use_bnb_nested_quant", "bnb_4bit_use_double_quant", "nf4 int8"),
        ("--include_input_output_embeddings", "include_input_output_embeddings", "quantization: none"),
        ("--load_in_8bit --include_input_output_embeddings --use_liger_kernel",
         "include_input_output_embeddings", "use_liger_kernel"),
        # The best checkpoint, which transformers asserts after the model is loaded, or never finds
        (f"{EVALUATED} --early_stopping_patience 2", "early_stopping_patience", "load_best_model_at_end"),
        ("--early_stopping_patience 2 --load_best_model_at_end", "load_best_model_at_end", "eval_dataset"),
        ("--eval_dataset e --eval_strategy no --load_best_model_at_end", "load_best_model_at_end", "eval_strategy"),
        ("--sample_prompts a", "sample_prompts", "eval_dataset"),
        ("--save_strategy best", "save_strategy", "eval_dataset"),
        (f"{BEST} --early_stopping_patience 0", "early_stopping_patience", "1 0"),
        (f"{BEST} --early_stopping_threshold 0.1", "early_stopping_threshold", "early_stopping_patience"),
        (f"{BEST} --save_strategy epoch", "save_strategy", "steps epoch"),
        (f"{BEST} --save_strategy no", "save_strategy", "steps no"),
        (BEST.replace("--save_steps 2", "--save_steps 3"), "save_steps", "eval_steps, 2, 3"),
        (f"{BEST} --metric_for_best_model los", "metric_for_best_model", "'los'"),
        # Options of another method
        ("--beta 0.1", "beta", "dpo, kto, grpo sft"),
        ("--method dpo --packing", "packing", "sft dpo"),
        ("--method kto --assistant_only_loss", "assistant_only_loss", "sft kto"),
        ("--method dpo --reward_funcs a.b", "reward_funcs", "grpo dpo"),
        ("--method reward --sample_prompts a", "sample_prompts", "sft, dpo, kto, grpo"),
        (f"{GRPO} --max_length 9", "max_length", "sft, dpo, kto, reward"),
        (f"{GRPO} --use_vllm", "use_vllm", "False"),
        (f"{GRPO} --vllm_mode server", "vllm_mode", "use_vllm"),
        (f"{GRPO} --use_transformers_continuous_batching", "use_transformers_continuous_batching", "False"),
        ("--method dpo --sync_ref_model", "sync_ref_model", "False"),
        ("--method dpo --betta 1", "betta", "'beta'"),
        ("--method grpo", "reward_funcs", "reward_model_name_or_path"),
        ("--method reward --task_type CAUSAL_LM", "task_type", "SEQ_CLS CAUSAL_LM"),
        ("--method dpo --eval_dataset e --metric_for_best_model a", "metric_for_best_model", "rewards/accuracies"),
        ("--method dpo --loss_type sigmoyd", "loss_type", "sigmoid 'sigmoyd'"),
        ("--method dpo --loss_type sigmoid ofp", "loss_type", "'ofp'"),
        ("--method kto --loss_type sigmoid", "loss_type", "apo_zero_unpaired 'sigmoid'"),
        ("--method kto --per_device_train_batch_size 1", "per_device_train_batch_size", "2 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_option(words: str, option: str | None, mentions: str) -> None:
    """Catches a mistake that is found by TRL in the ranks or not at all, or that is a stack of validation errors."""
    with pytest.raises(ConfigError) as caught:
        resolve(*re.split(r" (?![^{]*})", words))
    assert caught.value.option == option
    assert [word for word in mentions.split() if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "option", "line", "mentions"),
    [
        ("lora_r: 8\nlora_r: 8\n", "lora_r", 5, "line 4"),
        ("lr_scheduler_kwargs:\n  a: 1\n  a: 2\n", "a", 6, "line 5"),
        ("lora_r: 8\nlora_alpha: many\n", "lora_alpha", 5, "'many'"),
        ("lora_r:\n", "lora_r", 4, "nothing"),
        ("lora:\n  r: 8\n", "lora", 4, "flat"),
        ("lora_r: [8\n", None, 5, "YAML"),
        ("? [a, b]\n: 1\n", None, 4, "a list"),
        ("lora_target_modules: [q_proj, {a: 1}]\n", "lora_target_modules", None, "{'a': 1}"),
        ("r: 8\nlora_r: 9\n", "lora_r", 5, "r 8 9"),
        ("base_model: other/model\n", "base_model", 4, "model"),
    ],
)
def test_mistakes_in_yaml_name_file_and_line(
    tmp_path: Path, text: str, option: str | None, line: int | None, mentions: str
) -> None:
    """Catches a duplicate that silently wins, as it does in PyYAML, and errors that leave the place to the reader."""
    with pytest.raises(ConfigError) as caught:
        resolve_yaml(tmp_path, text)
    assert caught.value.option == option
    assert line is None or caught.value.where == f"{tmp_path}/run.yaml, line {line}"
    assert [word for word in mentions.split() if word not in str(caught.value)] == []


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", None])
def test_yaml_that_is_no_mapping_is_refused(tmp_path: Path, text: str | None) -> None:
    """Catches a crash on a list, a plain text or a wrong path; a file with nothing but comments is fine."""
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        RunConfig.resolve(path, REQUIRED)
    assert str(caught.value.where) == str(path)
    path.write_text("# nothing yet\n")
    assert read_yaml_options(path) == []


def test_what_contradicts_nothing_is_accepted(tmp_path: Path) -> None:
    """Catches a refusal of one value by two names, and of `fsdp: null`, which configurations of other tools hold."""
    text = "lora_r: 8\nlora_rank: 8\nfsdp: null\ndeepspeed:\nddp_find_unused_parameters: false\ndo_train: true\n"
    config = resolve_yaml(tmp_path, text)
    assert (config.lora_r, config.trainer) == (8, {})


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset", "output_dir"])
def test_a_missing_option_is_named(missing: str) -> None:
    """Catches a run that starts without one of the three, and a message about a class's fields."""
    index = REQUIRED.index(f"--{missing}")
    with pytest.raises(ConfigError) as caught:
        RunConfig.resolve(None, REQUIRED[:index] + REQUIRED[index + 2 :])
    assert caught.value.option == missing and f"--{missing}" in caught.value.fix


def test_python_code_takes_the_same_names() -> None:
    """Catches a constructor that knows less than the command line."""
    config = RunConfig(model="org/model", dataset="rows.jsonl", max_steps=5, lora_rank=4)
    assert (config.model_name_or_path, config.lora_r, config.trainer) == ("org/model", 4, {"max_steps": 5})
    with pytest.raises(ConfigError) as caught:
        RunConfig(model="org/model", dataset="rows.jsonl", max_steps="five")
    assert caught.value.option == "max_steps"


@pytest.mark.parametrize(
    "options",
    [
        RunConfig(model="m", dataset="d", output_dir="o", resident_layers="auto", max_steps=3, lora_target_modules="q"),
        ChatOptions.read(["an adapter", "--placement", "host", "--system", "é\n", "--json"]),
    ],
)
def test_ranks_read_the_options_that_were_resolved(tmp_path: Path, options: RankOptions) -> None:
    """Catches an option lost or changed in the file from which ranks read them, and a default taken for a choice."""
    options.to_file(tmp_path / "options.json")
    found = type(options).from_file(tmp_path / "options.json")
    assert found == options and found.model_fields_set == options.model_fields_set


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        ("Optional[Union[int, str]]", {"int", "str", "none"}),
        ("'float | None'", {"float", "none"}),
        ("Literal['a', 'b'] | None", {"str", "none"}),
        ("dict[str, Any] | str", {"dict", "str"}),
    ],
)
def test_annotations_of_every_style_are_understood(annotation: str, kinds: set[str]) -> None:
    """Catches an option that takes nothing, because its type is written in an older style."""
    assert Option.from_annotation("option", annotation).kinds == kinds


@pytest.mark.parametrize(
    "option",
    [
        {"activation_offloading": True},
        {"activation_checkpointing_kwargs": {"offload": True}},
        {"use_liger_kernel": True},
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(option):
    """Catches a crash inside torch's pinned allocator or a kernel, after the model has been loaded."""
    from lorashard.training.arguments import build_arguments

    config = RunConfig(model_name_or_path="m", dataset="d", output_dir="o", **option)
    with pytest.raises(ConfigError, match=rf"{next(iter(option))}.*GPU"):
        build_arguments(config, use_cpu=True)


def test_torch_compile_is_lorashards_own():
    """Catches the trainer's switch, which compiles whole models, and a backend or mode that is given and dropped."""
    options = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
    assert RunConfig(**options).compile_options() is False
    assert RunConfig(**options, torch_compile=True).compile_options() is True
    config = RunConfig(**options, torch_compile_backend="inductor", torch_compile_mode="default")
    assert config.compile_options() == {"backend": "inductor", "mode": "default"}
    assert not [name for name in config.trainer_options if "compile" in name]


@pytest.mark.parametrize("options", [{"format": "nf5"}, {"format": "fp8", "double_quant": True}])
def test_a_quantization_of_a_script_is_checked_as_an_option_is(options):
    """A misspelled format would quietly be another one, and a second quantization of no scales is none."""
    with pytest.raises(ConfigError) as caught:
        Quantization(**options)
    assert caught.value.option == "quantization" and options["format"] in caught.value.found


def test_numbers_that_cannot_work_are_refused_where_they_are_written(tmp_path: Path) -> None:
    """Catches a number that fails after a minute, in each rank: a limit that is missing, or is told without its line;
    and a limit that refuses what TRL itself has as its default, or that belongs to no option."""
    for written in (
        "learning_rate: -1",
        "per_device_train_batch_size: 0",
        "num_train_epochs: -3",
        "max_steps: 0",
        "logging_steps: 0",
        "save_steps: 1.5",
        "max_length: 1",
        "lora_r: 0",
        "lora_dropout: 1",
        "warmup_steps: -1",
        "weight_decay: -0.1",
        "max_grad_norm: -1",
        "num_train_epochs: inf",
        "adam_beta2: 1",
        "seed: -1",
    ):
        with pytest.raises(ConfigError, match="run.yaml, line 4") as caught:
            resolve_yaml(tmp_path, written)
        assert caught.value.option == written.partition(":")[0] and "expected a " in str(caught.value)
    assert resolve("--max_grad_norm", "inf", "--max_steps", "-1", "--warmup_steps", "0").trainer["max_steps"] == -1
    assert resolve("--save_steps", "0.5", "--logging_steps", "1").trainer["save_steps"] == 0.5  # a share of all steps
    nobodys = set(TRAINER_BOUNDS)
    for method in METHODS.values():
        for option in read_trainer_options(method.config_class).values():
            nobodys.discard(option.name)
            if option.name in TRAINER_BOUNDS and option.default:
                option.parse(option.default)
    assert not nobodys


def test_trackers_are_those_of_transformers() -> None:
    """Catches a tracker that transformers knows and lorashard refuses, or the reverse; and one whose package is
    missing, which the trainer tells after the model is loaded."""
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    assert set(TRACKERS) == set(INTEGRATION_TO_CALLBACK)
    for name in TRACKERS:
        if name not in get_available_reporting_integrations() and TRACKERS[name]:
            with pytest.raises(ConfigError, match=f"{name} needs"):
                check_trackers([name])
        elif TRACKERS[name]:
            check_trackers(name)
    with pytest.raises(ConfigError, match="pip install azureml-sdk"):
        check_trackers("azure_ml")
    check_trackers("all")
    check_trackers(None)
    with pytest.raises(ConfigError, match="report_to.*'wandbb'; did you mean 'wandb'"):
        resolve("--report_to", "wandbb")
