"""Options: TRL's, read from its source; values, parsed by type; YAML files and command lines.

Nothing here imports torch, transformers or TRL, so that a mistake in an option is reported at once. One parser serves
the command line and YAML, where every plain value is read as text first: `no`, `2e-4` and `007` mean what the option's
type says, not what YAML 1.1 makes of them.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from .bounds import TRAINER_BOUNDS, Bounds

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
COMMAND_LINE = "command line"

# The files that declare TRL's configuration classes, the classes that these inherit from, and the enumerations of both.
_SOURCES = {
    "trl": ("trainer/*_config.py",),
    "transformers": ("training_args.py", "trainer_utils.py", "debug_utils.py"),
}

_KIND_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": 'a mapping such as {"key": "value"}',
    "none": "null",
}


@dataclass(frozen=True)
class Option:
    """One option: its name, the kinds of value it takes (keys of `_KIND_NAMES`), its choices and limits if it has any.

    `default` and `help` are as they stand in the source of TRL or transformers, for people to read.
    """

    name: str
    kinds: frozenset[str]
    element_kind: str | None = None
    choices: tuple[str, ...] = ()
    default: str = ""
    help: str = ""
    bounds: Bounds = Bounds()

    @classmethod
    def from_annotation(cls, name: str, annotation: str, classes: Mapping[str, ast.ClassDef] | None = None) -> Option:
        """Return the option that an annotation in a source file declares.

        Args:
            classes: those that the annotation may name, of which enumerations of strings are choices.
        """
        kinds: set[str] = set()
        choices: list[str] = []
        element_kind = None
        for part in _flatten_union(ast.parse(annotation, mode="eval").body):
            head = part.value if isinstance(part, ast.Subscript) else part
            head_name = head.id.lower() if isinstance(head, ast.Name) else ""
            if isinstance(part, ast.Constant) and part.value is None:
                kinds.add("none")
            elif head_name == "literal" and isinstance(part, ast.Subscript):
                values = ast.literal_eval(part.slice)
                for value in values if isinstance(values, tuple) else (values,):
                    kinds.add(type(value).__name__)
                    choices += [value] if isinstance(value, str) else []
            elif head_name in _KIND_NAMES:
                kinds.add(head_name)
                if head_name == "list" and isinstance(part, ast.Subscript):
                    element_kind = ast.unparse(part.slice)
            elif isinstance(part, ast.Name) and classes and part.id in classes:
                members = _read_enum(classes[part.id])
                kinds |= {"str"} if members else set()
                choices += members
        if element_kind not in ("str", "int", "float"):
            element_kind = None
        return cls(name, frozenset(kinds), element_kind, tuple(choices))

    @property
    def expected(self) -> str:
        """The values that the option takes, in words."""
        if self.choices:
            names = [f"'{choice}'" for choice in self.choices]
            names += [_KIND_NAMES[kind] for kind in ("bool", "none") if kind in self.kinds]
            return "one of " + ", ".join(names)
        kinds = self.kinds - {"int"} if "float" in self.kinds else self.kinds
        limits = f" {self.bounds}" if str(self.bounds) else ""
        words = (
            text + (limits if kind in ("int", "float") else "") for kind, text in _KIND_NAMES.items() if kind in kinds
        )
        return " or ".join(words) or "a Python object"

    def parse(self, value: Any, where: str = "") -> Any:
        """Return `value`, given as text or already typed, as this option's type.

        Args:
            value: Text from a command line or YAML, or a Python value.
            where: The file and line, or the like, for the error.

        Raises:
            ConfigError: The value is of another type, not among the choices, or beyond the limits.
        """
        try:
            parsed = self._parse_text(value) if isinstance(value, str) else self._check_typed(value)
            if isinstance(parsed, int | float) and not isinstance(parsed, bool) and not self.bounds.admit(parsed):
                value = parsed
                raise ValueError(parsed)
            return parsed
        except ValueError:
            is_bare = value is True and where == COMMAND_LINE
            found = "no value" if is_bare else "nothing" if value is None else repr(value)
            nearest = difflib.get_close_matches(str(value), self.choices, n=1)
            fix = f"did you mean '{nearest[0]}'?" if nearest else None
            raise ConfigError(option=self.name, expected=self.expected, found=found, where=where, fix=fix) from None

    def _parse_text(self, written: str) -> Any:
        text = written.strip()
        word = text.lower()
        if self.choices and text in self.choices:
            return text
        # "none" is a value of some text options (`report_to`), "null" of none.
        if "none" in self.kinds and (word == "null" or (word == "none" and "str" not in self.kinds)):
            return None
        if "bool" in self.kinds and (word not in ("0", "1") or not self.kinds & {"int", "float", "str"}):
            if word in TRUE_WORDS:
                return True
            if word in FALSE_WORDS:
                return False
        if self.kinds & {"int", "float"} and re.fullmatch(r"[-+]?\d+", text):
            return int(text)
        if "float" in self.kinds and (number := _to_float(text)) is not None:
            return number
        if text[:1] in ("[", "{") and self.kinds & {"list", "dict"}:
            found = _load_flow(text)
            if isinstance(found, list | dict):
                return self._check_typed(found)
        if "list" in self.kinds and "," in text and ("str" not in self.kinds or re.fullmatch(r"[\w.\-/,\s]+", text)):
            return self._check_typed([part.strip() for part in text.split(",") if part.strip()])
        if "str" in self.kinds and not self.choices:
            return written
        if "list" in self.kinds and text:
            return self._check_typed([text])
        raise ValueError(text)

    def _check_typed(self, value: Any) -> Any:
        kind = {type(None): "none", bool: "bool", int: "int", float: "float", dict: "dict"}.get(type(value), "")
        if isinstance(value, list | tuple) and "list" in self.kinds:
            return [self._parse_element(element) for element in value]
        if kind in self.kinds or (kind == "int" and "float" in self.kinds):
            return value
        raise ValueError(value)

    def _parse_element(self, element: Any) -> Any:
        if self.element_kind is None:
            return element
        return Option(self.name, frozenset({self.element_kind})).parse(element)


@dataclass(frozen=True)
class GivenOption:
    """An option as the user wrote it, and where, and where nested values are by the keys to them."""

    name: str
    value: Any
    where: str
    places: dict[tuple[str | int, ...], str] = field(default_factory=dict)


@functools.cache
def read_trainer_options(config_class: str = "SFTConfig") -> dict[str, Option]:
    """Return every option of a configuration class of the installed TRL, with those it inherits from transformers.

    They are read from the packages' source, which takes 0.1 s where importing the packages takes many seconds.

    Raises:
        ConfigError: A package is missing, or its source is not where it was.
    """
    classes = _read_classes()
    options: dict[str, Option] = {}
    for ancestor in reversed(_find_ancestry(config_class, classes)):
        for statement in ancestor.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                if not name.startswith("_"):
                    option = Option.from_annotation(name, ast.unparse(statement.annotation), classes)
                    bounds = TRAINER_BOUNDS.get(name, option.bounds)
                    options[name] = replace(option, bounds=bounds, **_read_field(statement.value))
    return options


@functools.cache
def _read_classes() -> dict[str, ast.ClassDef]:
    """Return the classes that `_SOURCES` declare, by name."""
    classes: dict[str, ast.ClassDef] = {}
    for package, patterns in _SOURCES.items():
        for path in (path for pattern in patterns for path in sorted(_find_package(package).glob(pattern))):
            try:
                module = ast.parse(path.read_text(encoding="utf-8"))
            except OSError as error:
                raise ConfigError(
                    f"cannot be read: {error.strerror}", where=path, fix=f"install {package} again"
                ) from error
            classes |= {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    return classes


def _find_ancestry(name: str, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and the classes that it inherits from, nearest first."""
    if name not in classes:
        raise ConfigError(
            f"the installed versions of trl and transformers have no class {name} where it is expected",
            fix="install the versions that lorashard supports",
        )
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id != "object"]
    return [classes[name], *(ancestor for base in bases for ancestor in _find_ancestry(base, classes))]


