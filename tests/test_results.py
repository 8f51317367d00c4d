"""The page of results: cells, differences and ranks against independent sources; baselines that
learn; text that stays text; missing cells.
"""

import csv
import dataclasses
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy import stats

from bitimely_core import evaluate, workflows
from bitimely_core.errors import UserError
from bitimely_core.evaluate import baselines
from bitimely_core.evaluate.metrics import Estimate, weigh_units
from bitimely_core.evaluate.result_table import ScoreColumn, assign_rows, compare_column, read_speed
from bitimely_core.report import recipe_results
from bitimely_core.report.model_card import render_card
from bitimely_core.report.recipe_results import ResultPlan, write_results
from bitimely_core.report.recipe_tables import PlannedCell, format_cell, format_paper
from bitimely_core.schemas.runs import RunRecord, TrainSubjects
from bitimely_core.schemas.scores import (
    CorrectedDifference,
    Difference,
    MeanDifference,
    MetricValue,
    Scores,
)
from bitimely_core.store import records, storage
from bitimely_core.workflows.prepare import make_windows_opener

HOSTILE = "<b>&|_$x^2$ \\input{/etc/passwd} `code` =1+1"


def planted(
    workspace,
    name,
    data,
    *,
    row="m",
    seed=0,
    task="classification",
    skill=0.5,
    subjects=12,
    per=10,
    classes=("W", "N1", "N2"),
    bootstrap=200,
    fraction=1.0,
):
    """A run folder as fine-tuning and evaluation leave it: `skill` is the share of rows that are
    right (of errors, the noise).
    """
    rng = np.random.default_rng([seed, sum(map(ord, name))])
    truth = np.random.default_rng(7)  # the same windows for all runs
    n = subjects * per
    groups = np.repeat([f"s{k:03}" for k in range(subjects)], per)
    index = pl.DataFrame(
        {
            "window": np.arange(n),
            "subject_id": groups,
            "recording_id": groups,
            "start": np.tile(np.arange(per) * 30.0, subjects),
        }
    )
    if task == "regression":
        target = truth.normal(size=n)
        prediction = target + rng.normal(size=n) * skill
    elif task == "multilabel":
        target = (truth.random((n, len(classes))) < 0.4).astype(np.float32)
        prediction = np.clip(skill * target + (1 - skill) * rng.random(target.shape), 0.01, 0.99)
    else:
        target = truth.integers(0, len(classes), n)
        predicted = np.where(rng.random(n) < skill, target, rng.integers(0, len(classes), n))
        prediction = np.full((n, len(classes)), 0.1) + np.eye(len(classes))[predicted]
        prediction /= prediction.sum(1, keepdims=True)
    names = () if task == "regression" else classes
    scores = evaluate.score(
        task,
        target,
        prediction,
        groups,
        class_names=names,
        train_target=target,
        bootstrap=bootstrap,
    )
    folder = storage.make_folder(workspace / "runs" / name)
    audit = {
        split: {"subjects": subjects, "windows": n} for split in ("train", "validation", "test")
    }
    described = {
        "name": data,
        "dataset": "synthetic",
        "view": "",
        "fingerprint": "f" * 64,
        "channels": 1,
        "length": 100,
        "rate": 100.0,
        "split": "subject",
        "audit": audit,
    }
    settings = {
        "model": {"tokenizer": "patch"},
        "objective": {"name": "next"},
        "data": {"fraction": fraction, "limit": None},
        "train": {"batch_size": 8},
    }
    settings["finetune"] = {"readout": "sos", "layers": "last", "freeze": False}
    body = {
        "format_version": 1,
        "run": name,
        "kind": "finetune",
        "model": row,
        "preset": "tiny",
        "source": {"run": "base", "weights": "w"},
        "settings": settings,
    }
    body |= {
        "data": [described],
        "pretraining_data": [described],
        "pretraining_steps": 5,
        "parameters": 1234,
        "paper_parameters": None,
        "leak_free": True,
    }
    body |= {
        "seed": seed,
        "versions": {"bitimely": "0", "python": "3", "torch": "2"},
        "verified": True,
        "notices": [],
        "finished": True,
        "device": "cpu",
    }
    body |= {"final": {"step": 20, "loss": 1.0, "rel": 0.5, "validation": None}}
    stored = {
        "format_version": 1,
        "run": name,
        "data": data,
        "split": "test",
        "leak_free": True,
        "subjects_shared_with_training": 0,
        "notices": [],
    }
    stored["settings"] = {"bootstrap": bootstrap, "by": "subject", "seed": 0}
    evaluate.predictions_frame(index, task, names, target, prediction).write_parquet(
        folder / "predictions.parquet"
    )
    for step in (1, 10, 20):
        storage.append_line(
            folder / "metrics.jsonl",
            {
                "step": step,
                "split": "train",
                "loss": 1 / step,
                "rel": 1 / step,
                "tokens_per_second": 8000.0,
            },
        )
        storage.append_line(
            folder / "metrics.jsonl",
            {"step": step, "split": "validation", "loss": 1 / step, "rel": 1 / step},
        )
    files = {
        "run.json": storage.encode_json(body),
        "scores.json": storage.encode_json({**stored, **scores.model_dump(mode="json")}),
    }
    records.write_results(folder, {**files, "predictions.parquet": None, "metrics.jsonl": None})
    return PlannedCell(row, data, seed, "done", (name,))


