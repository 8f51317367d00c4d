"""The ledger of claims: every row has a recipe that exists, and every status a record that supports
it.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bitimely_core import registry

DOCS = Path(__file__).parents[1] / "docs"


def load_script(name: str = "claims") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


claims = load_script()


@pytest.mark.parametrize("claim", claims.read_claims(), ids=lambda claim: claim["id"])
def test_every_claim_has_a_recipe_and_a_status_that_its_record_supports(claim: dict) -> None:
    assert (registry.RECIPES / f"{claim['recipe']}.toml").is_file()
    record = claims.read_records().get(claim["id"])
    status = claims.find_status(claim, record)
    assert status in claims.STATUSES
    if record is None:
        run = f"<!-- {claim['recipe']} -->" in (
            DOCS / "results-full.md"
        ).read_text() and claims.has_printed_rows(claim)
        assert status == (
            "cannot be tested here"
            if "impossible" in claim
            else "undecided"
            if run
            else "not tested"
        )
    elif "lo" in record:  # a verdict has an interval on one side of 0 that does not hold it
        outside = record["lo"] is not None and (record["lo"] > 0 or record["hi"] < 0)
        assert outside or status == "undecided"


def test_the_page_is_that_of_the_records_and_names_every_table_and_figure() -> None:
    page = (DOCS / "claims.md").read_text()
    assert page == claims.format_page()
    # the others: drawings and notation
    measured = [*(f"Table {k}" for k in (1, 2, 3, 4, 5, 7, 8)), *(f"Figure {k}" for k in (4, 5, 6))]
    assert [name for name in measured if f"\n| {name}" not in page] == []
    assert not any(f"\n| {name}" in page for name in ("Table 6", "Figure 3", "Figure 7"))


@pytest.mark.parametrize(
    ("lo", "hi", "seeds", "missing", "status"),
    [
        (0.5, 2.0, [5, 5], [], "reproduced"),  # errors: the rival's is higher
        (-2.0, -0.5, [5, 5], [], "contradicted"),
        (-1.0, 1.0, [5, 5], [], "undecided"),
        (0.5, 2.0, [2, 2], [], "undecided"),
        (0.5, 2.0, [0, 0], [], "reproduced"),  # as on the pages: methods without seeds need none
        (
            0.5,
            2.0,
            [5, 5],
            [{"row": "rival", "column": "bidmc/hr", "seed": 4, "state": "not run", "detail": ""}],
            None,
        ),
    ],
)
def test_a_record_is_taken_from_a_complete_page_of_results(
    lo: float, hi: float, seeds: list[int], missing: list, status: str | None, tmp_path: Path
) -> None:
    claim = {
        "id": "x",
        "recipe": "open-bidmc",
        "row": "ours",
        "rival": "rival",
        "column": "bidmc/hr",
    }
    assert claims.take_record(claim, tmp_path) is None
    cell = {"value": 8.0, "lo": 7.0, "hi": 9.0, "n": 10, "n_subjects": 5}
    difference = {
        "difference": (lo + hi) / 2,
        "corrected_lo": lo,
        "corrected_hi": hi,
        "p_holm": 0.01,
        "seeds": seeds,
        "effective": 40.0,
    }
    page = {
        "rows": ["ours", "rival"],
        "columns": [{"column": "bidmc/hr", "lower_is_better": True}],
        "differences": {"rival": {"bidmc/hr": difference}},
        "cells": {"ours": {"bidmc/hr": cell}, "rival": {"bidmc/hr": cell}},
        "missing": missing,
    }
    folder = tmp_path / "reports" / "open-bidmc"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(page))
    record = claims.take_record(claim, tmp_path)
    assert (None if record is None else claims.find_status(claim, record)) == status


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        ("no significant difference", "undecided"),
        ("better", "reproduced"),
        ("worse", "contradicted"),
        (None, None),
    ],
)
def test_a_registered_test_decides_and_not_the_page_of_one_recipe(
    verdict: str | None, status: str | None, tmp_path: Path
) -> None:
    """The page of a recipe corrects for its own comparisons alone, fewer than the registered family
    has.
    """
    test_a_record_is_taken_from_a_complete_page_of_results(
        0.5, 2.0, [5, 5], [], "reproduced", tmp_path
    )
    test = {"data": "bidmc/hr", "row": "ours", "rival": "rival", "verdict": verdict}
    (tmp_path / "reports" / "open").mkdir()
    (tmp_path / "reports" / "open" / "summary.json").write_text(
        json.dumps({"tests": [{**test, "data": "bidmc/rr"}, test]})
    )
    claim = {
        "id": "x",
        "recipe": "open-bidmc",
        "row": "ours",
        "rival": "rival",
        "column": "bidmc/hr",
    }
    record = claims.take_record(claim, tmp_path)
    assert (None if record is None else claims.find_status(claim, record)) == status


def test_a_registered_test_whose_workspace_is_gone_is_read_from_the_printed_table() -> None:
    claim = {"row": "strict 0.2", "rival": "patchtst 0.2", "column": "epilepsy"}
    record = claims.take_printed_test(claim)
    assert record["side"] == 1
    assert "difference +5.1 points (1.8 to 8.4)" in record["text"]
    assert claims.take_printed_test({**claim, "rival": "masked 0.2"})["side"] == 0
    assert claims.take_printed_test({**claim, "column": "emg"}) is None


def test_a_row_that_has_not_run_in_a_printed_table_is_not_tested() -> None:
    claim = {
        "recipe": "open-bidmc",
        "row": "strict 0.2",
        "rival": "scratch 0.2",
        "column": "bidmc/spo2",
    }
    assert claims.has_printed_rows(claim)
    # registered at the primary fraction
    assert not claims.has_printed_rows({**claim, "rival": "cpc 0.05"})
    assert not claims.has_printed_rows({**claim, "recipe": "table2"})


@pytest.mark.parametrize(
    ("counted", "length", "status"),
    [
        (7949, 4000, "reproduced"),
        (8000, 4000, "reproduced"),
        (7000, 4000, "contradicted"),
        (7949, 3999, "contradicted"),
        (None, None, None),
    ],
)
def test_numbers_of_sequences_are_compared_with_the_papers(
    counted: int | None, length: int | None, status: str | None, tmp_path: Path
) -> None:
    page = tmp_path / "reports" / "statistics"
    page.mkdir(parents=True)
    row = {
        "data": "bidmc/hr",
        "sequences": counted,
        "length": length,
        "paper_sequences": 7949,
        "paper_length": 4000,
    }
    (page / "summary.json").write_text(json.dumps({"rows": [row]}))
    claim = {"id": "x", "recipe": "statistics", "counts": ["bidmc/hr"]}
    record = claims.take_counts(claim, tmp_path)
    assert (None if record is None else claims.find_status(claim, record)) == status


def test_figures_are_taken_from_the_pages_of_their_analyses(tmp_path: Path) -> None:
    """The growth of the operator is a measurement and decides; one seed of a model does not."""
    claim = next(claim for claim in claims.read_claims() if claim.get("analysis") == "complexity")
    assert claims.take_figure(claim, tmp_path) is None
    page = tmp_path / "reports" / "complexity-figures-small-4"
    page.mkdir(parents=True)
    for own, side in ((1.0, 1), (2.0, 0)):
        slopes = {"retention, chunkwise": own, "softmax attention": 2.0}
        found = {
            name: {
                "slope": {"value": x, "lo": x - 0.1, "hi": x + 0.1},
                "memory_slope": {"value": x},
            }
            for name, x in slopes.items()
        }
        (page / "summary.json").write_text(json.dumps({"candidates": found, "lengths": [64, 128]}))
        record = claims.take_figure(claim, tmp_path)
        assert record["side"] == side
        assert (
            f"retention, chunkwise: time {own:.2f} ({own - 0.1:.2f} to {own + 0.1:.2f})"
            in record["text"]
        )


def test_what_shapelets_receive_beyond_controls_is_a_difference_of_ratios(tmp_path: Path) -> None:
    """1.5 times its length with, and 1.2 times without training: 0.3 beyond random weights,
    whatever the logarithms.
    """
    claim = next(claim for claim in claims.read_claims() if claim.get("analysis") == "saliency")
    folder = tmp_path / "reports" / "saliency-figures-small"
    folder.mkdir(parents=True)
    measured = {
        name: {"value": x, "lo": x - 0.1, "hi": x + 0.1, "n_subjects": 8}
        for name, x in (("ratio", 1.6), ("trained", 0.3), ("size", 0.1))
    }
    found = {
        "inside_over_outside": measured["ratio"],
        "beyond_random_weights": measured["trained"],
        "beyond_signal_size": measured["size"],
    }
    (folder / "summary.json").write_text(
        json.dumps({"figures-small-bitimelygpt": {"embeddings": found}})
    )
    text = claims.take_figure(claim, tmp_path)["text"]
    assert (
        "difference of shares inside over shares of the length: 0.30 (0.20 to 0.40) beyond random weights"
        in text
    )
    assert "log" not in text


def test_parameters_of_models_are_those_of_their_layers() -> None:
    """LSTMs of width D with inputs of width F have 4 D (F + D) weights and 8 D biases; a layer of a
    bilstm has two and hands 2 D on.
    """
    width, layers = 384, 12
    cell = [4 * width * (into + width) + 8 * width for into in (width, 2 * width)]
    found = claims.count_models(["bitimelygpt", "lstm", "bilstm"], "18m")
    assert (
        f"lstm {layers * cell[0] / 1e6:.1f} M, bilstm {2 * (cell[0] + (layers - 1) * cell[1]) / 1e6:.1f} M"
        in found["text"]
    )
    assert found["side"] == -1
    # 14.2 of 17.2 M: within a fifth
    assert claims.count_models(["bitimelygpt", "lstm"], "18m")["side"] == 1


def test_spectra_are_told_from_the_most_to_the_least_uniform(tmp_path: Path) -> None:
    full, claim = (claim for claim in claims.read_claims() if claim.get("analysis") == "svd")
    page = tmp_path / "reports" / "svd-figures-small"
    page.mkdir(parents=True)
    ranks = {"gpt": 0.2, "bitimelygpt": 0.5}
    maps = {
        name: {"effective_rank": rank, "numerical_rank": 1 - rank} for name, rank in ranks.items()
    }
    runs = {
        f"figures-small-{name}": {"1": {}, "2": {"mean": {"map": found}}}
        for name, found in maps.items()
    }
    (page / "summary.json").write_text(json.dumps(runs))
    record = claims.take_figure(claim, tmp_path)
    assert "bitimelygpt 0.50, gpt 0.20" in record["text"]
    assert claims.find_status(claim, record) == "undecided"
    assert "gpt 0.80, bitimelygpt 0.50" in claims.take_figure(full, tmp_path)["text"]
