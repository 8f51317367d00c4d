"""Commands and options that messages name are followed, to the right values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest

from bitimely_cli.main import main
from bitimely_core.cache import open_cache
from bitimely_core.errors import UserError
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.recordings.mapping import FileRule
from bitimely_core.tokens import new_recordings
from bitimely_core.types import Annotation, Record


class Desk:
    """A folder in which commands run, and what the last of them said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.said = ""

    def run(self, line: str) -> int:
        """One command; -w is added where it is missing."""
        words = shlex.split(line)
        words += [] if "-w" in words else ["-w", "ws"]
        self.capsys.readouterr()
        code = main(words)
        self.said = "".join(self.capsys.readouterr())
        return code

    def find(self, pattern: str) -> str:
        """The advice of the last message: the first group of `pattern`."""
        match = re.search(pattern, self.said)
        assert match, self.said
        return match[1]

    def windows(self, name: str) -> pl.DataFrame:
        """The index of a token set."""
        return pl.read_parquet(f"ws/tokens/{name}/index.parquet").sort("recording_id", "start")

    def records(self) -> dict[str, Record]:
        """Name -> recording of the cache."""
        return {record.recording_id: record for record in open_cache("ws/cache/generic").records()}


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Desk:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BITIMELY_WORKSPACE", raising=False)
    return Desk(capsys)


def write_edf(
    name: str,
    channels: tuple[str, ...] = ("C4-M1",),
    rate: int = 10,
    notes: tuple[tuple[float, float, str], ...] = (),
    seconds: int = 120,
) -> None:
    rows = [
        edf_header.EdfChannel(channel, "uV", -200.0, 200.0, -2048, 2047, rate)
        for channel in channels
    ]
    rng = np.random.default_rng(sum(name.encode()))
    samples = [rng.integers(-1000, 1000, seconds * rate).astype(np.int16) for _ in rows]
    path = Path("raw") / f"{name}.edf"
    path.parent.mkdir(parents=True, exist_ok=True)
    annotations = tuple(Annotation(*note) for note in notes)
    edf_writer.write_edf(path, tuple(rows), samples, duration=1.0, notes=annotations)


def write_csv(name: str, rate: float = 50.0, n: int = 1000) -> np.ndarray:
    values = np.round(np.random.default_rng(1).standard_normal(n), 4)
    lines = [f"{i / rate:.4f},{x}" for i, x in enumerate(values.tolist())]
    path = Path("raw") / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("time,ppg\n" + "\n".join(lines) + "\n")
    return values


COMMAND = r"bitimely ((?:ingest|tokenize|pretrain|finetune|train)[^\n]*?)\.?(?:\n|$)"


def test_files_without_a_rate_are_read_by_the_commands_of_the_messages(desk: Desk) -> None:
    values = write_csv("my file")
    table = Path("raw/my file.csv")  # without its clock
    table.write_text("".join(f"{row.split(',')[1]}\n" for row in table.read_text().split()))
    assert desk.run("ingest generic raw") == 4
    assert desk.run(desk.find(COMMAND)) == 0
    assert desk.run(desk.find(COMMAND)) == 0
    (signal,) = desk.records()["my file"].signals
    np.testing.assert_allclose(signal.samples * signal.scale + signal.offset, values, atol=1e-5)
    assert desk.run(desk.find(COMMAND)) == 0
    assert len(desk.windows("generic")) == 100  # of 10 s at the assumed 1 Hz


def test_a_rate_in_the_names_is_proposed(desk: Desk) -> None:
    for name in ("p1_ecg_250Hz", "p2_ecg_250Hz"):
        write_csv(name)
        table = Path(f"raw/{name}.csv")  # without its clock
        table.write_text("".join(f"{row.split(',')[1]}\n" for row in table.read_text().split()))
    assert desk.run("ingest generic raw --init-map map.toml") == 0
    assert desk.run(desk.find(COMMAND)) == 0
    assert {s.rate for record in desk.records().values() for s in record.signals} == {250.0}


