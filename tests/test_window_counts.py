"""Counts of codes in windows as baselines: against pandas, never after the index day, planted
signals, and on the pages of scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score
from test_sequences import cohort

from bitimely_core import tokens, workflows
from bitimely_core.evaluate import score
from bitimely_core.evaluate.verdicts import compare_baselines, find_lift
from bitimely_core.methods import window_counts

MONTH = 365.25 / 12


def sequences(days, codes, index=None, size=9):
    """Event sequences in memory: lists of days and of ids, one a subject, and their index days
    (None: none).
    """
    flat, clock = (
        np.concatenate([np.asarray(one, dtype=np.float64) for one in of]) for of in (codes, days)
    )
    known = [np.nan if one is None else one / MONTH for one in (index or [None] * len(days))]
    return SimpleNamespace(
        firsts=np.cumsum([0, *map(len, days)]),
        flat=flat.astype(np.int32),
        clock=(clock / MONTH).astype(np.float32),
        index_time=np.array(known, np.float32),
        codes=size,
    )


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_pandas(seed):
    draw = np.random.default_rng(seed)
    days = [
        np.sort(draw.integers(0, draw.integers(10, 4000), draw.integers(1, 60))) for _ in range(40)
    ]
    codes = [draw.integers(5, 9, len(one)) for one in days]
    index = [None if draw.random() < 0.3 else int(draw.integers(0, 4000)) for _ in days]
    rows = np.sort(draw.choice(40, 25, replace=False))
    found = window_counts.count_windows(sequences(days, codes, index), rows).toarray()
    frame = pd.concat(
        [
            pd.DataFrame({"subject": i, "day": d, "code": c})
            for i, (d, c) in enumerate(zip(days, codes, strict=True))
        ]
    )
    ends = frame.groupby("subject")["day"].transform("max")
    frame["before"] = frame["subject"].map(dict(enumerate(index))).fillna(ends) - frame["day"]
    for k, most in enumerate((30, 180, 365, 10**6)):
        table = (
            frame[frame["before"].between(0, most)]
            .groupby(["subject", "code"])
            .size()
            .unstack(fill_value=0)
        )
        table = table.reindex(index=rows, columns=range(9), fill_value=0)
        assert found[:, k * 9 : (k + 1) * 9].tolist() == table.to_numpy().tolist()


def test_a_code_after_the_index_day_counts_nowhere():
    plain = sequences([[0, 400, 700]], [[5, 6, 7]], [720])
    planted = sequences([[0, 400, 700, 721, 5000]], [[5, 6, 7, 8, 8]], [720])
    first, second = (
        window_counts.count_windows(one, np.array([0])).toarray() for one in (plain, planted)
    )
    assert first.sum() == 1 + 1 + 2 + 3
    assert (first == second).all()


def fit_planted(draw, days, codes, y, kind, settings=4):
    """AUROC on the last third, fitted on the first."""
    n = len(y)
    rows = {
        "train": np.arange(n // 2),
        "validation": np.arange(n // 2, 2 * n // 3),
        "test": np.arange(2 * n // 3, n),
    }
    labels = {split: y[rows[split], None].astype(float) for split in ("train", "validation")}
    made = sequences(days, codes, [1000] * n)
    counts = {split: window_counts.count_windows(made, places) for split, places in rows.items()}
    x = {split: matrix.log1p() for split, matrix in counts.items()}
    if kind == window_counts.TREES:
        columns = window_counts.select_columns(counts["train"])
        x = {split: matrix[:, columns].toarray() for split, matrix in counts.items()}
    models = window_counts.fit_labels(kind, x, labels, settings)
    prediction = window_counts.predict_labels(models, x["test"])
    return roc_auc_score(y[rows["test"]], prediction[:, 0])


@pytest.mark.parametrize("kind", [window_counts.LOGISTIC, window_counts.TREES])
def test_a_code_of_the_last_30_days_alone_is_found(kind):
    """The label is whether code 8 is in the last 30 days; its count over all history is no
    signal.
    """
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 600)
    days = [[int(d) for d in draw.integers(0, 900, 6)] + [980 if one else 940] for one in y]
    codes = [[*draw.integers(5, 8, 6), 8] for _ in y]
    assert fit_planted(draw, days, codes, y, kind) > 0.99


def test_an_interaction_is_seen_by_trees_alone():
    draw = np.random.default_rng(1)
    has = draw.integers(0, 2, (1200, 2))
    y = has[:, 0] ^ has[:, 1]
    extra = draw.integers(1, 5, 1200)  # else the length would be the label
    codes = [
        [6] * a + [7] * b + [5] * (n + 2 - a - b) for (a, b), n in zip(has, extra, strict=True)
    ]
    days = [np.arange(len(one)) * 100 for one in codes]
    assert fit_planted(draw, days, codes, y, window_counts.TREES) > 0.95
    assert fit_planted(draw, days, codes, y, window_counts.LOGISTIC) < 0.65


def test_trees_read_the_columns_that_most_sequences_have():
    counts = window_counts.count_windows(
        sequences([[0, 900]] * 3 + [[0]], [[5, 6], [5, 6], [7, 6], [8]], [1000] * 4), np.arange(4)
    )
    columns = [9 + 6, 2 * 9 + 6, 3 * 9 + 5, 3 * 9 + 6]
    assert window_counts.select_columns(counts, 4).tolist() == columns


@pytest.mark.slow
def test_pages_of_claims_have_the_counts_and_the_lift_over_the_best_baseline(tmp_path: Path):
    cohort(tmp_path / "tokens" / "pophr", n=300)
    flags = {"train": {"steps": 2, "batch_size": 16}}
    workflows.pretrain(
        preset="tiny", flags={**flags, "data": {"names": ("pophr",)}}, workspace=tmp_path
    )
    fine = workflows.finetune("tiny", data="pophr", flags=flags, workspace=tmp_path)
    scores = workflows.evaluate(fine["run"], workspace=tmp_path)
    stored = json.loads((tmp_path / "runs" / fine["run"] / "scores.json").read_bytes())
    for name in ("window_counts_logistic", "window_counts_trees"):
        assert stored["baselines"][name]["settings"] == 4
        assert "30, 180 and 365 days" in stored["baselines"][name]["about"]
        # code 5 makes the label
        assert stored["baselines"][name]["by_class"]["chf"]["auprc"]["value"] > 0.9
    reached = {name: one["auprc"]["value"] for name, one in stored["baselines"].items()}
    best = stored["lift"]["baseline"]
    assert reached[best] == max(reached.values())
    assert stored["lift"]["difference"] == pytest.approx(
        scores["metrics"]["auprc"]["value"] - reached[best]
    )
    assert (
        stored["lift"]["corrected_lo"]
        < stored["lift"]["difference"]
        < stored["lift"]["corrected_hi"]
    )
    assert stored["lift"]["corrected_lo"] <= stored["baselines"][best]["auprc"]["difference"]["lo"]
    page = (tmp_path / "runs" / fine["run"] / "report.html").read_text()
    assert "Lift in AUPRC over the best baseline" in page
    assert "window counts trees" in page
    assert tokens.open_tokens(tmp_path / "tokens" / "pophr").codes == 11


def test_the_lift_is_over_the_best_baseline_of_errors_too():
    draw = np.random.default_rng(0)
    y = draw.normal(size=60)
    near, far = y + 0.1 * draw.normal(size=60), y + draw.normal(size=60)
    found = score(
        "regression",
        y,
        y + 0.3 * draw.normal(size=60),
        np.arange(60),
        baselines={"near": near, "far": far},
    )
    lift = find_lift(found)
    assert lift.baseline == "near"
    assert lift.difference > 0
    assert lift.p_holm == compare_baselines(found)["near"].p_holm
