"""docs/claims.md, the ledger of the paper's tables, figures and claims, from docs/claims.toml and
the records of runs in docs/claims.json.

    python docs/claims.py                       # the page again
    python docs/claims.py --from WORKSPACE      # first take the records of the recipes that have been run there

A record of a page of results is a difference of two rows with its corrected interval; where the
difference is a registered test, its verdict is the one of the registered family, from the workspace
or, where that is gone, from the table in docs/results-full.md. Status: reproduced or contradicted where
a verdict is allowed and points that way, undecided where it was tested and none is; not tested
without a record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from bitimely_core.evaluate import significance_sign
from bitimely_core.schemas.scores import CorrectedDifference

DOCS = Path(__file__).parent
RECORDS, PAGE, LEDGER, RESULTS = (
    DOCS / "claims.json",
    DOCS / "claims.md",
    DOCS / "claims.toml",
    DOCS / "results-full.md",
)
REGISTERED = ("open", "models")  # recipes with families of tests, decisions 007 and 009
NOT_COMPLETE = "family not complete"
SIDES = {"better": 1, "worse": -1}  # verdict -> for or against the claim
NEAR = 0.03  # share by which a number of sequences may differ from the paper's
STATUSES = ("reproduced", "contradicted", "undecided", "not tested", "cannot be tested here")
HEAD = """# Claims of the paper

One row for each table, figure and claim of the paper that a measurement can support or refute; figures 1 to 3 and 7 are drawings, table 6 is notation. *Reproduced* and *contradicted* are verdicts after
correction for the comparisons of the page ([statistics](statistics.md)), or, of counts and slopes, by the rule that stands in the row; *undecided*: run, and no verdict. Where the error of a mean or of
signal processing is below the paper's, the figure says so. Numbers of tables, figures and sections are those of the paper in the order of its source. Made by `python docs/claims.py` from `docs/claims.toml` and the records of runs in
`docs/claims.json`; `python docs/claims.py --from WORKSPACE` takes new records.
"""


def read_claims() -> list[dict[str, Any]]:
    """The rows of the ledger."""
    return list(tomllib.loads(LEDGER.read_text("utf-8"))["claim"])


def read_records() -> dict[str, Any]:
    """Claim -> record; under `baselines` the scores of docs/baselines.py, view -> name -> value,
    lo, hi.
    """
    return dict(json.loads(RECORDS.read_text("utf-8")))


def take_record(claim: dict[str, Any], workspace: Path) -> dict[str, Any] | None:
    """The record of a claim from the page of its recipe, None where it has not been run there."""
    page = workspace / "reports" / claim["recipe"] / "summary.json"
    if not page.is_file() or "row" not in claim:
        return None
    summary = json.loads(page.read_bytes())
    found = summary["differences"].get(claim["rival"], {}).get(claim["column"])
    if found is None or summary["rows"][0] != claim["row"]:
        return None
    lower = next(c["lower_is_better"] for c in summary["columns"] if c["column"] == claim["column"])
    lo, hi = (found.get(key) for key in ("corrected_lo", "corrected_hi"))
    # of the rival less the row
    side = significance_sign(CorrectedDifference.model_validate(found)) * (-1 if lower else 1)
    cells = [summary["cells"][name][claim["column"]] for name in (claim["row"], claim["rival"])]
    values = [
        {key: cell.get(key) for key in ("value", "lo", "hi", "n", "n_subjects")} for cell in cells
    ]
    rows = {claim["row"], claim["rival"]}
    missing = [
        m
        for m in summary["missing"]
        if m["column"] == claim["column"] and m["row"] in rows and m["state"] != "left out"
    ]
    verdict = find_registered_verdict(claim, workspace)
    if missing or verdict == NOT_COMPLETE:
        return None
    if verdict is not None:
        return {
            "registered": verdict,
            "side": SIDES.get(verdict, 0),
            "row": values[0],
            "rival": values[1],
        }
    return {
        "difference": found["difference"],
        "lo": lo,
        "hi": hi,
        "side": -side,
        "row": values[0],
        "rival": values[1],
    }


def find_registered_verdict(claim: dict[str, Any], workspace: Path) -> str | None:
    """The verdict of the registered test of a claim's difference, NOT_COMPLETE before its family
    is, None where none is registered.
    """
    pages = [workspace / "reports" / name / "summary.json" for name in REGISTERED]
    found = [json.loads(page.read_bytes())["tests"] for page in pages if page.is_file()]
    tests = [test for test in itertools.chain(*found) if not test.get("descriptive")]
    wanted = {"data": claim["column"], "row": claim["row"], "rival": claim["rival"]}
    return next(
        (test["verdict"] or NOT_COMPLETE for test in tests if wanted.items() <= test.items()), None
    )


def take_printed_test(claim: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a registered test from the tables of families in docs/results-full.md, None where
    it is not there.
    """
    wanted = [claim.get(key) for key in ("column", "row", "rival")]
    text = RESULTS.read_text("utf-8")
    tables = [
        text.partition(f"<!-- {name}-families -->")[2].partition("<!-- end of")[0]
        for name in REGISTERED
    ]
    for line in itertools.chain(*map(str.splitlines, tables)):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[1:4] == wanted:
            own, other, difference, interval, verdict = cells[4:]
            text = f"{claim['row']}: {own}, {claim['rival']}: {other}, difference {difference} ({interval}); registered test: {verdict}"
            return {"text": text, "side": SIDES.get(verdict, 0)}
    return None


