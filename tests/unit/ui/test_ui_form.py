"""The form of a new run: texts of fields to options, YAML and a command, and back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lorashard.config.methods import METHODS
from lorashard.config.options import read_command_line
from lorashard.config.run_config import RunConfig, read_known_options
from lorashard.config.sweep import list_data, read_jobs
from lorashard.config.use_options import MergeOptions
from lorashard.errors import ConfigError
from lorashard.runtime.devices import count_cores
from lorashard.runtime.gpus import Gpu
from lorashard_ui.form import form
from lorashard_ui.form.exporting import AS_TRAINED, MERGED_BASES
from lorashard_ui.form.form import BASIC, MORE, NAME
from lorashard_ui.form.paths import Allowed
from lorashard_ui.pages.new_run_updates import ask_plan, ask_preview, list_others, summarize


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a form of a server over an empty folder of runs, with `base` and `rows.jsonl` beside it."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs", "files/base"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "files/rows.jsonl").write_text("{}\n")
    allowed = Allowed(tmp_path / "runs", [tmp_path / "files"])
    gpus = [Gpu(index, f"GPU-{index}", "a GPU", 2**34, 2**34) for index in range(2)]
    monkeypatch.setattr(form, "list_gpus", lambda: gpus)

    def read(**texts: str) -> form.Form:
        given = {"model_name_or_path": "files/base", "dataset": "files/rows.jsonl", MORE: "", NAME: ""} | texts
        return form.read_form(given, tmp_path / "runs", allowed)

    return read


HARD = {
    "sample_prompts": '["--help", "it\'s $HOME `id` \\"q\\"", "two\\nlines", "a, b"]',
    "eval_dataset": "files/rows.jsonl",
    "lora_target_modules": "[qk]_proj|it's $(id)",
    "gpus": "1,",
    "learning_rate": "1e-5",
    "max_length": "null",
    "packing": "no",
    "quantization": "nf4",
    MORE: "warmup_steps: 0.1\nlr_scheduler_kwargs: {num_cycles: 2, deep: {a: [1, null, true]}}\nproject: 'no'\n"
    "run_name: 'true'\noptim_args: '-a=b $(id)'\nlogging_steps: 25\n",
}


def test_a_sweeps_mistakes_are_shown_where_it_is_written(read, tmp_path):
    """Catches a job's mistake at the field of all jobs, and a job that reads what the form's own field may not."""
    jobs = '{"jobs": [{"name": "a", "dataset": "files/rows.jsonl"}, {"name": "b", %s}]}'
    assert read(sweep=jobs % '"lora_r": 4', dataset="", max_steps="3").missing == ()
    for option in ('"lora_r": 0', '"dataset": "/etc/passwd"', '"dataset": "json"', '"max_length": 9'):
        for fields in ({"sweep": jobs % option}, {MORE: f"sweep: {jobs % option}"}):
            assert list(read(**fields, max_steps="3", lora_r="8").problems) == list(fields)
    started = Allowed(tmp_path / "runs", start=tmp_path)  # whose folder is read for models and datasets alone
    texts = {"model_name_or_path": "files/base", "sweep": jobs % '"dataset": "./files/rows.jsonl"', "max_steps": "3"}
    assert form.read_form(texts, tmp_path / "runs", started).problems == {}
    assert list(read(sweep="/etc/passwd").problems) == ["sweep"]  # a file here is the server's


def test_several_values_in_a_field_are_a_sweep(read, tmp_path):
    """Catches values of which one is lost, a mistake among them that is told elsewhere, a list, path or pattern that is
    split at its commas, and a summary, YAML or command that does not say that jobs are meant."""
    filled = read(lora_r="8, 16", learning_rate="1e-4,2e-4", use_dora="true, false", max_length="64")
    assert filled.problems == {} and len(filled.jobs) == 8
    grid = {"lora_r": [8, 16], "learning_rate": [1e-4, 2e-4], "use_dora": [True, False]}
    assert filled.values["sweep"] == {"grid": grid} and not grid.keys() & filled.values.keys()
    assert "8 jobs: lora_r-8_" in summarize(filled) and "sweep:" in filled.to_yaml()
    assert RunConfig.resolve(None, filled.to_words(tmp_path / "runs")).sweep == {"grid": grid}
    assert read(**form.fill_fields(filled.values, [*BASIC, MORE])).values == filled.values
    both = read(lora_r="8, 16", **{MORE: "sweep: {jobs: [{name: a, lora_r: 4}]}"})
    assert [job.name for job in both.jobs] == ["lora_r-8", "lora_r-16", "a"]
    for name, text in (("lora_r", "8, x"), ("learning_rate", "1e-4, -1"), ("lora_r", "8,"), ("max_length", "8, 16")):
        assert list(read(**{name: text}).problems) == [name]
    for name, text in (("lora_target_modules", "q_proj,v_proj"), ("dataset", "files/a,b.jsonl")):
        assert "sweep" not in read(**{name: text}).values
    assert summarize(read(lora_r="8")).count("jobs") == 0
    for wrong in ("{grid: 3}", "{grid: [lora_r]}"):  # said where it is written, of a form that has values for it too
        assert list(read(lora_r="8, 16", **{MORE: f"sweep: {wrong}"}).problems) == [MORE]


def test_a_sweep_needs_a_dataset_for_each_job(read):
    """Catches a sweep without data whose options are called valid, since its jobs might have their own."""
    assert read(lora_r="8, 16", dataset="").missing == ("dataset",)
    jobs = "sweep: {jobs: [{name: a, dataset: files/rows.jsonl}, {name: b%s}]}\nmax_steps: 3"
    found = read(dataset="", **{MORE: jobs % ", lora_r: 4"})
    assert "dataset: has to be given" in str(found.problems[MORE]) and "job b" in str(found.problems[MORE])
    alone = read(dataset="", **{MORE: jobs % ", dataset: files/rows.jsonl"})
    assert alone.problems == {} and alone.missing == ()


def test_the_first_examples_are_those_of_every_job(read, tmp_path):
    """Catches a preview that asks for a dataset where each job has its own, and one made anew for an option that
    changes no example."""
    (tmp_path / "files/more.jsonl").write_text("{}\n")
    jobs = "sweep: {jobs: [{name: a, dataset: files/rows.jsonl}, {name: b, dataset: files/more.jsonl, lora_r: %d}]}"

    def ask(**texts: str) -> list[str]:
        asked = ask_preview(read(**texts))
        assert asked is not None
        return asked[1]

    words = ask(dataset="", more=f"{jobs % 4}\nmax_steps: 3")
    runs = list_data(RunConfig.resolve(None, words, required=()))
    assert {name: run.dataset for name, run in runs.items()} == {"a": "files/rows.jsonl", "b": "files/more.jsonl"}
    assert ask(dataset="", more=f"{jobs % 8}\nmax_steps: 30") == words
    assert ask(lora_r="8, 16") == ask(lora_r="8") == ask()
    assert ask_preview(read(lora_r="8, 16", dataset="")) is None


def test_a_plan_asks_for_no_dataset(read):
    """Catches a plan that waits for a dataset, or tells to give --epoch_tokens, which the form has not."""
    asked = ask_plan(read())
    assert asked is not None and "--dataset" not in asked and ask_plan(read(dataset="")) == asked


def test_a_copied_sweep_has_its_grid_in_the_fields(read, tmp_path):
    """Catches a copy whose values have to be edited as JSON, beside fields that are empty; an option given twice
    when its field is edited; a value of the listed jobs that is lost; and a job's copy that is the whole sweep."""
    grid = {"lr": [1e-4, 2e-4], "lora_r": [8, 16], "use_dora": [True, False], "lora_dropout": [0.1]}
    sweep = {"grid": grid | {"lora_target_modules": ["q_proj", "v_proj"], "lora_alpha": [4, 8]}}
    sweep["jobs"] = [{"name": "own", "lora_r": 4}]
    values = {"model_name_or_path": "files/base", "dataset": "files/rows.jsonl", "lora_alpha": 6, "sweep": sweep}
    folder = tmp_path / "runs/first"
    config = RunConfig(output_dir=str(folder), **values)
    for job in read_jobs(config):
        (folder / job.name).mkdir(parents=True)
        (folder / job.name / "config.yaml").write_text(job.config.to_yaml())
    (folder / "config.yaml").write_text(config.to_yaml())
    (folder / "sweep.json").write_text("{}")

    texts = form.fill_fields(form.clone_run(tmp_path / "runs", "first"), [*BASIC, "use_dora", "sweep", MORE])
    shown = ("learning_rate", "lora_r", "use_dora", "lora_alpha")
    assert [texts[name] for name in shown] == ["0.0001, 0.0002", "8, 16", "true, false", "6"]
    left = {"lora_dropout": [0.1], "lora_target_modules": ["q_proj", "v_proj"], "lora_alpha": [4, 8]}
    assert json.loads(texts["sweep"]) == {"grid": left, "jobs": sweep["jobs"]}
    jobs = {tuple(sorted(job.options.items())) for job in read_jobs(config) if "use_dora" in job.options}

    def list_grid(filled):
        return {tuple(sorted(job.options.items())) for job in filled.jobs if "use_dora" in job.options}

    copied = read(**texts)
    assert copied.problems == {} and list_grid(copied) == jobs and len(copied.jobs) == len(jobs) + 1
    edited = read(**texts | {"learning_rate": "1e-3", "lora_r": "8, 16, 32", "lora_alpha": "1, 2"})
    assert edited.problems == {} and len(edited.jobs) == 1 + 3 * 2 * 2 * 2
    assert len(read(learning_rate="1, 2", **{MORE: "sweep: {grid: {lr: [3]}}"}).jobs) == 2  # and not "given twice"
    whole = read(**form.fill_fields(values | {"sweep": {"grid": {"lora_r": [8, 16]}}}, [*BASIC, "sweep", MORE]))
    assert whole.values["sweep"] == {"grid": {"lora_r": [8, 16]}}

    one = read(**form.fill_fields(form.clone_run(tmp_path / "runs", "first/own"), [*BASIC, "sweep", MORE]))
    assert one.problems == {} and one.jobs == () and (one.values["lora_r"], one.values["lora_alpha"]) == (4, 6)


