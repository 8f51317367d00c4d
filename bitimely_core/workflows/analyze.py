"""`analyze`: one analysis of runs, of a data set or of a model, and its report."""

from __future__ import annotations

import inspect
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from bitimely_core import registry
from bitimely_core.config import DataConfig
from bitimely_core.errors import Exit, safe_text, unknown_name_error, usage_error
from bitimely_core.page import BarPlot, Figure, ForestPlot, LinePlot, Page, Table, rename_units
from bitimely_core.privacy import NOTICE, has_small_count, is_small
from bitimely_core.run import FORMAT
from bitimely_core.system_errors import attach_result
from bitimely_core.types import Progress
from bitimely_core.workflows.prepare import open_run, prepare_windows
from bitimely_core.workspace import locate_new, shorten_name

# words of columns
COUNTED = frozenset(
    {"windows", "subjects", "subject", "n", "support", "rows", "cases", "positive", "unknown"}
)
# facts without counts of the rows that were scored
ABOUT_RUNS = frozenset({"Runs", "Data", "Split", "Model", "Seed", "Versions"})
# facts with counts of rows or subjects
OF_PEOPLE = frozenset({"Rows", "Subjects", "Sequences", "Tokens", "Bootstrap", "Intervals"})
UNDISCLOSED = "Withheld: these data have a label whose counts of people are withheld, and scores of it would show them."
SWITCHES = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
# numbers of which 0 leaves a part of the analysis out
MAY_BE_NONE = frozenset({"bootstrap", "permutations", "windows"})
Options = dict[str, Any]  # keyword arguments of an analysis


class AnalysisResult(TypedDict, total=False):
    """Result of `analyze`; under dry_run kind, runs, options and the file that would be written."""

    format_version: int
    kind: str
    runs: list[str]
    options: Options
    report: str
    page: Page
    verdict: str
    notices: list[str]
    summary: Any
    leak_free: Any  # as measured
    exit_code: int  # 5 when a leak contradicts the stamp of the run