def take_counts(claim: dict[str, Any], workspace: Path) -> dict[str, Any] | None:
    """Sequences of the data that are here whole beside the paper's; reproduced where lengths are
    equal and numbers within `NEAR`.
    """
    page = workspace / "reports" / claim["recipe"] / "summary.json"
    found = (
        {row["data"]: row for row in json.loads(page.read_bytes())["rows"]}
        if page.is_file()
        else {}
    )
    rows = [found[data] for data in claim["counts"] if found.get(data, {}).get("sequences")]
    if len(rows) < len(claim["counts"]):
        return None
    near = all(
        row["length"] == row["paper_length"]
        and abs(row["sequences"] / row["paper_sequences"] - 1) <= NEAR
        for row in rows
    )
    text = ", ".join(
        f"{row['data']} {row['sequences']:,} of {row['paper_sequences']:,}" for row in rows
    )
    return {"text": f"sequences, ours of the paper's: {text}", "side": 1 if near else -1}


def take_figure(claim: dict[str, Any], workspace: Path) -> dict[str, Any] | None:
    """The record of a figure from the pages of its analysis, None where it was not made there."""
    pages = sorted(workspace.glob(f"reports/{claim['analysis']}-{claim['recipe']}*/summary.json"))
    describe = FIGURES[claim.get("figure", claim["analysis"])]
    return (
        describe([json.loads(page.read_bytes()) for page in pages], claim["recipe"])
        if pages
        else None
    )


def describe_shapelets(
    pages: list[dict[str, Any]], recipe: str, field: str, what: str
) -> dict[str, Any]:
    """Inside over outside the shapelets, for BiTimelyGPT beyond random weights and beyond the
    signal's size; one seed allows no verdict.
    """
    models = {
        name.removeprefix(f"{recipe}-"): value[field]
        for name, value in pages[0].items()
        if name.startswith(f"{recipe}-")
    }
    own = next(value for name, value in models.items() if name.startswith("bitimelygpt"))
    tests = [own["beyond_random_weights"], own["beyond_signal_size"]]
    named = ", ".join(
        f"{name} {_show(value['inside_over_outside'])}" for name, value in models.items()
    )
    beyond = ", ".join(
        f"{_show(test)} beyond {against}"
        for test, against in zip(tests, ("random weights", "the signal's size"), strict=True)
    )
    found = f"{what} inside over outside shapelets: {named}. BiTimelyGPT, difference of shares inside over shares of the length: {beyond}"
    return {"text": f"{found} ({tests[0]['n_subjects']} subjects, one seed)", "side": 0}