def _read_enum(node: ast.ClassDef) -> list[str]:
    """Return the values of an enumeration of strings; of another class nothing."""
    values = [statement.value for statement in node.body if isinstance(statement, ast.Assign)]
    return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def _read_field(value: ast.expr | None) -> dict[str, Any]:
    """Return the default and the help that a dataclass's field is declared with."""
    if not isinstance(value, ast.Call):
        return {"default": ast.unparse(value)} if value else {}
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    declared = {"default": ast.unparse(keywords["default"])} if "default" in keywords else {}
    metadata = keywords.get("metadata")
    for key, text in zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ():
        if isinstance(key, ast.Constant) and key.value == "help" and isinstance(text, ast.Constant):
            declared["help"] = str(text.value)
    return declared


def _find_package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the package {name} is not installed", fix=f"pip install {name}")
    return Path(spec.origin).parent


def _flatten_union(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _flatten_union(node.left) + _flatten_union(node.right)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Optional":
            return [*_flatten_union(node.slice), ast.Constant(None)]
        if node.value.id == "Union" and isinstance(node.slice, ast.Tuple):
            return [part for element in node.slice.elts for part in _flatten_union(element)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _flatten_union(ast.parse(node.value, mode="eval").body)
    return [node]


def _to_float(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number


class _PlainLoader(yaml.SafeLoader):
    """YAML 1.2's core types: `no` and `2024-01-01` are text, `2e-4` is a number."""

    yaml_implicit_resolvers = {
        None: [
            ("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)\Z")),
            ("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")),
            ("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")),
            ("tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")),
        ]
    }


