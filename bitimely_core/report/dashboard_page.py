"""The page of a workspace: runs with scores and curves, reports, data sets, tokens, recipes,
exports, with links to their own pages.

It is made from records alone, without torch and without tables, so that every verb can write it
again; equal workspaces give equal bytes. Counts of people in histories are left out: the pages of
the token sets print what may be known of them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from bitimely_core import storage
from bitimely_core.errors import UserError, safe_text
from bitimely_core.evaluate.metrics import LOWER_IS_BETTER, NAMES
from bitimely_core.page import BarPlot, Figure, Link, Page, PageBuilder, Sparkline, Table, to_plain
from bitimely_core.records import has_result, read_result
from bitimely_core.schemas.ingest import CacheManifest, RecordingsManifest
from bitimely_core.schemas.reports import StageRecord, Summary
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import MetricValue, Scores
from bitimely_core.schemas.tokens import TokenManifest, WindowManifest
from bitimely_core.system_errors import raise_system_error
from bitimely_core.workspace import FolderKind

INDEX = "index.html"
POINTS = 60  # of a curve
SHOWN = 8  # runs of the key figure
DAMAGED = "damaged"


@dataclass(frozen=True)
class ScoreLine:
    """The main score of a run, as its page prints it."""

    run: str
    data: str
    split: str
    metric: str
    value: MetricValue


class TableSpec(NamedTuple):
    """A table of the page: the folders of a kind, and the cells of one."""

    kind: FolderKind
    title: str
    caption: str
    columns: tuple[str, ...]
    describe: Callable[[Path], list[Any]]


@dataclass
class WorkspaceReader:
    """Reads the records of a workspace into rows; `start`: the folder of the page, from which its
    links go.
    """

    workspace: Path
    start: Path
    scores: list[ScoreLine] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def link(self, folder: Path, *names: str, text: str = "") -> Link:
        """A link to the first of the files `names` that is in `folder`; the text is the name of the
        folder.
        """
        for name in names:
            if has_result(folder / name):
                return Link(
                    text or folder.name,
                    quote(Path(os.path.relpath(folder / name, self.start)).as_posix()),
                )
        return Link(text or folder.name)

    def make_table(self, spec: TableSpec) -> Table | None:
        """The rows of all folders of a kind; None without any. A folder with damaged records is a
        row that says so.
        """
        rows = []
        for folder in list_folders(self.workspace / spec.kind):
            try:
                rows.append(spec.describe(folder))
            except (UserError, OSError, ValueError, LookupError) as error:
                raise_system_error(error)
                problem = error.problem if isinstance(error, UserError) else safe_text(str(error))
                self.damaged.append(f"{spec.kind}/{folder.name}")
                rows.append(
                    [Link(folder.name), f"{DAMAGED}: {problem}", *[None] * (len(spec.columns) - 2)]
                )
        return (
            Table(
                name=spec.kind,
                title=spec.title,
                caption=spec.caption,
                columns=list(spec.columns),
                rows=to_cells(rows),
            )
            if rows
            else None
        )

    def describe_run(self, folder: Path) -> list[Any]:
        """Cells of a run."""
        record = RunRecord.load(folder / "run.json")
        scores = Scores.load_shared(folder) if has_result(folder / "scores.json") else None
        metric = scores.metrics.get(scores.main or "rel") if scores else None
        name = "" if scores is None else scores.main or "rel"
        if scores is not None and metric is not None:
            self.scores.append(ScoreLine(record.run, scores.data, scores.split, name, metric))
        state = (
            f"finished, {record.final.step:,} steps"
            if record.finished and record.final
            else "finished"
        )
        if not record.finished:
            state = "not finished"
            self.unfinished.append(folder.name)
        stamp = (
            {True: "yes", False: "no", None: None}[record.leak_free]
            if not isinstance(record.leak_free, str)
            else record.leak_free
        )
        data = ", ".join(one.name for one in record.data)
        shown = None if metric is None or metric.value is None else metric
        words = NAMES.get(name, name) or None
        return [
            self.link(folder, "report.html", "model_card.md"),
            state,
            f"{record.model}, {record.preset}" if record.preset else record.model,
            data,
            read_curves(folder),
            shown,
            words,
            stamp,
            record.parameters,
        ]

    def describe_report(self, folder: Path) -> list[Any]:
        """Cells of a report."""
        info = Summary.load(folder / "summary.json").report
        return [self.link(folder, "report.html", text=info.title), folder.name, info.verdict]

    def describe_cache(self, folder: Path) -> list[Any]:
        """Cells of a data set."""
        manifest = CacheManifest.read(folder)
        counts = manifest.report.counts
        used = f"{counts.accepted + counts.accepted_with_warning:,} of {counts.units_seen:,} units"
        recordings = manifest.recordings if isinstance(manifest, RecordingsManifest) else None
        return [
            self.link(folder, "report.html"),
            used,
            recordings,
            counts.quarantined,
            manifest.report.tool.version,
        ]

    def describe_tokens(self, folder: Path) -> list[Any]:
        """Cells of a token set."""
        manifest = TokenManifest.read(folder)
        options = manifest.options
        view = f"{options.dataset}/{options.view}" if options.view else options.dataset
        cells: list[Any] = [None, None, None]
        if isinstance(manifest, WindowManifest):
            rate = f"{manifest.options.rate:g} Hz, {manifest.options.length:g} s"
            subjects = (
                sum(one.subjects for one in manifest.counts.values())
                if options.split in {"subject", "official"}
                else None
            )
            cells = [manifest.windows, subjects, rate]
        classes = ", ".join(manifest.class_names) or None
        return [
            self.link(folder, "report.html"),
            view,
            options.task,
            options.split,
            *cells,
            classes,
        ]

    def describe_recipe(self, folder: Path) -> list[Any]:
        """Cells of a recipe, from the records of its stages."""
        states: dict[str, int] = {}
        for stage in list_folders(folder):
            if has_result(stage / "stage.json"):
                state = StageRecord.load(stage / "stage.json").state
                states[state] = states.get(state, 0) + 1
        page = self.link(self.workspace / "reports" / folder.name, "report.html", text=folder.name)
        return [
            page,
            ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            or "no stage yet",
        ]

    def describe_export(self, folder: Path) -> list[Any]:
        """Cells of an exported run."""
        record = RunRecord.load(folder / "run.json")
        return [self.link(folder, "model_card.md", "README.md"), record.model, record.parameters]


def list_folders(parent: Path) -> list[Path]:
    """Folders in `parent` by name, without those of killed commands and links."""
    found = parent.iterdir() if parent.is_dir() and not parent.is_symlink() else ()
    return sorted(
        path
        for path in found
        if path.is_dir() and not path.is_symlink() and not storage.is_temporary(path.name)
    )


def to_cells(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Rows with metrics as plain values; links and curves stay."""
    return [
        [cell if isinstance(cell, Link | Sparkline) else to_plain(cell) for cell in row]
        for row in rows
    ]