def test_a_field_takes_several_values_where_they_are_a_sweep():
    """Catches a choice that may differ by job, and whose field takes one value alone."""
    pytest.importorskip("gradio")
    from lorashard_ui.pages.option_fields import make_field

    method = METHODS["sft"]
    known = read_known_options(method)
    for name, text in {"use_dora": "true, false", "lr_scheduler_type": "linear, cosine", "lora_r": "8, 16"}.items():
        assert make_field(name, known[name], method).preprocess(text) == text


def test_command_and_yaml_say_what_the_form_says(read, tmp_path):
    """Catches a value that a shell, YAML or the command line's parser reads as another: quotes, dashes, lists, null."""
    filled = read(**HARD)
    assert filled.problems == {} and filled.missing == ()
    file = tmp_path / "asked.yaml"
    file.write_text(filled.to_yaml())
    from_yaml = RunConfig.resolve(file, ["--output_dir", "runs/x"])
    script = filled.to_command(tmp_path / "runs").replace("lorashard finetune", "printf '%s\\0'", 1)
    words = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode().split("\0")[:-1]
    from_command = RunConfig.resolve(None, words)
    assert Path(from_command.output_dir).resolve() == tmp_path / "runs" / filled.name  # seen from here
    assert from_yaml.model_dump(exclude={"output_dir"}) == from_command.model_dump(exclude={"output_dir"})
    assert from_yaml == RunConfig(output_dir="runs/x", **filled.values)
    assert from_yaml.quantization == "nf4"
    assert from_yaml.gpus == [1] and from_yaml.max_length is None and from_yaml.packing is False
    assert from_yaml.sample_prompts == ["--help", 'it\'s $HOME `id` "q"', "two\nlines", "a, b"]


