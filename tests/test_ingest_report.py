"""The page of an ingest: it equals the cache, is self-contained, never fails an ingest, and
contains no identifiers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
from samples import SAMPLES, require_sample

from bitimely_cli.main import main
from bitimely_core import cache, report, workflows
from bitimely_core.errors import Finding, Reason, UserError
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.page import Figure, Page, Table
from bitimely_core.report import ingest_page, recording_figures
from bitimely_core.schemas.ingest_records import IngestReport
from bitimely_core.types import Annotation
from bitimely_core.workflows.prepare import Execution, prepare_windows

RATE, SECONDS = 200, 120
HUM = 0.36  # of the power, see `recording`


def recording(path: Path, gain: float = 1.0, seed: int = 0) -> np.ndarray:
    """Two minutes of an EEG at 200 Hz, 10 Hz and 50 Hz of amplitudes 40 and 30 uV, with a spike of
    200 uV at 90 s; digital values.
    """
    t = np.arange(RATE * SECONDS) / RATE
    x = 40 * np.sin(2 * np.pi * 10 * t + seed) + 30 * np.sin(2 * np.pi * 50 * t)
    x[90 * RATE] = 200
    eeg = np.round(x * 10).astype(np.int16)
    limit = 3000.0 * gain
    channels = [
        edf_header.EdfChannel("EEG C3", "uV", -limit, limit, -30000, 30000, RATE),
        edf_header.EdfChannel("Temp", "degC", -3000.0, 3000.0, -30000, 30000, 1),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    edf_writer.write_edf(
        path, channels, [eeg, np.arange(SECONDS, dtype=np.int16) + 370], duration=1.0, notes=[]
    )
    return eeg


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Four recordings, the last a thousand times too large by its header, and a file that is
    none.
    """
    for i in range(4):
        recording(tmp_path / "raw" / f"rec{i}.edf", gain=1000.0 if i == 3 else 1.0, seed=i)
    (tmp_path / "raw" / "rec9.edf").write_bytes(b"")
    return tmp_path / "raw"


def of(page: Page, name: str) -> Any:
    return next(
        block for block in page.blocks if isinstance(block, Figure | Table) and block.name == name
    )


def row(table: Table, first: str) -> dict[str, Any]:
    return dict(zip(table.columns, next(row for row in table.rows if row[0] == first), strict=True))


