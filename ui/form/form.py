"""The form of a new run as options: read from its fields, written as YAML and as a command.

The fields' texts are the only source: YAML, command, plan and errors are computed from them at each change. An empty
field is an option that is not set. Imports neither torch nor Gradio.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lorashard.config.data_options import DATA_SUFFIXES
from lorashard.config.methods import METHODS, Method, explain_refused
from lorashard.config.names import ALIASES, PINNED_OPTIONS, REFUSED_OPTIONS
from lorashard.config.options import GivenOption, Option, parse_yaml_options
from lorashard.config.run_config import TRAINER_DEFAULTS, RunConfig, collect_options, find_method, read_known_options
from lorashard.config.sweep import JOB_OPTIONS, Job, check_datasets, read_jobs
from lorashard.errors import ConfigError
from lorashard.launch.checks import check_options
from lorashard.runs.root import find_place, find_run
from lorashard.runtime.devices import VisibleGpus
from lorashard.runtime.gpus import list_gpus

from ..reading.places import write_path
from ..reading.states import ASKED_NAME
from .paths import Allowed

MORE = "more"  # the field of all options that have none of their own
NAME = "name"
# The first screen. All other options are found by one search; those of COMMON are the first that have a field.
BASIC = (
    "model_name_or_path",
    "dataset",
    "method",
    "placement",
    "dtype",
    "quantization",
    "lora_r",
    "lora_alpha",
    "learning_rate",
    "num_train_epochs",
    "per_device_train_batch_size",
    "max_length",
)
COMMON = ("eval_dataset", "max_steps", "global_batch_size")
RANKS = ("gpus", "cpu", "queue")
# Not options of the form: a run's folder follows from its name, and resuming has its own button.
_NOT_HERE = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "task_type")
_MAX_YAML_BYTES = 65_536
_MAX_DEPTH = 16
_MAX_NAME_LETTERS = 80


@dataclass(frozen=True)
class Form:
    """What was filled in.

    Attributes:
        values: the options that are set, by canonical names, parsed.
        name: of the run; the suggested one if the field is empty.
        problems: the errors, by field; under "" what belongs to no single field.
        missing: required fields that are empty.
        jobs: of a sweep.
    """

    method: Method
    values: dict[str, Any]
    name: str
    problems: dict[str, ConfigError] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()

    def to_yaml(self) -> str:
        """Return the options as the --config file of `lorashard finetune`, without the run's folder."""
        return write_yaml(self.values)

    def to_words(self, root: Path | None = None) -> list[str]:
        """Return the options as words of a command line, with the run's folder where `root` is given."""
        known = read_known_options(self.method)
        values = self.values | ({"output_dir": str(root / self.name)} if root else {})
        words: list[str] = []
        for name, value in values.items():
            word = write_word(known[name], value)
            words += [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]
        return words

    def to_command(self, root: Path) -> str:
        """Return a command for a shell that starts this run."""
        lines, words = ["lorashard finetune"], self.to_words(Path(write_path(str(root))))
        for word in words:
            if word.startswith("--"):
                lines.append(f"  {shlex.quote(word)}")
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n".join(lines)