def test_filling_in_gives_the_same_form(read):
    """Catches what gets lost on the way from options to fields, as by loading YAML or copying a run."""
    values = read(**HARD).values
    for fields in (BASIC, (*BASIC, "gpus", "sample_prompts", "lora_target_modules", "packing")):
        texts = form.fill_fields(values, [*fields, MORE])
        assert read(**texts).values == values
        assert form.read_yaml(form.write_yaml(values), "x") == values


def test_words_of_every_option_read_back():
    """Catches a kind of option whose values the command line would read otherwise."""
    samples = [True, False, None, 3, 0.5, 1e-7, "a", "a b", ["a"], ["a", "b,c"], [1, 2], [1], [], {"a": [{"b": None}]}]
    num_tried = 0
    for method in METHODS.values():
        for name, option in read_known_options(method).items():
            for value in samples:
                try:
                    if option.parse(value) != value:
                        continue
                except ConfigError:
                    continue
                word = form.write_word(option, value)
                (given,) = read_command_line([f"--{name}={word}"])
                assert option.parse(given.value) == value, (name, value, word)
                num_tried += 1
    assert num_tried > 1000


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("lora_r", "x", "lora_r: expected a whole"),
        ("learning_rate", "fast", "learning_rate: expected a number above 0, found 'fast'"),
        ("method", "sfx", "method: expected one of"),
        ("quantization", "nf5", "quantization: expected one of 'none', 'nf4', 'int8', 'fp8', found 'nf5'"),
        ("max_length", "1.5", "max_length: "),
        ("learning_rate", "-1", "learning_rate: expected a number above 0, found -1"),
        ("gpus", "3", "gpus: expected at most 2"),
        ("cpu", str(8 * count_cores() + 1), "cpu: expected at most"),
        (MORE, "report_to: os", "report_to: expected of"),
        (MORE, "report_to: clearml", "pip install clearml"),
        ("eval_dataset", "/etc/passwd", "--allow"),
        ("sample_prompts", "[" * 3000, "sample_prompts"),
        (NAME, "../up", "name of a"),
        (NAME, "a/b", "name of a"),
        (MORE, "warmup_ratio: 0.1", "give the ratio"),
        (MORE, "\nlogging_steps: often", "more options, line 2"),
        (MORE, "a: [", "more options, line 1: not valid YAML"),
        (MORE, "- a", "expected lines of `option: value`"),
        (MORE, "lora_rank: 8", "own field"),
        (MORE, "output_dir: /tmp/x", "output_dir"),
        (MORE, "epochs: 2\nnum_epochs: 3", "given twice"),
        (MORE, "deepspeed: x.json", "deepspeed"),
        (MORE, "hub_token: hf_x", "hub_token"),
        (MORE, "accelerator_config: /etc/passwd", "--allow"),
        (MORE, "trust_remote_code: yes", "runs no code"),
    ],
)
def test_mistakes_are_told_at_their_field(read, field, text, said):
    """Catches a mistake that is told elsewhere, in other words than the command line's, or not at all."""
    given = {"lora_r": "4"} if field == MORE else {}
    found = read(**(given | {field: text}))
    assert list(found.problems) == [field]
    assert said in str(found.problems[field])