def write(tmp_path, cells, paper=None, out=None, **stated):
    """The page of planted runs, which have no windows to fit baselines on."""
    stated = {"title": "A recipe", "description": "all of it", **stated}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_results, "_list_kinds", lambda data, open_windows: [])
        return write_results(
            ResultPlan(name="recipe", cells=cells, paper=paper or {}, **stated),
            workspace=tmp_path,
            out=out or tmp_path / "out",
            open_windows=make_windows_opener(tmp_path),
        )


class Parsed(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data + "\n"


# --- statistics ---------------------------------------------------------------------------------------------------------------------------


def test_holm_by_hand():
    found = evaluate.holm([0.01, 0.04, 0.03, None, 0.005])
    assert [f and round(f[0], 12) for f in found] == [0.03, 0.06, 0.06, None, 0.02]
    # 0.005 <= .05/4, 0.01 <= .05/3, 0.03 > .05/2: there it stops, for 0.04 as well
    assert [f and round(f[1], 12) for f in found] == [
        round(0.05 / 3, 12),
        0.025,
        0.025,
        None,
        0.0125,
    ]
    assert evaluate.holm([]) == []
    assert evaluate.holm([0.9, 0.9])[0][0] == 1.0


def test_a_corrected_interval_excludes_zero_exactly_where_holm_rejects():
    rng = np.random.default_rng(0)
    for _ in range(50):
        differences = []
        for _ in range(6):
            difference, se, df = rng.normal() * 0.1, 0.03 + 0.05 * rng.random(), 9.0
            p = 2 * stats.t.sf(abs(difference) / se, df)
            differences.append(
                MeanDifference(
                    difference=difference, total_se=se, df=df, p=p, effective=10.0, seeds=(3, 3)
                )
            )
        p = np.array([d.p for d in differences])
        order = np.argsort(p)
        adjusted = np.minimum(np.maximum.accumulate(p[order] * np.arange(6, 0, -1)), 1)
        fixed = evaluate.holm_correct(differences)
        assert np.allclose([fixed[k].p_holm for k in order], adjusted)
        for d in fixed:
            assert (evaluate.significance_sign(d) != 0) == (d.p_holm <= 0.05)
            assert evaluate.significance_sign(d) in (0, np.sign(d.difference))


def test_ranks_are_those_of_scipy():
    values = [0.3, None, 0.9, 0.3, 0.1]
    kept = [v for v in values if v is not None]
    assert [r for r in evaluate.rank_values(values) if r is not None] == stats.rankdata(
        [-v for v in kept]
    ).tolist()
    assert evaluate.rank_values(values)[1] is None
    assert evaluate.rank_values([2.0, 1.0, 3.0], lower_is_better=True) == [2.0, 1.0, 3.0]


# Demsar 2006, table 5(a)
@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_difference_is_that_of_the_published_table(k, q):
    n = 8
    table = np.array([np.random.default_rng(i).permutation(k) + 1.0 for i in range(n)])
    found = evaluate.nemenyi(table)
    assert found.critical == pytest.approx(q * np.sqrt(k * (k + 1) / (6 * n)), abs=1e-3)
    assert np.allclose(found.mean_ranks, table.mean(0))
    if k > 2:
        assert found.friedman_p == pytest.approx(stats.friedmanchisquare(*table.T).pvalue)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_one_seed_equals_compare(tmp_path, task):
    for name in "ab":
        planted(tmp_path, name, "d", row=name, task=task, skill=0.4 if name == "a" else 0.7)
    read = {
        name: pl.read_parquet(tmp_path / "runs" / name / "predictions.parquet") for name in "ab"
    }
    classes = evaluate.list_classes(read["a"])
    both = {name: evaluate.parse_predictions(task, frame, classes) for name, frame in read.items()}
    metrics = evaluate.compare(task, both["b"], both["a"], class_names=classes).metrics
    pair = metrics[evaluate.MAIN[task]]
    found = evaluate.paired_difference(
        evaluate.estimate_runs(task, both, class_names=classes), ["b"], ["a"]
    )
    for key in ("difference", "se", "lo", "hi", "p", "df"):
        assert getattr(found, key) == pytest.approx(getattr(pair, key), abs=1e-12), key
    assert found.p == pytest.approx(2 * stats.t.sf(abs(pair.difference) / pair.se, 11))
    assert found.df == pytest.approx(11)


def test_baselines_are_one_family_with_the_seeds_of_a_row_together(tmp_path):
    """Of the stored differences mean and variance between seeds are exact, the standard error over
    subjects is a bound close to the exact one.
    """
    rows = {"good": (0.9, 3), "weak": (0.1, 3), "single": (0.85, 1)}
    for row, (skill, count) in rows.items():
        for seed in range(count):
            planted(tmp_path, f"{row}-{seed}", "one", row=row, seed=seed, skill=skill)
    names = [f"{row}-{seed}" for row, (_, count) in rows.items() for seed in range(count)]
    done = workflows.report(names, workspace=tmp_path)
    found = done["summary"]["baseline_differences"]["one"]
    assert set(found) == {"good", "weak", "single"}
    frames = {
        name: pl.read_parquet(tmp_path / "runs" / name / "predictions.parquet") for name in names
    }
    classes = evaluate.list_classes(frames[names[0]])
    read = {
        name: evaluate.parse_predictions("classification", frame, classes)
        for name, frame in frames.items()
    }
    target = read[names[0]].target
    constant = np.tile(np.eye(len(classes))[np.bincount(target).argmax()], (len(target), 1))
    read["majority"] = read[names[0]]._replace(prediction=constant)
    measured = evaluate.estimate_runs("classification", read, class_names=classes)
    for row, (_, count) in rows.items():
        runs, d = [f"{row}-{seed}" for seed in range(count)], found[row]["majority"]
        exact = evaluate.compare_with_baseline(measured, runs, "majority")
        values = [
            np.mean(read[run].prediction.argmax(1) == target)
            - np.mean(constant.argmax(1) == target)
            for run in runs
        ]
        assert d["difference"] == pytest.approx(exact.difference) == pytest.approx(np.mean(values))
        assert exact.se - 1e-12 <= d["se"] <= 1.5 * exact.se
        assert tuple(d["seeds"]) == ((3, 0) if count == 3 else (0, 0))
        of_seeds = np.var(values, ddof=1) / 3 if count == 3 else 0.0
        assert d["total_se"] == pytest.approx(np.sqrt(d["se"] ** 2 + of_seeds))
    family = [d for of_row in found.values() for d in of_row.values()]
    p = sorted(d["p"] for d in family)
    assert min(d["p_holm"] for d in family) == pytest.approx(len(p) * p[0])
    first = done["verdict"].partition(". ")[0]
    assert (
        f"(Holm-corrected over {len(family)} comparisons with baselines): weak on one (majority)"
        in first
    )
    assert "good" not in first
    assert "single" not in first
    page = Parsed(Path(done["report"]).read_text("utf-8")).text
    assert f"one family of {len(family)} comparisons with baselines" in page


def test_seeds_that_equal_a_baseline_are_no_reason_for_no_verdict():
    """A collapsed seed has a difference of exactly 0 on every subject; three of them have no
    interval.
    """
    one = {
        "difference": 0.2,
        "se": 0.05,
        "df": 9.0,
        "p": 0.003,
        "n_defined": 10,
        "unit": "points",
        "factor": 100.0,
    }
    same = {
        "difference": 0.0,
        "undefined_reason": "no CI: identical on every unit",
        "n_defined": 10,
    }
    mixed = evaluate.average_differences([Difference(**one), Difference(**one), Difference(**same)])
    assert mixed.difference == pytest.approx(0.4 / 3)
    assert mixed.total_se == pytest.approx(
        np.sqrt((0.1 / 3) ** 2 + np.var([0.2, 0.2, 0.0], ddof=1) / 3)
    )
    assert (
        evaluate.average_differences([Difference(**same)] * 3).undefined_reason
        == same["undefined_reason"]
    )
    few = Difference(
        difference=0.1, undefined_reason="no CI: 3 subjects, at least 5 required", n_defined=3
    )
    assert evaluate.average_differences([few] * 3).undefined_reason == few.undefined_reason
    alone = evaluate.average_differences([Difference(**one)])
    assert (alone.p, alone.total_se) == (pytest.approx(2 * stats.t.sf(4.0, 9)), 0.05)
    assert (alone.lo, alone.hi) == pytest.approx(stats.t.interval(0.95, 9, 0.2, 0.05))
    # of these trained models
    assert (mixed.lo, mixed.hi) == pytest.approx(stats.t.interval(0.95, 9, 0.4 / 3, 0.1 / 3))
    subjects, seeds = (0.1 / 3) ** 2, np.var([0.2, 0.2, 0.0], ddof=1) / 3
    df = (subjects + seeds) ** 2 / (subjects**2 / 9 + seeds**2 / 2)  # Welch and Satterthwaite
    assert mixed.p == pytest.approx(2 * stats.t.sf(0.4 / 3 / np.sqrt(subjects + seeds), df))


def test_speed_and_duration_are_those_of_the_log(tmp_path):
    """80 windows a second (8,000 tokens, windows of 100), 20 steps of 8 windows: 2 seconds."""
    planted(tmp_path, "a", "d")
    folder = tmp_path / "runs" / "a"
    assert read_speed(folder, RunRecord.load(folder / "run.json")) == (
        pytest.approx(2.0),
        pytest.approx(80.0),
    )


def test_a_single_label_equals_that_of_the_scores(tmp_path):
    planted(tmp_path, "a", "d", task="multilabel", classes=("CHF", "COPD"))
    scores = json.loads((tmp_path / "runs/a/scores.json").read_bytes())
    frame = pl.read_parquet(tmp_path / "runs/a/predictions.parquet")
    p = evaluate.parse_predictions("multilabel", frame, ["CHF", "COPD"])
    found = evaluate.mean_over_seeds(
        evaluate.estimate_runs("multilabel", {"a": p}, class_names=["CHF", "COPD"], label="COPD"),
        ["a"],
    )
    for key in ("value", "se", "lo", "hi"):
        assert getattr(found, key) == pytest.approx(
            scores["by_class"]["COPD"]["auprc"][key], abs=1e-12
        )


def estimates(values):
    """Subject means of runs, name -> [U], as estimates with subjects of equal size."""
    (subjects,) = {len(v) for v in values.values()}
    weights = weigh_units(np.full(subjects, 1 / subjects), subjects)
    runs = {
        name: Estimate(float(v.mean()), (v - v.mean()) / subjects, weights)
        for name, v in values.items()
    }
    return evaluate.RunEstimates("accuracy", runs, None, None)


def test_variance_between_seeds_is_added_and_each_row_has_its_own():
    person = np.linspace(0.4, 0.6, 10)
    found = estimates(
        {
            "a0": person,
            "a1": person + 0.2,
            "b0": person,
            "b1": person,
            "c0": person,
            "c1": person + 0.01,
        }
    )
    mean = evaluate.paired_difference(found, ["a0", "a1"], ["b0", "b1"])
    assert mean.difference == pytest.approx(0.1)
    assert mean.se is None  # subjects move both alike
    assert mean.total_se == pytest.approx(0.1)  # the standard error of 0 and 0.2
    assert mean.df == pytest.approx(1.0)
    # whatever row a does
    assert evaluate.paired_difference(found, ["c0", "c1"], ["b0", "b1"]).total_se == pytest.approx(
        0.005
    )
    same = evaluate.paired_difference(found, ["b0"], ["b1"])
    assert (same.difference, same.p, same.undefined_reason) == (
        0.0,
        None,
        "no CI: identical on every unit",
    )


@pytest.mark.parametrize(("subjects", "seeds"), [(8, 1), (20, 3)])
def test_a_page_of_equal_rows_keeps_the_family_wise_error(subjects, seeds):
    """300 pages of 9 rows without a true difference: at most 5 % (and three standard errors) name
    one; uncorrected intervals in many more.
    """
    rng, wrong, uncorrected = np.random.default_rng(1), 0, 0
    for _ in range(300):
        noise = 0.02 * (seeds > 1)
        person = rng.normal(size=subjects) * 0.1
        scores = {
            f"{(r, s)}": person + rng.normal(size=subjects) * 0.05 + rng.normal() * noise
            for r in range(9)
            for s in range(seeds)
        }
        found = estimates(scores)
        rows = [[f"{(r, s)}" for s in range(seeds)] for r in range(9)]
        differences = evaluate.holm_correct(
            [evaluate.paired_difference(found, row, rows[0]) for row in rows[1:]]
        )
        wrong += any(d.corrected_lo > 0 or d.corrected_hi < 0 for d in differences)
        uncorrected += any(d.p <= 0.05 for d in differences)
        assert seeds > 1 or not any(map(evaluate.significance_sign, differences))
    assert wrong / 300 < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)
    assert uncorrected / 300 > 0.12


