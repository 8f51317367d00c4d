"""The verb `analyze`: one analysis of runs, of a data set or of a model, and its report."""

from __future__ import annotations

import inspect
import json
import math
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

from bitimely_core import registry
from bitimely_core.errors import Exit, safe_text, unknown_name_error, usage_error
from bitimely_core.page import Figure, Page, Table, rename_units
from bitimely_core.privacy import NOTICE, Sharing, has_small_count, is_small, round_message
from bitimely_core.run import FORMAT, Run
from bitimely_core.store import storage
from bitimely_core.store.records import describe_changes
from bitimely_core.store.workspace import locate_new, shorten_name
from bitimely_core.system_errors import attach_result
from bitimely_core.types import select_keys
from bitimely_core.workflows.prepare import Execution, hides_counts, open_run, prepare_windows

# entries of a summary in which no people are counted
OPEN_SUMMARY = frozenset({"metrics", "leak_free", "contradiction"})
UNDISCLOSED = (
    "Withheld: these data have a label whose counts of people are withheld, "
    "and scores of it would show them."
)
SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
# numbers of which 0 leaves a part of the analysis out
MAY_BE_NONE = frozenset({"bootstrap", "permutations", "windows"})
Options = dict[str, Any]  # keyword arguments of an analysis


class OwnerAnalysis(TypedDict):
    """What the owner of the data sees in the place of a protected analysis of histories."""

    verdict: str
    notices: list[str]


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
    exact: OwnerAnalysis


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
) -> AnalysisResult:
    """Run the analysis `kind` on runs, on data or on a model by name, and write its report.

    An analysis that has no parameter `device` computes on the CPU.

    Raises UserError: unknown_name, config (2), incomplete (4).
    """
    from bitimely_core.train.devices import select_device

    entry = registry.analyses[kind]
    takes = entry.facts.takes
    _check_subject(entry, names, data)
    parsed = _parse_options(entry, options, sequences)
    if name is None:
        name = _name_report(entry, names, data, [model, objective, preset])
    target = out or locate_new(workspace, "reports", name, "--name")
    storage.check_target(target)
    select_device(device)
    if dry_run:
        return {
            "kind": kind,
            "runs": names,
            "options": parsed,
            "report": str(target / "report.html"),
        }
    choices = {"model": model or "bitimelygpt", "objective": objective, "preset": preset}
    arguments = {**parsed, "seed": seed} | _select_known(entry, {"device": device, **choices})
    execution = Execution(workspace, verify=verify)
    windows: Any = None
    if data is not None and _reads_windows(entry, names):
        windows = prepare_windows(data, execution)
    with registry.blame_plugin(entry.function):
        if takes == "data":
            page = exact = _name_unit(_make_page(entry, windows, arguments), {windows.subject_unit})
        else:
            arguments |= {"windows": windows} if windows is not None else {}
            runs = [open_run(run, execution, data) for run in names]
            exact = _add_changes(_analyze_runs(entry, runs, arguments), runs)
            page = _share_page(entry, exact, runs)
        return _write_page(kind, page, target, exact)


def _select_known(entry: registry.Entry[Any], offered: Options) -> Options:
    """Of the arguments that are offered those that the analysis has as parameters."""
    parameters = inspect.signature(entry.function).parameters
    return select_keys(offered, parameters)


def _make_page(entry: registry.Entry[Any], subject: object, arguments: Options) -> Page:
    """The page of an analysis. Raises TypeError where it returns another thing."""
    page = entry.function(subject, **arguments)
    if not isinstance(page, Page):
        raise TypeError(f"it returns {type(page).__name__}, not PageBuilder.finish(VERDICT)")
    return page


def _add_changes(page: Page, runs: list[Run]) -> Page:
    """The page with sentences on the altered files of its runs."""
    changes = list(chain.from_iterable(describe_changes(run.folder) for run in runs))
    return replace(page, notices=[*changes, *page.notices])


