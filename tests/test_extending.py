"""A model, an objective, a data set and an analysis, each added as one file of another package and
driven through the command line; what such a file gets wrong.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitimely_cli.main import main
from bitimely_core import models, registry
from bitimely_core.schemas.runs import RunRecord

MODEL = '''
"""A model with a setting of its own and no declared capabilities."""
import torch
from pydantic import Field
from torch import nn

from bitimely_core.config import ModelConfig
from bitimely_core.models import Model
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Encoded


class MineConfig(ModelConfig):
    """Settings."""

    my_setting: int = Field(1, ge=1, le=5, description="Convolutions.")


class Mine(Model):
    """Convolutions over tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.mix = nn.ModuleList(nn.Conv1d(config.dim, config.dim, 3, padding=1) for _ in range(config.my_setting))

    def forward(self, batch, *, directions=None, hide=None, attention=False):
        """Tokens, targets and states of a batch."""
        batch, adapter = self.expand_channels(batch), self.adapter_of(batch)
        tokens, targets, real = adapter.tokenizer(batch)
        x = adapter.embed(tokens).transpose(1, 2)
        for conv in self.mix:
            x = torch.relu(conv(x))
        return Encoded(tokens, targets, real, (x.transpose(1, 2),))


@models(ModelFacts(config=MineConfig, family="mine", objective="masked", readout="mean"))
def mine(config):
    """Mine: convolutions."""
    return Mine(config)
'''

OBJECTIVE = '''
"""An objective with a setting of its own."""
from pydantic import Field

from bitimely_core.config import ObjectiveConfig
from bitimely_core.objectives import LossPart, make_result
from bitimely_core.registry import ObjectiveFacts, objectives


class MineObjectiveConfig(ObjectiveConfig):
    """Settings."""

    factor: float = Field(1.0, gt=0, description="Factor of the target.")


@objectives(ObjectiveFacts(leak_free=None, config=MineObjectiveConfig), name="mine")
def mine_objective(model, batch, generator=None, *, config):
    """Autoencoder of scaled tokens."""
    encoded = model(batch)
    target, valid = model.targets(batch)
    return make_result(model, batch, [LossPart("copy", model.output(encoded.hidden[-1], batch=batch), config.factor * target, valid)])
'''

DATASET = '''
"""A data set."""
from functools import partial

import numpy as np

from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import Annotation, IngestUnit, Record, Signal

STATES = {"slow": "slow", "fast": "fast"}
VIEW = View(channels=("A",), rate=100.0, window=200, task="classification", classes=("slow", "fast"), labels=STATES, epoch=2.0)


def read(number):
    """Twenty seconds of one subject."""
    time = np.arange(1000) / 100
    samples = np.concatenate([np.sin(6 * np.pi * time), np.sin(16 * np.pi * time)]) * 100 + np.random.default_rng(number).normal(0, 20, 2000)
    notes = [Annotation(0, 10, "slow"), Annotation(10, 10, "fast")]
    signal = Signal("A", 100.0, "uV", samples.round().astype(np.int16), 0.1)
    return Record(recording_id=f"r{number}", subject_id=f"s{number}", signals=[signal], annotations=notes)


@datasets(DatasetFacts(title="Mine", views={"": VIEW}, licence="CC0", url="", download="", paper={}, rules={}, needs_source=False))
def mine(source, options):
    """Ten subjects with two sines each."""
    yield from (IngestUnit(name=f"r{n}", files=(), read=partial(read, n)) for n in range(10))
'''

ANALYSIS = '''
"""An analysis."""
from bitimely_core.page import PageBuilder
from bitimely_core.registry import AnalysisFacts, analyses


@analyses(AnalysisFacts(takes="runs"))
def mine(runs, *, my_option: int = 1, seed=0):
    """The number of parameters, times my_option."""
    page = PageBuilder("Mine")
    counts = {run.name: my_option * sum(p.numel() for p in run.model().parameters()) for run in runs}
    return page.finish("Counted.", counts)
