"""Analyses: each sibling file registers one function from runs (or data, or a model's name) to a
`Page`; `report.write_report` draws it.

All of them take `seed` (of their draws and random weights), `progress` (called with what is done)
and, where they show intervals, `bootstrap` (replicates over subjects).
"""

from __future__ import annotations

from collections.abc import Sequence

from bitimely_core.page import PageBuilder
from bitimely_core.run import Run
from bitimely_core.tokens import Windows


def start_page(title: str, runs: Sequence[Run], splits: Sequence[str], seed: int) -> PageBuilder:
    """A page with the notices and facts of some runs: data, models, seeds, versions. `splits` are
    those that their windows come from.
    """
    page = PageBuilder(title)
    windows = [run.windows() for run in runs]
    page.notice(*(notice for run in runs for notice in run.record.notices))
    page.notice(
        *(
            f"{r.name}: no test split, so windows of the {s} split are used."
            for r, s in zip(runs, splits, strict=True)
            if s != "test"
        )
    )
    if len({one.fingerprint for one in windows}) > 1:
        page.notice("The runs were trained on different windows, so their sequences differ.")
    page.fact("Runs", ", ".join(run.name for run in runs))
    page.fact("Data", ", ".join(dict.fromkeys(map(_describe_data, windows))))
    page.fact("Split", ", ".join(dict.fromkeys(f"by {one.split}" for one in windows)))
    page.fact("Model", ", ".join(dict.fromkeys(run.model().config.name for run in runs)))
    page.fact(
        "Seed",
        ", ".join(sorted({str(run.record.seed) for run in runs} | {f"{seed} (of this analysis)"})),
    )
    versions = next((run.record.versions for run in runs if run.record.versions), {})
    if versions:
        page.fact(
            "Versions",
            ", ".join(
                f"{key} {versions[key]}"
                for key in versions
                if key in {"bitimely", "torch", "numpy", "python"}
            ),
        )
    return page


def _describe_data(windows: Windows) -> str:
    codes = getattr(windows, "vocabulary", ())
    if codes:
        return f"{windows.name} (events of {len(codes):,} codes, the last {windows.length} of a subject)"
    return f"{windows.name} ({windows.channels} channels, {windows.length} samples at {windows.rate:g} Hz)"
