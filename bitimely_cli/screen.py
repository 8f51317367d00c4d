"""What the command line shows: results on stdout, findings and progress on stderr. The only module
that imports rich, and only when it draws.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core.errors import UserError, clean
from bitimely_core.notices import select_unseen
from bitimely_core.privacy import Result, choose_counts, round_message
from bitimely_core.progress import show_lines, show_progress
from bitimely_core.system_errors import is_later_process
from bitimely_core.wording import fit_number, list_first, shorten_answer

if TYPE_CHECKING:
    from bitimely_core.errors import Finding
    from bitimely_core.page import Page
    from bitimely_core.pipeline import ExperimentStatus
    from bitimely_core.progress import Draw
    from bitimely_core.registry import Choices
    from bitimely_core.schemas.ingest_records import FindingRecord

MOST_ROWS = 12  # of a table that a page holds in full
MOST_LINES = 20  # findings a run; the rest is in the report
# columns of a table that goes to a file or a pipe, where COLUMNS does not say otherwise
WIDTH = 160
LONGEST = 32  # characters of a word that is never broken; paths are longer
AROUND = 5  # stages before and after the running ones
# a command with its arguments in the advice of an error, whose verb reads a workspace
COMMAND = re.compile(
    r"bitimely (?:ingest|tokenize|pretrain|finetune|train|evaluate|embed|report|predict|analyze"
    r"|export|list(?= runs))(?: [^\s,;`]*[^\s,;`.])+"
)
LINE_EVERY = 10.0  # seconds between progress lines where no terminal is


class Screen:
    """Flags of this run (`--json`, `--debug`) and the functions that print. Of the processes of one
    training only the first prints.
    """

    silent = is_later_process()
    json = False
    debug = False
    n_printed = 0
    has_errors = False  # an error line was printed: the exit code is not 0
    workspace_option = ""  # the option with which a printed command finds the workspace

    def print_line(self, text: str = "") -> None:
        """A line for the reader, without control characters; on stderr under --json."""
        if not self.silent:
            text = fit_number(clean(text, len(text)))
            print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def note(self, text: str) -> None:
        """A line beside the result, without control characters: always stderr."""
        if not self.silent:
            print(fit_number(clean(text, len(text))), file=sys.stderr, flush=True)

    def announce(self, text: str) -> None:
        """A line of a training, as `note`; under --json with rounded counts of people."""
        self.note(round_message(text) if self.json else text)

    def print_finding(self, finding: Finding | FindingRecord) -> None:
        """One error or warning line; infos are only in the report."""
        if finding.level == "info":
            return
        self.n_printed += 1
        self.has_errors |= finding.level == "error"
        if self.n_printed <= MOST_LINES:
            message = COMMAND.sub(
                lambda command: command[0] + self.workspace_option, finding.message
            )
            self.note(f"{finding.level}[{finding.code}] {clean(message, 1000)}")

    def print_findings(
        self, findings: Sequence[Finding | FindingRecord], where: str = "the report"
    ) -> None:
        """Error lines first, then warnings; at most twenty a run, then how many more there are."""
        for level in ("error", "warning"):
            for finding in findings:
                if finding.level == level:
                    self.print_finding(finding)
        if self.n_printed > MOST_LINES:
            self.note(f"and {self.n_printed - MOST_LINES} more, see {where}")
            self.n_printed = MOST_LINES

    def make_room(self) -> None:
        """Room for one more line: the error that ends a verb is shown after any warnings."""
        self.n_printed = min(self.n_printed, MOST_LINES - 1)

    def choose(self, result: Result) -> Result:
        """The result for the reader: JSON may be shared, the lines are for who owns the data."""
        return choose_counts(result, owner=not self.json)

    @contextmanager
    def show_partial(self, show: Callable[[Any], Sequence[str]]) -> Iterator[None]:
        """Show what was computed before a fault of the machine in this block, and then lines; under
        --json it is printed with the error.
        """
        try:
            yield
        except UserError as error:
            if error.result is not None and not self.json:
                for line in show(error.result):
                    self.print_line(line)
            raise

    def result(self, result: Mapping[str, Any], lines: Sequence[str] = ()) -> None:
        """The end of a verb: one JSON object under --json, to be shared, else `lines`."""
        if self.silent:
            return
        if self.json:
            text = json.dumps(
                self.choose(result), allow_nan=False, ensure_ascii=False, sort_keys=True
            )
            sys.stdout.write(
                "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text) + "\n"
            )
            sys.stdout.flush()
            return
        for line in lines:
            self.print_line(line)

    def summarize(
        self, notices: Sequence[str], workspace: Path, verdict: str | None = None
    ) -> list[str]:
        """The notices that are new in the workspace, and the verdict in one short sentence; none
        under --json, which prints all.
        """
        if self.json or self.silent:
            return []
        answer = [] if verdict is None else [shorten_answer(verdict)]
        return [*select_unseen(notices, workspace), *answer]

    def lines(self, result: Mapping[str, Any]) -> list[str]:
        """A flat result (that of --dry-run) as lines: one a fact, sizes and times in units for
        people.
        """
        return [
            describe_fact(key, value)
            for key, value in self.choose(result).items()
            if key != "format_version" and value is not None
        ]

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> None:
        """A plain table; foreign text is shown as it is, never as markup."""
        if self.json:
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        is_fitted = sys.stdout.isatty() or "COLUMNS" in os.environ
        width = Console().width if is_fitted else WIDTH
        names, *cells = (list(map(show, row)) for row in (columns, *rows))
        widths = fit_columns([names, *cells], width)
        table = Table(
            box=box.SIMPLE_HEAD,
            title=Text(show(title)) if title else None,
            title_justify="left",
            pad_edge=False,
        )
        for i, column_width in enumerate(widths):
            is_number = all(isinstance(row[i], int | float | None) for row in rows)
            table.add_column(
                Text(names[i]),
                justify="right" if is_number else "left",
                overflow="fold",
                width=column_width,
            )
        for texts in cells:
            table.add_row(*map(Text, texts[: len(widths)]))
        Console(soft_wrap=False, width=width).print(table)
        if hidden := names[len(widths) :]:
            self.print_line(
                f"Not shown at {width} columns: {', '.join(hidden)}. "
                "Widen the terminal or use --json."
            )

    def page_table(self, page: Page) -> None:
        """The first table of a page, as far as a reader takes it in at once."""
        from bitimely_core.page import Table

        for table in [block for block in page.blocks if isinstance(block, Table)][:1]:
            rows = table.rows[:MOST_ROWS]
            cells = [[getattr(cell, "text", cell) for cell in row] for row in rows]
            self.table(table.columns, cells, table.title)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show what is reported inside: a bar with rate and time left on a terminal, else a plain
        line now and then, on stderr.
        """
        if self.silent or not sys.stderr.isatty():
            with show_progress(self._lines()), show_lines(self.announce):
                yield
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            tasks: dict[str, Any] = {}
            began: dict[str, tuple[float, int]] = {}

            def report(what: str, done: int, total: int | None) -> None:
                name, detail = split_progress(what)
                if name not in tasks:
                    tasks[name] = bar.add_task(name, total=total, rate="")
                    began[name] = time.monotonic(), done
                start, first = began[name]
                spent = time.monotonic() - start
                rate = f"{(done - first) / spent:.1f}/s" if spent > 0.5 and done > first else ""
                text = " ".join(filter(None, (rate, detail)))
                bar.update(tasks[name], completed=done, total=total, rate=text)

            with show_progress(report), show_lines(self.announce):
                yield

    @contextmanager
    def stages(self) -> Iterator[Callable[[ExperimentStatus], None]]:
        """Show what is reported inside, and the stages of an experiment with the function that it
        gives: on a terminal a table that changes, elsewhere a line for each stage.
        """
        if self.silent or not sys.stderr.isatty():
            with show_progress(self._lines()), show_lines(self.announce):
                yield self._stage_lines()
            return
        from rich.console import Console
        from rich.live import Live

        from bitimely_core.pipeline import ExperimentStatus

        bar, status = [""], [ExperimentStatus([], None)]
        draw = partial(_stage_table, bar, status)
        with Live(
            console=Console(file=sys.stderr),
            get_renderable=draw,
            refresh_per_second=2,
            transient=True,
        ):

            def report(what: str, done: int, total: int | None) -> None:
                name, detail = split_progress(what)
                count = f"{done:,} of {total:,}" if total else f"{done:,}"
                bar[0] = ", ".join(filter(None, (f"{name}: {count}", detail)))

            with show_progress(report), show_lines(self.announce):
                yield lambda now: status.__setitem__(0, now)

    def _stage_lines(self) -> Callable[[ExperimentStatus], None]:
        printed: set[tuple[str, str]] = set()

        def watch(now: ExperimentStatus) -> None:
            rest = describe_time_left(now)
            for label, state in now.stages:
                if state.state != "waiting" and (label, state.state) not in printed:
                    printed.add((label, state.state))
                    detail = f": {state.detail}" if state.detail else ""
                    self.note(f"{state.state}: {label}{detail}{rest}")

        return watch

    def _lines(self) -> Draw:
        last: dict[str, float] = {}
        start = time.monotonic()

        def report(what: str, done: int, total: int | None) -> None:
            now = time.monotonic()
            name, detail = split_progress(what)
            if name in last and now - last[name] < LINE_EVERY and done != total:
                return
            last[name] = now
            count = f"{done}" if total is None else f"{done} of {total}"
            text = ", ".join(filter(None, (count, detail)))
            self.note(f"{name}: {text} ({now - start:.0f} s)")

        return report