def read_curves(folder: Path) -> Sparkline | None:
    """Training and validation curve of a run, thinned; None without any."""
    path = folder / "metrics.jsonl"
    lines: dict[str, list[bytes]] = {"train": [], "validation": []}
    for line in read_result(path).splitlines() if has_result(path) else []:
        found = re.search(rb'"split": ?"(train|validation)"', line)
        if found:
            lines[found[1].decode()].append(line)
    parsed = [
        list(filter(None, map(parse_point, thin(lines[split]))))
        for split in ("train", "validation")
    ]
    has_rel = any(rel is not None for points in parsed for _, _, rel in points)
    curves = [
        [
            (step, value)
            for step, loss, rel in points
            if (value := rel if has_rel else loss) is not None
        ]
        for points in parsed
    ]
    if not (drawn := [curve for curve in curves if curve]):
        return None
    name, last = "validation" if curves[1] else "training", drawn[-1][-1][1]
    return Sparkline(
        last,
        drawn,
        f"{'relative loss' if has_rel else 'loss'} by step, the last of {name} is {last:.4g}",
    )


def thin(lines: Sequence[bytes]) -> list[bytes]:
    """At most `POINTS` lines, evenly, with the first and the last."""
    if len(lines) <= POINTS:
        return list(lines)
    return [lines[round(k * (len(lines) - 1) / (POINTS - 1))] for k in range(POINTS)]


def parse_point(line: bytes) -> tuple[float, float | None, float | None] | None:
    """Step, loss and relative loss of a line of `metrics.jsonl`; None where a kill has cut it."""
    try:
        values = json.loads(line)
        step, loss, rel = (values.get(name) for name in ("step", "loss", "rel"))
    except (ValueError, AttributeError):
        return None
    numbers = [
        float(v) if isinstance(v, int | float) and math.isfinite(v) else None
        for v in (step, loss, rel)
    ]
    return None if numbers[0] is None else (numbers[0], numbers[1], numbers[2])


