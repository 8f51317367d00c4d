"""Finds which files of a folder are claims, patients and labels, by their names and headers.

Claims are `claims.csv`, `claims_2005.csv`, the parts in a folder `claims.parquet` that Spark wrote,
or else every table with columns of subject, date and code.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import polars as pl

from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.code_columns import find_wide_columns
from bitimely_core.claims.sources.columns import ENDINGS, find_names, read_first
from bitimely_core.claims.sources.date_parts import find_date_parts, is_quarter
from bitimely_core.claims.sources.dated_codes import find_pairs
from bitimely_core.claims.sources.enrolment_months import MonthColumns, find_month_columns
from bitimely_core.claims.sources.headless_tables import refuse_fixed_widths, refuse_titles
from bitimely_core.claims.sources.observation_tables import PERIOD_DATES
from bitimely_core.errors import Exit, Finding, Reason, UserError, input_error, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import Source
from bitimely_core.types import drop_empty, find_only, group_by, leave_out
from bitimely_core.wording import list_first

CLAIMS_NAME = re.compile(r"claims(?![a-z]).*")
PART_NAME = re.compile(r"(part|data)[-_]?\d.*")  # of a table that was written in parts
PARTITION = re.compile(r"([^=/]+)=(.*)")  # of the folder of a part: column=value
ROLES = ("patients", "labels", "deaths")
MAP_FILE = "icd9_phecode.csv"  # a map of codes beside the tables
KIND_WORDS = words.index_words("kinds")
PERIOD_COLUMNS = ("subject", *PERIOD_DATES)
FIRST_ROWS = 100_000  # by which the key of a table is known
LISTED = 5  # files that a message names
OTHER_FORMATS = {  # what to do -> endings
    "Unpack the files": (".zip", ".xz", ".bz2", ".zst", ".7z", ".rar", ".tar", ".tgz", ".tar.gz"),
    "Save the tables as .csv or .parquet, with codes as text": (
        *(".xlsx", ".xls", ".ods", ".feather", ".arrow", ".rds", ".rdata"),
        *(".db", ".sqlite", ".duckdb", ".avro", ".orc", ".mdb", ".accdb"),
    ),
    "Write a row for each code as .csv, with patient_id, date, vocab and code: of conditions of "
    "FHIR subject.reference without Patient/, recordedDate or onsetDateTime, code.coding.system "
    "and code.coding.code; and a row for each Patient with id, gender, birthDate and "
    "deceasedDateTime as patients.csv": (".json", ".jsonl", ".ndjson"),
    "Call text with a mark between its cells .csv; write columns of fixed widths as .csv, as with "
    "pandas.read_fwf": (".dat", ".asc", ".fwf"),
}
TEXT_NOTES = {"readme", "license", "sha256sums", "notes", "changelog"}


Names = Mapping[str, Sequence[str]]
"""Key of a column -> accepted names of it, the preferred one first."""


@dataclass(frozen=True)
class AcceptedNames:
    """The names of columns that are read. `--col` replaces those that are accepted without it."""

    renamed: Mapping[str, str]  # key -> name, by `--col`
    events: Names  # of claims
    patients: Names  # of tables of subjects

    def find_date_pairs(
        self, names: Sequence[str], wide: Sequence[str]
    ) -> dict[str, tuple[str, ...]]:
        """The columns of dates of the columns of codes, {} where one date is that of all."""
        codes = wide or find_names(names, self.events["code"])[:1]
        return find_pairs(names, codes, self.renamed.get("date")) if codes else {}

    def find_wide_columns(self, names: Sequence[str]) -> tuple[str, ...]:
        """The columns of codes of a table with several."""
        return find_wide_columns(names, self.renamed.get("code"))

    def has_claims(self, names: Sequence[str]) -> bool:
        """Whether a table has columns of subjects and of dates."""
        if not find_names(names, self.events["subject"]):
            return False
        with suppress(UserError):
            if self.find_date_pairs(names, self.find_wide_columns(names)):
                return True
        return bool(find_names(names, self.events["date"]) or self.find_date_parts(names))

    def find_date_parts(self, names: Sequence[str]) -> tuple[str, ...]:
        """The columns of the parts of the date of a table that has it in no single one."""
        dated = list(itertools.filterfalse(is_quarter, find_names(names, self.events["date"])))
        return () if dated or "date" in self.renamed else find_date_parts(names)

    def has_codes(self, names: Sequence[str]) -> bool:
        """Whether a table has columns of codes."""
        with suppress(UserError):
            return bool(find_names(names, self.events["code"]) or self.find_wide_columns(names))
        return False

    def has_births(self, path: str, names: Sequence[str]) -> bool:
        """Whether a table has columns of subjects and of their births, and none of claims; one that
        is called as of drugs or measurements is none.
        """
        return self._has_fact(path, names, "birth")

    def has_sexes(self, path: str, names: Sequence[str]) -> bool:
        """As `has_births`, of sexes."""
        return self._has_fact(path, names, "sex")

    def _has_fact(self, path: str, names: Sequence[str], fact: str) -> bool:
        is_told = all(find_names(names, self.patients[key]) for key in ("subject", fact))
        return is_told and not (_is_other(path) or find_names(names, self.events["date"]))

    def has_periods(self, path: str, names: Sequence[str]) -> bool:
        """Whether a table has columns of subjects and of the start and end of their observation."""
        accepted = self.list_period_names(path)
        if self.find_months(path, names):
            return True
        return all(find_names(names, accepted[key]) for key in PERIOD_COLUMNS)

    def find_months(self, path: str, names: Sequence[str]) -> MonthColumns | None:
        """The columns of months of a table of enrolment that has no dates of its start and end."""
        if not _is_period(path) or not find_names(names, self.patients["subject"]):
            return None
        accepted = self.list_period_names(path)
        dated = any(find_names(names, accepted[key]) for key in PERIOD_DATES)
        return None if dated else find_month_columns(names)

    def list_period_names(self, path: str) -> Names:
        """The accepted names of a table of times of observation, which may be fewer words where its
        own name is that of one.
        """
        short = words.WORDS["periods"] if _is_period(path) else {}
        return {key: (*self.patients[key], *short.get(key, ())) for key in PERIOD_COLUMNS}

    def has_deaths(self, path: str, names: Sequence[str]) -> bool:
        """Whether a table has columns of subjects and of their deaths."""
        keys = ("subject", "death")
        return not _is_other(path) and all(find_names(names, self.patients[key]) for key in keys)

    def list_links(self, heads: Sequence[str], names: Sequence[str]) -> list[str]:
        """The columns that two tables share and that are no facts of rows of claims."""
        facts = itertools.chain(*(find_names(heads, texts) for texts in self.events.values()))
        told = set(facts).difference(find_names(heads, self.events["claim"]))
        return sorted(set(heads).intersection(names) - told, key=list(heads).index)


class PlainFiles(NamedTuple):
    """Relative paths of the tables of a folder."""

    claims: list[str]
    patients: list[str]
    labels: list[str]
    facts: Mapping[str, list[str]]  # death, birth, sex -> tables of them apart, if there are any
    periods: list[str]  # a row a time of observation
    unread: list[str]  # other tables
    codes: Mapping[str, Sequence[str]]  # those with codes -> columns that name the claim


def is_table(path: str) -> bool:
    """Whether a file may be a table, by its ending."""
    return path.lower().endswith(ENDINGS) and name_table(path) not in TEXT_NOTES


def name_table(path: str) -> str:
    """The name of the table that a file holds, in lower case: its own without endings, or that of
    the folder whose parts it is one of.
    """
    pure = PurePosixPath(path.lower())
    folders = list(pure.parts[:-1])
    is_part = bool(PART_NAME.fullmatch(pure.name))
    while folders and PARTITION.fullmatch(folders[-1]):
        folders.pop()
        is_part = True
    is_part = is_part or bool(folders and folders[-1].endswith(ENDINGS))
    name = folders[-1] if is_part and folders else pure.name
    return name.split(".")[0]


def list_partitions(path: str) -> dict[str, str]:
    """Column -> value, as the folders of a part of a table state them: `year=2005`."""
    matches = map(PARTITION.fullmatch, PurePosixPath(path).parts[:-1])
    return {match[1]: match[2] for match in matches if match}


def find_kinds(files: Sequence[str]) -> dict[str, str]:
    """Table of claims -> the kind of its rows, where the names of all state one and not the same:
    claims_inpatient.csv beside claims_physician.csv.
    """
    kinds = {file: _find_kind(file) for file in files}
    return kinds if all(kinds.values()) and len(set(kinds.values())) > 1 else {}


def _find_kind(file: str) -> str:
    """The kind that the name of a table states; "" for none."""
    stated = {
        KIND_WORDS[word] for word in re.split(r"[\W\d_]+", file.lower()) if word in KIND_WORDS
    }
    return find_only(stated, "")


def find_plain_files(source: Source, accepted: AcceptedNames) -> PlainFiles:
    """The tables of a folder.

    Raises UserError: no_input, where there are no claims, or a table is there twice.
    """
    groups = _group_tables(source)
    roles = [_find_group(groups, words.WORDS["tables"][key]) for key in ROLES]
    patients, labels, deaths = roles
    rest = {name: files for name, files in groups.items() if files not in roles}
    claims = _choose_claims(source, rest, accepted)
    _refuse_titled(source, itertools.chain(*groups.values()), accepted)
    paths = sorted(set(itertools.chain(*rest.values())) - set(claims))
    beside = {path: _list_columns(source, path) for path in paths}
    patients = patients or _choose_persons(accepted, beside)
    beside = leave_out(beside, patients)
    periods = _filter_tables(accepted.has_periods, beside)
    deaths = deaths or _filter_tables(accepted.has_deaths, beside)
    heads = itertools.chain(*(_list_columns(source, path) for path in patients))
    others = leave_out(beside, (*periods, *deaths))
    facts = _find_facts(accepted, deaths, list(heads), others)
    for files in (claims, periods, patients, labels, *facts.values()):
        _refuse_copies(files)
    _refuse_unjoined_tables(claims, beside, source, accepted)
    _refuse_without_claims(source, claims, paths, accepted)
    unread = leave_out(others, set(itertools.chain(*facts.values())))
    codes = _find_codes_beside(source, claims, unread, accepted)
    return PlainFiles(claims, patients, labels, facts, periods, list(unread), codes)


def _refuse_without_claims(
    source: Source, claims: Sequence[str], paths: Sequence[str], accepted: AcceptedNames
) -> None:
    """Raises UserError: header for fixed widths, no_input where nothing may be claims."""
    if not any(accepted.has_claims(_list_columns(source, path)) for path in claims):
        refuse_fixed_widths(source, claims or paths)
    if not claims:
        _refuse_other_formats(source)
        raise input_error(
            Reason.NO_INPUT,
            f"no claims{{{','.join(ENDINGS[:3])}}} among {len(source.files)} files, and no table "
            "with columns of subject, date and code",
            hint="Give the folder that holds it, and the --source it is laid out for, or name the "
            "columns: --col subject=NAME --col date=NAME --col code=NAME",
        )


def _refuse_titled(source: Source, paths: Iterable[str], accepted: AcceptedNames) -> None:
    """Raises UserError: as `refuse_titles`, of tables whose first line names no subject."""
    subject = (*accepted.events["subject"], *accepted.patients["subject"])
    headless = [path for path in paths if not find_names(_list_columns(source, path), subject)]
    refuse_titles(source, sorted(headless), {**accepted.patients, **accepted.events})


def _filter_tables(
    test: Callable[[str, Sequence[str]], bool], tables: Mapping[str, Sequence[str]]
) -> list[str]:
    """The tables, given as path -> columns, that pass a test of both."""
    return [path for path, names in tables.items() if test(path, names)]


def _choose_persons(accepted: AcceptedNames, beside: Mapping[str, Sequence[str]]) -> list[str]:
    """The tables with births, without any those with sexes."""
    born = _filter_tables(accepted.has_births, beside)
    return born or _filter_tables(accepted.has_sexes, beside)


def _find_facts(
    accepted: AcceptedNames,
    deaths: list[str],
    heads: Sequence[str],
    others: Mapping[str, Sequence[str]],
) -> dict[str, list[str]]:
    """Death, birth, sex -> the tables of it apart. Births and sexes are those that the columns
    `heads` of patients do not tell; without patients claims do.
    """
    facts = {"death": deaths}
    for key, test in (("birth", accepted.has_births), ("sex", accepted.has_sexes)):
        if heads and not find_names(heads, accepted.patients[key]):
            facts[key] = _filter_tables(test, others)
    return drop_empty(facts)


def _refuse_other_formats(source: Source) -> None:
    """Raises UserError: no_input, for tables in formats that are not read here."""
    for hint, endings in OTHER_FORMATS.items():
        files = [path for path in sorted(source.files) if path.lower().endswith(endings)]
        if files:
            listed = ", ".join(map(safe_text, files[:LISTED]))
            raise input_error(
                Reason.NO_INPUT, f"not read: {listed}, and no other claims", hint=hint
            )


def _group_tables(source: Source) -> dict[str, list[str]]:
    """Name of a table -> its files."""
    groups: dict[str, list[str]] = {}
    for path in sorted({*source.files, *source.rejected}):
        if is_table(path) and PurePosixPath(path).name.lower() != MAP_FILE:
            groups.setdefault(name_table(path), []).append(path)
    return groups


def _choose_claims(
    source: Source, groups: Mapping[str, list[str]], accepted: AcceptedNames
) -> list[str]:
    """The files of claims by name, else by their columns, best with codes and not of procedures,
    drugs or measurements by name; a single table without these is taken too, so that what it lacks
    is said when it is opened.
    """
    claims = filter(CLAIMS_NAME.fullmatch, groups)
    by_name = itertools.chain(*map(groups.__getitem__, claims))
    return list(by_name) or _choose_by_columns(
        source, list(itertools.chain(*groups.values())), accepted
    )


def _choose_by_columns(source: Source, paths: list[str], accepted: AcceptedNames) -> list[str]:
    """The files of claims of some tables, by their columns."""
    names = {path: _list_columns(source, path) for path in paths}
    dated = [path for path in paths if accepted.has_claims(names[path])]
    if not dated:
        return paths if len(paths) == 1 else []
    diagnoses = list(itertools.filterfalse(_is_other, dated)) or dated
    return [path for path in diagnoses if accepted.has_codes(names[path])] or diagnoses


def _is_other(path: str) -> bool:
    """Whether a table holds no diagnoses, by its name: procedures_2005."""
    return cut_number(path) in words.WORDS["tables"]["others"]


def _is_period(path: str) -> bool:
    """Whether a table holds times of observation, by its name."""
    return cut_number(path) in words.WORDS["tables"]["periods"]


def cut_number(path: str) -> str:
    """The name of a table without the number of its year or part."""
    return re.sub(r"[\W\d_]+$", "", name_table(path))


def _find_codes_beside(
    source: Source,
    claims: Sequence[str],
    beside: Mapping[str, Sequence[str]],
    accepted: AcceptedNames,
) -> dict[str, list[str]]:
    """Table of diagnoses beside the claims -> the columns by which it names the claim, [] for one
    with subjects and dates of its own. A list of codes with their titles is none.
    """
    heads = _list_columns(source, claims[0])
    codes = dict[str, list[str]]()
    for path in itertools.filterfalse(_is_other, beside):
        names = beside[path]
        is_apart = accepted.has_claims(names)
        links = [] if is_apart else accepted.list_links(heads, names)
        if (links or is_apart) and _repeats_codes(source, path, accepted):
            codes[path] = links
    return codes


def _repeats_codes(source: Source, path: str, accepted: AcceptedNames) -> bool:
    """Whether a table has codes of which one occurs twice in the first rows."""
    names = list_names(source, path)
    coded = [*accepted.find_wide_columns(names), *find_names(names, accepted.events["code"])]
    return bool(coded) and _read_first_rows(source, path, coded[:1]).is_duplicated().any()


def _refuse_unjoined_tables(
    claims: Sequence[str],
    beside: Mapping[str, Sequence[str]],
    source: Source,
    accepted: AcceptedNames,
) -> None:
    """Raises UserError: schema, where the claims have no codes, and a table of codes beside them
    names the claim in the place of subject and date.
    """
    heads = list(itertools.chain.from_iterable(_list_columns(source, path) for path in claims[:1]))
    if not heads or accepted.has_codes(heads):
        return
    subjects = find_names(heads, accepted.events["subject"])
    for path, names in beside.items():
        shared = [name for name in heads if name in names]
        is_joined = not set(shared).issubset(subjects)
        if is_joined and accepted.has_codes(names) and not _is_other(path):
            _refuse_unjoined(claims[0], path, _find_key(source, claims[0], shared))


def _refuse_unjoined(claims: str, codes: str, key: Sequence[str]) -> None:
    """Raises UserError: schema, with the columns by which both tables are to be joined."""
    names = list(map(safe_text, key))
    on = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    raise input_error(
        Reason.SCHEMA,
        f"has subjects and dates, but the codes are in {safe_text(codes)}",
        "expected subject, date and code in one table",
        f"Join both by {' and '.join(names)}, as with pandas: header.merge(codes, on={on}), and "
        "leave the result alone in the folder",
        file=claims,
    )


def _find_key(source: Source, file: str, names: Sequence[str]) -> Sequence[str]:
    """The fewest of some columns that tell the first rows of a table apart; all, where none do."""
    first = _read_first_rows(source, file, names)
    for size in range(1, len(names)):
        for key in itertools.combinations(names, size):
            if not first.select(key).is_duplicated().any():
                return key
    return names


def _read_first_rows(source: Source, file: str, names: Sequence[str]) -> pl.DataFrame:
    """Some columns of the first rows of a table."""
    path = source.path(file)
    blocks = tables.read_frames(path, names, delimiter=find_delimiter(path))
    return read_first((block.frame for block in blocks), names, FIRST_ROWS)


def _find_group(groups: Mapping[str, list[str]], names: Iterable[str]) -> list[str]:
    """The files of the first of these tables that is there."""
    return next((groups[name] for name in names if name in groups), [])


def list_names(source: Source, file: str) -> tuple[str, ...]:
    """Names of the columns of a table."""
    path = source.path(file)
    return tables.read_names(path, delimiter=find_delimiter(path))


def _list_columns(source: Source, path: str) -> list[str]:
    """The columns of a table and its partitions; none of one that cannot be read."""
    try:
        return [*list_names(source, path), *list_partitions(path)]
    except UserError as error:
        if error.exit_code != Exit.REFUSED:
            raise
        return []


def _refuse_copies(files: Collection[str]) -> None:
    """Refuse a table that is there twice: in two formats, or in a folder and one inside of it.

    Folders side by side, as of years, hold parts of one table. Raises UserError: no_input.
    """
    folders = group_by(map(PurePosixPath, files), lambda path: path.name.lower().split(".")[0])
    for name, paths in folders.items():
        parents = [path.parent for path in paths]
        is_twice = len(set(parents)) < len(parents)
        is_inside = any(parent in other.parents for parent in parents for other in parents)
        if is_twice or is_inside:
            listed = ", ".join(safe_text(str(path)) for path in paths[:LISTED])
            text = f"{safe_text(name)} occurs {len(paths)} times ({listed})"
            hint = "Keep one of them in the folder"
            raise input_error(Reason.NO_INPUT, text, "expected once", hint)


def report_patients(files: PlainFiles) -> list[Finding]:
    """An info on tables that are read as patients for their columns, not by name."""
    names = words.WORDS["tables"]["patients"]
    chosen = [path for path in files.patients if name_table(path) not in names]
    if not chosen:
        return []
    text = f"patients are read from {', '.join(map(safe_text, chosen[:LISTED]))}"
    why = "which have columns of subjects and births or sexes and none of claims"
    hint = "Move other tables elsewhere, or call the right one patients.csv"
    return [Finding(Reason.HEADER, text, why, hint, level="info", file=chosen[0])]


def report_unread(files: PlainFiles, read_elsewhere: Sequence[str]) -> list[Finding]:
    """What tables of the folder are not read, neither as claims nor, as maps of codes are,
    elsewhere: a warning of those with diagnoses, and of those that are called as the claims but for
    a number, an info on others.
    """
    called = {cut_number(path) for path in files.claims}
    read = {Path(path).name for path in read_elsewhere}
    unread = [path for path in files.unread if PurePosixPath(path).name not in read]
    plain = [path for path in unread if path not in files.codes]
    years = [path for path in plain if cut_number(path) in called]
    others = [path for path in plain if path not in years]
    columns = "no columns of subject, date and code are known in them"
    why = (
        "beside the claims, but neither claims, patients, deaths nor labels by name, nor births, "
        "sexes or times of observation by columns"
    )
    return [
        *_report_codes(files, unread),
        *_report_files(
            years, "warning", columns, "Call their columns as in the tables beside them"
        ),
        *_report_files(
            others, "info", why, "Name these as --col obs_start=NAME --col obs_end=NAME"
        ),
    ]


def report_other_formats(source: Source, files: PlainFiles) -> list[Finding]:
    """Warnings of files in formats that are not read here, which by their names hold more claims or
    what is told of subjects.
    """
    used = (files.claims, files.patients, files.labels, *files.facts.values(), files.periods)
    read = set(map(name_table, itertools.chain(*used)))
    names = {name for role in (*ROLES, "periods") for name in words.WORDS["tables"][role]}
    claims = set(map(cut_number, files.claims))
    findings: list[Finding] = []
    for hint, endings in OTHER_FORMATS.items():
        paths = [path for path in sorted(source.files) if path.lower().endswith(endings)]
        paths = [path for path in paths if name_table(path) not in read]
        wanted = [path for path in paths if name_table(path) in names or cut_number(path) in claims]
        findings += _report_files(wanted, "warning", "its format is none of those read here", hint)
    return findings


def _report_codes(files: PlainFiles, paths: Sequence[str]) -> list[Finding]:
    """Warnings of those of some tables that hold diagnoses, which are not read."""
    why = "more diagnoses are in it than in the claims"
    findings: list[Finding] = []
    for path in filter(files.codes.__contains__, paths):
        findings += _report_files([path], "warning", why, _advise_joining(files, path))
    return findings


def _advise_joining(files: PlainFiles, path: str) -> str:
    """What to do with a table of diagnoses beside the claims."""
    links, claims = files.codes[path], safe_text(files.claims[0])
    if not links:
        return f"Call all tables of claims claims_NAME, as {claims}, and their columns alike"
    return (
        f"Give each row of it the subject and date of {claims}, by "
        f"{' and '.join(map(safe_text, links))}, and add it as a file of claims with the same "
        "columns"
    )


def _report_files(
    paths: Sequence[str], level: Literal["info", "warning"], why: str, hint: str
) -> list[Finding]:
    """A line on tables that are not read."""
    if not paths:
        return []
    text = f"not read: {list_first(list(map(safe_text, paths)), LISTED)}"
    return [Finding(Reason.NO_INPUT, text, why, hint, level=level, count=len(paths))]