def read_form(texts: Mapping[str, str | None], root: Path, allowed: Allowed) -> Form:
    """Return what the fields hold, with the errors of each field, which are shown there.

    Args:
        texts: of the fields by option, with `NAME` and `MORE`.
    """
    given = {name: text for name, text in texts.items() if name not in (MORE, NAME) and (text or "").strip()}
    problems: dict[str, ConfigError] = {}
    values: dict[str, Any] = {}
    more: list[GivenOption] = []
    try:
        more = parse_yaml(texts.get(MORE) or "", "more options")
        _refuse_twice(more, given)
    except ConfigError as error:
        problems[MORE] = error
    try:
        method = find_method([GivenOption("method", given.get("method") or "sft", "")])
    except ConfigError as error:
        method, problems["method"] = METHODS["sft"], error
    known = read_known_options(method)
    grid: dict[str, list[Any]] = {}
    options = [(name, GivenOption(name, text, "")) for name, text in given.items()]
    for place, option in [*options, *((MORE, option) for option in more)]:
        try:
            parts = split_values(option, known) if place != MORE else []
            if len(parts) > 1:
                grid[option.name] = [collect_options([part], known, method)[option.name] for part in parts]
                continue
            found = collect_options([option], known, method)
            allowed.check_options({name: value for name, value in found.items() if name != "sweep"})
            values |= found
        except ConfigError as error:
            problems.setdefault(place, error)
        except RecursionError:
            problems.setdefault(place, ConfigError("nested too deeply", option=option.name))
    if grid:
        values["sweep"] = _add_grid(values.get("sweep") or {}, grid)
    jobs: tuple[Job, ...] = ()
    if not problems:
        try:
            config = RunConfig(**({"model_name_or_path": "none yet"} | values))
            jobs = _read_jobs(config, allowed)
            check_options(config, VisibleGpus(0 if config.cpu else len(list_gpus())))
        except ConfigError as error:
            problems[_find_place(error, texts, more)] = error
    needs_dataset = not any(job.config.dataset for job in jobs) if jobs else not values.get("sweep")
    needed = ("model_name_or_path", *(("dataset",) if needs_dataset else ()))
    missing = tuple(name for name in needed if not values.get(name) and name not in problems)
    name = (texts.get(NAME) or "").strip() or suggest_name(values, root)
    try:
        folder = find_place(root, name)
        if folder.exists():
            raise ConfigError(f"the run {name!r} already exists", fix="choose another name")
    except ConfigError as error:
        problems[NAME] = error
    return Form(method, values, name, problems, missing, jobs)


def split_values(option: GivenOption, known: Mapping[str, Option]) -> list[GivenOption]:
    """Return an option once for each of the values that its field holds, where it may differ by job; else none.

    Only numbers and choices are split at commas: a path, a list or a pattern may hold one.
    """
    found = known.get(option.name)
    if found is None or option.name not in JOB_OPTIONS or found.kinds & {"list", "dict"}:
        return []
    if "str" in found.kinds and not found.choices:
        return []
    return [replace(option, value=part.strip()) for part in str(option.value).split(",")]