def split_progress(what: str) -> tuple[str, str]:
    """The name of what is counted, and the detail behind a tab; fit to print."""
    name, _, detail = what.partition("\t")
    return clean(name, 60), clean(detail, 40)


def _describe_memory(sizes: Mapping[str, float]) -> str:
    parts = (f"{part} {size / 2**20:,.0f} MiB" for part, size in sizes.items())
    return f"memory: {', '.join(parts)}"


# fact of a result whose number needs a unit -> its line
FACTS: dict[str, Callable[[Any], str]] = {
    "memory_bytes": _describe_memory,
    "bytes": lambda value: f"size: {value / 2**20:,.1f} MiB",
    "seconds": lambda value: f"time: {span(value)}",
    "seconds_per_step": lambda value: f"time per step: {span(value)}",
}


def describe_fact(key: str, value: Any) -> str:
    """One fact of a flat result as a line."""
    name = key.replace("_", " ")
    if key in FACTS:
        return FACTS[key](value)
    if isinstance(value, list | tuple):
        items = [show(_name_item(item)) for item in value]
        # sentences stand for themselves
        between = " " if all(item.endswith(".") for item in items) else ", "
        return f"{name}: {list_first(items, 8, between) or 'none'}"
    return f"{name}: {show(value)}"


def _name_item(item: Any) -> Any:
    """What stands for an item of a list: the unit or the message of a dict."""
    return item.get("unit", item.get("message", "")) if isinstance(item, dict) else item