def test_mistakes_of_several_fields_are_all_told(read):
    """Catches a form that shows one mistake after another; and a combination, which belongs to no field alone."""
    assert set(read(lora_r="x", learning_rate="y", method="dpo", packing="true").problems) == {
        "lora_r",
        "learning_rate",
        "packing",
    }
    for wrong in (
        {"gpus": "0,", "cpu": "2"},
        {"global_batch_size": "7", "cpu": "2"},
        {"dtype": "float16", "cpu": "1"},
        {"quantization": "int8", MORE: "load_in_4bit: true"},
        {"lora_r": "0"},
    ):
        ((place, error),) = read(**wrong).problems.items()
        assert place == error.option and place in wrong, error
    for more in ("eval_strategy: epoch", "report_to: wandbb"):
        ((place, error),) = read(more=more).problems.items()
        assert place == MORE and error.option in more
    empty = read(model_name_or_path="", dataset=" ")
    assert empty.missing == ("model_name_or_path", "dataset") and empty.problems == {}


def test_names_are_suggested_and_free(read, tmp_path):
    """Catches a suggestion that is taken, or no name of a folder; and a name that would hit another run."""
    assert read().name == "base-rows"
    (tmp_path / "runs/base-rows").mkdir()
    assert read().name == "base-rows-2"
    assert "'base-rows'" in str(read(name="base-rows").problems[NAME])
    for odd in ("org/..odd name..", "\u00e9t\u00e9/\u96ea", "x" * 300, "-"):
        assert read(model_name_or_path="files/base", dataset=odd).name
        name = form.suggest_name({"model_name_or_path": odd, "dataset": odd}, tmp_path / "runs")
        form.find_run(tmp_path / "runs", name)


