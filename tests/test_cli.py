"""The command line as a user meets it: exit codes, error lines, --json, suggestions, dry runs, the
full workflow on a small cohort.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small

from bitimely_cli.main import app, main
from bitimely_core import models, workflows
from bitimely_core.errors import UserError

SMALL = ["--set", "model.tokenizer=patch", "--batch-size", "8", "--steps", "4"]


def call(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def loaded(capsys: pytest.CaptureFixture[str], *argv: str | Path, code: int = 0) -> dict[str, Any]:
    found, out, err = call(capsys, *argv, "--json")
    assert found == code, err
    assert out.count("\n") == 1, "stdout holds one JSON object and nothing else"
    return json.loads(out)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic cohort, a pre-trained, a fine-tuned and a from-scratch run, a few steps
    each.
    """
    home = tmp_path_factory.mktemp("workspace")
    w = ["-w", str(home)]
    assert main(["ingest", "synthetic", *w]) == 0
    assert main(["pretrain", "--preset", "tiny", "--data", "synthetic/staging", *SMALL, *w]) == 0
    assert (
        main(
            [
                "finetune",
                "tiny",
                "--data",
                "synthetic/staging",
                "--fraction",
                "1",
                "--batch-size",
                "8",
                "--steps",
                "4",
                *w,
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "finetune",
                "tiny",
                "--data",
                "synthetic/staging",
                "--fraction",
                "1",
                "--batch-size",
                "8",
                "--steps",
                "4",
                "--from-scratch",
                *w,
            ]
        )
        == 0
    )
    return home


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which every verb has run."""
    return small.copy_workspace(tmp_path_factory.mktemp("ready") / "home")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["ingst"], 2, "Did you mean ingest"),
        (["--seed", "list"], 2, "options of a verb after it"),
        (["evaluate", "--vectors", "x" * 300], 2, "names are up to 255 bytes long"),
        (["run", "smoke", "--on", "h1"], 2, "unknown accelerator"),
        (["run", "smoke", "--on", "v100", "--dry-run"], 2, "h100"),
        (["pretrain", "--presett", "tiny"], 2, "--preset"),
        (["ingest", "sleepedf", "x"], 2, "sleep-edf"),
        (["ingest", "."], 2, "Recordings of your own are read by: bitimely ingest generic"),
        (["train", "resnet", "synthetic/staging"], 2, "Data are given as --data"),
        (["train", "resnett", "--data", "synthetic/staging"], 2, "Did you mean resnet"),
        (["pretrain", "--preset", "18mm"], 2, "18m"),
        (["pretrain", "--model", "bitimelygtp"], 2, "bitimelygpt"),
        (["pretrain", "--objective", "next-previos"], 2, "next-previous"),
        (["pretrain", "--set", "train.learning_rtae=1"], 2, "Did you mean lr"),
        (["pretrain", "--set", "lr"], 2, "section.key=value"),
        (["pretrain", "--lr", "nan"], 2, "lr"),
        (["tokenize", "sleep-edf/stagin"], 2, "sleep-edf/staging"),
        (["list", "modles"], 2, "models"),
        (["analyze", "svdd", "x"], 2, "svd"),
        (["analyze", "svd", "x", "--out", __file__], 2, "is no folder"),  # no run is read before
        (["evaluate", "nothing"], 2, "or the folder of a run or export"),
        (["run", "smok"], 2, "smoke"),
        (["ingest", "synthetic", "--shard", "3/2"], 2, "k/n"),
        (["tokenize", "sleep-edf"], 4, "bitimely ingest sleep-edf"),
        (["ingest", "sleep-edf", "/nonexistent/folder"], 2, "folder"),
    ],
)
def test_wrong_input_gets_one_clear_line_and_a_stable_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], code: int, message: str
) -> None:
    found, out, err = call(capsys, *argv, *([] if argv[0] in {"ingst"} else ["-w", tmp_path]))
    assert found == code
    assert message in err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error[")


def test_json_errors_are_objects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    body = loaded(capsys, "evaluate", "nothing", "-w", tmp_path, code=2)
    assert body["exit_code"] == 2
    assert body["error"]["code"] == "unknown_name"


def test_config_names_every_wrong_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cfg.toml"
    path.write_text("learning_rtae = 1e-3\nwindow = -5\nlr = nan\n")
    code, _, err = call(capsys, "pretrain", "--config", path, "-w", tmp_path)
    assert code == 2
    for key in ("learning_rtae", "window", "lr"):
        assert f"cfg.toml:{key}" in err
    assert "pretrain.lr" in err
    yaml = tmp_path / "cfg.yaml"
    yaml.write_text("lr: !!python/object/apply:os.system ['true']\n")
    code, _, err = call(capsys, "pretrain", "--config", yaml, "-w", tmp_path)
    assert code == 2
    assert "cfg.yaml" in err


def test_help_names_every_verb_with_an_example() -> None:
    for name, command in _commands().items():
        assert f"Example: bitimely {name}" in (command.help or ""), name


def _commands() -> dict[str, Any]:
    import typer

    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_list_presets_counts_parameters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = {
        row["name"]: row for row in loaded(capsys, "list", "presets", "-w", tmp_path)["presets"]
    }
    assert list(rows) == ["18m", "7.5m-regression", "7.5m", "3m", "3.8m-ecg", "tiny"]
    for name, paper in (("18m", 17_224_955), ("7.5m", 6_466_740)):
        # closed form for glu blocks and the paper's tokens
        shape = {"preset": name, **models.default_shape(name)}
        of_paper = models.build("bitimelygpt", tokenizer="conv", **shape)
        assert models.count_parameters(of_paper) == paper
        listed = models.count_parameters(models.build("bitimelygpt", **shape))
        assert rows[name]["parameters"] == listed
    assert rows["18m"]["paper_parameters"] == 18_000_000
    assert rows["18m"]["models"]["timelygpt"] == rows["18m"]["parameters"]


@pytest.mark.parametrize(
    "kind", ["datasets", "views", "models", "objectives", "analyses", "pipelines", "runs"]
)
def test_list_answers_for_every_kind(
    capsys: pytest.CaptureFixture[str], ready: Path, kind: str
) -> None:
    assert loaded(capsys, "list", kind, "-w", ready)[kind]


@pytest.mark.parametrize(
    "argv",
    [
        ["ingest", "synthetic"],
        pytest.param(["tokenize", "synthetic"], marks=pytest.mark.slow),
        pytest.param(
            ["pretrain", "--preset", "tiny", "--data", "synthetic/staging", "--run", "never"],
            marks=pytest.mark.slow,
        ),
        ["finetune", "plain", "--data", small.VIEW, "--run", "never"],
        ["evaluate", "tuned"],
        ["embed", "plain", "--data", small.VIEW],
        ["analyze", "svd", "plain"],
        ["report", "tuned"],
        ["run", "smoke"],
        ["demo"],
    ],
)
def test_dry_run_writes_nothing(
    capsys: pytest.CaptureFixture[str], ready: Path, argv: list[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in ready.rglob("*")}
    body = loaded(capsys, *argv, "--dry-run", "-w", ready)
    assert body
    assert {p: p.stat().st_mtime_ns for p in ready.rglob("*")} == before


@pytest.mark.slow
def test_the_full_workflow(capsys: pytest.CaptureFixture[str], workspace: Path) -> None:
    scratch = loaded(
        capsys, "evaluate", "tiny-staging-scratch", "--bootstrap", "50", "-w", workspace
    )
    argv = [
        "evaluate",
        "tiny-staging",
        "--compare",
        "tiny-staging-scratch",
        "--margin",
        "90",
        "--bootstrap",
        "50",
        "-w",
        workspace,
    ]
    scores = loaded(capsys, *argv)
    assert scores["n"] == scratch["n"] > 0
    assert 0 <= scores["metrics"]["accuracy"]["value"] <= 1
    assert scores["baselines"]["majority"]["accuracy"]["value"] > 0
    paired = scores["comparison"]["metrics"]["accuracy"]
    assert paired["difference"] == pytest.approx(
        scores["metrics"]["accuracy"]["value"] - scratch["metrics"]["accuracy"]["value"]
    )
    assert scores["leak_free"] is True
    assert scores["comparison"]["margin"] == pytest.approx(0.9)
    said = scores["comparison"]["sentence"]
    assert "the margin of −90.0 points (given with this comparison)" in said
    assert said in html.unescape(Path(scores["report"]).read_text())
    assert not re.search("inferior|equivalent", said)
    held_out = loaded(capsys, "evaluate", "tiny", "-w", workspace)
    assert held_out["metrics"]["rel"]["value"] > 0
    embedded = loaded(capsys, "embed", "tiny", "--data", "synthetic/staging", "-w", workspace)
    assert embedded["width"] == 64
    assert (paired["unit"], paired["factor"]) == ("points", 100)
    for kind in ("svd", "attention"):
        more = ["--windows", "8"] if kind == "attention" else []
        page = loaded(capsys, "analyze", kind, "tiny", "--sequences", "2", *more, "-w", workspace)
        assert Path(page["report"]).stat().st_size < 1_000_000
    joined = loaded(capsys, "report", "tiny-staging", "tiny-staging-scratch", "-w", workspace)
    assert Path(joined["report"]).is_file()
    assert loaded(capsys, "verify", "-w", workspace)["exit_code"] == 0


def test_a_finished_run_is_left_alone_and_other_settings_are_refused(
    capsys: pytest.CaptureFixture[str], ready: Path
) -> None:
    argv = [*small.VERBS["pretrain"], "-w", ready]
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert "nothing to do" in out
    code, _, err = call(capsys, *argv, "--lr", "0.01")
    assert code == 2
    assert "settings.train.lr" in err
    assert "--force-new" in err


def test_a_damaged_model_is_noticed(capsys: pytest.CaptureFixture[str], ready: Path) -> None:
    path = ready / "runs" / "scratch" / "model" / "model.safetensors"
    original = path.read_bytes()
    path.write_bytes(original[:-4] + bytes(4 * [255]))
    try:
        code, _, err = call(capsys, "verify", "-w", ready)
        assert code == 5
        assert "model.safetensors" in err
        code, _, err = call(capsys, "evaluate", "scratch", "-w", ready)
        assert code == 5
    finally:
        path.write_bytes(original)


@pytest.mark.slow
def test_fine_tuning_on_other_channels_renews_the_adapters_and_says_so(
    capsys: pytest.CaptureFixture[str], workspace: Path
) -> None:
    pretrain = [
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        "synthetic",
        "--run",
        "seven",
        "--set",
        "model.tokenizer=patch",
        "--batch-size",
        "4",
        "--steps",
        "1",
    ]
    assert call(capsys, *pretrain, "-w", workspace)[0] == 0
    code, _, err = call(
        capsys,
        "finetune",
        "seven",
        "--data",
        "synthetic/staging",
        "--batch-size",
        "4",
        "--steps",
        "1",
        "-w",
        workspace,
    )
    assert code == 0
    assert "re-initialised" in err
    assert "of the 9 training subjects" in err or "training subjects" in err


def test_python_m_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bitimely_cli", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("bitimely ")


@pytest.mark.slow
def test_data_sets_of_other_channels_share_a_trunk(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 and 4 channels in the paper; here 7 and 2, of windows of two lengths. The adapter of a
    known data set is kept, another is renewed.
    """
    w = ["-w", str(workspace)]
    names = loaded(capsys, "tokenize", "synthetic", "--name", "whole", "--window", "1000", *w)[
        "channel_names"
    ]
    two = loaded(
        capsys,
        "tokenize",
        "synthetic",
        "--name",
        "two",
        "--channels",
        ",".join(names[:2]),
        "--window",
        "500",
        *w,
    )
    assert (len(names), two["channels"]) == (7, 2)
    run = loaded(
        capsys,
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        "whole",
        "--data",
        "two",
        "--run",
        "mixed",
        *SMALL,
        *w,
    )
    stored = json.loads((workspace / "runs" / "mixed" / "run.json").read_bytes())
    assert (run["steps"], stored["settings"]["model"]["others"]) == (4, [2])
    assert loaded(capsys, "embed", "mixed", "--data", "two", *w)["width"] == 64
    code, _, err = call(capsys, "embed", "mixed", "--data", "synthetic/staging", *w)
    assert code == 2
    assert "1 channel," in err
    assert "7 or 2" in err
    known = loaded(
        capsys,
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        "two",
        "--run",
        "from-mixed",
        "--init",
        "mixed",
        *SMALL,
        *w,
    )
    assert known["steps"] == 4
    loaded(
        capsys,
        "finetune",
        "mixed",
        "--data",
        "synthetic/staging",
        "--steps",
        "2",
        "--batch-size",
        "8",
        *w,
    )
    record = json.loads((workspace / "runs" / "mixed-staging" / "run.json").read_bytes())
    assert record["renewed"]
    assert all(name.startswith("adapter.") for name in record["renewed"]), (
        "exactly the adapter is new"
    )
    assert any(
        "7 and 2 in the pre-training: re-initialised the adapter" in line
        for line in record["notices"]
    )