def test_another_map_is_read_by_the_same_command(desk: Desk) -> None:
    write_csv("p1")
    assert desk.run("ingest generic raw --init-map map.toml") == 0
    assert desk.run("ingest generic raw --map map.toml") == 0
    Path("new map.toml").write_text(Path("map.toml").read_text() + 'unit = "mV"\n')
    assert desk.run("ingest generic raw --map 'new map.toml'") == 0
    (signal,) = desk.records()["p1"].signals
    assert signal.unit == "mV"


def make_staged(count: int, step: float = 20.0) -> tuple[tuple[float, float, str], ...]:
    return tuple((step * i, step, f"Sleep stage {'W123R'[i % 5]}") for i in range(count))


def make_marks(label: str, seconds: float) -> tuple[tuple[float, float, str], ...]:
    return tuple((20.0 * i + 10, seconds, label) for i in range(5))


class Advice(NamedTuple):
    """Input, the command that says what to do, how to find that, and what comes of it."""

    prepare: Callable[[], None]
    command: str
    code: int
    pattern: str
    follow: str  # {0}: what was found
    tokens: str
    check: Callable[[pl.DataFrame], bool]


def prepare_rates() -> None:
    for name in ("a", "b"):
        write_edf(name)
    write_edf("c", rate=40)


def prepare_channels() -> None:
    for name in ("a", "b"):
        write_edf(name, ("EEG", "EOG"))
    write_edf("c", ("EEG",))


def prepare_marks(seconds: float) -> Callable[[], None]:
    def prepare() -> None:
        write_edf("a", notes=make_marks("x", seconds))
        Path("map.toml").write_text('[labels]\nx = "x"\n')

    return prepare


