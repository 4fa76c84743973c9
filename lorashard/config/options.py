"""Names and values of options: read TRL's from its source, parse values, read YAML files and command lines.

Nothing here imports torch, transformers or TRL, so that a mistake in an option is answered at once. One parser serves
the command line and YAML, where every plain value is taken as text first: `no`, `2e-4` and `007` mean what the option's
type says, not what YAML 1.1 makes of them.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from ..errors import ConfigError

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
COMMAND_LINE = "command line"

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
    """One option: its name, the kinds of value it takes (keys of `_KIND_NAMES`), and its values where they are few.

    `default` and `help` are as they stand in the source of TRL or transformers, for people to read.
    """

    name: str
    kinds: frozenset[str]
    element_kind: str | None = None
    choices: tuple[str, ...] = ()
    default: str = ""
    help: str = ""

    @classmethod
    def from_annotation(cls, name: str, annotation: str, reader: _SourceReader | None = None) -> Option:
        """Read an option's type from its annotation as it stands in the source."""
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
            elif isinstance(part, ast.Name) and reader is not None:
                enum_values = reader.read_enum(part.id)
                kinds |= {"str"} if enum_values else set()
                choices += enum_values
        if element_kind not in ("str", "int", "float"):
            element_kind = None
        return cls(name, frozenset(kinds), element_kind, tuple(choices))

    @property
    def expected(self) -> str:
        """What to tell a person who gave something else."""
        if self.choices:
            names = [f"'{choice}'" for choice in self.choices]
            names += [_KIND_NAMES[kind] for kind in ("bool", "none") if kind in self.kinds]
            return "one of " + ", ".join(names)
        kinds = self.kinds - {"int"} if "float" in self.kinds else self.kinds
        return " or ".join(text for kind, text in _KIND_NAMES.items() if kind in kinds) or "a Python object"

    def parse(self, value: Any, where: str = "") -> Any:
        """Return `value`, given as text or already typed, as this option's type.

        Args:
            value: Text from a command line or YAML, or a Python value.
            where: The file and line, or the like, for the error.

        Raises:
            ConfigError: The value is of another type or not among the choices.
        """
        try:
            return self._parse_text(value) if isinstance(value, str) else self._check_typed(value)
        except ValueError:
            is_bare = value is True and where == COMMAND_LINE
            found = "no value" if is_bare else "nothing" if value is None else repr(value)
            nearest = difflib.get_close_matches(str(value), self.choices, n=1)
            hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
            place = f" ({where})" if where else ""
            raise ConfigError(f"{self.name}: expected {self.expected}, found {found}{place}{hint}") from None

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
    """An option as somebody wrote it."""

    name: str
    value: Any
    where: str


@functools.cache
def read_trainer_options(config_class: str = "SFTConfig") -> dict[str, Option]:
    """Return every option of a configuration class of the installed TRL, with those it inherits from transformers.

    They are read from the packages' source, which takes 0.05 s where importing them takes many seconds.

    Raises:
        ConfigError: A package is missing, or its source is not where it was.
    """
    reader = _SourceReader()
    path, node = reader.find_class(_find_package("trl") / "trainer" / "__init__.py", config_class)
    options: dict[str, Option] = {}
    for ancestor_path, ancestor in reversed(reader.find_ancestry(path, node)):
        reader.current_path = ancestor_path
        for statement in ancestor.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                if not name.startswith("_"):
                    option = Option.from_annotation(name, ast.unparse(statement.annotation), reader)
                    options[name] = replace(option, **_read_field(statement.value))
    return options


def _read_field(value: ast.expr | None) -> dict[str, Any]:
    """Return the default and the help that a dataclass's field is declared with."""
    if not isinstance(value, ast.Call):
        return {"default": ast.unparse(value)} if value else {}
    said: dict[str, str] = {}
    for keyword in value.keywords:
        if keyword.arg == "default":
            said["default"] = ast.unparse(keyword.value)
        elif keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
            for key, text in zip(keyword.value.keys, keyword.value.values, strict=True):
                is_help = isinstance(key, ast.Constant) and key.value == "help"
                if is_help and isinstance(text, ast.Constant):
                    said["help"] = str(text.value)
    return said


