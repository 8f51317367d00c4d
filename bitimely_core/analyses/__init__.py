"""Analyses: each sibling file registers one function that makes a `Page` of runs, of data, or of a
model's name. `report.write_report` draws the page.

All of them take `seed` (of their draws and random weights). Those that show intervals take
`bootstrap` (replicates over subjects).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bitimely_core.page import PageBuilder
from bitimely_core.privacy import Sharing
from bitimely_core.run import Run
from bitimely_core.tokens import Windows

PRINTED_VERSIONS = {"bitimely", "torch", "numpy", "python"}


def start_page(title: str, runs: Sequence[Run], splits: Sequence[str], seed: int) -> PageBuilder:
    """A page with the notices and facts of some runs: data, models, seeds, versions.

    `splits` are those that the windows of each run come from.
    """
    page = PageBuilder(title)
    windows = [run.windows() for run in runs]
    for run in runs:
        page.notice(*run.record.notices)
    for run, split in zip(runs, splits, strict=True):
        if split != "test":
            page.notice(f"{run.name}: no test split, so windows of the {split} split are used.")
    if len({part.fingerprint for part in windows}) > 1:
        page.notice("The runs were trained on different windows, so their sequences differ.")
    seeds = {str(run.record.seed) for run in runs} | {f"{seed} (of this analysis)"}
    page.fact("Runs", ", ".join(run.name for run in runs), Sharing.OPEN)
    page.fact("Data", _join_distinct(map(describe_data, windows)), Sharing.OPEN)
    page.fact("Split", _join_distinct(f"by {part.split}" for part in windows), Sharing.OPEN)
    page.fact("Model", _join_distinct(run.record.model for run in runs), Sharing.OPEN)
    page.fact("Seed", ", ".join(sorted(seeds)), Sharing.OPEN)
    _add_versions(page, runs)
    return page


def _join_distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _add_versions(page: PageBuilder, runs: Sequence[Run]) -> None:
    """Add the versions of the first run that has any."""
    versions = next((run.record.versions for run in runs if run.record.versions), {})
    texts = [f"{name} {text}" for name, text in versions.items() if name in PRINTED_VERSIONS]
    if versions:
        page.fact("Versions", ", ".join(texts), Sharing.OPEN)


def describe_data(windows: Windows) -> str:
    """Name and size of the windows, as a fact of a page."""
    codes = getattr(windows, "vocabulary", ())
    size = (
        f"events of {len(codes):,} codes, the last {windows.length} of a subject"
        if codes
        else f"{windows.channels} channels, {windows.length} samples at {windows.rate:g} Hz"
    )
    return f"{windows.name} ({size})"