def choose_scores(scores: Sequence[ScoreLine]) -> list[ScoreLine]:
    """The runs of the key figure, the best first: those with the metric, data set and split that
    most runs are scored on.
    """
    groups: dict[tuple[str, str, str], list[ScoreLine]] = {}
    for one in scores:
        if one.value.value is not None:
            groups.setdefault((one.metric, one.data, one.split), []).append(one)
    if not groups:
        return []
    (metric, *_), members = max(
        groups.items(), key=lambda item: (item[0][0] in NAMES, len(item[1]), item[0])
    )
    sign = 1 if metric in LOWER_IS_BETTER or metric not in NAMES else -1
    return sorted(members, key=lambda one: (sign * (one.value.value or 0.0), one.run))


def dashboard_page(workspace: Path, start: Path) -> Page:
    """The page of `workspace`, for `report.render_index`; its links are relative to the folder
    `start`.
    """
    reader = WorkspaceReader(workspace, start)
    specs = (
        TableSpec(
            "runs",
            "Runs",
            "Curve: loss of the validation split (in colour) and of the training split, relative to the mean as prediction where that is known; the number is the last "
            "one. Score: the main metric with its 95 % CI on the split of the evaluation. Names lead to the page of the run.",
            (
                "run",
                "state",
                "model",
                "data",
                "curve",
                "score",
                "metric",
                "leak-free",
                "parameters",
            ),
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
            "Units are recordings, or tables of a data set; those left out are named on the page of the ingest.",
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
        ),
        TableSpec(
            "exports",
            "Exports",
            "Runs as folders for others.",
            ("export", "model", "parameters"),
            reader.describe_export,
        ),
    )
    tables = {spec.kind: table for spec in specs if (table := reader.make_table(spec)) is not None}
    page, best = PageBuilder("Workspace"), choose_scores(reader.scores)
    if best:
        page.add(make_key_figure(best))
    page.add(*tables.values())
    if len(best) > 1:
        page.notice(
            "The best of several runs on the split that ranks them is optimistic; bitimely report compares runs with corrected intervals."
        )
    if reader.damaged:
        page.notice(f"Damaged, see bitimely verify: {', '.join(reader.damaged)}.")
    if reader.unfinished:
        page.notice(
            f"Not finished: {', '.join(reader.unfinished)}. The command that started a run continues it."
        )
    return page.finish(
        " ".join([*count_tables(tables), *describe_best(best)])
        or "Nothing here yet. Start with: bitimely demo"
    )


def count_tables(tables: dict[FolderKind, Table]) -> list[str]:
    """The sentence of what there is."""
    nouns = {
        "runs": "run",
        "reports": "report",
        "cache": "data set",
        "tokens": "token set",
        "pipelines": "recipe",
        "exports": "export",
    }
    counts = [
        f"{len(table.rows)} {nouns[kind]}{'s' * (len(table.rows) != 1)}"
        for kind, table in tables.items()
    ]
    return [f"{', '.join(counts[:-1])}{' and ' * (len(counts) > 1)}{counts[-1]}."] if counts else []


def describe_best(scores: Sequence[ScoreLine]) -> list[str]:
    """The sentence of the best run of the key figure."""
    if not scores:
        return []
    first = scores[0]
    value = first.value
    interval = (
        f" (95 % CI {value.lo:.3f} to {value.hi:.3f})"
        if value.lo is not None and value.hi is not None
        else ""
    )
    order = "lowest" if first.metric in LOWER_IS_BETTER or first.metric not in NAMES else "highest"
    words = NAMES.get(first.metric, first.metric)
    rank = f"the {order} {words} of {len(scores)} runs is" if len(scores) > 1 else f"the {words} is"
    return [f"On {first.data} ({first.split}) {rank} {value.value:.3f}{interval}, of {first.run}."]


def make_key_figure(scores: Sequence[ScoreLine]) -> Figure:
    """The scores of the best runs with their intervals."""
    first = scores[0]
    words = NAMES.get(first.metric, first.metric)
    more = f" The best {SHOWN} of {len(scores)} runs." if len(scores) > SHOWN else ""
    caption = (
        f"{words[:1].upper()}{words[1:]} on {first.data}, split {first.split}, with 95 % CI.{more}"
    )
    data = BarPlot.from_metrics({one.run: one.value for one in scores[:SHOWN]}, words)
    return Figure(name="scores", title=f"{words} of {first.run}", caption=caption, data=data)