def test_a_diverged_seed_is_named_and_leaves_the_errors_of_other_rows(tmp_path):
    def compare(skill):
        cells = [
            planted(
                tmp_path,
                f"{row}-{seed}",
                "one",
                row=row,
                seed=seed,
                skill=skill if (row, seed) == ("c", 2) else 0.8,
            )
            for row in "abc"
            for seed in (0, 1, 2)
        ]
        runs = assign_rows([tmp_path / "runs" / one.runs[0] for one in cells])
        return compare_column(ScoreColumn("one", "one", "accuracy"), runs, "a")

    good, bad = compare(0.8), compare(0.0)
    assert bad.differences["b"].total_se == pytest.approx(good.differences["b"].total_se, rel=0.1)
    assert bad.differences["c"].total_se > 2 * good.differences["c"].total_se
    (remark,) = bad.remarks
    assert remark.startswith("c, seed 2 on one: this seed diverged (0.3")
    assert not good.remarks


@pytest.mark.parametrize("seeds", [2, 3])
def test_a_diverged_seed_of_a_single_row_is_named(seeds, tmp_path):
    """The spread that it brings itself does not hide it."""
    for seed in range(seeds):
        planted(tmp_path, f"a-{seed}", "one", row="a", seed=seed, skill=0.8 if seed else 0.0)
    runs = assign_rows([tmp_path / "runs" / f"a-{seed}" for seed in range(seeds)])
    (remark,) = compare_column(ScoreColumn("one", "one", "accuracy"), runs, "a").remarks
    assert remark.startswith("a, seed 0 on one: this seed diverged (0.3")