def test_options_arrive_under_the_names_of_the_library() -> None:
    """0 is a value, a flag that is not given is absent, `--no-verify` is `verify=False`; options
    with callbacks go no further.
    """
    import typer

    from bitimely_cli import claims_options, options

    received: list[dict[str, Any]] = []

    def verb(
        *,
        build: claims_options.ClaimsBuildOptions,
        other: int = 3,
        train: options.TrainOptions,
        start: options.StartOptions,
    ) -> int:
        received.extend([build.collect(), {"other": other}, train.collect(), start.collect()])
        return 0

    verb.__annotations__ |= {
        "build": claims_options.ClaimsBuildOptions,
        "train": options.TrainOptions,
        "start": options.StartOptions,
    }
    build_options = [field.name for field in dataclasses.fields(claims_options.ClaimsBuildOptions)]

    own = typer.Typer()
    own.command()(options.expand_options(verb))
    command = typer.main.get_command(own)
    names = [parameter.name for parameter in command.params]
    assert names[: len(build_options)] == build_options, (
        "options stand where the group stands in the signature"
    )
    assert names.index("other") == len(build_options)
    given = [
        "--top-k",
        "0",
        "--min-codes",
        "0",
        "--seed",
        "0",
        "--no-verify",
        "--resume",
        "--set",
        "a.b=1",
        "-w",
        "here",
    ]
    assert command.main(given, standalone_mode=False) == 0
    assert received == [
        {"top_k": 0, "min_codes": 0},
        {"other": 3},
        {"seed": 0},
        {"assignments": ["a.b=1"], "verify": False, "workspace": Path("here")},
    ]