def describe_spectra(pages: list[dict[str, Any]], recipe: str) -> dict[str, Any]:
    """Effective rank of the maps of the last layer; one seed allows no verdict."""
    ranks = {
        name: list(layers.values())[-1]["mean"]["map"]["effective_rank"]
        for name, layers in pages[0].items()
        if name.startswith(f"{recipe}-")
    }
    named = ", ".join(
        f"{name.removeprefix(f'{recipe}-')} {rank:.2f}"
        for name, rank in sorted(ranks.items(), key=lambda item: -item[1])
    )
    return {
        "text": f"effective rank of the maps of the last layer over their number of tokens: {named} (one seed)",
        "side": 0,
    }


def describe_full_ranks(pages: list[dict[str, Any]], recipe: str) -> dict[str, Any]:
    """Singular values above float32 precision in the maps of the last layer, of all; one seed
    allows no verdict.
    """
    shares = {
        name.removeprefix(f"{recipe}-"): list(layers.values())[-1]["mean"]["map"]["numerical_rank"]
        for name, layers in pages[0].items()
        if name.startswith(f"{recipe}-")
    }
    named = ", ".join(
        f"{name} {share:.2f}" for name, share in sorted(shares.items(), key=lambda item: -item[1])
    )
    return {
        "text": f"numerical rank of the maps of the last layer over their number of tokens: {named} (one seed)",
        "side": 0,
    }


def describe_growth(pages: list[dict[str, Any]], _recipe: str) -> dict[str, Any]:
    """Log-log slopes of time and memory: for the claim where the operator's interval lies below
    that of softmax attention and not above 1.15.
    """
    found = pages[0]["candidates"]
    own, other = (found[name]["slope"] for name in ("retention, chunkwise", "softmax attention"))
    text = "; ".join(
        f"{name}: time {_show(row['slope'])}, memory {row['memory_slope']['value']:.2f}"
        for name, row in found.items()
    )
    lengths = pages[0]["lengths"]
    return {
        "text": f"log-log slopes for {lengths[0]} to {lengths[-1]} tokens: {text}",
        "side": int(own["hi"] < other["lo"] and own["hi"] <= 1.15),
    }


def _show(found: dict[str, float]) -> str:
    return f"{found['value']:.2f} ({found['lo']:.2f} to {found['hi']:.2f})"


FIGURES = {
    "saliency": partial(describe_shapelets, field="embeddings", what="saliency"),
    "attention": partial(describe_shapelets, field="shapelets", what="attention"),
    "svd": describe_spectra,
    "ranks": describe_full_ranks,
    "complexity": describe_growth,
}