ADVICE = {
    "window": Advice(
        lambda: write_edf("a", notes=make_staged(6)),
        "tokenize generic/staging",
        4,
        r"(--window \d+)",
        "tokenize generic/staging {0}",
        "generic-staging",
        lambda index: index["start"].to_list() == [20.0 * i for i in range(6)],
    ),
    "rate": Advice(
        prepare_rates,
        "tokenize generic",
        0,
        r"(--rate \d+)",
        "tokenize generic --force-new {0}",
        "generic",
        lambda index: index["recording_id"].value_counts()["count"].to_list() == [12] * 3,
    ),
    "channels": Advice(
        prepare_channels,
        "tokenize generic --channels EEG,EOG",
        0,
        r"Give (--channels) that they have too",
        "tokenize generic --force-new {0} EEG",
        "generic",
        lambda index: set(index["recording_id"]) == {"a", "b", "c"},
    ),
    "split": Advice(
        lambda: write_edf("a", seconds=600),
        "tokenize generic",
        0,
        r"(--split time)",
        "tokenize generic --force-new {0}",
        "generic",
        lambda index: set(index["split"]) == {"train", "validation", "test"},
    ),
    "points": Advice(
        prepare_marks(0.0),
        "tokenize generic/annotations",
        4,
        r"Take the view (generic/\w+)",
        "tokenize {0}",
        "generic-points",
        lambda index: index["start"].to_list() == [20.0 * i + 9.5 for i in range(5)],
    ),
    "annotations": Advice(
        prepare_marks(4.0),
        "tokenize generic/points",
        4,
        r"Take the view (generic/\w+)",
        "tokenize {0}",
        "generic-annotations",
        lambda index: index["start"].to_list() == [20.0 * i + 10 for i in range(5)],
    ),
    "settings": Advice(
        lambda: write_edf("a"),
        "tokenize generic --window 50",
        0,
        r"(next)",
        "tokenize generic --window 60 --force-new",
        "generic",
        lambda index: len(index) == 20,
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_option_that_a_message_names_gives_what_was_asked_for(desk: Desk, name: str) -> None:
    advice = ADVICE[name]
    advice.prepare()
    assert desk.run("ingest generic raw" + (" --map map.toml" * Path("map.toml").exists())) == 0
    assert desk.run(advice.command) == advice.code, desk.said
    assert desk.run(advice.follow.format(desk.find(advice.pattern))) == 0, desk.said
    index = desk.windows(advice.tokens)
    assert advice.check(index), index


VIEWS = {
    "generic": ((), ""),
    "generic/staging": (make_staged(4, 30.0), ""),
    "generic/points": (make_marks("x", 0.0), '[labels]\nx = "x"\n'),
    "generic/annotations": (make_marks("x", 4.0), '[labels]\nx = "x"\n'),
    "generic/classification": ((), '[[files]]\npattern = "*"\nlabel = "ill"\n'),
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_next_command_reads_the_labels_there_are(desk: Desk, view: str) -> None:
    notes, text = VIEWS[view]
    write_edf("a", notes=notes)
    if text:
        Path("map.toml").write_text(text)
    assert desk.run("ingest generic raw" + (" --map map.toml" if text else "")) == 0
    command = desk.find(r"next: " + COMMAND)
    assert command == f"tokenize {view} -w ws"
    assert desk.run(command) == 0, desk.said
    verb = "pretrain" if view == "generic" else "train"
    assert desk.find(r"next: " + COMMAND) == f"{verb} --data {view} -w ws"
    assert desk.run("train features --data generic") == 2
    assert (f"Take the view {view}." in desk.said) == bool(text or notes), desk.said
    assert ("Give labels at ingest (--map)." in desk.said) == (view == "generic"), desk.said


def test_a_view_without_labels_names_that_of_the_labels_there_are(desk: Desk) -> None:
    write_edf("a")
    Path("map.toml").write_text('[[files]]\npattern = "*"\nlabel = "ill"\n')
    assert desk.run("ingest generic raw --map map.toml") == 0
    assert desk.run("train features --data generic/staging") == 4
    assert "Take the view generic/classification." in desk.said


def test_a_table_that_names_nobody_says_what_the_names_are(desk: Desk) -> None:
    for name in ("a", "b"):
        write_edf(name)
    Path("raw/table.csv").write_text("recording,label\na.EDF,ill\nb.EDF,well\n")
    text = '[table]\npath = "table.csv"\nfile = "recording"\nlabel = "label"\n'
    Path("map.toml").write_text(text)
    assert desk.run("ingest generic raw --map map.toml") == 4
    name = desk.find(r"expected such as '([^']*)'")
    assert name in {"a", "a.edf", "b", "b.edf"}
    ending = name[1:]
    Path("raw/table.csv").write_text(f"recording,label\na{ending},ill\nb{ending},well\n")
    assert desk.run("ingest generic raw --map map.toml") == 0
    assert [record.attributes["label"] for record in desk.records().values()] == ["ill", "well"]


def test_the_texts_that_a_new_map_lists_are_those_that_labels_want(desk: Desk) -> None:
    write_edf("a", notes=make_marks("Spindle", 2.0))
    Path("bad.toml").write_text('[labels]\nspindle = "spindle"\n')
    assert desk.run("ingest generic raw --map bad.toml") == 4
    assert "--init-map lists them" in desk.said
    assert desk.run("ingest generic raw --init-map map.toml") == 0
    text = Path("map.toml").read_text()
    assert '# "Spindle" = "Spindle"' in text
    head, _, tail = text.partition("# [labels]")
    Path("map.toml").write_text(head + "[labels]" + tail.replace('\n# "', '\n"'))
    assert desk.run(desk.find(r"next: " + COMMAND)) == 0
    assert [note.label for note in desk.records()["a"].annotations] == ["Spindle"] * 5


@pytest.mark.parametrize(("name", "advice"), [("map.toml", "--map"), ("ecg.dcm", "pydicom")])
def test_a_file_that_predict_cannot_read_has_the_advice_of_ingest(name: str, advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        new_recordings._find_format(name, FileRule())