def _write_page(kind: str, page: Page, folder: Path, exact: Page) -> AnalysisResult:
    """Write the page into `folder`; the result of the analysis. `exact`: the page with what it
    withholds.
    """
    from bitimely_core.report import write_report

    result: AnalysisResult = {
        "kind": kind,
        "verdict": page.verdict,
        "notices": page.notices,
        "summary": page.summary,
    }
    with attach_result(lambda: dict(result)):
        path = write_report(folder, page)
    result |= {
        "format_version": FORMAT,
        "report": str(path),
        "page": page,
        "exit_code": int(Exit.INTEGRITY if page.summary.get("contradiction") else Exit.OK),
    }
    if page is not exact:
        hidden = [f"{name}: {exact.facts[name]}" for name in exact.facts.keys() - page.facts.keys()]
        result["exact"] = {"verdict": exact.verdict, "notices": [*exact.notices, *sorted(hidden)]}
    if "leak_free" in page.summary:
        result["leak_free"] = page.summary["leak_free"]
    return result


def _reads_windows(entry: registry.Entry[Any], names: list[str]) -> bool:
    """Whether the analysis reads `--data` itself: with runs, it is the data of the runs."""
    if entry.facts.takes != "model":
        return entry.facts.takes == "data"
    return not names and "windows" in inspect.signature(entry.function).parameters


def _name_unit(page: Page, units: set[str]) -> Page:
    """The page in the word for what its data are of, where that is one: subjects, nights."""
    if len(units) == 1:
        page = rename_units(page, *units)
        page.summary["subject_unit"] = units.pop()
    return page


def _check_subject(entry: registry.Entry[Any], names: list[str], data: str | None) -> None:
    """Raises UserError (config, exit 2) where the analysis lacks its runs or data, or gets more."""
    takes, example = entry.facts.takes, f"For example: bitimely analyze {entry.name}"
    if takes in {"run", "runs"} and not names:
        raise usage_error("no run", "expected at least one RUN", f"{example} tiny")
    if takes == "run" and len(names) > 1:
        raise usage_error(f"{len(names)} runs", f"expected one for {entry.name}")
    if takes == "data" and data is None:
        raise usage_error("no data", "expected --data", f"{example} --data synthetic/staging")


def _analyze_runs(entry: registry.Entry[Any], runs: list[Run], arguments: Options) -> Page:
    """The page of an analysis of runs, or of a model where there is none, with all counts.

    Raises UserError (subject_leakage, exit 4) where an analysis scores subjects that a training has
    seen.
    """
    if entry.facts.scores:  # it compares predictions with labels
        for run in runs:
            run.count_shared_subjects()
    page = _make_page(entry, runs or None, arguments)
    return _name_unit(page, {run.windows().subject_unit for run in runs})


def _share_page(entry: registry.Entry[Any], page: Page, runs: list[Run]) -> Page:
    """The page of an analysis, protected where runs read events whose small counts are withheld."""
    events = [run.windows() for run in runs if hides_counts(run.windows())]
    if not events:
        return page
    withheld = any(windows.data_kind.has_withheld_labels(windows.folder) for windows in events)
    shared = protect_page(page, withhold=entry.facts.scores and withheld)
    return _name_unit(shared, {run.windows().subject_unit for run in runs})


def protect_page(page: Page, *, withhold: bool = False) -> Page:
    """The page of an analysis of events without what could tell of single people.

    What is open by its `Sharing` stays. Of the rest figures are left out, and tables and facts with
    a number of 1 to 10. `withhold`: the page has scores of a label whose counts are withheld. Its
    counts could be computed from them, so that only open facts are left.
    """
    if withhold:
        stated = {
            name: text
            for name, text in page.facts.items()
            if page.fact_sharing.get(name) is Sharing.OPEN
        }
        return Page(title=page.title, verdict=UNDISCLOSED, notices=[NOTICE], facts=stated)
    return replace(
        page,
        notices=[*map(round_message, page.notices), NOTICE],
        blocks=list(filter(_is_open_block, page.blocks)),
        facts={name: text for name, text in page.facts.items() if _is_open_fact(page, name)},
        summary=select_keys(page.summary, OPEN_SUMMARY),
    )


