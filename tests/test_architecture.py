"""The shape of the tree: who imports whom, what --help costs, that nothing runs code from a file,
that the wheel is complete.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = sorted((ROOT / "bitimely_core").rglob("*.py"))
SOURCES = [
    *CORE,
    *sorted((ROOT / "bitimely_cli").rglob("*.py")),
    *sorted((ROOT / "bitimely").rglob("*.py")),
]
HEAVY = {"torch", "polars", "pyarrow", "mne", "sklearn", "pandas", "scipy", "matplotlib"}


def test_no_two_modules_have_one_name() -> None:
    names = [path.stem for path in SOURCES if not path.stem.startswith("__")]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


def test_imports_follow_the_contracts() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["list", "datasets"], ["pretrain", "--help"]])
def test_help_and_lists_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom bitimely_cli.main import main\n"
        f"code = main({arguments!r})\nassert code == 0, code\nprint(sorted(m for m in {sorted(HEAVY)!r} if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("registry", "name", "room"),
    [
        ("datasets", "sleep-edf", "datasets"),
        pytest.param("models", "inceptiontime", "zoo", marks=pytest.mark.slow),
        ("methods", "features", "methods"),
        pytest.param("analyses", "saliency", "insight", marks=pytest.mark.slow),
        ("data_kinds", "recordings", "claims"),
    ],
)
def test_a_name_imports_only_the_module_that_has_it(registry: str, name: str, room: str) -> None:
    code = (
        f"import sys\nfrom bitimely_core.registry import {registry} as names\n"
        f"names[{name!r}]\n"
        f"print([m for m in sys.modules if m.startswith('bitimely_core.{room}.')])\n"
        f"assert {name!r} in list(names) and len(names) > 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    members = {path.stem for path in (ROOT / "bitimely_core" / room).glob("*.py")}
    imported = {
        module.rpartition(".")[2] for module in ast.literal_eval(done.stdout.splitlines()[-1])
    }
    assert len(imported & members) <= len(members) / 2, imported


def test_the_library_is_imported_on_first_use() -> None:
    code = f"import sys, bitimely\nassert not {sorted(HEAVY)!r} or not set({sorted(HEAVY)!r}) & set(sys.modules)\nprint(bitimely.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists_and_is_that_of_the_library() -> None:
    import importlib

    import bitimely

    assert set(dir(bitimely)) == set(bitimely.__all__)
    assert {*bitimely.MODULES, *bitimely.SOURCES, "__version__"} == set(bitimely.__all__)
    for name, (module, source) in bitimely.SOURCES.items():
        assert getattr(bitimely, name) is getattr(importlib.import_module(module), source)
    with pytest.raises(AttributeError, match="no_such_name"):
        bitimely.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_runs_code_from_a_file(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in {
                "eval",
                "exec",
                "pickle.load",
                "pickle.loads",
                "torch.load",
                "yaml.load",
                "marshal.loads",
            }, f"{name} at line {node.lineno}"
            assert not any(
                k.arg == "shell" and getattr(k.value, "value", None) is True for k in node.keywords
            ), f"shell=True at line {node.lineno}"


@pytest.mark.parametrize("path", CORE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_core_neither_prints_nor_exits(path: Path) -> None:
    calls = {
        ast.unparse(n.func)
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Call)
    }
    assert not calls & {"print", "sys.exit", "exit"}


@pytest.mark.slow
def test_every_module_has_a_docstring() -> None:
    bare = [
        p.relative_to(ROOT).as_posix()
        for p in SOURCES
        if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert bare == []


def test_every_member_registers_something_with_help() -> None:
    from bitimely_core import registry

    kinds = ["datasets", "models", "objectives", "augmentations", "analyses"]
    for book in (getattr(registry, kind) for kind in kinds):
        assert book
        assert all(entry.help for entry in book.values())


@pytest.mark.slow
def test_the_wheel_and_the_sdist_hold_both_packages_and_the_recipes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    recipes = {
        p.relative_to(ROOT / "pipelines").as_posix() for p in (ROOT / "pipelines").rglob("*.toml")
    }
    assert {f"bitimely_core/pipelines/{r}" for r in recipes} <= set(names)
    assert {p.relative_to(ROOT).as_posix() for p in SOURCES} <= set(names)
    assert any(n.endswith(".html.j2") for n in names)
    assert not any(n.startswith("tests/") for n in names)
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    where = "import bitimely_core.registry as r, bitimely_core; print(r.RECIPES)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(target)!r}]; {where}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert found.stdout.strip() == str(target / "bitimely_core" / "pipelines"), found.stderr


def test_versions_in_constraints_satisfy_the_project() -> None:
    import tomllib

    from packaging.requirements import Requirement

    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    pins = {re.sub(r"[-_.]+", "-", k).lower(): v.strip() for k, v in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        need = Requirement(text)
        pin = pins.get(re.sub(r"[-_.]+", "-", need.name).lower())
        assert pin is None or need.specifier.contains(pin, prereleases=True), text
