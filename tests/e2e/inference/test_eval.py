"""`lorashard eval` as a person runs it: real processes, an adapter that has learned to answer some of the questions."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.cases import slow
from helpers.finetune import LORASHARD
from helpers.finetune import run as run_command
from helpers.tiny import add_lora, build_base
from helpers.words import make_tokenizer
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lorashard.config.data_options import DataOptions
from lorashard.config.use_options import EvalOptions
from lorashard.data.prepare import prepare
from lorashard.errors import ConfigError, DataError
from lorashard.inference.evaluation import find_questions, prepare_questions

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|> ' + message.role + ' ' + message.content + ' <|im_end|> ' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|> assistant ' }}{%- endif %}"
)
WORDS = ["<pad>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", *(f"w{i}" for i in range(60))]
SPECIAL = {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}
# Completions of different lengths; the last four are other ones than those that the adapter learns.
LEARNED = [(f"w{i} w{i + 20}", " ".join(f"w{40 + (i + j) % 20}" for j in range(1 + i % 3))) for i in range(10)]
ASKED = LEARNED[:7] + [(prompt, f"{completion} w0") for prompt, completion in LEARNED[6:]]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a base, its tokenizer, an adapter that has learned answers by heart, and questions."""
    folder = tmp_path_factory.mktemp("task")
    tokenizer = make_tokenizer(WORDS, **SPECIAL)
    tokenizer.save_pretrained(folder / "base")
    build_base(vocab_size=len(WORDS), num_hidden_layers=2, eos_token_id=1).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = add_lora(base, r=16, modules_to_save=["lm_head"]).train()
    batch = tokenizer([f"{p} {c} </s>" for p, c in LEARNED], padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :2] = -100
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(60):
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "runs" / "answers")
    write_rows(folder / "questions.jsonl", [{"prompt": f"{p} ", "completion": c} for p, c in ASKED])
    return folder


def run(task: Path, *words: object) -> subprocess.CompletedProcess:
    return run_command([*LORASHARD, "eval", "runs/answers", *map(str, words)], task, folder=task)