def test_hostile_yaml_is_refused_at_once(read):
    """Catches aliases that grow without bounds, depth, size, and objects that YAML would make."""
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for text, said in (
        (bomb, "line 2"),
        ("x: " + "[" * 50_000, "nested too deeply"),
        ("x: " + "{a: " * 5_000, "nested too deeply"),
        ("# " + "x" * 70_000, "at most 65,536 bytes"),
        ("run_name: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("run_name: !!binary aGk=", ""),
    ):
        if said:
            assert said in str(read(more=text).problems[MORE])
        else:
            read(more=text)


def test_a_run_is_copied_by_what_it_was_asked(tmp_path):
    """Catches a copy that goes on in the other run's folder, resumes it, or holds two hundred defaults."""
    run = tmp_path / "first"
    run.mkdir()
    values = {"model_name_or_path": "m", "dataset": "d", "eval_dataset": "e", "lora_r": 8, "max_steps": 3}
    config = RunConfig(output_dir=str(run), resume_from_checkpoint="auto", **values)
    (run / "config.yaml").write_text(config.to_yaml())
    assert form.clone_run(tmp_path, "first") == values
    (run / "asked.yaml").write_text("model: m2\ndataset: d\nmax_steps: 4\n")
    assert form.clone_run(tmp_path, "first") == {"model_name_or_path": "m2", "dataset": "d", "max_steps": 4}
    for name in ("nobody", "../first", ".hidden", ""):
        with pytest.raises(ConfigError):
            form.clone_run(tmp_path, name)


def test_uploads_are_kept_once_and_inside(tmp_path):
    """Catches an upload that is written elsewhere by its name, twice, or over another of the same name."""
    (tmp_path / "up").mkdir()
    kept = []
    odd = "a b;$(id).jsonl"
    for name, content in ((odd, "1"), (odd, "1"), (odd, "2"), (".x.csv", "3")):
        path = tmp_path / "up" / name
        path.write_text(content)
        kept.append(form.keep_upload(path, tmp_path / "runs"))
        assert kept[-1].read_text() == content
    assert kept[0] == kept[1] != kept[2]
    assert {path.parent.parent for path in kept} == {tmp_path / "runs/.uploads"}
    assert [path.name for path in kept[2:]] == ["a_b_id_.jsonl", "x.csv"]
    for name in ("rows.py", "rows", ".jsonl", "x.jsonl.gz"):
        (tmp_path / "up" / name).write_text("x")
        with pytest.raises(ConfigError, match="ends in .jsonl"):
            form.keep_upload(tmp_path / "up" / name, tmp_path / "runs")


def test_what_a_merge_offers_is_what_the_command_takes():
    """Catches a choice of the export page that `lorashard merge` has no longer, or another default than its own."""
    read = [MergeOptions.read(["runs/a", "out", *words]) for words in MERGED_BASES.values()]
    assert [(one.quantization, one.requantize) for one in read] == [
        (None, None),
        ("none", None),
        (None, "nf4"),
        (None, "int8"),
    ]
    assert MERGED_BASES[AS_TRAINED] == []


def test_every_option_describes_itself():
    """Catches an option in the form without a word of what it is for, one that would be refused, and one that the
    search over all of them does not find."""
    for method in METHODS.values():
        options = form.list_choosable(method)
        assert not options.keys() & {"deepspeed", "hub_token", "output_dir", "use_cpu", "do_train"}
        for name, option in options.items():
            default, text = form.describe_option(option, method)
            assert len(text) > 10, name
            assert isinstance(default, str)
        found = {name for _, name in list_others(method.name)}
        assert found == options.keys() - {"gpus"} and {"dtype", "placement", "lora_dropout"} <= found
    learning_rate = read_known_options(METHODS["dpo"])["learning_rate"]
    assert form.describe_option(learning_rate, METHODS["dpo"])[0] == "1e-05"