def test_the_page_is_one_file_beside_the_report(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = workflows.ingest("edf", raw, out)
    assert json.loads((out / "ingest_report.json").read_bytes()) == found
    assert {path.name for path in out.iterdir() if path.suffix in {".html", ".svg"}} == {
        "report.html"
    }
    text = (out / "report.html").read_text("utf-8")
    assert len(text.encode()) < report.LIMIT
    assert re.findall(r'(?:href|src)="(?!#|data:)[^"]*"', text) == []
    assert cache.verify(out, deep=True) == []
    for phrase in (
        "4 of 5 units were accepted, 1 was quarantined",
        "empty file",
        "rec9.edf",
        "EEG C3",
    ):
        assert phrase in text


def test_the_page_shows_unit_status_and_channel_quality(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    page = ingest_page.ingest_page(out, IngestReport.model_validate(cache.ingest("edf", raw, out)))
    assert of(page, "units").rows[2] == ["quarantined", 1]
    assert sum(count for _, count in of(page, "units").rows) == 5
    assert [unit for unit, _ in of(page, "quarantined").rows] == ["rec9"]
    assert of(page, "reasons").rows[0][:4] == ["quarantined", "empty file", 1, 1]
    values = row(of(page, "values"), "EEG C3, uV")
    assert (values["Hz"], values["recordings"]) == (RATE, 4)
    assert values["highest"] == pytest.approx(200_000)
    eeg = recording(tmp_path / "again.edf") / 10
    assert values["interquartile range"] == pytest.approx(
        np.subtract(*np.percentile(eeg, [75, 25])), rel=0.02
    )
    faults = row(of(page, "faults"), "EEG C3")
    assert faults["line noise %"] == pytest.approx(100 * HUM, rel=0.02)
    assert faults["line frequency, Hz"] == 50
    spread = of(page, "spread-uV")
    assert spread.data.hi[0] == pytest.approx(1000 * spread.data.lo[0], rel=0.2)
    notices = "\n".join(page.notices)
    assert (
        "EEG C3: the interquartile range of 1 of 4 recordings is more than 30 times wider or narrower"
        in notices
    )
    assert "--notch 50" in notices
    assert "Temp" not in notices


def test_the_picture_is_the_first_recording_in_physical_units(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    page = ingest_page.ingest_page(out, IngestReport.model_validate(cache.ingest("edf", raw, out)))
    eeg = recording(tmp_path / "again.edf") / 10
    excerpt = of(page, "excerpt").data
    assert excerpt.rate == RATE
    first, slow = excerpt.signals
    assert (first.name, first.unit) == ("EEG C3", "uV")
    np.testing.assert_allclose(first.values, eeg[: 30 * RATE], atol=0.06)
    # held, not interpolated
    np.testing.assert_allclose(slow.values, np.repeat(np.arange(30) + 370, RATE) / 10, atol=0.06)
    overview = of(page, "overview").data
    low, high = overview.signals[0].values.reshape(-1, 2).T
    assert high.argmax() == int(90 / SECONDS * recording_figures.COLUMNS)
    assert (high.max(), low.min()) == (
        pytest.approx(200, abs=0.1),
        pytest.approx(eeg.min(), abs=0.1),
    )
    assert overview.rate * SECONDS == 2 * recording_figures.COLUMNS


@pytest.mark.slow
def test_the_hypnogram_stands_on_the_axis_of_the_signals(tmp_path: Path) -> None:
    nights = small.copy_nights(tmp_path) / "cache" / "synthetic"
    found = IngestReport.model_validate_json((nights / "ingest_report.json").read_bytes())
    page = ingest_page.ingest_page(nights, found)
    record = next(cache.open_cache(nights).records())
    overview = of(page, "overview")
    lanes = overview.data.lanes
    assert lanes.names[:5] == ["W", "REM", "N1", "N2", "N3"]
    stages = {
        "Sleep stage W": "W",
        "Sleep stage R": "REM",
        "Sleep stage 1": "N1",
        "Sleep stage 2": "N2",
        "Sleep stage 3": "N3",
    }
    wanted = [
        (note.onset, note.onset + note.duration, stages[note.label])
        for note in record.annotations
        if note.label in stages
    ]
    drawn = [
        (span.start, span.stop, span.name) for span in lanes.spans if span.name in stages.values()
    ]
    assert drawn == wanted
    text = report.render_html(Page(title="", verdict="", blocks=["", overview]), alone=True)
    assert all(f">{name}<" in text for name in ("W", "REM", "N3", "EEG Fpz-Cz"))


def test_gaps_and_slow_channels_are_drawn_where_they_are() -> None:
    from bitimely_core.types import Signal

    two = [
        Signal("x", 10.0, "", np.full(100, 1 + k, np.int16), 2.0, 0.5, onset)
        for k, onset in enumerate((0.0, 30.0))
    ]
    sampled = recording_figures._resample_segments(two, 10.0, 0.0, 40.0)
    assert np.array_equal(sampled[:100], np.full(100, 2.5))
    assert np.isnan(sampled[100:300]).all()
    assert np.array_equal(sampled[300:], np.full(100, 4.5))
    high = recording_figures._measure_envelope(two, 40.0)[1::2]
    assert [np.nanmin(high), np.nanmax(high)] == [2.5, 4.5]
    assert np.isnan(high).sum() == pytest.approx(recording_figures.COLUMNS / 2, abs=2)
    once = recording_figures._measure_envelope(
        [Signal("slow", 0.1, "", np.arange(4, dtype=np.int16))], 40.0
    )
    assert [once[0], once[-1]] == [0, 3]


@pytest.mark.slow
def test_the_page_is_rewritten_only_after_a_change(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    workflows.ingest("edf", raw, out)
    path = out / "report.html"
    before = path.stat().st_mtime_ns, path.read_bytes()
    workflows.ingest("edf", raw, out)
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    path.unlink()
    workflows.ingest("edf", raw, out)
    assert path.read_bytes() == before[1]
    (raw / "rec9.edf").unlink()
    workflows.ingest("edf", raw, out)
    assert "All 4 units were accepted" in path.read_text("utf-8")


def test_a_page_that_fails_is_a_warning_and_the_cache_is_there(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    workflows.ingest("edf", raw, out)

    def broken(*_: Any, **__: Any) -> str:
        raise ZeroDivisionError("Haagse")

    monkeypatch.setattr(ingest_page, "render_html", broken)
    (raw / "rec9.edf").unlink()
    notices: list[Finding] = []
    found = workflows.ingest("edf", raw, out, notice=notices.append)
    assert (found["status"], found["generation"]) == ("published", 2)
    assert [(fault.level, fault.problem) for fault in notices] == [
        ("warning", "the page could not be written (ZeroDivisionError)")
    ]
    assert not (out / "report.html").exists(), "the former page would show another ingest"
    assert workflows.ingest("edf", raw, out) == found, "also without a callback"


def test_a_refused_ingest_shows_the_reason_until_the_next_accepted_one(
    raw: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    workflows.ingest("edf", raw, out)
    with pytest.raises(UserError) as caught:
        workflows.ingest("edf", raw, out, strict=True)
    assert caught.value.code == Reason.EMPTY_FILE
    text = (out / "report.html").read_text("utf-8")
    assert "Refused, nothing was published" in text
    assert "an earlier generation, if any, is unchanged" in text
    assert "The first recording" not in text
    workflows.ingest("edf", raw, out)
    assert "4 of 5 units were accepted" in (out / "report.html").read_text("utf-8")


def test_texts_that_can_hold_names_are_only_counted(tmp_path: Path) -> None:
    recording(tmp_path / "raw" / "a.edf")
    channels, samples = (
        [edf_header.EdfChannel("EEG", "uV", -100.0, 100.0, -1000, 1000, 100)],
        [np.arange(6000, dtype=np.int16) % 900],
    )
    edf_writer.write_edf(
        tmp_path / "raw" / "b.edf",
        channels,
        samples,
        duration=1.0,
        notes=[Annotation(2.0, 3.0, "Mrs Haagse moves")],
    )
    out = tmp_path / "out"
    found = workflows.ingest("edf", tmp_path / "raw", out, keep_phi=True)
    labels = cache.open_cache(out).annotations()["label"].to_list()
    text = (out / "report.html").read_text("utf-8")
    assert "Haagse" not in text
    assert "--keep-phi" in text
    if labels:  # the reader kept the text
        assert of(
            ingest_page.ingest_page(out, IngestReport.model_validate(found)), "annotations"
        ).rows[0][:2] == ["other text", 1]


def test_the_verb_writes_it_and_its_json_is_the_report(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ingest", "edf", str(raw), "-w", str(tmp_path), "--json"]) == 3
    out, _ = capsys.readouterr()
    folder = tmp_path / "cache" / "edf"
    assert json.loads(out) == json.loads((folder / "ingest_report.json").read_bytes())
    assert (folder / "report.html").is_file()
    assert main(["verify", str(folder)]) == 0
    assert main(["ingest", "edf", str(raw), "-w", str(tmp_path / "dry"), "--dry-run"]) == 0
    assert not (tmp_path / "dry").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "folder"),
    [("sleep-edf", "sleep-edf"), ("ptb-xl", "ptb-xl"), ("bidmc", "bidmc"), ("emg", "emg")],
)
def test_real_samples(dataset: str, folder: str, tmp_path: Path) -> None:
    require_sample(SAMPLES / folder)
    notices: list[Finding] = []
    found = workflows.ingest(dataset, SAMPLES / folder, tmp_path / "out", notice=notices.append)
    assert notices == []
    text = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert len(text.encode()) < report.LIMIT
    assert re.search(r"19[89]\d-\d\d-\d\d|\d\d\.\d\d\.[89]\d", text) is None, "no dates"
    shown = re.sub(
        r"<svg.*?</svg>|<script.*?</script>|<style.*?</style>|data:[^\"]*",
        "",
        text,
        flags=re.DOTALL,
    )
    units = {unit["unit"] for unit in found["units"]} | {
        word for unit in found["units"] for word in unit["files"]
    }
    subjects = set(cache.open_cache(tmp_path / "out").subjects()["subject_id"].to_list()) - units
    assert not [
        subject
        for subject in subjects
        if len(subject) > 3 and re.search(rf"\b{re.escape(subject)}\b", shown)
    ]


def test_options_of_a_data_set_are_arguments_and_its_cache_is_in_the_workspace(
    tmp_path: Path,
) -> None:
    plan = workflows.ingest("synthetic", size="night", workspace=tmp_path, dry_run=True)
    assert plan["dataset"] == "synthetic"
    with pytest.raises(UserError, match=r"unknown option of synthetic 'sise'.*Did you mean size"):
        workflows.ingest("synthetic", sise="night", workspace=tmp_path)
    assert not list(tmp_path.iterdir())


def test_missing_tokens_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(UserError) as fault:
        prepare_windows("generic-staging", Execution(tmp_path))
    assert "Run: bitimely tokenize generic/staging" in str(fault.value)