def test_seeds_of_a_row_that_is_hardly_above_a_constant_have_not_diverged(tmp_path):
    for seed in range(6):
        planted(tmp_path, f"a-{seed}", "one", row="a", seed=seed, skill=0.1)
    runs = assign_rows([tmp_path / "runs" / f"a-{seed}" for seed in range(6)])
    constant = max(one.metrics["accuracy"].value for one in runs[0].scores.baselines.values())
    found = compare_column(ScoreColumn("one", "one", "accuracy"), runs, "a")
    values = [one.value for one in found.cells["a"].seeds]
    assert min(values) <= constant < np.median(values) < constant + found.cells["a"].se
    assert not found.remarks


@pytest.mark.parametrize("seeds", [1, 2, 4])
def test_the_standard_deviation_over_seeds_needs_two(seeds, tmp_path):
    cells = [
        planted(tmp_path, f"a-{seed}", "one", row="a", seed=seed, skill=0.5 + 0.1 * seed)
        for seed in range(seeds)
    ]
    cell = compare_column(
        ScoreColumn("one", "one", "accuracy"),
        assign_rows([tmp_path / "runs" / e.runs[0] for e in cells]),
        "a",
    ).cells["a"]
    values = [
        json.loads((tmp_path / f"runs/a-{s}/scores.json").read_bytes())["metrics"]["accuracy"][
            "value"
        ]
        for s in range(seeds)
    ]
    if seeds == 1:
        assert (cell.seed_sd, cell.seed_se) == (None, None)
    else:
        mean = sum(values) / seeds
        variance = sum((value - mean) ** 2 for value in values) / (seeds - 1)
        assert (cell.seed_sd, cell.seed_se) == pytest.approx(
            (variance**0.5, (variance / seeds) ** 0.5)
        )