'''

FILES = {"model": MODEL, "objective": OBJECTIVE, "dataset": DATASET, "analysis": ANALYSIS}
SMALL = (
    "--preset",
    "tiny",
    "--data",
    "mine",
    "--steps",
    "2",
    "--batch-size",
    "8",
    "--set",
    "model.tokenizer=patch",
)


def write_plugins(folder: Path) -> None:
    """One module a plug-in, and the metadata of a package that names them in the group
    `bitimely.plugins`.
    """
    for kind, text in FILES.items():
        (folder / f"my_{kind}.py").write_text(text)
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines = [f"{kind} = my_{kind}" for kind in FILES]
    (info / "entry_points.txt").write_text("\n".join(["[bitimely.plugins]", *lines, ""]))


def unregister() -> None:
    for book in (registry.models, registry.objectives, registry.datasets, registry.analyses):
        book._items.pop("mine", None)
    for kind in FILES:
        sys.modules.pop(f"my_{kind}", None)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with the ingested data set `mine`; the plug-ins are installed while the module
    runs.
    """
    folder = tmp_path_factory.mktemp("plugins")
    write_plugins(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        workspace = tmp_path_factory.mktemp("home")
        assert main(["ingest", "mine", "-w", str(workspace)]) == 0
        yield workspace
        unregister()


def call(
    capsys: pytest.CaptureFixture[str], home: Path, *argv: str, code: int = 0
) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json", "-w", str(home)]) == code
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def load_record(home: Path, run: str) -> RunRecord:
    return RunRecord.load(home / "runs" / run / "run.json")


@pytest.mark.slow
def test_a_model_with_its_own_setting_is_one_file(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    argv = ("pretrain", "--model", "mine", *SMALL, "--run", "mine", "--set", "model.my_setting=3")
    assert call(capsys, home, *argv)["steps"] == 2
    record = load_record(home, "mine")
    assert (record.format_version, record.leak_free) == (1, True)
    stored = record.to_json()["settings"]
    assert (
        stored["model"]["name"],
        stored["model"]["my_setting"],
        stored["objective"]["ratio"],
    ) == ("mine", 3, 0.4)
    assert not {"top_periods", "decay", "rotary"} & stored["model"].keys()
    config = json.loads((home / "runs" / "mine" / "model" / "config.json").read_text())
    assert (config["format_version"], config["model"]["my_setting"]) == (1, 3)
    model = models.load(home / "runs" / "mine" / "model")
    assert len(model.mix) == 3  # type: ignore[arg-type]
    assert call(capsys, home, *argv)["trained"] is False
    error = call(capsys, home, *argv[:-1], "model.my_setting=2", code=2)["error"]
    assert (error["code"], error["field"]) == ("settings_differ", "settings.model.my_setting")
    tuned = call(
        capsys,
        home,
        "finetune",
        "mine",
        "--data",
        "mine",
        "--steps",
        "1",
        "--fraction",
        "1",
        "--run",
        "tuned",
    )
    assert tuned["steps"] == 1
    scratch = (
        "finetune",
        "mine",
        "--data",
        "mine",
        "--steps",
        "1",
        "--fraction",
        "1",
        "--from-scratch",
        "--run",
        "scratch",
    )
    assert call(capsys, home, *scratch)["steps"] == 1
    assert load_record(home, "scratch").to_json()["settings"]["model"]["my_setting"] == 3
    assert (
        0
        <= call(capsys, home, "evaluate", "tuned", "--bootstrap", "20")["metrics"]["accuracy"][
            "value"
        ]
        <= 1
    )
    assert call(capsys, home, "reproduce", "mine")["reproduced"] is True
    assert call(capsys, home, "export", "mine")["run"] == "mine"
    assert len(models.load(home / "exports" / "mine").mix) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "pair", "hint"),
    [
        ("lstm", "model.top_periods=9", "timesnet"),
        ("lstm", "model.my_setting=3", "mine"),
        ("mine", "model.top_periods=3", "timesnet"),
        ("mine", "model.my_seting=3", "my_setting"),
        ("mine", "objective.factor=2", "mine"),
        ("timesnet", "model.rotary=time", "bitimelygpt"),
    ],
)
def test_a_setting_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], home: Path, model: str, pair: str, hint: str
) -> None:
    error = call(
        capsys,
        home,
        "pretrain",
        "--model",
        model,
        "--preset",
        "tiny",
        "--data",
        "mine",
        "--set",
        pair,
        code=2,
    )["error"]
    assert (error["code"], error["field"]) == ("config", pair.partition("=")[0])
    assert error["message"].count("unknown key") == 1
    assert hint in error["message"].split(". ")[-1]


@pytest.mark.parametrize("value", ["0", "6", "many"])
def test_a_setting_is_checked_by_its_field(
    capsys: pytest.CaptureFixture[str], home: Path, value: str
) -> None:
    argv = (
        "pretrain",
        "--model",
        "mine",
        "--preset",
        "tiny",
        "--data",
        "mine",
        "--set",
        f"model.my_setting={value}",
    )
    error = call(capsys, home, *argv, code=2)["error"]
    assert (error["code"], error["field"]) == ("config", "model.my_setting")


@pytest.mark.parametrize("objective", sorted(registry.objectives))
def test_a_model_without_capabilities_never_ends_in_a_bug(
    capsys: pytest.CaptureFixture[str], home: Path, objective: str
) -> None:
    needs = registry.objectives[objective].facts.requires
    code = 0 if needs == "hidden" and objective != "masked-runs" else 2
    body = call(
        capsys,
        home,
        "pretrain",
        "--model",
        "mine",
        *SMALL,
        "--objective",
        objective,
        "--run",
        f"mine-{objective}",
        code=code,
    )
    assert code == 0 or body["error"]["code"] == "config"


def test_an_objective_with_its_own_setting_is_one_file(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    argv = (
        "pretrain",
        "--model",
        "mine",
        *SMALL,
        "--objective",
        "mine",
        "--run",
        "scaled",
        "--set",
        "objective.factor=2.5",
    )
    assert call(capsys, home, *argv)["steps"] == 2
    assert load_record(home, "scaled").to_json()["settings"]["objective"] == {
        "name": "mine",
        "factor": 2.5,
    }
    assert call(capsys, home, *argv)["trained"] is False
    plain = call(capsys, home, *argv[:-4], "--run", "unscaled")
    assert plain["final"]["loss"] != load_record(home, "scaled").to_json()["final"]["loss"]
    assert (
        call(capsys, home, "pretrain", "--model", "patchtst", *argv[3:-4], "--run", "other")[
            "steps"
        ]
        == 2
    ), "it requires nothing of a model"
    assert call(capsys, home, "evaluate", "scaled")["metrics"]["rel"]["value"] > 0


@pytest.mark.slow
def test_a_data_set_and_an_analysis_are_one_file_each(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    counts = json.loads((home / "cache" / "mine" / "ingest_report.json").read_text())["counts"]
    assert counts["accepted"] == 10
    call(capsys, home, "pretrain", "--model", "mine", *SMALL, "--run", "analyzed")
    call(capsys, home, "analyze", "mine", "analyzed", "--my-option", "3", "--name", "page")
    summary = json.loads((home / "reports" / "page" / "summary.json").read_text())
    assert summary["analyzed"] == 3 * load_record(home, "analyzed").parameters
    listed = [
        item["name"]
        for kind in ("datasets", "models", "analyses")
        for item in call(capsys, home, "list", kind)[kind]
    ]
    assert listed.count("mine") == 3


def test_a_run_of_a_model_that_is_not_installed_can_be_read(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    call(
        capsys,
        home,
        "pretrain",
        "--model",
        "mine",
        *SMALL,
        "--run",
        "orphan",
        "--set",
        "model.my_setting=2",
    )
    entry = registry.models._items.pop("mine")
    try:
        assert load_record(home, "orphan").to_json()["settings"]["model"]["my_setting"] == 2
    finally:
        registry.models._items["mine"] = entry


@pytest.mark.slow
def test_a_fresh_process_finds_the_plug_ins(tmp_path: Path) -> None:
    write_plugins(tmp_path)
    code = "import sys; from bitimely_core.config import validate_settings; s = validate_settings({'model': {'name': 'mine', 'my_setting': 4}})"
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}; print(s.model.my_setting, s.objective.name == '')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["4", "True"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        ("objectives", "models", "datasets", "analyses"),
        pytest.param(("models", "objectives"), marks=pytest.mark.slow),
    ],
)
def test_the_command_line_of_a_fresh_process_lists_the_plug_ins(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    write_plugins(tmp_path)
    code = "from bitimely_cli.main import main; codes = [main(['list', kind, '--json', '-w', 'w']) for kind in sys.argv[1:]]"
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}; sys.exit(max(codes))"
    done = subprocess.run(
        [sys.executable, "-c", program, *kinds], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    listed = [
        {item["name"] for item in json.loads(line)[kind]}
        for kind, line in zip(kinds, done.stdout.splitlines(), strict=True)
    ]
    assert all("mine" in names for names in listed), listed


BROKEN = '''
"""Analyses that return what is no page, or a page that cannot be drawn, and an augmentation."""
from bitimely_core.page import PageBuilder
from bitimely_core.registry import AnalysisFacts, AugmentationFacts, analyses, augmentations


