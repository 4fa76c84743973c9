"""What the project as a whole promises: its versions, its wheel, and which files may name what."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.privates import find_uses, find_uses_in
from mutants.mistakes import MUTANTS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lorashard

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# torch's CUDA build brings these, in versions of its own choice; its CPU build does not.
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")
# Tests that use private names of ours, each with the reason why no public way shows what it asks; thirty at most.
# `python tests/helpers/privates.py` lists what is found in all of `tests`, as `file::function: names`.
PRIVATES = {
    "tests/e2e/launch/test_hang.py::SITECUSTOMIZE": "makes tokenizing slow inside of a run's own process",
    "tests/unit/runs/test_folder.py::test_a_plan_that_cannot_be_made_ends_no_run": "only a whole training shows it too",
}
STORE = {"torch.distributed"}  # whose PrefixStore is no collective
ELASTIC_LAUNCHER = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def find_required() -> dict[str, list[Requirement]]:
    """Return what the project and its extras dev and ui need, directly or not, as the installed packages state it."""
    required: dict[str, list[Requirement]] = {}
    optional = PROJECT["optional-dependencies"]
    waiting = [Requirement(line) for line in PROJECT["dependencies"] + optional["dev"] + optional["ui"]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name.startswith(CUDA_PACKAGES):
            continue
        if name not in required:
            for line in importlib.metadata.requires(name) or []:
                needed = Requirement(line)
                extras = requirement.extras or {""}
                if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                    waiting.append(needed)
        required.setdefault(name, []).append(requirement)
    return required


def find_imports(source: str) -> set[str]:
    """Return the dotted names that the source imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def find_distributed_names(source: str) -> set[str]:
    """Return the dotted names below torch.distributed, or its C++ side, that the source imports or uses."""
    names = find_imports(source)
    names.update(ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return {name for name in names if re.match(r"torch\.(distributed|ops\._?c10d|_C\._distributed)", name)}


def find_project_files() -> list[Path]:
    folders = ["lorashard", "ui", "tests", "docs", "configs", "examples", "benchmarks", ".ci"]
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in paths if not {"__pycache__", "runs"} & set(path.relative_to(ROOT).parts)]


def test_version_is_one() -> None:
    """Catches a release whose package, metadata and pyproject.toml name different versions."""
    assert importlib.metadata.version("lorashard") == PROJECT["version"]
    assert getattr(lorashard, "__version__", PROJECT["version"]) == PROJECT["version"]


def test_constraints_pin_everything_that_is_installed_for_the_tests() -> None:
    """Catches a dependency that was added without a pin, or a pin that pyproject.toml's bounds exclude."""
    pins = read_pins()
    required = find_required()
    assert sorted(required.keys() - pins.keys()) == []
    excluded = [
        f"{requirement} excludes {pins[name]}"
        for name, requirements in required.items()
        for requirement in requirements
        if not requirement.specifier.contains(pins[name], prereleases=True)
    ]
    assert excluded == []


def test_no_pin_names_a_build_of_one_kind_of_machine() -> None:
    """Catches `torch==2.13.0+cpu` from a plain `pip freeze`: no machine with a GPU could install it."""
    assert [f"{name}=={version}" for name, version in read_pins().items() if "+" in version] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    """Catches a command, record or log pasted with the path of the checkout or of somebody's home folder."""
    places = [re.escape(str(place)) for place in (ROOT, Path.home()) if place != Path("/")]
    machine_path = re.compile(rf"(?<![\w./-])(?:{'|'.join(places)}|/(?:home|Users)/\w+)(?=/)".encode())
    found = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in find_project_files()
        if (match := machine_path.search(path.read_bytes()))
    ]
    assert found == []


def test_only_dist_names_collectives() -> None:
    """Catches another file that talks to torch.distributed; two may name the elastic launcher, no more."""
    found = {}
    for path in [*(ROOT / "lorashard").rglob("*.py"), *(ROOT / "ui").rglob("*.py")]:
        file = path.relative_to(ROOT).as_posix()
        names = find_distributed_names(path.read_text())
        if file in ("lorashard/launch/elastic.py", "lorashard/runtime/failures.py"):
            names = {name for name in names if not name.startswith(ELASTIC_LAUNCHER)}
        if file == "lorashard/runtime/rank_store.py":
            names -= STORE
        if names and file not in ("lorashard/runtime/dist.py", "lorashard/runtime/shared_groups.py"):
            found[file] = sorted(names)
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ntorch.distributed.barrier()",
        "import torch\ntorch.ops._c10d_functional.all_gather_into_tensor",
    ],
)
def test_every_way_of_naming_collectives_is_seen(source: str) -> None:
    """Catches a check that looks for one spelling and lets the others through."""
    assert find_distributed_names(source)


