"""Records of an ingest of claims: its configuration, checked before any row is read, and what its
first pass has found so far.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from pydantic import BaseModel, Field

from bitimely_core.cache.ingest_run import IngestRun
from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.clean import RowAccount
from bitimely_core.claims.codebook import Codebook
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.label_rules import LabelRule, RuleTable
from bitimely_core.claims.phecode_maps import PhecodeMap
from bitimely_core.claims.sources import ClaimsSource
from bitimely_core.store import storage

FILE_SHIFT = 40  # bits of a line number; those above number the file
SPAN_DAYS = 1 << 19  # days, before and after 1970, are fewer than half of it
SUBJECT_DATES = {
    "birth": "birth_day",
    "obs_start": "obs_start",
    "obs_end": "obs_end",
    "death": "death_day",
}
DAY_COLUMNS = (*SUBJECT_DATES.values(), "index_day")


@dataclass(frozen=True, kw_only=True)
class ClaimsJob:
    """Validated configuration of an ingest of claims."""

    run: IngestRun
    options: ClaimsOptions
    claims: ClaimsSource
    splits: pl.DataFrame | None  # subject_id, split, where the source or the user gives them
    codemap: PhecodeMap
    rule_table: list[RuleTable]  # as the manifest keeps it
    rules: tuple[LabelRule, ...]
    flags: tuple[str, ...]  # label columns of the source
    book: Codebook
    unknown_days: frozenset[int]  # of rows of claims: they stand for an unknown date
    key: bytes
    shards: int
    home: Path  # of unfinished work
    stem: str  # beginning of the names of its files

    @property
    def ruled(self) -> bool:
        """Whether the rules make the labels.

        Else the columns of the source do, and rules are only compared with them.
        """
        return not self.flags or bool(self.options.rules)

    @property
    def names(self) -> list[str]:
        """The labels: of the rules, and the columns of the source."""
        rules = [rule.name for rule in self.rules] if self.ruled else []
        return [*rules, *map(self.name_flag, self.flags)]

    def name_flag(self, flag: str) -> str:
        """The label of a column; one that shares the name of a rule is called `<name>_source`."""
        shares_name = self.ruled and any(rule.name == flag for rule in self.rules)
        return f"{flag}_source" if shares_name else flag


class CleaningFindings(BaseModel):
    """What the first pass has found so far; its size does not grow with the number of subjects."""

    blocks: int = 0  # of the source, finished
    stretches: int = 0  # spill files of each kind that hold their rows
    subjects: list[int] = []  # in those files, by shard; a subject may be counted several times
    done: bool = False
    files: list[str] = []
    accounts: dict[str, RowAccount] = {}  # by file
    days: Counter[int] = Field(default_factory=Counter)  # valid day -> rows
    code_counts: Counter[int] = Field(default_factory=Counter)  # code -> valid rows
    sources: Counter[int] = Field(default_factory=Counter)  # kind of claim -> valid rows
    codes: list[IcdCode] = []
    latest: int | None = None  # days after it are in the future of the data; known when all is read

    @classmethod
    def load(cls, path: Path) -> CleaningFindings:
        """What `save` wrote; nothing where there is no file."""
        return cls.model_validate_json(path.read_bytes()) if path.is_file() else cls()

    def save(self, path: Path) -> None:
        """Write the findings in one step. Raises UserError: disk (exit 6)."""
        storage.write_json(path, self.model_dump(mode="json", exclude={"latest"}))

    def add_account(self, file: str, account: RowAccount) -> None:
        """Add the account of some rows of a file."""
        total = self.accounts.setdefault(file, RowAccount())
        total += account

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last day of the data."""
        valid = [day for day in self.days if self.latest is None or day <= self.latest]
        return (min(valid), max(valid)) if valid else None

    @property
    def total(self) -> RowAccount:
        """The accounts of all files together."""
        total = RowAccount()
        for account in self.accounts.values():
            total += account
        return total


def clear_folder(folder: Path, *stems: str) -> None:
    """Remove the files of a folder whose names begin with none of some stems, and the folder when
    it is empty.
    """
    if folder.is_dir():
        for path in folder.iterdir():
            if not path.name.startswith(stems):
                with suppress(OSError):
                    storage.os_unlink(path)
        with suppress(OSError):
            storage.os_rmdir(folder)