def _load_flow(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_PlainLoader)  # noqa: S506  a SafeLoader with fewer types
    except yaml.YAMLError:
        return None


def read_yaml_options(path: Path, option: str = "config") -> list[GivenOption]:
    """Return the options of a flat YAML file, plain values as text; an empty file gives none.

    Args:
        path: The file.
        option: The one that names it, for errors.

    Raises:
        ConfigError: The file is missing, not YAML, not a mapping, or names an option twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot be read: {reason}", option=option, where=path) from error
    return parse_yaml_options(text, str(path))


def parse_yaml_options(text: str, path: str) -> list[GivenOption]:
    """Return the options of flat YAML, as `read_yaml_options` does.

    Args:
        text: The YAML.
        path: Its name in errors.

    Raises:
        ConfigError: It is not YAML, not a mapping, or names an option twice.
    """
    loader = _PlainLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(where=path, expected="lines of `option: value`", found=_describe_node(root))
        _refuse_duplicates(root, path)
        given = []
        for key, node in root.value:
            is_plain = isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null"
            value = node.value if is_plain else loader.construct_object(node, deep=True)
            where = f"{path}, line {key.start_mark.line + 1}"
            given.append(GivenOption(key.value, value, where, dict(_find_places(node, path))))
        return given
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"not valid YAML: {error.problem}", where=f"{path}{line}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {str(error).splitlines()[0]}", where=path) from error
    finally:
        loader.dispose()


def _find_places(node: yaml.Node, path: str, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, str]]:
    """Yield the keys that lead to each value inside a node, with the file and line of the value."""
    pairs: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(key.value, key, value) for key, value in node.value]
    if isinstance(node, yaml.SequenceNode):
        pairs = [(i, value, value) for i, value in enumerate(node.value)]
    for key, named, value in pairs:
        yield (*keys, key), f"{path}, line {named.start_mark.line + 1}"
        yield from _find_places(value, path, (*keys, key))


def _describe_node(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"the text {node.value[:40]!r}"


def _refuse_duplicates(node: yaml.Node, path: str) -> None:
    children = [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    where=f"{path}, line {line}", expected="the name of an option", found=_describe_node(key)
                )
            if key.value in lines:
                raise ConfigError(
                    f"given twice, first in line {lines[key.value]}", option=key.value, where=f"{path}, line {line}"
                )
            lines[key.value] = line
    for child in children:
        _refuse_duplicates(child, path)


def read_command_line(tokens: Sequence[str]) -> list[GivenOption]:
    """Return the options of a command line: `--key value`, `--key=value`, `--key a b c` and bare `--flag` (true).

    Raises:
        ConfigError: A word that belongs to no option.
    """
    given: list[tuple[str, list[str]]] = []
    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token[2:].partition("=")
            given.append((name, [value] if equals else []))
        elif re.match(r"-[A-Za-z]", token) or not given:
            raise ConfigError(where=COMMAND_LINE, expected="an option such as --learning_rate 2e-4", found=f"'{token}'")
        else:
            given[-1][1].append(token)
    return [GivenOption(name, _join_words(words), COMMAND_LINE) for name, words in given]


def _join_words(words: list[str]) -> Any:
    if not words:
        return True
    return words[0] if len(words) == 1 else words


def find_nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that `name` is probably a misspelling of, if any is near; first one of the same letters."""
    nearest = difflib.get_close_matches(name, list(names), n=3)
    swapped = [one for one in nearest if sorted(one) == sorted(name)]
    return next(iter([*swapped, *nearest]), None)


@functools.cache
def read_own_options(cls: type[BaseModel]) -> dict[str, Option]:
    """Return the options that the fields of a class declare, inherited ones included."""
    own = {}
    for owner in reversed(cls.__mro__):
        for name, annotation in owner.__dict__.get("__annotations__", {}).items():
            if name in cls.model_fields:
                bounds = Bounds.of_field(cls.model_fields[name].metadata)
                own[name] = replace(Option.from_annotation(name, annotation), bounds=bounds)
    return own


def to_config_error(error: ValidationError) -> ConfigError:
    """Return pydantic's first complaint about an option as an error of ours."""
    problem = error.errors()[0]
    if problem["type"] == "missing":
        return ConfigError("has to be given", option=str(problem["loc"][0]), fix=f"give --{problem['loc'][0]}")
    reason = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return ConfigError(reason)
    name = str(problem["loc"][0])  # the rest of the path is pydantic's own names of a union's members
    expected = reason.removeprefix("Input should be ")
    if expected != reason:
        return ConfigError(option=name, expected=expected, found=repr(problem["input"]))
    return ConfigError(f"{reason[:1].lower()}{reason[1:]}", option=name, found=repr(problem["input"]))
