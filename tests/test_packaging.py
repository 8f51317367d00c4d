"""What comes with the code: the citation, the image, the schema of recipes."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import bitimely

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402

SCHEMA = ROOT / "docs" / "recipe.schema.json"


def test_the_citation_has_what_its_format_requires() -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found.keys() >= {"cff-version", "message", "title", "authors"}, (
        "required by Citation File Format 1.2.0"
    )
    assert found["cff-version"] == "1.2.0"
    assert (found["title"], found["version"]) == ("bitimely", bitimely.__version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (found["license"], found["keywords"]) == (project["license"], project["keywords"])
    assert found["type"] in {"software", "dataset"}
    for authors in (found["authors"], *(one["authors"] for one in found["references"])):
        assert authors
        assert all(
            author.keys() <= {"name"} or author.keys() == {"family-names", "given-names"}
            for author in authors
        )
    for one in found["references"]:
        assert one.keys() >= {"authors", "title", "type"}


def read_instructions() -> list[tuple[str, list[str]]]:
    """The Dockerfile as instructions and their words."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], shlex.split(line)[1:]) for line in text.splitlines() if line.strip()]


def test_the_image_copies_what_is_there_and_runs_as_a_user() -> None:
    steps = read_instructions()
    assert {name for name, _ in steps} == {
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "ENTRYPOINT",
        "CMD",
    }
    copied = [
        word
        for name, words in steps
        if name == "COPY" and not words[0].startswith("--from")
        for word in words[:-1]
    ]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {
        *project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
        "pipelines",
        project["project"]["readme"],
        "constraints.txt",
    }
    assert needed | {"pyproject.toml", *project["project"]["license-files"]} == set(copied)
    assert [words for name, words in steps if name == "USER"] == [["bitimely"]]
    last = [name for name, _ in steps]
    assert last.index("USER") > max(i for i, name in enumerate(last) if name == "RUN")
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", steps[0][1][0])
    assert version is not None
    assert f"Programming Language :: Python :: {version[1]}" in project["project"]["classifiers"]


def test_the_image_is_installed_by_the_commands_of_the_readme() -> None:
    readme, docker = (ROOT / "README.md").read_text(), (ROOT / "Dockerfile").read_text()
    by_hand = re.search(r"By hand: `(.*?)`", readme, flags=re.S)
    assert by_hand is not None
    for command in ("python3 -m venv", "pip install", "-c constraints.txt"):
        assert command in by_hand[1], command
        assert command in docker, command
    assert docker.splitlines()[0].endswith(build := "docker build -t bitimely .")
    assert build in readme
    entry = [words for name, words in read_instructions() if name == "ENTRYPOINT"]
    assert entry == [["[bitimely]"]]
    assert "bitimely" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def list_faults(recipe: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return [
        f"{'.'.join(map(str, fault.absolute_path))}: {fault.message}"
        for fault in jsonschema.Draft202012Validator(schema).iter_errors(recipe)
    ]


def test_the_schema_is_that_of_the_code() -> None:
    assert SCHEMA.read_text() == generate.format_recipe_schema(), "run: python docs/generate.py"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "pipelines").glob("*.toml")), ids=lambda path: path.stem
)
def test_shipped_recipes_fit_the_schema(path: Path) -> None:
    assert list_faults(tomllib.loads(path.read_text())) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[pretrain]\nepohcs = 1", "pretrain: "),
        ("[pretrain]\nepochs = -1", "pretrain.epochs: "),
        ("[finetune]\nfraction = 1.5", "finetune.fraction: "),
        ("[evaluate]\nsplit = 'all'", "evaluate.split: "),
        ("[[analyze]]\nof = 'pretrain'", "analyze.0: 'kind' is a required"),
        ("[[arm]]\nmodel = 'gpt'", "arm.0: 'name' is a required"),
        ("[ingest]\ndatasets = 'synthetic'", "ingest.datasets: "),
        ("folds = [11]", "folds.0: "),
        ("finetun = 1", ": "),
    ],
)
def test_a_wrong_recipe_does_not_fit_the_schema(text: str, where: str) -> None:
    faults = list_faults(tomllib.loads(text))
    assert len(faults) == 1
    assert faults[0].startswith(where), faults