# --- the page -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cells_are_means_over_seeds_with_differences_to_the_reference(tmp_path):
    cells = [
        planted(tmp_path, f"{row}-{view}-{seed}", view, row=row, seed=seed, skill=skill)
        for row, skill in (("ours", 0.9), ("weak", 0.2), ("twin", 0.88))
        for view in ("one", "two")
        for seed in (0, 1, 2)
    ]
    paper = {
        "ours": {"one": [90.4, 2.5], "two": 93.0},
        "names": {"ours": "Ours"},
        "source": "Table 2",
    }
    done = write(tmp_path, cells, paper)
    values = [
        json.loads((tmp_path / f"runs/ours-one-{s}/scores.json").read_bytes())["metrics"][
            "accuracy"
        ]["value"]
        for s in (0, 1, 2)
    ]
    cell = done["cells"]["ours"]["one"]
    assert cell["value"] == pytest.approx(np.mean(values))
    assert cell["seed_se"] == pytest.approx(np.std(values, ddof=1) / np.sqrt(3))
    assert cell["lo"] < cell["value"] < cell["hi"]
    assert set(done["differences"]) == {"weak", "twin"}
    assert (
        evaluate.significance_sign(CorrectedDifference(**done["differences"]["weak"]["one"])) == -1
    )
    assert "Ours is better than weak on one" in done["verdict"]
    # the weak runs are no better than a constant
    first = "A baseline does not significantly differ from "
    assert done["verdict"].startswith(first)
    assert "weak on one (majority)" in done["verdict"].partition(". ")[0]
    assert "18 of 18 cells were run." in done["verdict"]
    assert ("twin" in done["verdict"]) == any(
        evaluate.significance_sign(CorrectedDifference(**d))
        for d in done["differences"]["twin"].values()
    )
    shown = Parsed((tmp_path / "out/report.html").read_text("utf-8")).text
    for words in (
        "90.4 (2.5)",
        "Variation between seeds",
        "Mean ranks and their critical difference",
        "Nemenyi",
        "Cost",
        "Holm correction",
        "leak-free",
    ):
        assert words in shown, words
    ranks = pl.read_parquet(tmp_path / "out/ranks.parquet")
    means = {
        row: [done["cells"][row][c]["value"] for c in ("one", "two")]
        for row in ("ours", "weak", "twin")
    }
    expected = np.mean([stats.rankdata([-means[r][k] for r in means]) for k in (0, 1)], axis=0)
    assert dict(ranks.select("row", "mean rank").iter_rows()) == dict(
        zip(["Ours", "weak", "twin"], expected.tolist(), strict=True)
    )


def test_a_second_call_computes_nothing_and_writes_the_same(tmp_path, monkeypatch):
    cells = [planted(tmp_path, row, "one", row=row) for row in "ab"]
    write(tmp_path, cells)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()}
    monkeypatch.setattr(evaluate, "estimate_runs", lambda *a, **k: pytest.fail("computed again"))
    write(tmp_path, cells)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()} == before
    monkeypatch.undo()
    planted(tmp_path, "b", "one", row="b", skill=0.99)  # trained again
    assert write(tmp_path, cells)["cells"]["b"]["one"]["value"] > 0.9