def span(seconds: float | None) -> str:
    """A length of time for people."""
    if seconds is None:
        return "-"
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.0f} d"
    if seconds > 90:
        return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"
    return f"{seconds:.{1 if seconds >= 10 else 2}f} s"


def _stage_table(bar: list[str], status: list[ExperimentStatus]) -> Any:
    """The stages around the running one, then how many have ended and the time left."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = status[0].stages
    waiting = [row for row in rows if row.state.state == "waiting"]
    running = [row for row in rows if row.state.state == "running"]
    ended = [row for row in rows if row.state.state not in {"waiting", "running"}]
    table = Table("stage", "state", "time", box=box.SIMPLE_HEAD, pad_edge=False)
    for label, state in (*ended[-AROUND:], *running, *waiting[:AROUND]):
        seconds = span(state.seconds) if state.seconds else ""
        table.add_row(Text(show(label)), Text(state.state), Text(seconds))
    failed = sum(row.state.state == "failed" for row in rows)
    text = f"{len(ended)} of {len(rows)} stages" + (f", {failed} failed" if failed else "")
    return Group(table, Text(text + describe_time_left(status[0])), Text(bar[0]))


def describe_time_left(status: ExperimentStatus) -> str:
    """The estimated time to the end as the last part of a line; empty where it is unknown."""
    return f"; about {span(status.seconds_left)} left" if status.seconds_left else ""


def fit_columns(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the first columns, as many as `width` characters hold without a word of theirs (of
    up to `LONGEST`) being broken.

    What is left goes to the columns that need least first: a short cell stays on one line beside a
    long one.
    """
    columns = list(zip(*cells, strict=True))
    needed = [
        min(max(len(word) for cell in column for word in [*cell.split(), ""]), LONGEST)
        for column in columns
    ]
    # three characters between two columns, one at each end
    while len(needed) > 1 and sum(needed) + 3 * len(needed) - 1 > width:
        needed.pop()
    spare = max(0, width - sum(needed) - 3 * len(needed) + 1)
    wanted = [max(map(len, column)) - least for column, least in zip(columns, needed, strict=False)]
    widths = [min(least, width) for least in needed]
    for ahead, k in enumerate(sorted(range(len(widths)), key=wanted.__getitem__)):
        growth = min(wanted[k], spare // (len(widths) - ahead))
        widths[k] += growth
        spare -= growth
    return widths


def show(cell: Any) -> str:
    """A cell of a table: numbers short, None a dash, foreign text without control characters."""
    return next(show_kind(cell) for kind, show_kind in KINDS if isinstance(cell, kind))


def _show_fields(cell: Choices) -> str:
    """A metric with its interval or a text of a page, which have a `value`, or any other fields."""
    if "value" not in cell:
        return ", ".join(f"{key} {show(value)}" for key, value in cell.items())
    text = cell.get("text") or show(cell["value"])
    if cell.get("lo") is None:
        return str(text)
    return f"{text} ({show(cell['lo'])} to {show(cell.get('hi'))})"


# of a cell that is of several the first counts
KINDS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (type(None), lambda _: "-"),
    (bool, lambda cell: "yes" if cell else "no"),
    (float, lambda cell: f"{cell:.4g}"),
    (int, lambda cell: f"{cell:,}"),
    (dict, _show_fields),
    (list, lambda cell: ", ".join(map(show, cell))),
    (tuple, lambda cell: ", ".join(map(show, cell))),
    (object, lambda cell: fit_number(clean(str(cell), 400))),
)

screen = Screen()
