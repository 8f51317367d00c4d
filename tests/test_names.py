"""Names and paths that users, recipes, plug-ins and stored records give: what bitimely writes stays
in the workspace.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import small

from bitimely_cli.main import app, main
from bitimely_cli.options import describe_parameter, parse_path
from bitimely_core import registry
from bitimely_core.errors import UserError
from bitimely_core.formats.source import scan_folder
from bitimely_core.store import workspace
from bitimely_core.store.records import write_results

BAD_NAMES = [
    "../../x",
    "..",
    ".",
    "/absent/x",
    "a/b",
    "a\\b",
    ".hidden",
    "-x y",
    "a b",
    "con",
    "NUL.txt",
    "été",
    "a\nb",
    "\x1b[31m",
    "x" * 300,
    "",
]
GOOD_NAMES = ["a", "Run_1", "18m-staging", "0.2", "probing-sos+eos", "x" * 150]
STEPS = ["--steps", "1", "--batch-size", "8", "--set", "model.tokenizer=patch"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a pre-trained run and one that is fine-tuned from it."""
    home = small.copy_data(tmp_path_factory.mktemp("trained") / "workspace")
    assert (
        main(["pretrain", "--preset", "tiny", "--data", small.VIEW, *STEPS, "-w", str(home)]) == 0
    )
    assert (
        main(
            [
                "finetune",
                "tiny",
                "--data",
                small.VIEW,
                "--fraction",
                "1",
                *STEPS[:4],
                "-w",
                str(home),
            ]
        )
        == 0
    )
    return home