@pytest.mark.parametrize(
    ("kind", "option", "text", "expected"),
    [
        ("attention", "start", "a", "expected float"),
        ("attention", "stop", "true", "expected float"),
        ("attention", "start", "[1]", "expected float"),
        ("attention", "start", "nan", "at least 0"),
        ("attention", "windows", "-1", "at least 0"),
        ("saliency", "masks", "0", "at least 1"),
        ("probing", "control", "maybe", "expected true or false"),
    ],
)
def test_an_option_of_an_analysis_that_it_cannot_use_is_refused(
    kind: str, option: str, text: str, expected: str
) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        workflows.analyze(kind, ["tiny"], options={option: text}, dry_run=True)
    assert (caught.value.exit_code, caught.value.field) == (2, f"--{option}")


def test_options_of_an_analysis_have_their_types() -> None:
    def parse(kind: str, **options: str) -> dict[str, Any]:
        return workflows.analyze(kind, ["tiny"], options=options, dry_run=True)["options"]

    assert parse("attention", start="1", stop="2.5", windows="0") == {
        "start": 1.0,
        "stop": 2.5,
        "windows": 0,
    }
    assert [parse("probing", control=text)["control"] for text in ("on", "True", "off", "no")] == [
        True,
        True,
        False,
        False,
    ]


def test_help_of_ingest_shows_the_options_of_the_named_data_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(*words: str) -> set[str]:
        assert main([*words, "--help"]) == 0
        return set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", capsys.readouterr().out, flags=re.M))

    recordings, claims, ptb = shown("ingest"), shown("ingest", "pophr"), shown("ingest", "ptb-xl")
    assert len(recordings) <= 25
    assert {"--map", "--rate", "--size"} <= recordings
    assert not recordings & {"--phecode-map", "--leakage"}
    assert {"--phecode-map", "--leakage", "--jobs"} <= claims
    assert "--rate" in ptb
    assert not ptb & {"--map", "--size"}
    assert "--task" in shown("tokenize", "pophr") - shown("tokenize", "sleep-edf")