def parse_yaml(text: str, label: str) -> list[GivenOption]:
    """Return the options of YAML that came from a browser.

    Args:
        label: what messages call it.

    Raises:
        ConfigError: it is no flat YAML, is too large or too deep, or has aliases, which grow without bounds.
    """
    if len(text.encode("utf-8", "replace")) > _MAX_YAML_BYTES:
        raise ConfigError(where=label, expected=f"at most {_MAX_YAML_BYTES:,} bytes of YAML", found="more")
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            place = f"{label}, line {event.start_mark.line + 1}" if event.start_mark else label
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError("YAML aliases are not accepted", where=place, fix="write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigError("nested too deeply", where=place)
    except RecursionError:
        raise ConfigError("nested too deeply", where=label) from None
    except yaml.YAMLError:
        pass  # said below, with its line
    return parse_yaml_options(text, label)


def read_yaml(text: str, label: str) -> dict[str, Any]:
    """Return the options of YAML from a browser, by their true names, parsed, without those of the run's folder.

    Raises:
        ConfigError: it is wrong, with the line.
    """
    given = [option for option in parse_yaml(text, label) if _true_name(option.name) not in _NOT_HERE]
    method = find_method(given)
    return collect_options(given, read_known_options(method), method)


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Return the options of an uploaded YAML file, as `read_yaml` does.

    Raises:
        ConfigError: it is no such file, or is too large.
    """
    with path.open("rb") as file:
        content = file.read(_MAX_YAML_BYTES + 1)
    try:
        # A character that the limit cuts in two is no reason to say that the text is not UTF-8.
        text = content.decode("utf-8", "strict" if len(content) <= _MAX_YAML_BYTES else "replace")
    except UnicodeDecodeError as error:
        raise ConfigError(where=path.name, expected="YAML in UTF-8", found=error.reason) from None
    return read_yaml(text, path.name)


def write_yaml(values: Mapping[str, Any]) -> str:
    """Return options as flat YAML that reads back to the same."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=1000) if values else ""


def fill_fields(values: Mapping[str, Any], fields: Sequence[str]) -> dict[str, str]:
    """Return the texts of the fields that hold these options; what has no field is in `MORE`.

    Of a sweep's grid, a field holds the values of its option, to be edited there.
    """
    known = read_known_options(METHODS[values.get("method", "sft")])
    columns, values = _take_columns(values, known, fields)
    texts = {name: write_word(known[name], values[name]) if name in values else "" for name in fields if name != MORE}
    texts[MORE] = write_yaml({name: value for name, value in values.items() if name not in texts})
    return texts | columns


def leave_out_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from what lorashard takes without them, as of a run's whole configuration."""
    method = METHODS[values.get("method", "sft")]
    defaults = {name: field.default for name, field in RunConfig.model_fields.items()}
    defaults |= TRAINER_DEFAULTS | {"learning_rate": method.learning_rate}
    if values.get("eval_dataset"):
        defaults["eval_strategy"] = "epoch"
    return {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}


def clone_run(root: Path, name: str) -> dict[str, Any]:
    """Return the options that an earlier run was given.

    Raises:
        ConfigError: there is no such run, or what it was given cannot be read.
    """
    folder = find_run(root, name)
    for file in (ASKED_NAME, "config.yaml"):
        try:
            text = (folder / file).read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {error}", where=f"{name}/{file}") from error
        return leave_out_defaults(read_yaml(text, f"{name}/{file}"))
    raise ConfigError(f"there is no run {name!r} with a configuration to copy", where=root)


def suggest_name(values: Mapping[str, Any], root: Path) -> str:
    """Return a name for a run, which no other has, from its model and dataset."""
    model = os.path.basename(str(values.get("model_name_or_path") or "").rstrip("/"))
    dataset = Path(str(values.get("dataset") or "").rstrip("/")).stem
    method = values.get("method", "sft")
    words = [re.sub(r"[^\w.+=@-]+", "-", word).strip("-.") for word in (model, dataset)]
    stem = "-".join([*(word for word in words if word), *([method] if method != "sft" else [])]) or "run"
    stem = stem.lstrip("-.+=@")[:_MAX_NAME_LETTERS] or "run"
    name, number = stem, 1
    while (root / name).exists():
        number += 1
        name = f"{stem}-{number}"
    return name


def keep_upload(path: Path, root: Path) -> Path:
    """Copy an uploaded dataset to where runs find it again; the same content is kept once.

    Raises:
        ConfigError: it is no file of data, by its name.
    """
    name = re.sub(r"[^\w.-]+", "_", path.name).lstrip(".")[-_MAX_NAME_LETTERS:]
    if Path(name).suffix not in DATA_SUFFIXES:
        raise ConfigError(
            option="dataset", expected=f"a file that ends in {', '.join(DATA_SUFFIXES)}", found=repr(path.name)
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    folder = root / ".uploads" / digest
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / name
    if not kept.exists():
        staged = folder / f".{secrets.token_hex(4)}.{name}"  # two tabs may keep the same
        try:
            shutil.copyfile(path, staged)
            staged.replace(kept)
        finally:
            staged.unlink(missing_ok=True)
    return kept


def write_word(option: Option, value: Any) -> str:
    """Return a value as one word of the command line, from which `option` reads the same."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        short = ",".join(map(str, value)) + ("," if len(value) == 1 else "")
        return short if _reads_as(option, short, value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def list_choosable(method: Method) -> dict[str, Option]:
    """Return the options that may be given here, by name."""
    known = read_known_options(method)
    closed = {*REFUSED_OPTIONS, *PINNED_OPTIONS, *dict(method.pinned), *_NOT_HERE}
    return {name: option for name, option in known.items() if name not in closed and not explain_refused(method, name)}


def describe_option(option: Option, method: Method) -> tuple[str, str]:
    """Return an option's default as text, and what it is for, from the fields of whoever declares it."""
    own = RunConfig.model_fields.get(option.name)
    if own is not None:
        default = "" if own.is_required() or own.default in (None, "") else write_word(option, own.default)
        return default, " ".join((own.description or "").split())
    chosen_here: dict[str, Any] = TRAINER_DEFAULTS | {"learning_rate": method.learning_rate}
    default = chosen_here.get(option.name, option.default.strip("\"'"))
    return (write_word(option, default) if default not in (None, "None") else ""), " ".join(option.help.split())


def _add_grid(sweep: Mapping[str, Any], grid: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return a sweep with the values of fields in its grid, in place of those that it has for these options."""
    written = sweep.get("grid") or {}
    if not isinstance(written, Mapping):  # which is said of the sweep
        return dict(sweep)
    left = {name: values for name, values in written.items() if _true_name(name) not in grid}
    return {**sweep, "grid": {**left, **grid}}


def _take_columns(
    values: Mapping[str, Any], known: Mapping[str, Option], fields: Sequence[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the texts of the fields that can hold an option's values in a sweep's grid, and the options without these.

    What is not read back from a field stays in the sweep, as does an option with a value of its own for listed jobs.
    """
    sweep = values.get("sweep")
    grid = sweep.get("grid") if isinstance(sweep, Mapping) else None
    if not isinstance(sweep, Mapping) or not isinstance(grid, Mapping):
        return {}, dict(values)
    texts: dict[str, str] = {}
    left: dict[str, Any] = {}
    for written, column in grid.items():
        name = _true_name(str(written))
        is_free = name in fields and name in known and name not in {*values, *texts}
        if is_free and isinstance(column, list) and len(column) > 1:
            text = ", ".join(write_word(known[name], value) for value in column)
            if len(split_values(GivenOption(name, text, ""), known)) == len(column):
                texts[name] = text
                continue
        left[written] = column
    rest = {part: value for part, value in sweep.items() if part != "grid"} | ({"grid": left} if left else {})
    others = {name: value for name, value in values.items() if name != "sweep"}
    return texts, others | ({"sweep": rest} if rest else {})


def _read_jobs(config: RunConfig, allowed: Allowed) -> tuple[Job, ...]:
    """Return a sweep's jobs.

    Raises:
        ConfigError: what they cannot do, or may not, as an error of `sweep`, which is where they are written.
    """
    try:
        jobs = read_jobs(config)
        for job in jobs:
            allowed.check_options(job.options)
        if any(job.config.dataset for job in jobs):  # else it is missing, and not only from some
            check_datasets(jobs)
        return jobs
    except ConfigError as error:
        raise ConfigError(str(error), option="sweep") from error


def _reads_as(option: Option, word: str, value: Any) -> bool:
    try:
        return bool(option.parse(word) == value)
    except ConfigError:
        return False


def _true_name(written: str) -> str:
    written = written.replace("-", "_")
    return ALIASES.get(written, written)


def _find_place(error: ConfigError, texts: Mapping[str, Any], more: Sequence[GivenOption]) -> str:
    """Return the field that an error of the whole form is shown at; "" if its option has none."""
    if error.option in {_true_name(option.name) for option in more}:
        return MORE
    return error.option if error.option is not None and error.option in texts else ""


def _refuse_twice(more: Sequence[GivenOption], given: Mapping[str, Any]) -> None:
    seen: set[str] = set()
    for option in more:
        name = _true_name(option.name)
        if name in given or name == "method":
            raise ConfigError("has its own field", option=option.name, where=option.where, fix="set it there")
        if name in _NOT_HERE:
            raise ConfigError(
                "cannot be set here: a run's folder follows from its name", option=option.name, where=option.where
            )
        if name in seen:
            raise ConfigError("given twice", option=option.name, where=option.where, fix="keep one")
        seen.add(name)