def test_missing_cells_leave_a_readable_table(tmp_path):
    cells = [
        planted(tmp_path, "a-one", "one", row="a"),
        planted(tmp_path, "b-two", "two", row="b", task="regression"),
    ]
    cells += [PlannedCell("c", "one", 0, "left out", detail="needs 8 GB | a lot")]
    cells += [PlannedCell("a", "two", 0, "done", ("gone",))]
    done = write(tmp_path, cells, {"a": {"one": [90.4, 2.5], "three": 1.25}, "d": {"two": 26.1}})
    assert [m["row"] for m in done["missing"]] == ["c", "a"]
    assert "gone" in done["missing"][1]["detail"]
    assert done["verdict"] == "2 of 3 cells were run. No two rows could be compared."
    lines = (tmp_path / "out/results.md").read_text("utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == "| row | one | two | three |"
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table[:7]} == {5}
    assert "needs 8 GB \\| a lot" in "\n".join(lines)
    rows = list(csv.DictReader((tmp_path / "out/results.csv").read_text("utf-8").splitlines()))
    assert [(r["row"], r["column"], r["state"]) for r in rows] == [
        ("a", "one", "done"),
        ("b", "two", "done"),
        ("c", "one", "left out"),
        ("a", "two", "failed"),
    ]
    body = (tmp_path / "out/results.tex").read_text("utf-8")
    assert all(line.count("&") == 3 for line in body.splitlines() if line.endswith("\\\\"))
    assert "-- / 26.1" in body
    alone = write(
        tmp_path, [PlannedCell("ours", "one", 0, "left out", detail="later"), *cells[:2]]
    )["verdict"]
    assert alone.endswith("No two rows could be compared: ours, the reference, has no scores.")


def test_a_second_run_in_a_cell_is_reported(tmp_path):
    cells = [planted(tmp_path, "a", "one", row="m"), planted(tmp_path, "b", "one", row="m")]
    done = write(tmp_path, cells)
    assert done["missing"] == [
        {
            "row": "m",
            "column": "one",
            "seed": 0,
            "state": "not run",
            "detail": "another run is in this cell, not b",
        }
    ]
    assert done["verdict"].startswith("1 of 2 cells")


def test_a_page_without_any_run(tmp_path):
    cells = [PlannedCell("a", "one", 0, "failed", detail="no source")]
    done = write(tmp_path, cells)
    assert done["verdict"].startswith("0 of 1 cells were run.")
    assert "no source" in Parsed((tmp_path / "out/report.html").read_text("utf-8")).text


def test_too_few_subjects_give_no_interval_and_no_test(tmp_path):
    cells = [planted(tmp_path, row, "one", row=row, subjects=3, per=30) for row in "ab"]
    done = write(tmp_path, cells)
    assert "(n < 5)" in (tmp_path / "out/results.md").read_text("utf-8")
    assert "; 3 subjects: no interval (at least 5)." in done["verdict"]
    assert done["differences"]["b"]["one"]["corrected_lo"] is None
    assert "3 test subjects" in Parsed((tmp_path / "out/report.html").read_text("utf-8")).text


def test_labels_get_columns(tmp_path):
    cells = [
        planted(
            tmp_path, row, "pophr", row=row, task="multilabel", classes=("CHF", "COPD"), skill=0.3
        )
        for row in "ab"
    ]
    done = write(tmp_path, cells, {"a": {"pophr:CHF": [65.2, 2.2], "pophr:auroc": 80.0}})
    assert set(done["cells"]["a"]) == {"pophr:CHF", "pophr:auroc"}
    scores = json.loads((tmp_path / "runs/a/scores.json").read_bytes())
    assert done["cells"]["a"]["pophr:CHF"]["value"] == pytest.approx(
        scores["by_class"]["CHF"]["auprc"]["value"]
    )
    assert done["cells"]["a"]["pophr:auroc"]["value"] == pytest.approx(
        scores["metrics"]["auroc"]["value"]
    )
    assert set(write(tmp_path, cells)["cells"]["a"]) == {"pophr:CHF", "pophr:COPD"}
    assert "prevalence" in Parsed((tmp_path / "out/report.html").read_text("utf-8")).text


def test_lower_errors_are_better(tmp_path):
    cells = [
        planted(tmp_path, f"{row}-{seed}", "hr", row=row, seed=seed, task="regression", skill=skill)
        for row, skill in (("ours", 0.1), ("poor", 2.0))
        for seed in (0, 1, 2)
    ]
    assert "these trained models differ by" in write(tmp_path, [cells[0], cells[3]])["verdict"]
    done = write(tmp_path, cells)
    assert "poor is worse than ours on hr" in done["verdict"]
    ranks = pl.read_parquet(tmp_path / "out/ranks.parquet")
    assert dict(ranks.select("row", "mean rank").iter_rows()) == {"ours": 1.0, "poor": 2.0}


def test_runs_on_other_windows_are_not_compared(tmp_path):
    cells = [planted(tmp_path, "a", "one", row="a"), planted(tmp_path, "b", "one", row="b", per=9)]
    done = write(tmp_path, cells)
    assert done["differences"] == {}
    assert (
        "evaluated on different windows"
        in Parsed((tmp_path / "out/report.html").read_text("utf-8")).text
    )


