"""The page of a workspace: runs with scores and curves, reports, data sets, tokens, recipes,
exports, with links to their own pages.

It is made from records alone, without torch and without tables, so that every verb can write it
again; equal workspaces give equal bytes. What was read of a folder is kept in `.index.json` until
one of its files has another size or time. Counts of people in histories are left out: the pages of
the token sets print what may be known of them.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from pydantic import BaseModel

from bitimely_core import __version__
from bitimely_core.errors import UserError, safe_text
from bitimely_core.evaluate.intervals import list_values
from bitimely_core.evaluate.metrics import NAMES, is_lower_better
from bitimely_core.evaluate.result_table import read_curves
from bitimely_core.page import (
    BarPlot,
    Figure,
    Link,
    MetricLike,
    Page,
    PageBuilder,
    Sparkline,
    Table,
    make_tables,
)
from bitimely_core.report.page_text import text_cell
from bitimely_core.schemas.ingest_records import CacheManifest, IngestReport, RecordingsManifest
from bitimely_core.schemas.reports import StageRecord, Summary
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import BestBaseline, MetricValue, Scores
from bitimely_core.schemas.tokens import TokenManifest, WindowManifest
from bitimely_core.store import storage
from bitimely_core.store.records import describe_changes, has_result
from bitimely_core.store.workspace import NOUNS, FolderKind
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import count_nouns, group_by

INDEX, ENTRIES = "index.html", ".index.json"
POINTS = 60  # of a curve
SEEDS = "seeds"  # the table of runs that are pooled in that of all
SHOWN = 8  # runs of the key figure
RUN_COLUMNS = (
    "run",
    "state",
    "score",
    "best baseline",
    "metric",
    "curve",
    "model",
    "data",
    "leak-free",
    "parameters",
)


@dataclass(frozen=True)
class ScoreLine:
    """The main score of a run, as its page prints it."""

    run: str
    data: str
    split: str
    metric: str
    value: MetricValue
    baseline: BestBaseline | None = None  # the best one on the same windows


Cell = Link | Sparkline | dict[str, float | str | None] | bool | int | float | str | None


@dataclass(frozen=True)
class FolderEntry:
    """What the page says of a folder."""

    cells: list[Cell]
    score: ScoreLine | None = None
    unfinished: bool = False
    damage: str = ""  # which record cannot be read, and why
    changes: tuple[str, ...] = ()  # sentences on the altered files of a run
    arm: str = ""  # of a run: equal where runs differ in their seed alone
    seed: int = 0
    pooled: tuple[str, ...] = ()  # the name of a run, then those of its folds or seeds


FileState = tuple[str, int, int]
"""Path in the folder, size and time of change in nanoseconds of a file."""


class StoredEntries(BaseModel):
    """Content of `.index.json`: the entries of folders, and the files of each when it was read."""

    version: str = __version__
    entries: dict[str, tuple[list[FileState], FolderEntry]] = {}


class TableSpec(NamedTuple):
    """A table of the page: the folders of a kind, and what it says of one."""

    kind: FolderKind
    title: str
    caption: str
    columns: tuple[str, ...]
    describe: Callable[[Path], FolderEntry]
    is_flat: bool = True  # an entry depends on the files of its folder alone


@dataclass
class WorkspaceReader:
    """Reads the records of a workspace into rows."""

    workspace: Path
    start: Path  # folder of the page, from which its links go
    former: StoredEntries = field(default_factory=StoredEntries)
    present: StoredEntries = field(default_factory=StoredEntries)  # as they are now

    def link(self, folder: Path, *names: str, text: str = "") -> Link:
        """A link to the first of the files `names` that is in `folder`; the text is the name of the
        folder.
        """
        for name in names:
            if has_result(folder / name):
                path = Path(os.path.relpath(folder / name, self.start))
                return Link(text or folder.name, quote(path.as_posix()))
        return Link(text or folder.name)

    def make_table(self, spec: TableSpec) -> list[Table]:
        """The rows of all folders of a kind; empty without any. A folder with damaged records is a
        row that says so.
        """
        entries = [
            self.read_entry(folder, spec) for folder in list_folders(self.workspace / spec.kind)
        ]
        rows, members = pool_seeds(entries)
        cells = [entry.cells for entry in rows]
        return [
            *make_tables(spec.kind, spec.title, spec.caption, spec.columns, cells),
            *make_tables(
                SEEDS,
                "Single runs of folds and seeds",
                "Those of a method are one row in the table of all runs.",
                spec.columns,
                [entry.cells for entry in members],
            ),
        ]

    def read_entry(self, folder: Path, spec: TableSpec) -> FolderEntry:
        """What the page says of a folder: as it is stored, where its files are those of then."""
        name = f"{spec.kind}/{folder.name}"
        states = list_states(folder)
        before, entry = self.former.entries.get(name, ([], None))
        if entry is None or before != states or not spec.is_flat:
            entry = self.describe(folder, spec)
        self.present.entries[name] = states, entry
        return entry

    def describe(self, folder: Path, spec: TableSpec) -> FolderEntry:
        """What the page says of a folder, from its records."""
        changes: list[str] = []
        try:
            if spec.kind == "runs":
                changes += describe_changes(folder)
            entry = spec.describe(folder)
        except (UserError, OSError, ValueError, LookupError) as error:
            raise_system_error(error)
            problem = safe_text(str(error))
            if isinstance(error, UserError):
                problem = f"{Path(error.file or folder).name} {error.problem}"
            rest = [None] * (len(spec.columns) - 2)
            cells: list[Cell] = [Link(folder.name), f"damaged: {problem}", *rest]
            entry = FolderEntry(cells, damage=problem)
        return replace(entry, changes=tuple(changes))

    def describe_run(self, folder: Path) -> FolderEntry:
        """FolderEntry of a run."""
        record = RunRecord.load(folder / "run.json")
        state = "finished" if record.finished else "not finished"
        if record.finished and record.final and record.final.step:
            state = f"finished, {count_nouns(record.final.step, 'step')}"
        score, words = read_score(folder, record.run)
        stamps: dict[bool | str | None, str] = {True: "yes", False: "no"}
        cells: list[Cell] = [
            self.link(folder, "report.html", "model_card.md"),
            state,
            score.value.model_dump(include={"value", "lo", "hi"}) if score else None,
            show_baseline(score.baseline if score else None),
            words,
            draw_curves(folder),
            ", ".join(filter(None, (record.model, record.preset))),
            ", ".join(data.name for data in record.data),
            stamps.get(record.leak_free, record.leak_free),
            record.parameters,
        ]
        pooled = (record.run, *(record.members.runs if record.members else ()))
        return FolderEntry(
            cells,
            score,
            unfinished=not record.finished,
            arm=identify_arm(record),
            seed=record.seed,
            pooled=pooled,
        )

    def describe_report(self, folder: Path) -> FolderEntry:
        """FolderEntry of a report."""
        info = Summary.load(folder / "summary.json").report
        page = self.link(folder, "report.html", text=info.title)
        return FolderEntry([page, folder.name, info.verdict])

    def describe_cache(self, folder: Path) -> FolderEntry:
        """FolderEntry of a data set; of one without any accepted unit there is only the report."""
        path = folder / "ingest_report.json"
        if not has_result(folder / "manifest.json") and has_result(path):
            report = IngestReport.load(path)
            if not report.published:
                left_out = report.counts.quarantined
                state = "nothing was read"
                return FolderEntry([folder.name, state, None, left_out, report.tool.version])
        manifest = CacheManifest.read(folder)
        counts, version = manifest.report.counts, manifest.report.tool.version
        used = f"{counts.accepted + counts.accepted_with_warning:,} of {counts.units_seen:,} units"
        recordings = manifest.recordings if isinstance(manifest, RecordingsManifest) else None
        page = self.link(folder, "report.html")
        return FolderEntry([page, used, recordings, counts.quarantined, version])

    def describe_tokens(self, folder: Path) -> FolderEntry:
        """FolderEntry of a token set."""
        manifest = TokenManifest.read(folder)
        options = manifest.options
        view = f"{options.dataset}/{options.view}" if options.view else options.dataset
        cells: list[Any] = [None, None, None]
        if isinstance(manifest, WindowManifest):
            rate = f"{manifest.options.rate:g} Hz, {manifest.options.length:g} s"
            cells = [manifest.windows, None, rate]
            if options.split in {"subject", "official"}:
                cells[1] = sum(count.subjects for count in manifest.counts.values())
        classes = ", ".join(manifest.class_names) or None
        page = self.link(folder, "report.html")
        return FolderEntry([page, view, options.task, options.split, *cells, classes])

    def describe_recipe(self, folder: Path) -> FolderEntry:
        """FolderEntry of a recipe, from the records of its stages."""
        stages = [path / "stage.json" for path in list_folders(folder)]
        states = Counter(StageRecord.load(path).state for path in stages if has_result(path))
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        page = self.link(self.workspace / "reports" / folder.name, "report.html", text=folder.name)
        return FolderEntry([page, counts or "no stage yet"])

    def describe_export(self, folder: Path) -> FolderEntry:
        """FolderEntry of an exported run."""
        record = RunRecord.load(folder / "run.json")
        page = self.link(folder, "model_card.md", "README.md")
        return FolderEntry([page, record.model, record.parameters])


def read_score(folder: Path, run: str) -> tuple[ScoreLine | None, str | None]:
    """The main score of a run and the words for its metric; None where there is none."""
    if not has_result(folder / "scores.json"):
        return None, None
    scores = Scores.load_shared(folder)
    name = scores.main or "rel"
    score = scores.metrics.get(name)
    line = None
    if score is not None:
        value = MetricValue(value=score.value, lo=score.lo, hi=score.hi)
        baseline = scores.find_best_baseline(name, lower=is_lower_better(name))
        line = ScoreLine(run, scores.data, scores.split, name, value, baseline)
    return line, NAMES.get(name, name)


def show_baseline(best: BestBaseline | None) -> dict[str, float | str | None] | None:
    """The cell of the best baseline beside a score."""
    return None if best is None else text_cell(best.value, f"{best.value:.3f}", best.name)


def show_seeds(values: Sequence[float]) -> dict[str, float | str | None]:
    """The cell of the scores of several seeds: their mean ± standard deviation, and their range."""
    mean = statistics.fmean(values)
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    note = f"{len(values)} seeds, {min(values):.3f} to {max(values):.3f}"
    return text_cell(mean, f"{mean:.3f}{spread}", note)


def identify_arm(record: RunRecord) -> str:
    """A hash of what a run was trained on, from what and how, without its seed; of runs over folds
    or seeds that of their own.
    """
    if record.members:
        return record.run
    settings = record.settings.model_dump(mode="json")
    settings["train"]["seed"] = None
    data = [(part.name, part.fingerprint) for part in record.data]
    source = record.source.model_dump(mode="json") if record.source else record.init
    return storage.fingerprint([record.kind, record.model, record.preset, settings, data, source])


def pool_seeds(entries: Sequence[FolderEntry]) -> tuple[list[FolderEntry], list[FolderEntry]]:
    """The rows of a table, runs that differ in their seed alone as one, and those runs with those
    of a run over folds or seeds, which is a row of its own.
    """
    pooled = set(itertools.chain.from_iterable(entry.pooled[1:] for entry in entries))
    arms: dict[str, list[FolderEntry]] = {}
    rows, members = [], []
    for number, entry in enumerate(entries):
        if pooled.isdisjoint(entry.pooled[:1]):
            arms.setdefault(entry.arm or str(number), []).append(entry)
        else:
            members.append(entry)
    for arm in arms.values():
        if len({entry.seed for entry in arm}) < len(arm) or len(arm) == 1:
            rows += arm  # copies of a run are no seeds
        else:
            rows.append(pool_arm(arm))
            members += arm
    return rows, members


def pool_arm(arm: Sequence[FolderEntry]) -> FolderEntry:
    """Runs that differ in their seed alone as one row: the mean of their scores and its spread."""
    first, scores = arm[0], [entry.score for entry in arm if entry.score]
    values = list_values(score.value for score in scores)
    name = first.cells[0].text if isinstance(first.cells[0], Link) else ""
    cells = dict(zip(RUN_COLUMNS, first.cells, strict=True))
    cells |= {"run": Link(f"{name} and {len(arm) - 1} more seeds", f"#{SEEDS}"), "curve": None}
    score = None
    if values:
        cells["score"] = show_seeds(values)
        mean = MetricValue(value=statistics.fmean(values))
        score = replace(scores[0], run=f"{name} ({len(values)} seeds)", value=mean)
    unfinished = any(entry.unfinished for entry in arm)
    if unfinished:
        cells["state"] = "not all finished"
    return FolderEntry(list(cells.values()), score, unfinished)


def list_states(folder: Path, prefix: str = "") -> list[FileState]:
    """The files and folders in `folder` and below, by their paths in it."""
    states = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name, info = prefix + entry.name, entry.stat(follow_symlinks=False)
            states.append((name, info.st_size, info.st_mtime_ns))
            if entry.is_dir(follow_symlinks=False):
                states += list_states(Path(entry.path), f"{name}/")
    return sorted(states)


def read_stored(path: Path) -> StoredEntries:
    """The entries that `path` holds; none where it is not there or of another version."""
    try:
        stored = StoredEntries.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise_system_error(error)
        return StoredEntries()
    return stored if stored.version == __version__ else StoredEntries()


def list_folders(parent: Path) -> list[Path]:
    """Folders in `parent` by name, without those of killed commands and links."""
    paths = parent.iterdir() if parent.is_dir() and not parent.is_symlink() else ()
    return sorted(
        path
        for path in paths
        if path.is_dir() and not path.is_symlink() and not storage.is_temporary(path.name)
    )


def draw_curves(folder: Path) -> Sparkline | None:
    """Training and validation curve of a run, each of at most `POINTS` points, evenly, with the
    first and the last; None without any.
    """
    key, curves = read_curves(folder)
    if not curves:
        return None
    thinned = []
    for curve in curves.values():
        count = curve.shape[1]
        places = np.linspace(0, count - 1, min(count, POINTS)).round().astype(int)
        thinned.append(list(map(tuple, curve[:, places].T.tolist())))
    split, last = list(curves)[-1], thinned[-1][-1][1]
    quantity = "relative loss" if key == "rel" else "loss"
    about = f"{quantity} by step, the last of {split.replace('train', 'training')} is {last:.4g}"
    return Sparkline(last, thinned, about)


def choose_scores(scores: Sequence[ScoreLine]) -> list[ScoreLine]:
    """The runs of the key figure, the best first: those with the metric, data set and split that
    most runs are scored on.
    """
    defined = [score for score in scores if score.value.value is not None]
    if not defined:
        return []
    groups = group_by(defined, lambda score: (score.metric, score.data, score.split))
    (metric, *_), members = max(
        groups.items(), key=lambda item: (item[0][0] in NAMES, len(item[1]), item[0])
    )
    sign = 1 if is_lower_better(metric) else -1
    return sorted(members, key=lambda score: (sign * (score.value.value or 0.0), score.run))


def dashboard_page(reader: WorkspaceReader) -> Page:
    """The page of a workspace, for `report.render_index`."""
    specs = (
        TableSpec(
            "runs",
            "Runs",
            "Curve: loss of the validation split (in colour) and of the training split, relative "
            "to the mean as prediction where that is known; the number is the last one. Score: the "
            "main metric with its 95 % CI on the split of the evaluation; of runs that differ in "
            "their seed alone mean ± standard deviation. Best baseline: on the same windows. Names "
            "lead to the page of the run.",
            RUN_COLUMNS,
            reader.describe_run,
        ),
        TableSpec(
            "reports",
            "Reports",
            "Comparisons, analyses and predictions, with the sentence that each begins with.",
            ("report", "name", "result"),
            reader.describe_report,
        ),
        TableSpec(
            "cache",
            "Data sets",
            "Units are recordings, or tables of a data set; those left out are named on the page "
            "of the ingest.",
            ("data set", "used", "recordings", "left out", "bitimely"),
            reader.describe_cache,
        ),
        TableSpec(
            "tokens",
            "Token sets",
            "Windows of all splits. Counts of histories are on the page of the token set.",
            ("tokens", "data", "task", "split", "windows", "subjects", "window", "classes"),
            reader.describe_tokens,
        ),
        TableSpec(
            "pipelines",
            "Recipes",
            "Stages by their last state.",
            ("recipe", "stages"),
            reader.describe_recipe,
            is_flat=False,
        ),
        TableSpec(
            "exports",
            "Exports",
            "Runs as folders for others.",
            ("export", "model", "parameters"),
            reader.describe_export,
        ),
    )
    tables = list(itertools.chain.from_iterable(map(reader.make_table, specs)))
    runs, _ = pool_seeds([entry for _, entry in reader.present.entries.values() if entry.score])
    scores = [entry.score for entry in runs if entry.score]
    page, best = PageBuilder("Workspace"), choose_scores(scores)
    if best:
        page.add(make_key_figure(best))
    page.add(*tables)
    if len(best) > 1:
        page.notice(
            "The best of several runs on the split that ranks them is optimistic; bitimely report "
            "compares runs with corrected intervals."
        )
    page.notice(*describe_faults(reader))
    sentences = describe_best(best) or count_folders(reader)
    return page.finish(" ".join(sentences) or "Nothing here yet. Start with: bitimely demo")


def describe_faults(reader: WorkspaceReader) -> list[str]:
    """Sentences on altered files, on folders that are damaged and on runs that are not finished."""
    entries = {name: entry for name, (_, entry) in reader.present.entries.items()}
    lines = list(itertools.chain.from_iterable(entry.changes for entry in entries.values()))
    damaged = [f"{name} ({entry.damage})" for name, entry in entries.items() if entry.damage]
    if damaged:
        lines.append(f"Damaged, see bitimely verify: {', '.join(damaged)}.")
    names = [name.removeprefix("runs/") for name, entry in entries.items() if entry.unfinished]
    if names:
        stopped = ", ".join(names)
        lines.append(f"Not finished: {stopped}. The command that started a run continues it.")
    return lines


def count_folders(reader: WorkspaceReader) -> list[str]:
    """The sentence of what there is."""
    numbers = Counter(name.partition("/")[0] for name in reader.present.entries)
    counts = [f"{count} {NOUNS[kind]}{'s' * (count != 1)}" for kind, count in numbers.items()]
    return [f"{', '.join(counts[:-1])}{' and ' * (len(counts) > 1)}{counts[-1]}."] if counts else []


def describe_best(scores: Sequence[ScoreLine]) -> list[str]:
    """The sentence of the best run of the key figure."""
    if not scores:
        return []
    first, interval = scores[0], ""
    value = first.value
    if value.lo is not None:
        interval = f" (95 % CI {value.lo:.3f} to {value.hi:.3f})"
    rank = words = NAMES.get(first.metric, first.metric)
    if len(scores) > 1:
        order = "lowest" if is_lower_better(first.metric) else "highest"
        rank = f"{order} {words} of {len(scores)} runs"
    reached = f"the {rank} is {value.value:.3f}{interval}, of {first.run}"
    if first.baseline:
        best = first.baseline
        reached += f"; the best baseline, {best.name}, reaches {best.value:.3f}"
    return [f"On {first.data} ({first.split}) {reached}."]


def make_key_figure(scores: Sequence[ScoreLine]) -> Figure:
    """The scores of the best runs with their intervals."""
    first = scores[0]
    words = NAMES.get(first.metric, first.metric)
    title = words[:1].upper() + words[1:]
    part = f" The best {SHOWN} of {len(scores)} runs." if len(scores) > SHOWN else ""
    caption = f"{title} on {first.data}, split {first.split}, with 95 % CI.{part}"
    bars: dict[str, MetricLike] = {score.run: score.value for score in scores[:SHOWN]}
    if first.baseline:
        bars[f"best baseline: {first.baseline.name}"] = first.baseline
    data = BarPlot.from_metrics(bars, words)
    return Figure("scores", f"{title} of {first.run}", caption, data)
