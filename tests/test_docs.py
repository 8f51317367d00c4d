"""Documentation that cannot drift: verbs, links, the command line reference, recipes, examples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
sys.path.insert(0, str(ROOT / "docs"))
import api  # noqa: E402
import datasets  # noqa: E402
import generate  # noqa: E402
import settings  # noqa: E402

from bitimely_core import catalog  # noqa: E402


def commands() -> dict[str, Any]:
    import typer

    from bitimely_cli.main import app

    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_every_verb_is_in_the_readme() -> None:
    assert [
        name for name in commands() if not re.search(rf"(?:bitimely|make) {name}\b", README)
    ] == []


def test_the_command_line_reference_is_what_typer_says() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == generate.format_command_line(), (
        "run: python docs/generate.py"
    )


@pytest.mark.slow
def test_stored_listings_are_those_of_the_code() -> None:
    assert catalog.LISTINGS.read_text() == catalog.format_listings(), "run: python docs/generate.py"


@pytest.mark.slow
def test_generated_files_are_those_of_the_checkout_of_the_script(tmp_path: Path) -> None:
    for name in ("docs", "bitimely", "bitimely_cli", "bitimely_core", "pipelines"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import generate; print(generate.catalog.LISTINGS, generate.api.PAGE)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "docs")],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == [
        str(tmp_path / "bitimely_core" / "listings.json"),
        str(tmp_path / "docs" / "api.md"),
    ]


def test_the_page_of_the_data_sets_is_what_the_registry_says() -> None:
    assert datasets.PAGE.read_text() == datasets.format_page(datasets.read_tables()), (
        "run: python docs/generate.py"
    )
    assert "| `emg` of emg | 0 | 204 |" in datasets.read_tables()


def test_the_page_of_the_api_is_what_the_package_exports() -> None:
    assert api.PAGE.read_text() == api.format_page(), "run: python docs/generate.py"


def test_the_page_of_settings_is_what_the_code_says() -> None:
    assert settings.PAGE.read_text() == settings.format_page(), "run: python docs/generate.py"


def test_every_setting_of_a_component_is_on_its_page() -> None:
    """A model's own settings, and those of its objectives, on the page of the model; nothing is
    declared without words.
    """
    from bitimely_core import registry

    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "models").glob("*.md")}
    pages |= dict.fromkeys(("timelygpt", "timelybert", "gpt", "gpt-baar"), pages["bitimelygpt"])
    pages |= dict.fromkeys(
        ("lstm", "lstm-baar", "bilstm", "elmo"), pages["recurrent"] + pages["bitimelygpt"]
    )
    pages["mtand-enc"] = pages["mtand"]
    pages |= dict.fromkeys(("resnet", "inceptiontime"), pages["networks"])
    missing = []
    for title, rows in settings.list_sections().items():
        missing += [key for key, row in rows if not row.split("|")[-2].strip()]
        kind, _, names = title.partition(": ")
        for name in names.split(", ") if names and names != "all" else ():
            owners = (
                [name]
                if kind == "Models"
                else [
                    model
                    for model, entry in registry.models.items()
                    if entry.facts.objective == name
                ]
            )
            missing += [
                (o, key)
                for key, _ in rows
                for o in owners
                if not re.search(rf"\b{re.escape(key.split('.')[-1])}\b", pages[o])
            ]
    missing += [
        key for key, _ in settings.list_sections()["Models: all"] if key not in pages["bitimelygpt"]
    ]
    assert missing == []


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        # made at build
        assert (
            target.startswith("https://")
            or (path.parent / target).exists()
            or target == "gallery/index.md"
        ), target
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
        headings = re.findall(
            r"^#+ (.*)", (path.parent / target if target else path).read_text(), flags=re.M
        )
        assert anchor in {
            re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            for heading in headings
        }, anchor


def test_the_page_of_data_sets_says_nothing_twice() -> None:
    lines = [
        line
        for line in datasets.PAGE.read_text().splitlines()
        if len(line) > 60 and line[0] not in "|*"
    ]
    assert [line[:60] for line in dict.fromkeys(lines) if lines.count(line) > 1] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_in_the_docs_exist_and_so_do_their_options(path: Path) -> None:
    known = commands()
    code = "\n".join(re.findall(r"^```\w*\n(.*?)^```", path.read_text(), flags=re.M | re.S))
    for line in re.findall(r"^(?:\$ )?bitimely ([^#\n]+)", code, flags=re.M):
        words = line.split(" | ")[0].split()  # what comes after a pipe is no option of bitimely
        verb = known[words[0]]
        options = {name for parameter in verb.params for name in parameter.opts}
        for word in words[1:]:
            if word.startswith("-") and words[0] != "analyze":
                assert word.split("=")[0] in options | {"--help"}, line


@pytest.mark.parametrize("path", sorted((ROOT / "pipelines").rglob("*.toml")), ids=lambda p: p.stem)
def test_recipes_and_presets_parse(path: Path) -> None:
    from bitimely_core import registry
    from bitimely_core.config import (
        TrainConfig,
        build_model_config,
        list_presets,
        load_preset,
        validate,
    )
    from bitimely_core.recipe import load_recipe

    if path.parent.name == "presets":
        shipped = load_preset(path.stem)
        sections = {entry.facts.family for entry in registry.models.values()} & shipped.keys()
        assert sections >= {"retention", "attention", "recurrent"}
        for model, entry in registry.models.items():
            if entry.facts.family in sections:
                build_model_config(model, path.stem)
        for stage in ("train", "finetune"):
            validate(TrainConfig, shipped[stage])
        return
    recipe = load_recipe(path)
    assert recipe.title
    assert all(model in registry.models for model in recipe.matrix.get("model", ()))
    assert not recipe.pretrain.preset or recipe.pretrain.preset in list_presets()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert len(path.read_text().splitlines()) <= 65


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_hold_the_outputs_of_all_cells_in_order(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), (
        "run: python docs/notebooks.py"
    )
    assert all(cell["outputs"] for cell in cells[:-1])
    assert len(path.read_bytes()) < 40_000


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    code = "import sys, nbformat, notebooks; from pathlib import Path; print(nbformat.writes(notebooks.run_notebook(Path(sys.argv[1]), Path())))"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'docs'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [
        out for cell in cells for out in cell.get("outputs", ()) if out.get("name") == "stderr"
    ] == [], "a warning"

    def list_outputs(text: str) -> list[list[str]]:
        return [
            [one["output_type"] for one in cell.get("outputs", ())]
            for cell in json.loads(text)["cells"]
        ]

    assert list_outputs(done.stdout) == list_outputs(path.read_text()), (
        "run: python docs/notebooks.py"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S))
    assert code.count("\n") <= 13
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout


READ_WHOLE = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "results.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
LONGEST_SENTENCE = 30  # words


def split_sentences(text: str) -> list[str]:
    """The sentences of a Markdown text, without code. A cell of a table and a point of a list are
    texts of their own.
    """
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.|#+|\|)\s?)|\|", text)
    return [
        " ".join(sentence.split())
        for block in blocks
        for sentence in re.split(r"(?<=[.?!])\s+|(?<=[:;])\s+", block)
    ]


@pytest.mark.parametrize("page", READ_WHOLE, ids=lambda path: path.name)
def test_sentences_are_short(page: Path) -> None:
    counts = {
        sentence: len(re.findall(r"\S*\w\S*", sentence))
        for sentence in split_sentences(page.read_text())
    }
    assert {text: n for text, n in counts.items() if n > LONGEST_SENTENCE} == {}


def test_sentences_of_help_are_short() -> None:
    long = [
        sentence
        for command in commands().values()
        for text in [command.help or "", *(getattr(p, "help", "") or "" for p in command.params)]
        for sentence in split_sentences(text)
        if len(sentence.split()) > LONGEST_SENTENCE
    ]
    assert long == []


def test_the_map_for_contributors_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = re.findall(r"`((?:bitimely|docs|pipelines|tests|benchmarks|examples)[\w/.-]*)`", text)
    assert [place for place in places if not (ROOT / place).exists()] == []
    rooms = {path.parent.name for path in (ROOT / "bitimely_core").glob("*/__init__.py")}
    assert {room for room in rooms if f"{room}/" not in text} == set()