def test_foreign_text_stays_text(tmp_path):
    cells = [planted(tmp_path, "a", "one", row=HOSTILE), planted(tmp_path, "b", "one", row="b")]
    cells += [PlannedCell(HOSTILE, HOSTILE, 0, "failed", detail=HOSTILE)]
    write(
        tmp_path,
        cells,
        {"names": {"b": HOSTILE}, "notes": [HOSTILE], "source": HOSTILE},
        title=HOSTILE,
        description=HOSTILE,
    )
    parsed = Parsed((tmp_path / "out/report.html").read_text("utf-8"))
    assert parsed.tags.count("script") == 1
    assert "b" not in [t for t in parsed.tags if t == "b"][3:] or parsed.text.count("<b>") > 5
    body = (tmp_path / "out/results.tex").read_text("utf-8")
    assert "\\input" not in body
    assert "\\textbackslash{}input\\{/etc/passwd\\}" in body
    mark = (tmp_path / "out/results.md").read_text("utf-8")
    assert "<b>" not in mark.replace("\\<b\\>", "")
    rows = list(csv.DictReader((tmp_path / "out/results.csv").read_text("utf-8").splitlines()))
    assert rows[0]["row"] == HOSTILE
    with pytest.raises(UserError, match="standard error"):
        write(tmp_path, cells, {"a": {"one": "90.4 (2.5)"}})


@pytest.mark.slow
def test_a_table_of_the_papers_size_is_drawn_in_time(tmp_path):
    cells = [
        planted(
            tmp_path,
            f"{row}-{view}",
            view,
            row=row,
            skill=0.3 + 0.03 * k,
            bootstrap=100,
            subjects=6,
            per=5,
        )
        for k, row in enumerate([f"model {k}" for k in range(18)])
        for view in [f"view {v}" for v in range(8)]
    ]
    write(tmp_path, cells)
    began = time.process_time()
    write(tmp_path, cells)
    assert time.process_time() - began < 10  # 5 s on an idle machine
    assert (tmp_path / "out/report.html").stat().st_size < 1_000_000


# --- baselines ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_baselines_on_tokens_never_read_test_labels_and_are_stored(tmp_path, monkeypatch):
    """On the synthetic cohort: better than the majority, the same with test labels shuffled, not
    computed twice.
    """
    from bitimely_core.config import DataConfig
    from bitimely_core.run import describe_data
    from bitimely_core.workflows.prepare import Execution, prepare_windows

    windows = prepare_windows("synthetic/staging", Execution(tmp_path), DataConfig(rate=20))
    planted(tmp_path, "a", windows.name)
    record = RunRecord.load(tmp_path / "runs/a/run.json").model_copy(
        update={"data": (describe_data(windows),)}
    )
    scores = Scores.load(tmp_path / "runs/a/scores.json")
    kinds = [kind for kind in baselines.DESCRIPTIONS if kind in baselines.list_baselines(windows)]
    assert kinds == ["features", "kernels"], "those of counts are of histories"
    for kind in kinds:
        found = baselines.fit_baseline(
            kind, record, scores, keep=tmp_path / "kept", open_windows=make_windows_opener(tmp_path)
        )
        assert not isinstance(found, str)
        fitted, frame = found
        assert fitted.metrics["accuracy"].value > 0.6
        assert evaluate.list_classes(frame) == list(windows.class_names)

        def shuffled(name):
            opened = make_windows_opener(tmp_path)(name)
            test = (opened.whole_index["split"] == "test").to_numpy()
            return dataclasses.replace(opened, target=np.where(test, 0, opened.target))

        again = baselines.fit_baseline(
            kind, record, scores, keep=tmp_path / "other", open_windows=shuffled
        )[1]
        assert np.allclose(
            again.select(pl.col("^p_.*$")).to_numpy(), frame.select(pl.col("^p_.*$")).to_numpy()
        )
        monkeypatch.setattr(baselines, "fit_and_predict", lambda *a: pytest.fail("computed again"))
        assert (
            baselines.fit_baseline(
                kind,
                record,
                scores,
                keep=tmp_path / "kept",
                open_windows=make_windows_opener(tmp_path),
            )[0]
            == fitted
        )
        monkeypatch.undo()


# --- several runs, and the card -----------------------------------------------------------------------------------------------------------