def measure(task: Path, *words: object) -> dict:
    options = ("--dataset", "questions.jsonl", "--dtype", "float32", "--json")
    result = run(task, *options, *words)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def measure_plainly(task: Path, is_base: bool) -> tuple[float, int, int]:
    """Return mean loss, tokens and exact answers from plain PEFT, a row at a time."""
    tokenizer = make_tokenizer(WORDS, **SPECIAL)
    base = AutoModelForCausalLM.from_pretrained(task / "base", dtype=torch.float32)
    model = base if is_base else PeftModel.from_pretrained(base, task / "runs" / "answers").eval()
    total, num_tokens, num_exact = 0.0, 0, 0
    for prompt, completion in ASKED:
        prompt_ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        ids = tokenizer(f"{prompt} {completion} </s>", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            log_probs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            answer = model.generate(input_ids=prompt_ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
        start = prompt_ids.shape[1]
        total -= float(log_probs.gather(1, ids[0, 1:, None])[start - 1 :].sum())
        num_tokens += ids.shape[1] - start
        num_exact += tokenizer.decode(answer[start:], skip_special_tokens=True).strip() == completion
    return total / num_tokens, num_tokens, num_exact


@pytest.mark.parametrize(
    "words",
    [
        ["--cpu", 2, "--placement", "shard", "--per_device_eval_batch_size", 2],
        slow(["--cpu", 1, "--per_device_eval_batch_size", 4]),
    ],
)
def test_results_are_plain_pefts_on_any_ranks(task, words):
    """A tail that is counted twice, an adapter that is off, and another prompt than in training."""
    loss, num_tokens, num_exact = measure_plainly(task, is_base=False)
    assert 0 < num_exact < len(ASKED)
    found = measure(task, *words)
    assert found["loss"] == pytest.approx(loss, rel=1e-5) and found["perplexity"] == math.exp(found["loss"])
    assert (found["num_rows"], found["num_tokens"], found["num_cut"]) == (len(ASKED), num_tokens, 0)
    assert (found["num_exact"], found["num_questions"]) == (num_exact, len(ASKED))
    assert found["exact_match"] == num_exact / len(ASKED)


def test_a_mistake_in_the_data_is_one_line_and_exit_code_2(task):
    """Ranks that wait in a collective for one that found nothing to read."""
    (task / "empty.jsonl").touch()
    result = run(task, "--dataset", "empty.jsonl", "--cpu", 2)
    errors = [line for line in result.stderr.splitlines() if "error: " in line and "empty.jsonl" in line]
    assert result.returncode == 2 and len(errors) == 1 and "Traceback" not in result.stderr, result.stderr


@pytest.mark.parametrize(
    "words, option",
    [
        ([], "dataset"),
        (["--dataset", "rows.jsonl", "--packing"], "packing"),
        (["--dataset", "rows.jsonl", "--max_new_tokens", "0"], "max_new_tokens"),
    ],
)
def test_a_mistake_in_the_options_is_found_before_any_rank_starts(words, option):
    """An option of the training that has no meaning here, taken and passed over."""
    with pytest.raises(ConfigError) as caught:
        EvalOptions.read(["adapter", *words])
    assert caught.value.option == option


@pytest.mark.slow
def test_the_base_alone_and_other_questions_are_measured(task):
    """Catches an adapter that stays on in `--base_only`, and answers that are generated though not wanted."""
    base = measure(task, "--cpu", 2, "--placement", "shard", "--base_only")
    assert base["loss"] == pytest.approx(measure_plainly(task, is_base=True)[0], rel=1e-5)
    words = ("--dataset", "questions.jsonl", "--cpu", 1, "--exact_match", "false", "--max_length", "null")
    result = run(task, *words)
    assert result.returncode == 0 and "loss" in result.stdout and "exact" not in result.stdout, result.stderr


def test_a_question_is_all_before_the_assistants_last_turn(tmp_path):
    """A prompt without the assistant's header, or an answer to a turn that is not the last."""
    tokenizer = make_tokenizer(WORDS, CHATML, **SPECIAL)

    def turn(*contents: str) -> dict:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}

    rows = [turn("w1", "w2 w3"), turn("w4", "w5", "w6", "w7"), turn("w8", "w9", "w10")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prepared = prepare(DataOptions(dataset=str(path)), tokenizer, tmp_path / "cache")
    asked = [
        (tokenizer.decode(one.prompt_ids), tokenizer.decode(one.answer_ids, skip_special_tokens=True))
        for one in find_questions(prepared.train, tokenizer)
    ]
    header = "<|im_start|> assistant"
    assert asked == [
        (f"<|im_start|> user w1 <|im_end|> {header}", "w2 w3"),
        (f"<|im_start|> user w4 <|im_end|> {header} w5 <|im_end|> <|im_start|> user w6 <|im_end|> {header}", "w7"),
    ]


def test_questions_are_of_whole_rows_and_completions(tmp_path, monkeypatch):
    """A completion that is cut to max_length cannot be answered; without a mask its prompt is not known."""
    monkeypatch.setattr("lorashard.data.prepare.datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = make_tokenizer(WORDS, **SPECIAL)
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "w1 w2 ", "completion": "w3 w4 w5 w6"}])
    for words in (["--max_length", "4"], ["--completion_only_loss", "false"]):
        options = EvalOptions.read(["adapter", "--dataset", str(path), *words])
        prepared = prepare(options.data_options(), tokenizer)
        (question,) = prepare_questions(options, prepared, tokenizer)
        assert tokenizer.decode(question.prompt_ids) == "w1 w2"
        assert tokenizer.decode(question.answer_ids) == "w3 w4 w5 w6 </s>"
    write_rows(path, [{"text": "w1 w2"}])
    options = EvalOptions.read(["adapter", "--dataset", str(path)])
    prepared = prepare(options.data_options(), tokenizer)
    assert prepare_questions(options, prepared, tokenizer) == []
    with pytest.raises(DataError) as caught:
        prepare_questions(options.model_copy(update={"exact_match": True}), prepared, tokenizer)
    assert caught.value.option == "exact_match" and "text rows" in caught.value.found
