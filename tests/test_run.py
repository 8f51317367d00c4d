"""Class Run and the records of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import small

import bitimely
from bitimely_core import tokens, workflows
from bitimely_core.config import (
    PLACES,
    RENAMED,
    FinetuneConfig,
    Settings,
    TrainConfig,
    place_options,
)
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.run import Run, hash_subjects, mark_subject
from bitimely_core.schemas.ingest_records import IngestReport
from bitimely_core.schemas.reports import Summary
from bitimely_core.schemas.runs import CheckpointMeta, RunRecord, TrainSubjects, TrialRecord
from bitimely_core.schemas.scores import Scores
from bitimely_core.schemas.tokens import Calibration, Preprocessing
from bitimely_core.store import storage
from bitimely_core.store.records import ResultManifest, StoredRecord, write_results
from bitimely_core.text_paths import accept_texts
from bitimely_core.tokens.channel_maps import parse_map
from bitimely_core.types import SPLITS

RECORDS: dict[str, type[StoredRecord]] = {
    "run.json": RunRecord,
    "meta.json": CheckpointMeta,
    "train_subjects.json": TrainSubjects,
    "trial.json": TrialRecord,
    "preprocessing.json": Preprocessing,
    "calibration.json": Calibration,
    "scores.json": Scores,
    "summary.json": Summary,
    "ingest_report.json": IngestReport,
    "results.json": ResultManifest,
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return small.copy_workspace(tmp_path / "home")


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_written_byte_for_byte_as_they_were_read(name: str) -> None:
    paths = sorted(small.find_workspace().rglob(name))
    assert paths
    for path in paths:
        record = RECORDS[name].load(path)
        assert record.encode() == path.read_bytes(), path
        assert record.format_version == 1
        assert isinstance(record, IngestReport | Summary) or not record.model_extra


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(
    ("version", "code"), [(2, 4), (None, 5), (0, 5), ("1", 5), (1.0, 5), (True, 5)]
)
def test_a_record_of_another_format_is_refused(
    tmp_path: Path, name: str, version: object, code: int
) -> None:
    body = json.loads(next(small.find_workspace().rglob(name)).read_bytes())
    body = (
        {**body, "format_version": version}
        if version is not None
        else {key: body[key] for key in body if key != "format_version"}
    )
    with pytest.raises(UserError) as refused:
        RECORDS[name].parse(body, tmp_path / name)
    assert (int(refused.value.exit_code), refused.value.file) == (code, str(tmp_path / name))
    assert "expected 1" in refused.value.finding.line()


@pytest.mark.parametrize("name", ["run.json", "scores.json", "summary.json"])
def test_a_result_without_the_manifest_of_its_folder_is_refused(home: Path, name: str) -> None:
    folder = home / "runs" / "tuned"
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json") as refused:
        RECORDS[name].load(folder / name)
    assert refused.value.exit_code == Exit.INTEGRITY


def test_a_pretraining_has_a_model_and_no_head(home: Path) -> None:
    run = Run.open("plain", home)
    assert (run.name, run.data, run.record.is_finetuned, run.record.channels) == (
        "plain",
        "generic-classification",
        False,
        (2,),
    )
    assert run.head() is None
    assert run.model() is run.model()
    assert not run.model().training
    assert len(run.windows()) == 30
    assert run.scores is not None
    assert run.scores.run == "plain"


def test_a_fine_tuning_holds_its_backbone_in_its_head(home: Path) -> None:
    run = Run.open(home / "runs" / "tuned", home)
    head = run.head()
    assert head is not None
    assert run.model() is head.model
    assert run.require_finished() is run


def test_an_unfinished_run_is_refused(home: Path) -> None:
    with pytest.raises(UserError) as refused:
        Run.open("unfinished", home).require_finished()
    assert (refused.value.code, refused.value.exit_code) == (Reason.INCOMPLETE, Exit.REFUSED)


def test_damaged_weights_are_refused(home: Path) -> None:
    path = home / "runs" / "plain" / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError) as refused:
        Run.open("plain", home).model()
    assert (refused.value.code, refused.value.file) == (Reason.INTEGRITY, str(path))


def test_a_record_without_its_fields_is_refused_by_field(home: Path) -> None:
    path = home / "runs" / "plain" / "run.json"
    body = json.loads(path.read_bytes())
    body["settings"]["train"]["lr"] = "fast"
    write_results(path.parent, {path.name: storage.encode_json(body)})
    with pytest.raises(UserError) as refused:
        Run.open("plain", home)
    assert (refused.value.exit_code, refused.value.field) == (Exit.INTEGRITY, "settings.train.lr")


def test_subjects_of_the_training_are_counted_and_refused_in_a_held_out_split(home: Path) -> None:
    run = Run.open("plain", home)
    assert run.count_shared_subjects("test") == 0
    test = hash_subjects([tokens.open_tokens(home / "tokens" / run.data)], "test")
    write_results(
        run.folder, {"train_subjects.json": TrainSubjects(marks=tuple(test[:3])).encode()}
    )
    run = Run.open("plain", home)
    assert run.count_shared_subjects("train") == 0
    with pytest.raises(UserError, match="3 subjects") as refused:
        run.count_shared_subjects("test")
    assert refused.value.code == Reason.SUBJECT_LEAKAGE
    windows = tokens.open_tokens(home / "tokens" / run.data)
    named = {s for s in windows["test"].subjects() if f"'{s}'" in refused.value.problem}
    assert set(hash_subjects([windows], "test")[:3]) == {
        mark_subject(windows.dataset, subject) for subject in named
    }


VERBS_WITH_TEXTS: dict[str, Callable[[str], object]] = {
    "evaluate": lambda home: bitimely.evaluate("tuned", workspace=home, dry_run=True),
    "report": lambda home: bitimely.report("tuned", workspace=home, out=f"{home}/page"),
    "analyze": lambda home: bitimely.analyze("svd", "tuned", workspace=home, dry_run=True),
    "predict": lambda home: bitimely.predict("tuned", f"{home}/raw", workspace=home, dry_run=True),
    "tokenize": lambda home: bitimely.tokenize("generic", workspace=home, dry_run=True),
    "dashboard": lambda home: bitimely.dashboard(workspace=home, dry_run=True),
    "export": lambda home: bitimely.export("tuned", workspace=home, out=f"{home}/out"),
    "embed": lambda home: bitimely.embed("tuned", workspace=home, dry_run=True),
    "reproduce": lambda home: bitimely.reproduce("tuned", workspace=home, dry_run=True),
    "run": lambda home: bitimely.run("smoke", workspace=home, dry_run=True),
    "verify": lambda home: bitimely.verify(workspace=home),
    "from_pretrained": lambda home: bitimely.from_pretrained("tuned", workspace=home),
    "open": lambda home: bitimely.Run.open("tuned", home),
}


@pytest.mark.parametrize("name", VERBS_WITH_TEXTS)
def test_the_library_takes_texts_for_paths(home: Path, name: str) -> None:
    VERBS_WITH_TEXTS[name](str(home))


def test_lists_without_a_file_or_a_run_are_refused(home: Path) -> None:
    """As of a pattern that finds nothing."""
    with pytest.raises(UserError, match="expected recordings, folders of them or a cache"):
        bitimely.predict("tuned", [], workspace=home)
    with pytest.raises(UserError, match="expected at least one RUN"):
        bitimely.report([], workspace=home)


def test_texts_become_paths_wherever_they_stand() -> None:
    def verb(
        run: str | Path, out: Path | None, files: Sequence[Path] = (), *, workspace: Path = Path()
    ) -> tuple[object, ...]:
        return run, out, files, workspace

    wrapped: Any = accept_texts(verb)
    assert wrapped("run", "a/b", ["c"], workspace="d") == (
        "run",
        Path("a/b"),
        [Path("c")],
        Path("d"),
    )
    assert wrapped("run", None, "c") == ("run", None, [Path("c")], Path())
    assert wrapped("run", None) == ("run", None, (), Path())
    with pytest.raises(TypeError, match="positional"):
        wrapped("run", None, (), "one too many")
    assert wrapped.__name__ == "verb"


@pytest.mark.parametrize("name", ["map", "channel_map"])
def test_an_option_has_its_name_on_the_command_line_in_python(name: str) -> None:
    def predict(run: str, *, channel_map: object = (), **options: object) -> tuple[object, object]:
        return channel_map, options

    wrapped: Any = accept_texts(predict)
    assert wrapped("run", **{name: {"EEG": "C3"}}, at=1) == ({"EEG": "C3"}, {"at": 1})


@pytest.mark.parametrize("items", ["EEG=C3", ["EEG=C3"], {"EEG": "C3"}])
def test_channels_are_mapped_by_a_text_a_list_or_a_dict(items: Any) -> None:
    assert parse_map(items, ["EEG"]).list_names("EEG") == ("C3", "EEG")


def test_the_command_after_an_export_quotes_its_folder(home: Path) -> None:
    out = home / "my exports"
    result = bitimely.export("tuned", workspace=home, out=out, dry_run=True)
    assert result["next"] == f"bitimely predict '{out}' FILES"


def test_options_of_the_command_line_are_arguments_in_python(home: Path) -> None:
    options = {"steps": 7, "lr": 3e-3, "class_weights": "balanced", "fraction": 0.5, "tune": None}
    assert place_options(options) == {
        "train": {"steps": 7, "lr": 3e-3},
        "finetune": {"class_weights": "balanced"},
        "data": {"fraction": 0.5},
    }
    plan = workflows.train("resnet", data=small.VIEW, workspace=home, dry_run=True, **options)
    assert plan["steps"] == 7


@pytest.mark.parametrize("name", ["step", "readout"])
def test_an_option_that_a_pretraining_does_not_have_is_named(home: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"unknown option of a training '{name}'"):
        workflows.pretrain(small.VIEW, workspace=home, **{name: 5})


def test_no_option_of_a_training_stands_for_two_settings() -> None:
    fields = [*TrainConfig.model_fields, *FinetuneConfig.model_fields, *RENAMED]
    assert len(fields) == len(set(fields))
    settings = Settings().model_dump()
    for section, key in PLACES.values():
        assert section == "model" or key in settings[section]


def write_classes(workspace: Path, names: Sequence[str], unit: str = "uV", size: float = 1) -> None:
    """Recordings of nine people each, whose class is the frequency that they hold, at an amplitude
    of `size` of its unit.
    """
    raw, rows, time = workspace / "raw", ["file,subject,label"], np.arange(200) / 50
    raw.mkdir(parents=True)
    for number, name in enumerate(sorted(names * 9)):
        wave = size * np.sin(2 * np.pi * FREQUENCIES[name] * time + number)
        cells = [f"{t:.2f},{value:.7g}" for t, value in zip(time, wave, strict=True)]
        (raw / f"p{number}.csv").write_text("\n".join([f"time,ecg [{unit}]", *cells]) + "\n")
        rows.append(f"p{number}.csv,{'-'.join(names)}{number},{name}")
    (raw / "labels.csv").write_text("\n".join(rows) + "\n")
    workflows.ingest("generic", raw, workspace=workspace)


FREQUENCIES = {"rest": 1, "sit": 2, "run": 9, "walk": 4}
VIEW = "generic/classification"


@pytest.mark.slow
def test_classes_of_new_data_are_those_of_the_run(tmp_path: Path) -> None:
    """By their names: a class may be missing, and no class of others is scored in its place."""
    home, run = tmp_path / "three", tmp_path / "three" / "runs" / "three"
    write_classes(home, ["rest", "run", "walk"])
    workflows.train("features", data=VIEW, run="three", workspace=home)
    write_classes(tmp_path / "two", ["run", "walk"])
    scores = workflows.evaluate(run, data=VIEW, baselines="cheap", workspace=tmp_path / "two")
    assert scores["metrics"]["accuracy"]["value"] == 1.0
    table = pl.read_parquet(run / "predictions.parquet")
    assert {1, 2} >= set(table["target"]), "ids in the order of the run"
    workflows.tokenize("generic", workspace=tmp_path / "two")
    write_classes(tmp_path / "other", ["sit", "walk"])
    with pytest.raises(UserError, match="has the labels sit, walk, the run predicts rest, run, w"):
        workflows.evaluate(run, data=VIEW, workspace=tmp_path / "other")
    with pytest.raises(UserError, match="generic has no labels, the run predicts rest"):
        workflows.evaluate(run, data="generic", workspace=tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "size"), [("uV", 3.0), ("mV", 0.003)])
def test_all_people_of_other_data_are_scored_as_predict_reads_them(
    tmp_path: Path, unit: str, size: float
) -> None:
    """Under `--split external`: by the statistics of the training, whatever their own are."""
    home, theirs = tmp_path / "ours", tmp_path / "theirs"
    run, out = home / "runs" / "ours", tmp_path / "out"
    write_classes(home, ["rest", "run"])
    workflows.train("features", data=VIEW, run="ours", workspace=home)
    write_classes(theirs, ["rest", "run"], unit, size)
    made = workflows.tokenize(VIEW, workspace=theirs, split="external")
    assert [made["audit"][split]["subjects"] for split in SPLITS] == [0, 0, 18]
    assert not any(finding["level"] == "warning" for finding in made["findings"])
    scores = workflows.evaluate(run, data="generic-classification", workspace=theirs)
    assert scores["n_subjects"] == 18
    assert "External validation" in scores["notices"][0]
    workflows.train("kernels", data=VIEW, run="kernels", workspace=home)
    kernels = workflows.evaluate(home / "runs" / "kernels", data=made["name"], workspace=theirs)
    fitted = scores["baselines"]["random_kernels"]["accuracy"]["value"]
    assert fitted == pytest.approx(kernels["metrics"]["accuracy"]["value"])
    scored = pl.read_parquet(run / "predictions.parquet").sort("recording_id")
    workflows.predict(run, [theirs / "raw"], out=out, workspace=theirs)
    predicted = pl.read_parquet(out / "predictions.parquet").sort("recording_id")
    columns = ["p_rest", "p_run"]
    near = np.allclose(scored[columns].to_numpy(), predicted[columns].to_numpy(), atol=1e-5)
    assert near, "as the same recordings without labels"
    assert unit == "mV" or scored[columns].equals(predicted[columns]), "bit for bit"
    workflows.tokenize(VIEW, workspace=home, name="all", split="external")
    scores = workflows.evaluate(run, data="all", workspace=home, bootstrap=0)
    assert "trained on some of them" in scores["notices"][0]
    shutil.copytree(run, tmp_path / "alone")
    scores = workflows.evaluate(tmp_path / "alone", data=made["name"], workspace=theirs)
    assert "There are no baselines" in scores["remarks"][0]
    with pytest.raises(UserError, match="all of these are tested"):
        workflows.train("features", data="generic-classification", workspace=theirs)


@pytest.mark.slow
def test_recordings_of_others_are_cut_as_the_run_reads_them(tmp_path: Path) -> None:
    """Where no tokens of them are there: a second each, and all people are tested."""
    home, theirs = tmp_path / "ours", tmp_path / "theirs"
    run, out = home / "runs" / "ours", tmp_path / "out"
    write_classes(home, ["rest", "run"])
    workflows.tokenize(VIEW, workspace=home, window=50)
    workflows.train("features", data=VIEW, run="ours", workspace=home)
    write_classes(theirs, ["rest", "run"])
    (theirs / "raw" / "p0.csv").unlink()  # other data than those of the training
    workflows.ingest("generic", theirs / "raw", workspace=theirs, force_new=True)
    for _ in range(2):
        scores = workflows.evaluate(run, data=VIEW, workspace=theirs, baselines="cheap")
        assert (scores["n"], scores["n_subjects"]) == (4 * 17, 17)
    assert [path.name for path in (theirs / "tokens").iterdir()] == ["generic-classification-ours"]
    order, columns = ["recording_id", "start"], ["p_rest", "p_run"]
    scored = pl.read_parquet(run / "predictions.parquet").sort(order)
    workflows.predict(run, [theirs / "raw"], out=out, workspace=theirs)
    predicted = pl.read_parquet(out / "predictions.parquet").sort(order)
    assert scored[columns].equals(predicted[columns]), "bit for bit"
    with pytest.raises(UserError, match="no recording has an annotation"):
        workflows.evaluate(run, data="generic/annotations", workspace=theirs)
    assert workflows.evaluate("ours", data=VIEW, workspace=home)["n_subjects"] < 17


@pytest.mark.slow
def test_a_pre_training_reads_no_data_without_a_training_split(tmp_path: Path) -> None:
    write_classes(tmp_path, ["rest", "run"])
    small_run = {"preset": "tiny", "steps": 1, "run": "base", "workspace": tmp_path}
    workflows.pretrain("generic", **small_run)
    workflows.tokenize(VIEW, workspace=tmp_path, split="external")
    with pytest.raises(UserError, match="has no training split"):
        workflows.evaluate("base", data="generic-classification", workspace=tmp_path)
