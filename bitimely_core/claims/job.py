"""What an ingest of claims works with, read and checked before any row; and where its unfinished work lies."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import storage
from bitimely_core.cache.ingest_run import IngestRun
from bitimely_core.claims.clean import Account
from bitimely_core.errors import Reason

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.claims.codes import Code, Codebook
    from bitimely_core.claims.label_rules import Rule
    from bitimely_core.claims.phecode_maps import PhecodeMap
    from bitimely_core.claims.sources import Claims

FILE = 40  # bits of a line number; those above say of which file
SPAN_DAYS = 1 << 19  # days, before and after 1970, are fewer than half of it
SPAN = {"birth": "birth_day", "obs_start": "obs_start", "obs_end": "obs_end", "death": "death_day"}
DAYS = (*SPAN.values(), "index_day")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an ingest of claims works with."""

    attempt: IngestRun
    given: dict[str, Any]  # options as given
    claims: Claims
    splits: pl.DataFrame | None  # subject_id, split, where the source or the user says so
    codemap: PhecodeMap
    table: list[dict[str, Any]]  # rules as the manifest keeps them
    rules: tuple[Rule, ...]
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
class Found:
    """What the first pass has found so far: small, however many the subjects."""

    blocks: int = 0  # of the source that are done
    stretches: int = 0  # that these have been laid down in
    done: bool = False
    files: list[str] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)  # file -> what became of its rows
    days: Counter[int] = field(default_factory=Counter)  # valid day -> rows
    spoken: Counter[int] = field(default_factory=Counter)  # code -> valid rows
    sources: Counter[int] = field(default_factory=Counter)  # kind of claim -> valid rows
    codes: list[Code] = field(default_factory=list)
    latest: int | None = None  # days after it are in the future of the data; known when all is read

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last day of the data."""
        valid = [day for day in self.days if self.latest is None or day <= self.latest]
        return (min(valid), max(valid)) if valid else None

    @property
    def total(self) -> Account:
        """The accounts of all files together."""
        total = Account()
        for account in self.accounts.values():
            total += account
        return total


def noted(account: Account) -> dict[str, Any]:
    """An account as JSON; `recalled` reads it."""
    return {
        "rows": account.rows,
        "faults": dict(account.faults),
        "reasons": {str(reason): n for reason, n in account.reasons.items()},
        "steps": dict(account.steps),
        "examples": {str(reason): shown for reason, shown in account.examples.items()},
    }


def recalled(told: dict[str, Any]) -> Account:
    """The account that `noted` wrote."""
    return Account(
        rows=told["rows"],
        faults=Counter(told["faults"]),
        reasons=Counter({Reason(reason): n for reason, n in told["reasons"].items()}),
        steps=Counter(told["steps"]),
        examples={Reason(reason): shown for reason, shown in told["examples"].items()},
    )


def clear(folder: Path, *stems: str) -> None:
    """Remove the files of a folder but for those whose names begin with one of some stems, and the folder when it is empty."""
    if folder.is_dir():
        for path in folder.iterdir():
            if not path.name.startswith(stems):
                with suppress(OSError):
                    storage.os_unlink(path)
        with suppress(OSError):
            folder.rmdir()