def test_wheel_holds_every_python_file_and_recipe(tmp_path: Path) -> None:
    """Catches a subpackage, `ui` or `configs` left out of the wheel: an editable install would not show it."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for folder in ("lorashard", "ui", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path.relative_to(source).as_posix() for path in source.glob("*/**/*.py")}

    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True, text=True)

    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    recipes = {f"lorashard_ui/recipes/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert recipes and recipes == {name for name in names if name.endswith(".yaml")}
    packed = {name for name in names if name.endswith(".py")}
    assert packed == {re.sub("^ui/", "lorashard_ui/", file) for file in files}


def test_tests_ask_through_the_public_way() -> None:
    """Catches a test that is bound to a private name, and an entry that is no longer needed or has no reason."""
    found = find_uses("tests")
    assert {place: names for place, names in found.items() if place not in PRIVATES} == {}
    assert sorted(PRIVATES.keys() - found.keys()) == []
    assert all(PRIVATES.values()) and len(PRIVATES) <= 10


@pytest.mark.parametrize(
    "source",
    [
        "from lorashard.runtime.disk import _lost",
        "def test(): disk._lost(1)",
        "def test(): monkeypatch.setattr(disk, '_lost', None)",
        "def test(): monkeypatch.setattr('lorashard.runtime.disk._LIMIT', 1)",
        'SCRIPT = """\nfrom lorashard import disk\ndisk._LIMIT = 1\n"""',
    ],
)
def test_every_way_of_naming_privates_is_seen(source: str) -> None:
    """Catches a check that looks for one spelling and lets the others through, or one that sees them everywhere."""
    own = {"_lost", "_LIMIT"}
    assert len(find_uses_in(source, own)) == 1
    assert find_uses_in(source.replace("_lost", "lost").replace("_LIMIT", "LIMIT"), own) == {}


def test_tests_share_helpers_alone_and_lie_in_folders() -> None:
    """Catches a test file that imports another, which runs its tests twice, and one that lies in no area's folder."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    stems = {path.stem for path in files}
    sources = {path.name: find_imports(path.read_text()) for path in files}
    assert {
        name for name, imported in sources.items() if any(stems & set(word.split(".")) for word in imported)
    } == set()
    loose = {path.name for folder in ("unit", "distributed") for path in (ROOT / "tests" / folder).glob("test_*.py")}
    assert loose == {"test_cli.py", "test_errors.py", "test_pairwise.py", "test_project.py"}, (
        "of the project as a whole are these alone"
    )


def test_what_is_patched_on_models_is_in_one_table() -> None:
    """A method that is replaced somewhere in the package, which whoever wonders about it has to search for."""
    folder = ROOT / "lorashard/model"
    table = (folder / "patches.py").read_text(encoding="utf-8").partition('"""\n\n')[0]
    names = "__class__|forward|prepare_data_loader|_attn_implementation_internal"
    patching = re.compile(rf"(?<!def )(?:wrap_method|extend_classes)\(|\.(?:{names}) = ")
    files = {path.name for path in folder.glob("*.py") if patching.search(path.read_text(encoding="utf-8"))}
    assert files - {"patches.py"} == set(re.findall(r"`(\w+\.py)` \|", table))


def test_each_promise_names_a_test_that_exists() -> None:
    """A promise whose test was renamed or deleted is kept by nobody."""
    documents = [(ROOT / "docs" / name).read_text() for name in ("reliability.md", "ui.md")]
    named = [pair for document in documents for pair in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document)]
    assert len(named) > 40
    assert [f"{path}::{test}" for path, test in named if f"\ndef {test}(" not in (ROOT / path).read_text()] == []


def test_each_picture_that_is_shown_is_there() -> None:
    """Catches a picture that was never made, and a page of the web UI of which one width is missing."""
    shown = [
        (document, document.parent / picture)
        for document in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
        for picture in re.findall(r"\]\((?!https?:)([^)\s]+\.(?:png|svg))\)", document.read_text(encoding="utf-8"))
    ]
    assert [f"{document.name}: {path.name}" for document, path in shown if not path.is_file()] == []
    light = [path.stem for path in ROOT.glob("docs/img/*.png") if not path.stem.endswith("-dark")]
    pages = {stem.rpartition("-")[0] for stem in light}
    assert {path.name for _, path in shown} >= {f"{page}-{width}.png" for page in pages for width in ("wide", "phone")}


def test_each_mistake_can_still_be_made() -> None:
    """A mistake of tests/mutants whose line has changed, or whose tests are gone, shows nothing any more."""
    for name, mutant in MUTANTS.items():
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, f"{name}: its line is not in {mutant.file}"
        files = [word for word in mutant.tests if word.endswith(".py")]
        assert files and all((ROOT / file).is_file() for file in files), f"{name}: not all of {files} are there"