@pytest.fixture
def ws(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained`."""
    return Path(shutil.copytree(trained, tmp_path / "outer" / "workspace"))


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(folder)): (p.lstat().st_size, p.lstat().st_mtime_ns)
        for p in folder.rglob("*")
        if not p.is_dir()
    }


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verbs = {
        "--run": (["pretrain"], ["finetune", "tiny", "--data", "synthetic/staging"]),
        "--name": (
            ["tokenize", "synthetic"],
            ["tokenize", "synthetic-claims"],
            ["analyze", "leakage"],
            ["analyze", "shapelets", "--data", "x"],
        ),
    }
    for option, (*calls,) in verbs.items():
        for argv in calls:
            assert main([*argv, f"{option}={name}", "-w", "ws/inner"]) == 2, (argv, name)
            out, err = capsys.readouterr()
            assert out == ""
            assert err.count("\n") == 1
            assert option in err
            assert "For example" in err or not name or not name.isprintable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names_are_kept(name: str, tmp_path: Path) -> None:
    assert workspace.locate_new(tmp_path, "runs", name) == tmp_path / "runs" / name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_the_suggested_name_is_good(name: str) -> None:
    with pytest.raises(UserError) as caught:
        registry.check_name(name, "run", "--run")
    suggested = caught.value.hint.removeprefix("For example --run ")
    assert registry.check_name(suggested, "run") == suggested


@pytest.mark.parametrize("name", ["../../x", "a b", "/x"])
@pytest.mark.parametrize(
    "stage",
    [
        '[[block]]\nname = "{}"',
        '[[arm]]\nname = "{}"',
        '[matrix]\ndevice = ["{}"]\n[tokenize]\nsplit = "{}"',
    ],
)
def test_names_in_recipes_stay_inside(
    stage: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(
        f'[pretrain]\npreset = "tiny"\ndata = "synthetic"\n[finetune]\ndata = "synthetic/staging"\n{stage.replace("{}", name)}\n'
    )
    assert main(["run", "./recipe.toml", "-w", "a/b/ws"]) == 2
    assert "error[config]" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.toml"]


def test_a_recipe_is_named_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my study.toml"
    path.write_text('statistics = ["synthetic"]\n')
    assert main(["run", str(path), "-w", str(tmp_path / "ws")]) == 2
    assert "my-study" in capsys.readouterr().err
    assert not (tmp_path / "ws").exists()


@pytest.mark.parametrize("kind", [registry.datasets, registry.models, registry.analyses])
def test_plug_ins_cannot_register_names_that_leave_the_workspace(
    kind: registry.Registry[Any],
) -> None:
    with pytest.raises(UserError, match="is no name for a"):
        kind(None, name="../../x")(lambda: None)
    assert "../../x" not in kind


def list_path_options() -> list[tuple[str, str]]:
    names = [
        (str(command.name), describe_parameter(parameter))
        for command in app.registered_commands
        for parameter in inspect.signature(command.callback or main).parameters.values()
        if parameter.annotation.__metadata__[0].parser is parse_path
    ]
    assert {
        ("verify", "[PATH]"),
        ("ingest", "--workspace"),
        ("embed", "--out"),
        ("ingest", "--map"),
        ("pretrain", "--init"),
    } <= set(names)
    return names


@pytest.mark.parametrize(("verb", "option"), list_path_options())
@pytest.mark.parametrize("value", ["s3://bucket/ws", "file:///absent/x", ""])
def test_no_path_is_a_url(
    verb: str,
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {
        "ingest": ["pophr"],
        "tokenize": ["synthetic"],
        "list": ["models"],
        "analyze": ["svd"],
        "run": ["smoke"],
    }
    argv = [
        verb,
        *arguments.get(
            verb,
            ["x"]
            if verb in {"finetune", "evaluate", "predict", "embed", "report", "export", "reproduce"}
            else [],
        ),
    ]
    assert main([*argv, value] if not option.startswith("-") else [*argv, option, value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "is a URL" in err or (value == "" and "not empty" in err)
    assert list(tmp_path.iterdir()) == []


def test_the_library_refuses_a_url_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitimely as bt

    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: bt.ingest("synthetic", None, "s3://bucket/ws/cache/synthetic"),
        lambda: bt.ingest("synthetic-claims", None, "s3://bucket/ws/cache/synthetic-claims"),
        lambda: bt.pretrain(run="x", workspace=Path("s3://bucket/ws")),
    ):
        with pytest.raises(UserError, match="is a URL"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["finetune", "reproduce", "export"])
def test_names_in_stored_records_stay_inside(
    ws: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ws / "runs" / "tiny" / "run.json"
    write_results(
        path.parent,
        {
            path.name: json.dumps(
                {**json.loads(path.read_text()), "run": "../../../escaped"}
            ).encode()
        },
    )
    before = list_files(ws.parent.parent)
    more = ["--data", small.VIEW, "--fraction", "1", *STEPS[:4]] if verb == "finetune" else []
    assert main([verb, "tiny", *more, "-w", str(ws)]) == 2
    assert "no name for a" in capsys.readouterr().err
    assert list_files(ws.parent.parent) == before


def test_data_named_in_a_record_is_looked_for_inside(
    ws: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(ws / "tokens" / "generic-classification", ws.parent / "elsewhere")
    path = ws / "runs" / "tiny-classification" / "run.json"
    body = json.loads(path.read_text())
    body["data"][0]["name"] = "../../elsewhere"
    write_results(path.parent, {path.name: json.dumps(body).encode()})
    assert main(["evaluate", "tiny-classification", "-w", str(ws)]) == 2
    assert "unknown" in capsys.readouterr().err


@pytest.mark.parametrize("inner", ["runs/tiny-classification", "runs"])
def test_results_are_not_written_through_links(
    ws: Path, inner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ws.parent / "other"
    shutil.move(ws / inner, target)
    (ws / inner).symlink_to(target, target_is_directory=True)
    before = list_files(target)
    for argv in (
        ["finetune", "tiny", "--data", small.VIEW, "--fraction", "1", *STEPS[:4]],
        ["finetune", "tiny", "--data", small.VIEW, "--fraction", "1", *STEPS[:4], "--force-new"],
        *(
            [["evaluate", "tiny-classification"], ["embed", "tiny-classification"]]
            if inner != "runs"
            else []
        ),
    ):
        assert main([*argv, "-w", str(ws)]) == 2, argv
        assert "link" in capsys.readouterr().err
    assert list_files(target) == before


@pytest.mark.parametrize(
    "inner", ["reports/svd-tiny", "reports", "tokens/t", "cache/synthetic", "exports/tiny"]
)
def test_links_in_the_place_of_folders_are_refused(
    ws: Path, inner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ws.parent / "other"
    target.mkdir()
    (ws / inner).parent.mkdir(exist_ok=True)
    (ws / inner).symlink_to(target, target_is_directory=True)
    calls = {
        "reports": ["analyze", "svd", "tiny"],
        "tokens": ["tokenize", "synthetic", "--name", "t"],
        "cache": ["ingest", "synthetic"],
        "exports": ["export", "tiny"],
    }
    assert main([*calls[inner.partition("/")[0]], "-w", str(ws)]) == 2
    assert "is a link" in capsys.readouterr().err
    assert list(target.iterdir()) == []


def write_recordings(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        (folder / f"r{number}.csv").write_text(
            "time,ppg\n" + "".join(f"{i / 10},{i % 7}\n" for i in range(50))
        )
    (folder / "id.key").write_text("a file of the study with a name that bitimely also uses")
    (folder / "cache").mkdir()
    (folder / "cache" / "kept.csv").write_text("time,ppg\n0,1\n")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param("complete", marks=pytest.mark.slow),
        *("no locks", "unfinished", "linked", "linked folders", "linked files"),
    ],
)
def test_a_workspace_below_a_source_is_no_source(trained: Path, tmp_path: Path, state: str) -> None:
    root = tmp_path / "study"
    write_recordings(root)
    expected = scan_folder(root).files
    assert len(expected) == 4
    for at, home in enumerate((trained, small.find_workspace())):
        place = tmp_path / "outside" if state.startswith("linked") else root
        copy = Path(shutil.copytree(home, place / f"w{at}" / "inner"))
        if state == "no locks":
            for path in copy.rglob(".lock"):
                path.unlink()
        if state == "unfinished":
            for path in [*copy.rglob("manifest.json"), *copy.rglob("ingest_report.json")]:
                path.unlink()
        if state == "linked":
            (root / f"l{at}").symlink_to(copy)
        if state == "linked folders":
            for kind in copy.iterdir():
                # which nobody links by themselves
                if kind.name not in {".index.json", ".notices.json"}:
                    (root / f"l{at}-{kind.name}").symlink_to(kind)
        if state == "linked files":
            for number, path in enumerate(
                p for p in copy.rglob("*") if p.is_file() and p.parent != copy
            ):
                (root / f"f{at}-{number}.csv").symlink_to(path)
    assert scan_folder(root, follow_symlinks=True).files == expected
    if not state.startswith("linked"):
        assert not scan_folder(root).rejected


@pytest.mark.slow
def test_ingest_reads_the_same_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, raw = tmp_path / "map.csv", tmp_path / "raw"
    table.write_text("icd9,phecode\n" + "".join(f"250.0{i},250.2\n" for i in range(4)))
    raw.mkdir()
    monkeypatch.chdir(raw)
    (raw / "claims.csv").write_text(
        "patient_id,date,icd9\n"
        + "".join(f"p{i % 9},2001-0{1 + i % 8}-11,250.0{i % 4}\n" for i in range(90))
    )
    found = []
    for home in ("workspace", ".", "deep/er", "workspace"):
        assert main(
            [
                "ingest",
                "pophr",
                ".",
                "--phecode-map",
                str(table),
                "--no-select",
                "--rules",
                "none",
                "--min-codes",
                "1",
                "-w",
                home,
                "--json",
            ]
        ) in {0, 3}
        report = json.loads(capsys.readouterr().out)
        found.append(
            (report["source"]["files"], report["source"]["bytes"], report["source"]["sha256"])
        )
    assert len(set(found)) == 1, found
    assert found[0][0] == 1


def test_no_reader_lists_folders_itself() -> None:
    """All readers get the files of a source from `scan_folder`, which leaves the folders of
    bitimely out.
    """
    core = Path(workspace.__file__).parent
    for package in ("datasets", "formats", "claims/sources"):
        for path in (core / package).rglob("*.py"):
            if path.name != "source.py":
                assert not re.search(
                    r"\b(rglob|glob|iterdir|os\.walk|scandir|listdir)\(", path.read_text()
                ), path


@pytest.mark.slow
def test_advised_commands_go_on(ws: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a message says to run or to add is accepted, and then the refused command runs."""

    def call(*argv: str) -> tuple[int, str]:
        code = main([*argv, "-w", str(ws)])
        return code, capsys.readouterr().err

    scratch = [
        "finetune",
        "tiny",
        "--data",
        small.VIEW,
        "--fraction",
        "1",
        *STEPS[:4],
        "--from-scratch",
    ]
    assert call(*scratch)[0] == 0
    compared = [
        "evaluate",
        "tiny-classification",
        "--compare",
        "tiny-classification-scratch",
        "--bootstrap",
        "10",
    ]
    code, err = call(*compared)
    assert code == 4
    advised = re.search(r"Run: bitimely ([^.]*)\.", err)
    assert advised is not None, err
    assert call(*advised[1].split(), "--bootstrap", "10")[0] == 0
    assert call(*compared)[0] == 0
    changed = ["pretrain", "--preset", "tiny", "--data", small.VIEW, *STEPS, "--lr", "0.01"]
    code, err = call(*changed)
    assert code == 2
    assert "--run NAME" in err
    assert "--force-new" in err
    assert call(*changed, "--run", "other")[0] == 0
    assert call(*changed, "--force-new")[0] == 0
    code, err = call("pretrain", "--run", "a b", "--preset", "tiny", "--data", small.VIEW, *STEPS)
    assert code == 2
    better = re.search(r"For example (--run \S+)\.", err)
    assert better is not None, err
    assert (
        call("pretrain", *better[1].split(), "--preset", "tiny", "--data", small.VIEW, *STEPS)[0]
        == 0
    )


@pytest.mark.parametrize(
    ("inner", "more"),
    [
        *((one, []) for one in ("checkpoints", "model", ".lock")),
        *((one, ["--force-new"]) for one in ("checkpoints", ".lock")),
    ],
)
def test_parts_of_a_run_that_are_links_change_nothing_outside(
    ws: Path, inner: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = ws / "runs" / "tiny", ws.parent / "other"
    if not (run / inner).exists():
        (run / inner).touch()
    shutil.move(run / inner, target)
    (run / inner).symlink_to(target, target_is_directory=target.is_dir())
    if target.is_dir():
        for name in ("step-7.tmp", "model.safetensors.tmp-1-00000000"):
            (target / name).mkdir()
            (target / name / "precious").touch()
        (target / "x.tmp-1-00000000").touch()
    before = list_files(target) if target.is_dir() else target.read_bytes()
    for argv in (["pretrain", "--preset", "tiny", "--data", small.VIEW, *STEPS, *more], ["verify"]):
        assert main([*argv, "-w", str(ws)]) in {0, 2, 4, 5}, capsys.readouterr().err
    assert (list_files(target) if target.is_dir() else target.read_bytes()) == before
