"""The verb `ingest`: the cache of a data set with its page, of claims also the sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from bitimely_core import cache, registry
from bitimely_core.cache import open_cache
from bitimely_core.cache.ingest_run import REPORT
from bitimely_core.errors import Exit, Finding, Reason, UserError, check_choice
from bitimely_core.privacy import EXACT
from bitimely_core.registry import Choices
from bitimely_core.store import storage
from bitimely_core.store.records import write_results
from bitimely_core.store.workspace import find_data_kind, load_dataset, locate_new
from bitimely_core.tokens.open_views import suggest_view
from bitimely_core.workflows.prepare import ingest_cache
from bitimely_core.workflows.tokenize import tokenize

# of the result of `tokenize`, kept in the report
TOKEN_KEYS = ("windows", "events", "codes", "honesty", "selected", "small_counts")


def ingest(
    dataset: str,
    source: str | Path | None = None,
    out: str | Path | None = None,
    *,
    workspace: Path = Path("workspace"),
    options: Choices | None = None,
    build: Choices | None = None,
    notice: Callable[[Finding], object] | None = None,
    **arguments: Any,
) -> Choices:
    """`cache.ingest`, and `report.html` beside its report; of claims with `build` also the
    sequences, whose warnings the report has too.

    Args:
        dataset: registered name.
        source: raw folder, or the URL of one; None for generated data sets.
        out: folder of the data set's cache; None: `<workspace>/cache/<dataset>`.
        workspace: holds the cache where `out` is None.
        options: the data set's own, which may also be given by name, such as rate=500.
        build: choices of sequences (`claims.sequence_plan.resolve_plan`); `split_file` has the ids
            of the source and is an option of the cache.
        notice: called with a warning where the page could not be written, or the sequences could
            not be made, but the cache is complete.
        **arguments: the other arguments of `cache.ingest`.

    Returns:
        The report of `cache.ingest`. Its exit code is 4 where no subject has a sequence: the cache
        is complete, so `tokenize` with other choices needs no second ingest.

    Raises:
        UserError: that of `cache.ingest`, whose page has the reasons of a refused data set; exit 2
            for choices that do not fit.
    """
    folder = Path(out or locate_new(Path(workspace), "cache", load_dataset(dataset).name))
    kind = find_data_kind(dataset)
    options = {**(options or {}), **_take_options(dataset, arguments)}
    kind.check_arguments(build or {}, {**options, **arguments}, folder)
    options, choices = kind.split_choices(options, build)

    def add_tokens(report: Choices) -> None:
        if choices is None:
            return
        reasons = report["reasons"]
        try:
            built = tokenize(
                dataset, workspace=folder.parent.parent, options=choices, force_new=True
            )
            findings = built["findings"]
            report["tokens"] = _summarize_tokens(built, folder.parent.parent, reasons)
        except UserError as error:
            shared, exact = _make_findings(error)
            if shared.level == "error":
                report["exit_code"] = int(Exit.REFUSED)
            findings = [exact.as_dict()]
            if notice is not None:
                notice(shared)
        report["reasons"] = [*reasons, *findings]
        counts = Counter[str](report["reason_counts"])
        counts.update({reason["code"]: reason["count"] for reason in findings})
        report["reason_counts"] = dict(sorted(counts.items()))
        write_results(folder, {REPORT: storage.encode_json(report) + b"\n"}, beside=True)

    return ingest_cache(
        dataset, source, folder, extend=add_tokens, options=options, notice=notice, **arguments
    )


def _take_options(dataset: str, arguments: Choices) -> Choices:
    """The options of the data set, which are taken out of `arguments`.

    Raises UserError (unknown_name, exit 2) for a name that is neither one of them nor an argument
    of `cache.ingest`.
    """
    options = registry.datasets[dataset].facts.options or {}
    names = [*signature(cache.ingest).parameters, *options]
    for name in arguments:
        check_choice(f"option of {dataset}", name, names)
    return {name: arguments.pop(name) for name in options if name in arguments}


def _summarize_tokens(built: Choices, workspace: Path, reasons: Sequence[Choices]) -> Choices:
    """The entry of new sequences in a report with these reasons; under `exact` the counts, and all
    reasons, as the owner of the data sees them.
    """
    # the report is the same in every workspace
    place = Path(built["folder"]).relative_to(workspace).as_posix()
    tokens: Choices = {"folder": place, **{key: built[key] for key in TOKEN_KEYS}}
    if exact := built.get(EXACT):
        counts = {key: exact[key] for key in TOKEN_KEYS}
        tokens[EXACT] = {**counts, "reasons": [*reasons, *exact["findings"]]}
    return tokens


def _make_findings(error: UserError) -> list[Finding]:
    """The finding of sequences that could not be made as it is shared and as the owner of the data
    sees it, a warning where a default keeps little: the cache is complete. Raises `error` where
    the data are not its reason.
    """
    if error.exit_code != Exit.REFUSED:
        raise error
    findings = [error.finding, (error.exact or [error.finding])[0]]
    is_default = error.code == Reason.MIN_CODES
    return [replace(finding, level="warning") for finding in findings] if is_default else findings


def suggest_tokens(dataset: str, folder: Path) -> str:
    """The data set with the view that reads the labels of its cache in `folder`."""
    if find_data_kind(dataset).section != "tokenize":
        return dataset
    view = suggest_view(open_cache(folder, verify=False))
    return f"{dataset}/{view}" if view else dataset