def has_printed_rows(claim: dict[str, Any]) -> bool:
    """Whether the section of the claim's recipe in docs/results-full.md has numbers of ours in its row
    and in that of its rival.
    """
    section = (
        RESULTS.read_text("utf-8")
        .partition(f"<!-- {claim['recipe']} -->")[2]
        .partition("<!-- end of")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    run = {
        name
        for name, *cells in rows
        if any(cell.partition("/")[0].strip() not in {"", "–"} for cell in cells)
    }
    return bool(section) and {claim[key] for key in ("row", "rival") if key in claim} <= run


def find_status(claim: dict[str, Any], record: dict[str, Any] | None) -> str:
    """The status that the record supports."""
    if claim.get("impossible"):
        return "cannot be tested here"
    if record is None:
        return "undecided" if has_printed_rows(claim) else "not tested"
    return {1: "reproduced", -1: "contradicted", 0: "undecided"}[record["side"]]


def describe_figure(claim: dict[str, Any], records: dict[str, Any]) -> str:
    """What was found, and the best that needs no network where it is below the paper's error."""
    record, parts = records.get(claim["id"]), []
    if record and "row" in record:
        value, rival = (record[key]["value"] for key in ("row", "rival"))
        parts.append(
            f"{claim['row']}: {value:.3g}, {claim['rival']}: {rival:.3g} ({record['row']['n_subjects']} units)"
        )
        parts += [f"registered test: {record['registered']}"] if "registered" in record else []
    elif record:
        parts.append(record["text"])
    elif find_status(claim, None) == "undecided":
        parts.append(
            f"[results](results-full.md), {claim['recipe']}: no significant difference or no verdict"
        )
    known = records.get("baselines", {}).get(claim.get("baseline"), {})
    if known:
        name, best = min(known.items(), key=lambda item: item[1]["value"])
        beaten = "below the paper's" if best["value"] < claim["value"] else "above the paper's"
        parts.append(
            f"without a network: {name} {best['value']:.2f} ({best['lo']:.2f} to {best['hi']:.2f}), {beaten}"
        )
    parts += [claim["remark"]] if "remark" in claim else []
    return "; ".join(parts) or claim.get("impossible", "")


def _count_parameters(model: str, preset: str) -> int:
    """Parameters of a model at a preset, with the paper's tokens."""
    from bitimely_core import models
    from bitimely_core.config import build_model_config

    shape = {"tokenizer": "conv", **models.default_shape(preset)}
    return int(models.count_configured(build_model_config(model, preset, **shape)))


def count_presets(names: list[str]) -> dict[str, Any]:
    """Parameters of presets beside the paper's; reproduced within a fifth."""
    from bitimely_core import catalog

    rows = {row["name"]: row for row in catalog.list_rows("presets", Path())}
    pairs = [
        (name, _count_parameters("bitimelygpt", name), rows[name]["paper_parameters"])
        for name in names
    ]
    text = ", ".join(
        f"{name} {own / 1e6:.1f} M of {stated / 1e6:g} M" for name, own, stated in pairs
    )
    return {
        "text": f"the stated widths give {text}",
        "side": 1 if all(abs(own / stated - 1) < 0.2 for _, own, stated in pairs) else -1,
    }


def count_models(names: list[str], preset: str) -> dict[str, Any]:
    """Parameters of models at the stated widths of one preset; reproduced where all are within a
    fifth of the first.
    """
    known = {name: _count_parameters(name, preset) for name in names}
    text = ", ".join(f"{name} {known[name] / 1e6:.1f} M" for name in names)
    same = all(abs(known[name] / known[names[0]] - 1) < 0.2 for name in names)
    return {"text": f"the stated widths give {text}", "side": 1 if same else -1}


def format_page() -> str:
    """The content of docs/claims.md."""
    records = read_records()
    lines = [
        "| paper | recipe | settings against the paper's | data | status | figure |",
        "|---|---|---|---|---|---|",
    ]
    for claim in read_claims():
        shown = [claim["paper"], f"`{claim['recipe']}`", claim["settings"], claim["data"]]
        lines.append(
            f"| {' | '.join([*shown, find_status(claim, records.get(claim['id'])), describe_figure(claim, records)])} |"
        )
    return HEAD + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Take records where a workspace is given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="workspace", type=Path)
    parser.add_argument(
        "--baselines", type=Path, nargs="*", default=[], help="outputs of docs/baselines.py --json"
    )
    given = parser.parse_args()
    records = read_records() if RECORDS.is_file() else {}
    for claim in read_claims():
        take = (
            take_figure
            if "analysis" in claim
            else take_counts
            if "counts" in claim
            else take_record
        )
        counted = count_presets(claim["presets"]) if "presets" in claim else None
        counted = count_models(claim["models"], claim["preset"]) if "models" in claim else counted
        found = counted or (take(claim, given.workspace) if given.workspace else None)
        if found is None and claim["id"] not in records:
            found = take_printed_test(claim)
        records |= {claim["id"]: found} if found else {}
    for path in given.baselines:
        records["baselines"] = {**records.get("baselines", {}), **json.loads(path.read_bytes())}
    RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", "utf-8")
    PAGE.write_text(format_page(), "utf-8")


if __name__ == "__main__":
    main()