@analyses(AnalysisFacts(takes="runs"))
def unseeded(runs):
    """Lacks an argument."""


@analyses(AnalysisFacts(takes="runs"))
def unfinished(runs, *, seed=0):
    """Returns the builder."""
    return PageBuilder("Mine")


@analyses(AnalysisFacts(takes="runs"))
def undrawn(runs, *, seed=0):
    """Shows what is no figure."""
    page = PageBuilder("Mine")
    page.figure("counts", "Counts", "Of something.", {"a": 1})
    return page.finish("Counted.")


@analyses(AnalysisFacts(takes="runs"))
def listed(runs, *, seed=0):
    """Its verdict is a list."""
    return PageBuilder("Mine").finish(["Counted."])


@augmentations(AugmentationFacts())
def shorten(row, draw, context):
    """Cuts the window."""
    return row._replace(values=row.values[:10])
'''


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["analyze", "unseeded"], "unexpected keyword argument 'seed'"),
        (["analyze", "unfinished"], r"returns PageBuilder, not PageBuilder.finish\(VERDICT\)"),
        (["analyze", "undrawn"], "data of type dict are no kind of figure"),
        (["analyze", "listed"], "verdict Input should be a valid string"),
        (["train", "--augment", "shorten"], r"no LabelledRow with values \[200, 1\]"),
    ],
)
def test_what_a_plug_in_returns_is_refused_with_its_place(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    """The error of a plug-in that is found behind its own lines is no bug of bitimely."""
    install_broken(tmp_path, monkeypatch, BROKEN)
    work = ["-w", str(home)]
    if words[0] == "analyze":
        assert main(["train", "features", "--data", "mine", *work]) == 0
        words = [*words, "features-mine"]
    else:
        words = [words[0], "resnet", "--data", "mine", "--steps", "1", *words[1:]]
    assert main([*words, *work]) == 2
    error = capsys.readouterr().err
    assert re.search(
        rf"the plug-in 'broken\.py:\d+' of the package broken fails: .*{reason}", error
    )
    assert "This is a bug" not in error


@pytest.mark.slow
def test_a_plug_in_cannot_take_a_name_of_bitimely(tmp_path: Path) -> None:
    """In a fresh process, for the names are there once."""
    write_broken(tmp_path, BROKEN.replace("def undrawn", "def svd"))
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    program += "from bitimely_cli.main import main; sys.exit(main(['list', 'analyses']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'broken.py:18' of the package broken fails" in done.stderr
    assert "'svd' is registered twice" in done.stderr


def write_broken(folder: Path, text: str) -> None:
    """The module `broken`, and the metadata of its package."""
    (folder / "broken.py").write_text(text)
    info = folder / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[bitimely.plugins]\nbroken = broken\n")


def install_broken(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The module `broken` as a plug-in of this process, until the test ends."""
    write_broken(folder, text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    for book in (registry.analyses, registry.augmentations):
        monkeypatch.setattr(book, "_items", dict(book._items))
