"""Class Run and the records of a run, on the workspace of version 0.1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bitimely_core import storage, tokens
from bitimely_core.config import fill_event_settings
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.records import StoredRecord
from bitimely_core.run import Run, hash_subjects
from bitimely_core.schemas.runs import CheckpointMeta, RunRecord, TrainSubjects

FIXTURE = Path(__file__).parent / "fixtures" / "v1" / "home"
RECORDS: dict[str, type[StoredRecord]] = {
    "run.json": RunRecord,
    "meta.json": CheckpointMeta,
    "train_subjects.json": TrainSubjects,
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "home"))


def settings_of(identity: dict[str, dict[str, object]]) -> dict[str, str]:
    """The settings of an identity, values as text."""
    return {key: str(value) for key, value in identity["settings"].items()}


def test_records_are_written_byte_for_byte_as_they_were_read(tmp_path: Path) -> None:
    files = [path for path in sorted(FIXTURE.rglob("*.json")) if path.name in RECORDS]
    assert {path.name for path in files} == set(RECORDS)
    for path in files:
        RECORDS[path.name].load(path).save(tmp_path / "copy.json")
        before, after = (
            json.loads(path.read_bytes()),
            json.loads((tmp_path / "copy.json").read_bytes()),
        )
        if path.name == "train_subjects.json":
            assert (tmp_path / "copy.json").read_bytes() == path.read_bytes(), path
            continue
        if path.name == "meta.json":
            identity = before.pop("identity"), after.pop("identity")
            assert before == after
            own, rest = settings_of(identity[1]), settings_of(identity[0])
            assert own.items() <= rest.items()
            assert (
                {"settings.model.layers", "settings.model.decay.kind", "settings.train.lr"}
                <= own.keys()
                <= rest.keys() - {"settings.model.top_periods"}
            )
            continue
        kept = json.dumps({**before, "format_version": 3, "settings": after["settings"]})
        assert json.loads(kept) == after
        # what was read of events before it was a setting
        before["settings"]["model"] = fill_event_settings(before["settings"]["model"])
        # format 2: without the settings of other models and objectives
        for section, values in after["settings"].items():
            assert all(before["settings"][section][key] == value for key, value in values.items())
            assert section in {"model", "objective"} or values == before["settings"][section]
        RunRecord.load(tmp_path / "copy.json").save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == (tmp_path / "copy.json").read_bytes(), path


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
    run = Run.open(home / "runs" / "plain-class", home)
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
    path.write_text(json.dumps(body))
    with pytest.raises(UserError) as refused:
        Run.open("plain", home)
    assert (refused.value.exit_code, refused.value.field) == (Exit.INTEGRITY, "settings.train.lr")


def test_subjects_of_the_training_are_counted_and_refused_in_a_held_out_split(home: Path) -> None:
    run = Run.open("plain", home)
    assert run.count_shared_subjects("test") == 0
    test = hash_subjects([tokens.open_tokens(home / "tokens" / run.data)], "test")
    storage.write_json(run.folder / "train_subjects.json", {"format_version": 1, "marks": test[:3]})
    run = Run.open("plain", home)
    assert run.count_shared_subjects("train") == 0
    with pytest.raises(UserError, match="3 subjects") as refused:
        run.count_shared_subjects("test")
    assert refused.value.code == Reason.SUBJECT_LEAKAGE
