"""What an ingest of claims works with, read and checked before any row; and where its unfinished work lies."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import storage
from bitimely_core.cache.ingest_run import IngestRun
from bitimely_core.claims.clean import RowAccount
from bitimely_core.errors import Reason

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.claims.codes import Codebook, IcdCode
    from bitimely_core.claims.label_rules import LabelRule
    from bitimely_core.claims.phecode_maps import PhecodeMap
    from bitimely_core.claims.sources import ClaimsSource

FILE_SHIFT = 40  # bits of a line number; those above say of which file
SPAN_DAYS = 1 << 19  # days, before and after 1970, are fewer than half of it
SUBJECT_DATES = {"birth": "birth_day", "obs_start": "obs_start", "obs_end": "obs_end", "death": "death_day"}
DAY_COLUMNS = (*SUBJECT_DATES.values(), "index_day")


@dataclass(frozen=True, kw_only=True)
class ClaimsJob:
    """What an ingest of claims works with."""

    run: IngestRun
    given: dict[str, Any]  # options as given
    claims: ClaimsSource
    splits: pl.DataFrame | None  # subject_id, split, where the source or the user says so
    codemap: PhecodeMap
    table: list[dict[str, Any]]  # rules as the manifest keeps them
    rules: tuple[LabelRule, ...]
    flags: tuple[str, ...]  # label columns of the source
    book: Codebook
    key: bytes
    shards: int
    home: Path  # of unfinished work
    stem: str  # what its files are called

    @property
    def ruled(self) -> bool:
        """Whether the rules make the labels; else the source's columns do, and rules are compared with them alone."""
        return not self.flags or bool(self.given["rules"])

    @property
    def names(self) -> list[str]:
        """The labels: of the rules, and the columns, those that share a rule's name under `<name>_source`."""
        own = [rule.name for rule in self.rules] if self.ruled else []
        return [*own, *(f"{flag}_source" if flag in own else flag for flag in self.flags)]


@dataclass
class CleaningFindings:
    """What the first pass has found so far: small, however many the subjects."""

    blocks: int = 0  # of the source that are done
    stretches: int = 0  # that these have been laid down in
    done: bool = False
    files: list[str] = field(default_factory=list)
    accounts: dict[str, RowAccount] = field(default_factory=dict)  # file -> what became of its rows
    days: Counter[int] = field(default_factory=Counter)  # valid day -> rows
    spoken: Counter[int] = field(default_factory=Counter)  # code -> valid rows
    sources: Counter[int] = field(default_factory=Counter)  # kind of claim -> valid rows
    codes: list[IcdCode] = field(default_factory=list)
    latest: int | None = None  # days after it are in the future of the data; known when all is read

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


def account_to_json(account: RowAccount) -> dict[str, Any]:
    """An account as JSON; `recalled` reads it."""
    return {
        "rows": account.rows,
        "faults": dict(account.faults),
        "reasons": {str(reason): n for reason, n in account.reasons.items()},
        "steps": dict(account.steps),
        "examples": {str(reason): shown for reason, shown in account.examples.items()},
    }


def account_from_json(told: dict[str, Any]) -> RowAccount:
    """The account that `noted` wrote."""
    return RowAccount(
        rows=told["rows"],
        faults=Counter(told["faults"]),
        reasons=Counter({Reason(reason): n for reason, n in told["reasons"].items()}),
        steps=Counter(told["steps"]),
        examples={Reason(reason): shown for reason, shown in told["examples"].items()},
    )


def clear_folder(folder: Path, *stems: str) -> None:
    """Remove the files of a folder but for those whose names begin with one of some stems, and the folder when it is empty."""
    if folder.is_dir():
        for path in folder.iterdir():
            if not path.name.startswith(stems):
                with suppress(OSError):
                    storage.os_unlink(path)
        with suppress(OSError):
            folder.rmdir()