class _SourceReader:
    """Finds classes in source files and follows their imports; each file is parsed once."""

    def __init__(self) -> None:
        self._modules: dict[Path, ast.Module] = {}
        self.current_path = Path()

    def find_class(self, path: Path, name: str) -> tuple[Path, ast.ClassDef]:
        module = self._parse(path)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return path, node
        for statement in ast.walk(module):
            if isinstance(statement, ast.ImportFrom) and name in [a.asname or a.name for a in statement.names]:
                source = self._locate(path, statement)
                if source is not None:
                    return self.find_class(source, name)
        raise ConfigError(f"class {name} was not found from {path}: this version of its package is not supported")

    def find_ancestry(self, path: Path, node: ast.ClassDef) -> list[tuple[Path, ast.ClassDef]]:
        """Return a class and its bases, nearest first."""
        ancestry = [(path, node)]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id != "object":
                ancestry += self.find_ancestry(*self.find_class(path, base.id))
        return ancestry

    def read_enum(self, name: str) -> list[str]:
        """Return the values of an enumeration of strings that the current file defines or imports, else nothing."""
        try:
            _, node = self.find_class(self.current_path, name)
        except ConfigError:
            return []
        values = [statement.value for statement in node.body if isinstance(statement, ast.Assign)]
        return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]

    def _parse(self, path: Path) -> ast.Module:
        if path not in self._modules:
            try:
                self._modules[path] = ast.parse(path.read_text(encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}; is its package whole?") from error
        return self._modules[path]

    @staticmethod
    def _locate(path: Path, node: ast.ImportFrom) -> Path | None:
        if node.level:
            target = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        elif node.module == "transformers":  # its front door is lazy, so the name leads no further
            target = _find_package("transformers") / "training_args"
        else:
            return None
        source = target.with_suffix(".py")
        return source if source.is_file() else None


def _find_package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the package {name} is not installed: pip install {name}")
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


def read_yaml_options(path: Path) -> list[GivenOption]:
    """Return the options of a flat YAML file, plain values as text; an empty file gives none.

    Raises:
        ConfigError: The file is missing, not YAML, not a mapping, or names an option twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the configuration file {path} cannot be read: {reason}") from error
    return parse_yaml_options(text, str(path))


def parse_yaml_options(text: str, path: str) -> list[GivenOption]:
    """Return the options of flat YAML, as `read_yaml_options` does.

    Args:
        text: Of the file, or of what stands for one.
        path: Its name in messages.

    Raises:
        ConfigError: It is not YAML, not a mapping, or names an option twice.
    """
    loader = _PlainLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected lines of `option: value`, found {_describe_node(root)}")
        _refuse_duplicates(root, path)
        given = []
        for key, node in root.value:
            is_plain = isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null"
            value = node.value if is_plain else loader.construct_object(node, deep=True)
            given.append(GivenOption(key.value, value, f"{path}, line {key.start_mark.line + 1}"))
        return given
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    finally:
        loader.dispose()


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
                raise ConfigError(f"{path}, line {line}: expected the name of an option, found {_describe_node(key)}")
            if key.value in lines:
                raise ConfigError(
                    f"{path}, line {line}: '{key.value}' is given twice, first in line {lines[key.value]}"
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
            raise ConfigError(f"expected an option such as --learning_rate 2e-4, found '{token}' ({COMMAND_LINE})")
        else:
            given[-1][1].append(token)
    return [GivenOption(name, _join_words(words), COMMAND_LINE) for name, words in given]


def _join_words(words: list[str]) -> Any:
    if not words:
        return True
    return words[0] if len(words) == 1 else words


def find_nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that `name` was probably meant to be, if any is near."""
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return nearest[0] if nearest else None


def read_own_options(cls: type[BaseModel]) -> dict[str, Option]:
    """Return the options that are the fields of a class and of those that it inherits from."""
    own = {}
    for owner in reversed(cls.__mro__):
        for name, annotation in owner.__dict__.get("__annotations__", {}).items():
            if name in cls.model_fields:
                own[name] = Option.from_annotation(name, annotation)
    return own