def _is_open_fact(page: Page, name: str) -> bool:
    return _is_open(page.fact_sharing.get(name), has_count=has_small_count(page.facts[name]))


def _is_open_block(block: Figure | Table | str) -> bool:
    if isinstance(block, str):
        return True
    return _is_open(block.sharing, has_count=isinstance(block, Figure) or _has_small_cell(block))


def _is_open(sharing: Sharing | None, *, has_count: bool) -> bool:
    """Whether a part of a page is shared: as its maker states, or where it has no small count."""
    return not has_count if sharing is None else sharing is Sharing.OPEN


def _has_small_cell(table: Table) -> bool:
    """Whether a table has a whole number of 1 to 10."""
    return any(type(cell) is int and is_small(cell) for row in table.rows for cell in row)


def _parse_options(
    entry: registry.Entry[Any], options: dict[str, str] | None, sequences: int | None
) -> Options:
    """Texts of the command line as the types of the analysis's keyword arguments. Raises UserError
    (config, exit 2).
    """
    texts = dict(options or {})
    if sequences is not None:
        texts["sequences"] = str(sequences)
    defaults = list_analysis_options(entry)
    for key in texts:
        if key not in defaults:
            flag = _make_flag(key)
            raise unknown_name_error(f"option of {entry.name}", flag, map(_make_flag, defaults))
    parameters = inspect.signature(entry.function).parameters
    return {key: _read_option(parameters[key], text) for key, text in texts.items()}


def _read_option(parameter: inspect.Parameter, text: str) -> Any:
    """`text` as a value of a keyword argument. Raises UserError (config, exit 2)."""
    flag, problem = _make_flag(parameter.name), f"found {safe_text(text)}"
    word = str(parameter.annotation).partition(" ")[0]  # also of `float | None`
    kind: Any = {"float": float, "int": int}.get(word, type(parameter.default))
    try:
        value = _parse_value(text, kind)
    except (ValueError, KeyError) as error:
        expected = "true or false" if kind is bool else kind.__name__
        raise usage_error(problem, f"expected {expected}", field=flag) from error
    least = int(kind is int and parameter.default != 0 and parameter.name not in MAY_BE_NONE)
    if isinstance(value, int | float) and not least <= value < math.inf:
        raise usage_error(problem, f"expected a number of at least {least}", field=flag)
    return value


def _make_flag(key: str) -> str:
    """The option of the command line for the keyword argument `key`."""
    return f"--{key.replace('_', '-')}"


def _parse_value(text: str, kind: Any) -> Any:
    """`text` as a value of `kind`. Where the kind is that of None, JSON is decoded and other text
    stays. Raises ValueError, KeyError.
    """
    if kind is bool:
        return SWITCHES[text.lower()]
    if kind is not type(None):
        return kind(text)
    with suppress(ValueError):
        return json.loads(text)
    return text


def list_analysis_options(entry: registry.Entry[Any]) -> Options:
    """Keyword arguments of an analysis that are options of its command, with their defaults."""
    hidden = {"seed", "model", "objective", "preset", "device"}
    return {
        name: parameter.default
        for name, parameter in inspect.signature(entry.function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
        and name not in hidden
        and (name, parameter.default) != ("windows", None)
    }


def _name_report(
    entry: registry.Entry[Any], names: list[str], data: str | None, model: list[str | None]
) -> str:
    """The folder of a report: the analysis with its runs, its data, or the parts of its model."""
    parts = [Path(name).resolve().name for name in names]
    if not parts and data is not None and entry.facts.takes == "data":
        parts = [data.strip("/").replace("/", "-")]
    # the preset of an analysis is tiny where it is not given
    stated = [part for part in model if part and part != "tiny"]
    return shorten_name([entry.name, *(parts or stated)])