def analyze(
    kind: str,
    names: list[str],
    *,
    data: str | None = None,
    model: str | None = None,
    objective: str | None = None,
    preset: str = "tiny",
    sequences: int | None = None,
    options: dict[str, str] | None = None,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
    out: Path | None = None,
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> AnalysisResult:
    """Run the analysis `kind` on runs (or on a model by name) and write its report; those without a
    `device` compute on the CPU.

    Raises UserError: unknown_name, config (2), incomplete (4).
    """
    from bitimely_core import report as rendering
    from bitimely_core.train.devices import select_device

    entry = registry.analyses[kind]
    takes = entry.facts.takes
    if takes in {"run", "runs"} and not names:
        raise usage_error(
            "no run", "expected at least one RUN", f"For example: bitimely analyze {kind} tiny"
        )
    if takes == "run" and len(names) > 1:
        raise usage_error(f"{len(names)} runs", f"expected one for {kind}")
    parsed = _parse_options(
        entry, {**(options or {}), **({} if sequences is None else {"sequences": str(sequences)})}
    )
    if takes == "data" and data is None:
        raise usage_error(
            "no data",
            "expected --data",
            f"For example: bitimely analyze {kind} --data synthetic/staging",
        )
    view = data if takes == "data" else None
    named = name if name is not None else _name_report(kind, names, view, model, objective, preset)
    target = out or locate_new(workspace, "reports", named, "--name")
    select_device(device)
    if dry_run:
        return {
            "kind": kind,
            "runs": names,
            "options": parsed,
            "report": str(target / "report.html"),
        }
    own = inspect.signature(entry.function).parameters
    arguments = {**parsed, "seed": seed} | {
        key: value for key, value in (("device", device), ("progress", progress)) if key in own
    }
    units = set[str]()
    if view is not None:
        windows = prepare_windows(view, workspace, DataConfig(), verify=verify, progress=progress)
        page: Page = entry.function(windows, **arguments)
        units.add(windows.subject_unit)
    else:
        runs = [
            open_run(one, workspace, data=data, verify=verify, progress=progress) for one in names
        ]
        for run in runs if entry.facts.scores else ():  # it compares predictions with labels
            run.count_shared_subjects()
        if takes == "model":
            arguments |= {"model": model or "bitimelygpt", "objective": objective, "preset": preset}
            if (
                data is not None
                and not runs
                and "windows" in inspect.signature(entry.function).parameters
            ):
                arguments["windows"] = prepare_windows(
                    data, workspace, DataConfig(), verify=verify, progress=progress
                )
        page = entry.function(runs or None, **arguments)
        units |= {run.windows().subject_unit for run in runs}
        events = [run.windows() for run in runs if run.windows().vocabulary]
        if any(not getattr(one.options, "small_counts", None) for one in events):
            from bitimely_core.claims.disclosure import has_withheld_labels

            page = protect_page(
                page,
                withhold=entry.facts.scores
                and any(has_withheld_labels(one.folder) for one in events),
            )
    if len(units) == 1:
        page = rename_units(page, *units)
        page.summary["subject_unit"] = units.pop()
    with attach_result(
        lambda: {
            "kind": kind,
            "verdict": page.verdict,
            "notices": page.notices,
            "summary": page.summary,
        }
    ):
        path = rendering.write_report(target, page)
    result: AnalysisResult = {
        "format_version": FORMAT,
        "kind": kind,
        "report": str(path),
        "page": page,
        "verdict": page.verdict,
        "notices": page.notices,
        "summary": page.summary,
        "exit_code": int(Exit.INTEGRITY if page.summary.get("contradiction") else Exit.OK),
    }
    if "leak_free" in page.summary:
        result["leak_free"] = page.summary["leak_free"]
    return result


def protect_page(page: Page, *, withhold: bool = False) -> Page:
    """The page of an analysis of events without figures of single people or counts, tables and
    facts with a count of 1 to 10, and counts in its summary.

    `withhold`: it has scores of a label whose counts are withheld, from which they could be
    computed; only what it was made of is left.
    """
    if withhold:
        facts = {name: text for name, text in page.facts.items() if name in ABOUT_RUNS}
        return Page(
            title=page.title,
            verdict=UNDISCLOSED,
            notices=[NOTICE],
            blocks=[],
            facts=facts,
            summary={},
        )

    def is_open(block: Figure | Table | str) -> bool:
        if isinstance(block, str):
            return True
        if isinstance(block, Figure):
            data = block.data
            counts = isinstance(data, BarPlot) and all(
                isinstance(value, int) for value in data.values
            )
            return isinstance(data, BarPlot | LinePlot | ForestPlot) and not counts
        of_people = [
            k
            for k, column in enumerate(block.columns)
            if COUNTED & set(column.lower().replace("_", " ").split())
        ]
        return not any(
            isinstance(row[k], int) and is_small(row[k]) for row in block.rows for k in of_people
        )

    kept = [block for block in page.blocks if is_open(block)]
    return Page(
        title=page.title,
        verdict=page.verdict,
        notices=[*page.notices, NOTICE],
        blocks=kept,
        facts={
            name: text
            for name, text in page.facts.items()
            if name not in OF_PEOPLE or not has_small_count(text)
        },
        summary={
            key: value
            for key, value in page.summary.items()
            if key in {"metrics", "leak_free", "contradiction"}
        },
    )


def _parse_options(entry: registry.Entry[Any], texts: dict[str, str]) -> Options:
    """Texts of the command line as the types of the analysis's keyword arguments. Raises UserError
    (config, exit 2).
    """
    known, parameters = list_analysis_options(entry), inspect.signature(entry.function).parameters
    out: Options = {}
    for key, text in texts.items():
        flag = f"--{key.replace('_', '-')}"
        if key not in known:
            raise unknown_name_error(
                f"option of {entry.name}", flag, [f"--{name.replace('_', '-')}" for name in known]
            )
        default = known[key]
        word = str(parameters[key].annotation).partition(" ")[0]  # also of `float | None`
        kind: Any = {"float": float, "int": int}.get(word, type(default))
        try:
            if kind is bool:
                out[key] = SWITCHES[text.lower()]
            elif kind is type(None):
                out[key] = text
                with suppress(ValueError):
                    out[key] = json.loads(text)
            else:
                out[key] = kind(text)
        except (ValueError, KeyError) as error:
            expected = "true or false" if kind is bool else kind.__name__
            raise usage_error(
                f"found {safe_text(text)}", f"expected {expected}", field=flag
            ) from error
        least = 1 if kind is int and default != 0 and key not in MAY_BE_NONE else 0
        if isinstance(out[key], int | float) and not least <= out[key] < math.inf:
            raise usage_error(
                f"found {safe_text(text)}", f"expected a number of at least {least}", field=flag
            )
    return out


def list_analysis_options(entry: registry.Entry[Any]) -> Options:
    """Keyword arguments of an analysis that are options of its command, with their defaults."""
    hidden = {"seed", "model", "objective", "preset", "device", "progress"}
    parameters = (
        one
        for one in inspect.signature(entry.function).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    )
    return {
        one.name: one.default
        for one in parameters
        if one.name not in hidden and (one.name != "windows" or one.default is not None)
    }


def _name_report(
    kind: str,
    names: list[str],
    data: str | None,
    model: str | None,
    objective: str | None,
    preset: str,
) -> str:
    of_data = [data.strip("/").replace("/", "-")] if data is not None else None
    of_model = [part for part in (model, objective, None if preset == "tiny" else preset) if part]
    parts = [Path(name).resolve().name for name in names] or of_data or of_model
    return shorten_name([kind, *parts])
