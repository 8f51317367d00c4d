"""Verbs on data: ingest, tokenize, verify, list, doctor."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from bitimely_cli.claims_options import (
    ClaimsBuildOptions,
    ClaimsReadOptions,
    TaskOptions,
    shortcut_rows,
)
from bitimely_cli.completion import complete
from bitimely_cli.options import (
    VIEWS,
    BuildOptions,
    CommonOptions,
    Encoding,
    OptionGroup,
    expand_options,
    name_workspace,
    parse_shard,
    parse_source,
    take_settings,
)
from bitimely_cli.screen import screen
from bitimely_core.config import DataConfig, SettingsLayer, validate
from bitimely_core.errors import Exit, Finding, Reason, safe_text, unknown_name_error, usage_error
from bitimely_core.privacy import format_count, round_message
from bitimely_core.store.workspace import find_data_kind, load_dataset, locate_new

if TYPE_CHECKING:
    from bitimely_core.registry import Choices
    from bitimely_core.schemas.ingest_records import (
        IngestPart,
        IngestReport,
        TableReport,
        UnitReport,
    )

UNITS_SHOWN = 30
EVALUATE = "evaluate RUN"
FEW_SUBJECTS = 50  # a tenth of fewer is too small a test split to rely on
# options of `ingest` that are the data set's own
DATASET_CHOICES = ("size", "seed", "rate", "extra")


@dataclass(frozen=True, kw_only=True)
class IngestOptions(OptionGroup):
    """How a source is read, and what of it."""

    jobs: Annotated[int, Option(min=1, max=1024, help="Worker processes.")] = 1
    strict: Annotated[
        bool, Option("--strict", help="Refuse the data set when any unit is quarantined.")
    ] = False
    max_bad: Annotated[
        float, Option(min=0.0, max=1.0, help="Largest quarantined share of units or of rows.")
    ] = 0.5
    shard: Annotated[
        str | None, Option(metavar="k/n", help="Read part k of n; the last part publishes.")
    ] = None
    size: Annotated[str | None, Option(help="small, large, night or planted (synthetic).")] = None
    seed: Annotated[int | None, Option(min=0, help="Seed (synthetic).")] = None
    rate: Annotated[
        int | None, Option(help="Sampling rate of the files to read, 100 or 500 Hz (ptb-xl).")
    ] = None
    map_: Annotated[
        Path | None,
        Option(
            "--map",
            metavar="FILE|NAME",
            help="Subjects, channels, labels (generic); of claims: --phecode-map.",
        ),
    ] = None
    init_map: Annotated[
        Path | None,
        Option(
            metavar="FILE.toml",
            help="Write a map of SOURCE to fill in, and read nothing (generic).",
        ),
    ] = None
    extra: Annotated[
        str | None, Option(help="Recording that is else left out, such as S04_T01 (ieee-ppg).")
    ] = None
    encoding: Encoding = None
    follow_symlinks: Annotated[
        bool, Option("--follow-symlinks", help="Follow links that leave SOURCE.")
    ] = False
    exclude: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Recording to leave out, as the report names it; repeatable."),
    ] = None
    keep_phi: Annotated[
        bool, Option("--keep-phi", help="Keep identifying header fields (stated in the manifest).")
    ] = False
    keep_dates: Annotated[bool, Option("--keep-dates", help="Keep start times of recordings.")] = (
        False
    )
    keep_staged: Annotated[
        bool, Option("--keep-staged", help="Keep the files that were downloaded from a URL.")
    ] = False
    quarantine: Annotated[
        Path | None, Option(help="Write the list of quarantined units to this file.")
    ] = None
    wait: Annotated[float, Option(min=0.0, help="Seconds to wait for another process.")] = 0.0


@take_settings(DataConfig, "tokenize")
@dataclass(frozen=True, kw_only=True)
class CutOptions(OptionGroup):
    """How recordings are cut into windows, and windows into splits."""


@expand_options
def ingest(
    dataset: Annotated[
        str,
        Argument(
            help="Data set, see: bitimely list datasets.",
            metavar="DATASET",
            autocompletion=complete("datasets"),
        ),
    ],
    *,
    source: Annotated[
        str | None,
        Argument(
            help="Folder in the official layout, or its URL: s3://, gs://, https://, ...",
            metavar="[SOURCE]",
        ),
    ] = None,
    choices: IngestOptions,
    build: BuildOptions,
    claims_read: ClaimsReadOptions,
    claims_build: ClaimsBuildOptions,
) -> int:
    """Read raw files into the Parquet cache; units with errors are quarantined and named.

    Example: bitimely ingest sleep-edf ./raw
    """
    from bitimely_core import workflows

    source = parse_source(source)
    if choices.init_map is not None:
        return _init_map(
            dataset,
            source,
            choices.init_map,
            build.workspace,
            follow_symlinks=choices.follow_symlinks,
        )
    arguments = {**choices.collect(), **build.collect(), "shard": parse_shard(choices.shard)}
    options = {name: arguments.pop(name) for name in DATASET_CHOICES if name in arguments}
    quarantine, map_file = (arguments.pop(name, None) for name in ("quarantine", "map_"))
    entry = load_dataset(dataset)
    if map_file is not None and entry.facts.kind == "events":
        maps = [*(claims_read.phecode_map or []), str(map_file)]
        claims_read = replace(claims_read, phecode_map=maps)
    elif map_file is not None:
        options["map"] = str(map_file)
    folder = locate_new(arguments.pop("workspace"), "cache", entry.name)
    unpublished = list[Finding]()
    with screen.progress():
        result = workflows.ingest(
            dataset,
            source,
            folder,
            notice=unpublished.append,
            options=options | claims_read.collect(),
            build=claims_build.build_choices(),
            **arguments,
        )
    where = folder / "ingest_report.json"
    if build.dry_run:
        screen.result(result, screen.lines(result))
        return Exit.OK
    shared = find_data_kind(dataset).protect_report(result)
    if quarantine is not None:
        _write_quarantine(quarantine, dataset, _parse_report(shared, where).units)
    report = _parse_report(shared if screen.json else _open_report(result), where)
    _show_findings(report, unpublished, where)
    screen.result(shared, _show_ingest_report(report, where, has_page=not unpublished))
    return report.exit_code


def _show_splits(audit: Choices, class_names: Sequence[str]) -> None:
    """Print subjects, windows and labels of each split."""
    rows = []
    for split, counts in audit.items():
        classes = [counts["classes"].get(name, 0) for name in class_names]
        rows.append([split, *map(format_count, (counts["subjects"], counts["windows"], *classes))])
    screen.table(["split", "subjects", "windows", *class_names], rows)


def _parse_report(result: Choices, where: Path) -> IngestReport | IngestPart:
    from bitimely_core.schemas.ingest_records import IngestPart, IngestReport

    return (IngestPart if "parts_missing" in result else IngestReport).parse(result, where)


def _show_findings(
    report: IngestReport | IngestPart, unpublished: Sequence[Finding], where: Path
) -> None:
    """Print what was found in units and in the data set, and why no page was written."""
    told = {round_message(reason.message) for reason in report.reasons}
    screen.print_findings(
        [
            *(chain.from_iterable(unit.reasons for unit in report.units)),
            *report.reasons,
            *(finding for finding in unpublished if round_message(finding.message) not in told),
        ],
        str(where),
    )


def _open_report(result: Choices) -> Choices:
    """The report of an ingest as the owner of the data sees it, with the counts of new sequences
    and the findings on them.
    """
    if not result.get("tokens"):
        return result
    tokens = screen.choose(result["tokens"])
    return {**result, "reasons": tokens.pop("reasons", result["reasons"]), "tokens": tokens}


def _init_map(
    dataset: str, source: str | None, path: Path, workspace: Path, *, follow_symlinks: bool
) -> int:
    """Write a mapping file for the folder `source`."""
    from bitimely_core.cache.remote_files import is_url
    from bitimely_core.formats.source import require_source, scan_folder
    from bitimely_core.recordings import template as map_template
    from bitimely_core.store import storage

    if dataset != "generic":
        raise usage_error(
            f"found {safe_text(dataset)}",
            "expected generic, which alone takes a map",
            field="--init-map",
        )
    if path.exists():
        raise usage_error(
            "is there already",
            "expected a new file",
            "Give another name, or remove it",
            file=str(path),
            field="--init-map",
        )
    if is_url(source):
        raise usage_error(
            "--init-map with a URL",
            "expected a folder",
            "Copy the folder, or ingest it with --keep-staged and give the folder of the files",
            field="--init-map",
        )
    folder = None if source is None else scan_folder(Path(source), follow_symlinks=follow_symlinks)
    text = map_template.write_template(require_source(folder))
    storage.write_bytes(path, text.encode())
    count = sum("TO STATE" in line and not line.startswith("#") for line in text.splitlines())
    words = ["bitimely", "ingest", "generic", str(source), "--map", str(path)]
    following = f"next: {shlex.join(words)}{name_workspace(workspace)}"
    lines = [f"map of {source}: {path}" + (f"; {count} rates to fill in" if count else "")]
    screen.result({"map": str(path), "to_fill_in": count, "format_version": 1}, [*lines, following])
    return Exit.OK


def _write_quarantine(path: Path, dataset: str, units: Sequence[UnitReport]) -> None:
    """The quarantined units of an ingest report as a file of their own."""
    from bitimely_core.store import storage

    quarantined = [
        unit.model_dump(mode="json", include={"unit", "files", "reasons"})
        for unit in units
        if unit.status == "quarantined"
    ]
    storage.write_json(path, {"format_version": 1, "dataset": dataset, "quarantined": quarantined})


def _show_ingest_report(
    report: IngestReport | IngestPart, where: Path, *, has_page: bool
) -> list[str]:
    """Print the units of an ingest. Returns the lines of its counts and of the next steps."""
    from bitimely_core.cache.source_use import describe_use

    _show_units(report)
    sequences = getattr(report, "tokens", None)  # of claims
    if sequences is not None and sequences["honesty"]:
        screen.table(*shortcut_rows(sequences["honesty"]))
    lines = _describe_units(report, where)
    if sequences is not None:
        tokens = where.parents[2] / sequences["folder"]
        sequences = {**sequences, "folder": str(tokens)}
        text, verb = find_data_kind(report.dataset).describe_tokens(sequences)
        page = tokens / "report.html"
        following = _name_next(verb, report.dataset, where.parents[2])
        return [*lines, text, f"page: {page}", following]
    use = getattr(report, "use", None)
    lines += [] if use is None else describe_use(use)
    page = where.with_name("report.html")
    if has_page and report.published and page.is_file():
        lines.append(f"page: {page}")
    data = _name_tokens(report, where.parent)
    return [*lines, f"next: bitimely tokenize {data}{name_workspace(where.parents[2])}"]


def _describe_units(report: IngestReport | IngestPart, where: Path) -> list[str]:
    """The lines of formats, of files that were not read, and of the number of units."""
    units, counts = report.units, report.counts
    lines = [reason.message for reason in report.reasons if reason.code == Reason.FORMAT]
    # an info of this kind names files that were not read
    lines += [
        reason.message
        for reason in report.reasons
        if reason.level == "info" and reason.code == Reason.NO_INPUT
    ]
    if len(units) > UNITS_SHOWN:
        lines.append(f"... and {len(units) - UNITS_SHOWN} more units in the report")
    accepted = counts.accepted + counts.accepted_with_warning
    quarantined = f"; {counts.quarantined} quarantined, see {where}" if counts.quarantined else ""
    return [*lines, f"{accepted} of {counts.units_seen} units in {where.parent}{quarantined}"]


def _name_tokens(report: IngestReport | IngestPart, folder: Path) -> str:
    """The data set, view and options with which tokens of the cache in `folder` can be made."""
    from bitimely_core.workflows.ingest import suggest_tokens

    data = suggest_tokens(report.dataset, folder) if report.published else report.dataset
    # the default selection has left nothing, or so few that no sequences were made
    codes = {reason.code for reason in report.reasons if reason.level == "error"}
    if getattr(report, "tokens", None) is None:
        codes |= {reason.code for reason in report.reasons} & {Reason.MIN_CODES}
    return f"{data} --no-select" if codes & {Reason.NO_INPUT, Reason.MIN_CODES} else data


def _name_next(verb: str, data: str, workspace: Path) -> str:
    """The line with the next verb on tokens. RUN is the last pre-training, without one `train`
    follows; of `evaluate` it is the last run with a head.
    """
    from bitimely_core.catalog import list_rows

    if "RUN" in verb:
        kind, instead = ("finetune", verb) if verb == EVALUATE else ("pretrain", "train")
        rows = list_rows("runs", workspace)
        runs = [row["name"] for row in rows if row["kind"] == kind and row["finished"]]
        folders = sorted(runs, key=lambda run: (workspace / "runs" / run).stat().st_mtime)
        verb = verb.replace("RUN", shlex.quote(folders[-1])) if folders else instead
    return f"next: bitimely {verb} --data {data}{name_workspace(workspace)}"


def _show_units(report: IngestReport | IngestPart) -> None:
    """Print the units of an ingest: recordings with their size, tables of claims with the rows that
    were used and those that were not.
    """
    tables = {table.file: table for table in report.rows}
    is_claims = any(unit.unit in tables for unit in report.units)
    rows = []
    for unit in report.units[:UNITS_SHOWN]:
        codes = sorted({reason.code for reason in unit.reasons if reason.level != "info"})
        row_counts = _list_row_counts(tables.get(unit.unit))
        figures = row_counts if is_claims else [unit.channels, unit.samples]
        rows.append([unit.unit, unit.status, *figures, ", ".join(codes)])
    names = ["rows", "used", "dropped", "quarantined"] if is_claims else ["channels", "samples"]
    screen.table(["unit", "status", *names, "reasons"], rows)


def _list_row_counts(table: TableReport | None) -> list[int | None]:
    """The counts of the rows of a table; None each where they are not shown."""
    if table is None:
        return [None] * 4
    return [table.seen, table.used, table.dropped, table.quarantined]


@expand_options
def tokenize(
    data: Annotated[
        str,
        Argument(
            help="Data set or view, for example sleep-edf/staging.",
            metavar="DATA",
            autocompletion=VIEWS,
        ),
    ],
    *,
    cuts: CutOptions,
    name: Annotated[
        str | None, Option(help="Name of the tokens (default: DATASET[-VIEW]).")
    ] = None,
    encoding: Encoding = None,
    build: BuildOptions,
    claims_build: ClaimsBuildOptions,
    task: TaskOptions,
) -> int:
    """Cut the cache into training windows, split by subject, normalised with the training split.

    Example: bitimely tokenize sleep-edf/staging
    """
    from bitimely_core import workflows
    from bitimely_core.formats.text import use_encoding
    from bitimely_core.schemas.ingest_records import FindingRecord
    from bitimely_core.schemas.tokens import WindowUse
    from bitimely_core.tokens.survey import describe_use

    kind = find_data_kind(data)
    options = _choose_options(data, kind.section, cuts, claims_build, task)
    with use_encoding(encoding), screen.progress():
        result = workflows.tokenize(data, name=name, options=options, **build.collect())
    if build.dry_run:
        screen.result(result, screen.lines(result))
        return Exit.OK
    visible = screen.choose(result)
    screen.print_findings([FindingRecord(**finding) for finding in visible.get("findings", [])])
    result.pop("findings", None)
    _show_splits(visible["audit"], result["class_names"])
    if visible.get("honesty"):
        screen.table(*shortcut_rows(visible["honesty"]))
    text, verb = kind.describe_tokens(visible)
    if options.get("vocabulary"):  # of other people, all of whom are tested
        verb = f"evaluate {shlex.quote(str(options['vocabulary']))}"
    elif result["split"] == "external":
        verb = EVALUATE
    page = [f"page: {result['report']}"] if "report" in result else []
    following = _name_next(verb, name or data, build.workspace)
    advice = [] if kind.no_folds else _advise_folds(result, name or data, build.workspace)
    use = result.get("use")
    lines = [] if use is None else describe_use(WindowUse(**use), result["task"])
    notices = screen.summarize(visible["notices"], build.workspace)
    screen.result(result, [*notices, text, *lines, *page, *advice, following])
    return Exit.OK


def _advise_folds(result: Choices, data: str, workspace: Path) -> list[str]:
    """`suggest_folds` for labelled tokens whose subjects can be dealt to folds."""
    if result["task"] == "none" or result["split"] not in {"subject", "official"}:
        return []
    subjects = [audit["subjects"] for audit in result["audit"].values()]
    return suggest_folds(subjects, data, workspace)


def suggest_folds(subjects: Sequence[int], data: str, workspace: Path) -> list[str]:
    """The command that tests every subject once, where a test split would hold few; `subjects`: of
    each split, that of test last.
    """
    count = sum(subjects)
    if not 3 <= count < FEW_SUBJECTS:
        return []
    command = f"bitimely train --data {data} --folds {min(5, count)}{name_workspace(workspace)}"
    return [f"{subjects[-1]} of {count} subjects in the test split; each once: {command}"]


def _choose_options(
    data: str, section: str, cuts: CutOptions, claims_build: ClaimsBuildOptions, task: TaskOptions
) -> SettingsLayer:
    """The options that differ from their defaults, of windows or of sequences as `section` says.
    Raises UserError (unknown_name, exit 2) for one of the other kind of data.
    """
    windows = validate(DataConfig, cuts.collect()).model_dump(exclude_defaults=True)
    seed = windows.pop("seed", 0)
    sections = {"tokenize": windows, "build": {**claims_build.build_choices(), **task.collect()}}
    options = {**sections.pop(section), **({"seed": seed} if seed else {})}
    (unsuitable,) = sections.values()
    if unsuitable:
        groups = (cuts,) if section == "tokenize" else (claims_build, task)
        names = {"seed", *(field.name for group in groups for field in fields(group))}
        first = next(iter(unsuitable))
        flag, *flags = (f"--{name.replace('_', '-')}" for name in (first, *names))
        raise unknown_name_error(f"option of {data}", flag, flags)
    return options


@expand_options
def verify(
    path: Annotated[
        Path | None,
        Argument(
            help="Cache, tokens, run, model folder, checkpoint or raw folder "
            "(default: the workspace).",
            metavar="[PATH]",
        ),
    ] = None,
    deep: Annotated[bool, Option("--deep", help="Hash the sources again, too.")] = False,
    *,
    common: CommonOptions,
) -> int:
    """Compare everything stored with its checksums.

    Example: bitimely verify
    """
    from bitimely_core import workflows

    with screen.progress():
        result = workflows.verify(path or common.workspace, deep=deep)
    checked = result["checked"]
    screen.print_findings(result["findings"])
    screen.table(
        ["what", "kind", "files", "state"],
        [[c["path"], c["kind"], c["files"], c["state"]] for c in checked],
    )
    screen.result(
        {key: value for key, value in result.items() if key != "findings"},
        [f"{len(checked)} checked, {sum(c['state'] != 'good' for c in checked)} with findings"],
    )
    return result["exit_code"]


@expand_options
def list_(
    common: CommonOptions,
    kind: Annotated[
        str | None,
        Argument(
            help="datasets, views, models, pretrained, objectives, presets, analyses, "
            "pipelines or runs.",
            metavar="KIND",
            autocompletion=complete("kinds"),
        ),
    ] = None,
) -> int:
    """What there is: data sets, views, models, pretrained, objectives, presets, analyses,
    pipelines, runs.

    Example: bitimely list presets
    """
    from bitimely_core import catalog

    if kind is None:
        kinds = catalog.list_kinds(common.workspace)
        screen.table(["kind", "number"], [list(row.values()) for row in kinds])
        next_line = "next: bitimely list models"
        screen.result({"kinds": kinds, "format_version": 1}, [next_line])
        return Exit.OK
    rows = catalog.list_rows(kind, common.workspace)
    tables = [catalog.COLUMNS[kind], *([catalog.CLAIMED] if kind == "models" else [])]
    for columns in tables if rows else ():
        screen.table(columns, [list(map(row.get, columns)) for row in rows])
    notes = catalog.list_notes(kind) if rows else [f"no {kind} in {common.workspace}"]
    screen.result({kind: rows, "format_version": 1}, notes)
    return Exit.OK


@expand_options
def doctor(common: CommonOptions) -> int:
    """Versions, devices, memory and optional extras; what is missing and how to get it.

    Example: bitimely doctor
    """
    from bitimely_core import catalog

    installation = catalog.check_installation(common.workspace)
    screen.table(
        ["what", "found", "note"],
        [[row["what"], row["found"], row["note"]] for row in installation["checks"]],
    )
    screen.result(installation)
    return Exit.OK if installation["good"] else Exit.REFUSED


VERBS = (ingest, tokenize, verify, list_, doctor)