def test_comparison_of_runs_counts_wins_and_ranks(tmp_path):
    names = []
    for row, skill in (("good", 0.9), ("fair", 0.6), ("poor", 0.2)):
        for view in ("one", "two"):
            planted(tmp_path, f"{row}-{view}", view, row=row, skill=skill)
            names.append(f"{row}-{view}")
    done = workflows.report(names, workspace=tmp_path)
    folder = tmp_path / "reports" / ("compare-" + "-".join(names))
    wins = pl.read_parquet(folder / "wins.parquet")
    assert wins.filter(pl.col("row") == "good")["poor"].to_list() == ["2/2"]
    assert wins.filter(pl.col("row") == "poor")["good"].to_list() == ["0/2"]
    assert (folder / "critical-difference.svg").is_file()
    assert "No verdict in 4 of 4 comparisons: fewer than 3 seeds." in done["verdict"]
    classes = ["W", "N1", "N2"]
    paths = (tmp_path / f"runs/{r}-one/predictions.parquet" for r in ("fair", "good"))
    both = (
        evaluate.parse_predictions("classification", pl.read_parquet(path), classes)
        for path in paths
    )
    one = evaluate.compare("classification", *both, class_names=classes).metrics["accuracy"]
    shown = done["summary"]["differences"]["one"]["fair"]
    assert (shown["difference"], shown["lo"], shown["hi"]) == pytest.approx(
        (one.difference, one.lo, one.hi)
    )


def test_many_runs_have_a_page_with_a_short_name(tmp_path):
    names = [f"a-run-with-a-rather-long-name-{k}" for k in range(12)]
    for k, name in enumerate(names):
        planted(
            tmp_path,
            name,
            "d",
            row=f"m{k}",
            bootstrap=20,
            subjects=6,
            per=4,
            task="regression" if k % 2 else "classification",
        )
    done = workflows.report(names, workspace=tmp_path)
    folder = next((tmp_path / "reports").iterdir())
    assert len(folder.name) < 200
    assert "Comparison of 12 runs" in Parsed((folder / "report.html").read_text("utf-8")).text
    assert workflows.report(names[::-1], workspace=tmp_path)["report"] != done["report"]


def test_rows_are_models_where_they_differ_else_runs(tmp_path):
    for name, row, seed in (("a", "gpt", 0), ("b", "gpt", 1), ("c", "lstm", 0)):
        planted(tmp_path, name, "d", row=row, seed=seed)
    folders = [tmp_path / "runs" / name for name in "abc"]
    assert [one.row for one in assign_rows(folders)] == ["gpt", "gpt", "lstm"]
    planted(tmp_path, "b", "d", row="gpt", seed=0)  # the same model, data and seed: by name
    assert [one.row for one in assign_rows(folders)] == ["a", "b", "c"]


def test_a_card_has_scores_leakage_and_licence_but_no_subject(tmp_path):
    planted(tmp_path, "a", "one", row="gpt")
    folder = tmp_path / "runs" / "a"
    record, subjects = RunRecord.load(folder / "run.json"), TrainSubjects(marks=("aa", "bb"))
    card = render_card(folder, record, Scores.load_shared(folder), subjects).decode()
    scores = json.loads((folder / "scores.json").read_bytes())["metrics"]["accuracy"]
    assert (
        f"| accuracy | {scores['value']:.3f} | {scores['se']:.3f} | {scores['lo']:.3f} to {scores['hi']:.3f} |"
        in card
    )
    for words in (
        "## Leakage",
        "leak-free",
        "## Intended use",
        "## Limits",
        "Not a medical device",
        "CC0 1.0",
        "1,234",
        "Versions",
        "120 windows of 12 subjects",
        "of 2.",
    ):
        assert words in card, words
    assert "s001" not in card
    assert b"Not evaluated" in render_card(folder, record, None, subjects)


def test_cells_have_the_digits_of_the_paper():
    percent, error = ScoreColumn("a", "a", "accuracy"), ScoreColumn("b", "b", "mae")
    assert format_cell(MetricValue(value=0.9041, se=0.0251), percent) == "90.4 (2.5)"
    assert format_cell(MetricValue(value=2.8149, se=0.119), error) == "2.81 (0.12)"
    assert format_cell(MetricValue(value=0.5), percent) == "50.0 (no s.e.)"
    assert format_cell(None, percent) == "–"
    assert [format_paper(p) for p in ((26.1, 2.5), (2.8, 0.12), (93.0, None), None)] == [
        "26.1 (2.5)",
        "2.80 (0.12)",
        "93.0",
        "–",
    ]


@pytest.mark.parametrize("name", ["predictions.parquet", "summary.json", "model/config.json"])
@pytest.mark.parametrize("change", ["altered", "missing"])
def test_a_comparison_names_the_files_of_a_run_that_are_not_as_they_were_written(
    tmp_path, name, change
):
    planted(tmp_path, "a", "D")
    folder = tmp_path / "runs" / "a"
    records.write_results(storage.make_folder(folder / "model"), {"config.json": b"{}"})
    records.write_results(folder, {"summary.json": b"{}"})
    assert not any(
        "not as they were" in line
        for line in workflows.report(["a"], workspace=tmp_path)["notices"]
    )
    path = folder / name
    path.write_bytes(path.read_bytes() + b" ") if change == "altered" else path.unlink()
    if (name, change) == ("predictions.parquet", "altered"):  # the page needs it
        with pytest.raises(UserError, match=r"predictions\.parquet"):
            workflows.report(["a"], workspace=tmp_path)
        return
    found = workflows.report(["a"], workspace=tmp_path)
    (line,) = [line for line in found["notices"] if "not as they were written" in line]
    assert name in line
    assert name in Path(found["report"]).read_text()
