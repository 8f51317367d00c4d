"""Runs on claims that are applied to other people: `predict`, `tokenize --vocabulary`, `evaluate`
on their data, `finetune` and `export`.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import shutil
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
import scipy.optimize
import scipy.special
import sklearn.linear_model
import sklearn.metrics
from claims_folders import needs
from samples import SAMPLES

import bitimely
from bitimely_cli.main import main
from bitimely_core import tokens
from bitimely_core.claims import codes
from bitimely_core.claims.synthetic_claims import write_cohort
from bitimely_core.errors import Exit, UserError
from bitimely_core.evaluate import risk_calibration
from bitimely_core.evaluate.prediction import Computation
from bitimely_core.evaluate.scoring import length_baseline
from bitimely_core.workflows import calibrate

MAP = SAMPLES / "phecode" / "phecode_map_v1_2_icd9cm.csv"
CUT = "2009-06-30"
LABELS = ("chf", "copd", "diabetes")
RUN = ["--steps", "3", "--set", "train.device=cpu", "--set", "model.dim=8"]
RUN += ["--set", "model.layers=1", "--set", "model.heads=1", "--set", "model.ffn_dim=8"]

pytestmark = [needs("de-synpuf"), needs("phecode")]
slow = pytest.mark.slow  # whatever reads the two halves


def run(*words: object, code: int = Exit.OK) -> None:
    assert main(list(map(str, words))) == code


def write_half(half: int, out: Path) -> Path:
    """The beneficiaries of DE-SynPUF whose ids have one of two hashes, in its layout."""
    out.mkdir(parents=True)
    for path in (SAMPLES / "de-synpuf").glob("*.csv"):
        if "Prescription" in path.name:
            continue
        head, *lines = path.read_text().splitlines(keepends=True)
        kept = [
            line
            for line in lines
            if hashlib.sha256(line.split(",")[0].encode()).digest()[0] % 2 == half
        ]
        (out / path.name).write_text(head + "".join(kept))
    return out


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two halves of DE-SynPUF in workspaces `a` and `b`, and a run that is trained on the first."""
    home = tmp_path_factory.mktemp("halves")
    for half, name in enumerate("ab"):
        folder = write_half(half, home / f"raw-{name}")
        options = ["--phecode-map", MAP, "--keep-dates", "--max-bad", "0.9", "--no-select"]
        options += ["--landmark-date", CUT, "--landmark", "0,400", "--min-codes", "3"]
        run("ingest", "pophr", folder, "-w", home / name, *options, code=Exit.PARTIAL)
    run("train", "timelygpt", "--data", "pophr", "-w", home / "a", "--run", "risk", *RUN)
    run("evaluate", home / "a/runs/risk", "--data", "pophr", "-w", home / "b", "--bootstrap", "0")
    return home


@pytest.fixture(scope="module")
def risks(site: Path) -> pl.DataFrame:
    """The prediction of the second half as of the day at which it was scored."""
    ids = site / "ids.csv"
    words = ["--as-of", CUT, "--keep-ids", ids]
    source = site / "raw-b"
    run("predict", site / "a/runs/risk", source, "-w", site / "b", *words, code=Exit.PARTIAL)
    return pl.read_parquet(site / "b/reports/predict-risk/predictions.parquet")


@slow
def test_risks_are_the_predictions_of_evaluate(site: Path, risks: pl.DataFrame) -> None:
    scored = pl.read_parquet(site / "a/runs/risk/predictions.parquet")
    scored = scored.with_columns(pl.col("subject_id").cast(pl.Int64))
    both = scored.join(risks, on="subject_id", suffix="_new")
    assert both.height == scored.height > 80
    for label in LABELS:
        np.testing.assert_allclose(both[f"p_{label}_new"], both[f"p_{label}"], atol=1e-6)
    assert risks["subject_id"].is_unique().all()
    assert set(risks["index_date"].cast(pl.String)) == {CUT}


@slow
def test_people_of_the_training_are_named(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other half, whose pseudonyms are the same numbers, is not."""
    for name, expected in (("a", True), ("b", False)):
        cache, out = site / name / "cache" / "pophr", tmp_path / name
        run("predict", "risk", cache, "--as-of", CUT, "-w", site / "a", "--out", out, "--json")
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert ("subject_leakage" in [finding["code"] for finding in findings]) is expected
        assert ("trained on some" in (out / "report.html").read_text()) is expected


@slow
def test_external_people_of_the_training_are_named(site: Path, tmp_path: Path) -> None:
    """The people of the training from another cache, whose pseudonyms are others, and new ones."""
    shutil.copytree(site / "a", tmp_path / "a")
    options = ["--phecode-map", MAP, "--keep-dates", "--max-bad", "0.9", "--no-select"]
    options += ["--landmark-date", CUT, "--landmark", "0,400", "--min-codes", "3"]
    (tmp_path / "key").write_bytes(bytes(range(32)))
    options += ["--id-key", str(tmp_path / "key")]
    run("ingest", "pophr", site / "raw-a", "-w", tmp_path / "c", *options, code=Exit.PARTIAL)
    for workspace, expected in ((tmp_path / "c", True), (site / "b", False)):
        words = ["--data", "pophr", "-w", workspace, "--bootstrap", "0"]
        run("evaluate", tmp_path / "a/runs/risk", *words)
        notices = json.loads((tmp_path / "a/runs/risk/scores.json").read_text())["notices"]
        lines = [line for line in notices if line.startswith("External validation")]
        assert len(lines) == 1
        assert ("was trained on some of them" in lines[0]) is expected


@pytest.mark.slow
def test_everybody_of_the_source_has_a_row(site: Path, risks: pl.DataFrame) -> None:
    names = {
        line.split(",")[0]
        for path in (site / "raw-b").glob("*.csv")
        for line in path.read_text().splitlines()[1:]
    }
    table = pl.read_csv(site / "ids.csv", infer_schema=False)
    assert set(table["subject_id"]) == names
    assert risks.height == len(names)
    deaths: dict[str, str] = {}
    for path in (site / "raw-b").glob("*Beneficiary*.csv"):
        with path.open(newline="") as file:
            deaths |= {
                row["DESYNPUF_ID"]: row["BENE_DEATH_DT"]
                for row in csv.DictReader(file)
                if row["BENE_DEATH_DT"]
            }
    died = {name for name, day in deaths.items() if day < CUT.replace("-", "")}
    is_dead = pl.col("status") == "died before the index day"
    assert set(table.filter(is_dead)["subject_id"]) == died
    risks_of_dead = table.filter(is_dead).select(pl.selectors.starts_with("risk_"))
    assert risks_of_dead.unique().rows() in ([(None,) * 3], [("",) * 3])


@slow
def test_a_run_without_an_index_day_predicts_everybody(tmp_path: Path) -> None:
    made, place = tmp_path / "made", ["-w", tmp_path / "w"]
    write_cohort(made, subjects=200, seed=0)
    (made / "labels.csv").unlink()  # which has index dates
    read = ["--phecode-map", made / "icd_phecode_demo.csv", "--no-select"]
    run("ingest", "pophr", made, *place, *read, code=Exit.PARTIAL)
    run("train", "counts", "--data", "pophr", *place)
    ids = tmp_path / "ids.csv"
    run("predict", "counts-pophr", made, *place, "--keep-ids", ids, code=Exit.PARTIAL)
    risks = pl.read_parquet(tmp_path / "w/reports/predict-counts-pophr/predictions.parquet")
    people = set(pl.read_csv(made / "patients.csv")["patient_id"])
    assert set(pl.read_csv(ids)["subject_id"]) == people
    assert len(risks) == len(people)
    assert "index_day" not in risks.columns
    assert not risks["status"].str.contains("died").any()


def write_diabetes(raw: Path) -> list[tuple[str, date, str]]:
    """Claims of 200 people with and without diabetes, and their births."""
    draw = np.random.default_rng(3)
    first, codes = date(2012, 1, 1), ["401.9", "496", "530.81", "272.4", "250.00"]
    rows = [
        (f"p{i}", first + timedelta(int(day)), str(draw.choice(codes, p=[0.3, 0.2, 0.2, 0.2, 0.1])))
        for i in range(200)
        for day in draw.integers(0, 1400, 14)
    ]
    raw.mkdir()
    claims = pl.DataFrame(rows, schema=["patient_id", "date", "icd9"], orient="row")
    claims.write_csv(raw / "claims.csv")
    births = claims.select("patient_id").unique().with_columns(birth_date=pl.lit("1950-01-01"))
    births.write_csv(raw / "patients.csv")
    return rows


def write_as_meds(raw: Path, out: Path) -> None:
    """The claims and births of `raw` in the layout of MEDS, without kinds of claims."""
    who = pl.col("patient_id").str.strip_prefix("p").cast(pl.Int64).alias("subject_id")
    time = pl.col("date").cast(pl.Datetime("us"))
    claims = pl.read_csv(raw / "claims.csv", schema_overrides={"icd9": pl.String, "date": pl.Date})
    births = pl.read_csv(raw / "patients.csv", schema_overrides={"birth_date": pl.Date})
    parts = (
        births.rename({"birth_date": "date"}).select(who, time=time, code=pl.lit("MEDS_BIRTH")),
        claims.select(who, time=time, code=pl.format("ICD9CM//{}", "icd9")),
    )
    (out / "data").mkdir(parents=True)
    data = pl.concat(parts).with_columns(numeric_value=pl.lit(None, pl.Float32))
    data.sort("subject_id", "time").write_parquet(out / "data" / "0.parquet")


@slow
@pytest.mark.parametrize("design", ["landmark", "cohort"])
def test_who_had_the_outcome_by_the_index_day_has_no_risk(tmp_path: Path, design: str) -> None:
    """Two claims of physicians within two years are diabetes, one alone is not."""
    raw, place = tmp_path / "raw", ["-w", tmp_path / "w"]
    rows = write_diabetes(raw)
    choices = ["--min-codes", "2", "--no-select", "--leakage", "drop-phecode"]
    choices += ["--landmark", "400,0,500"] if design == "landmark" else []
    choices += ["--cohort", "diabetes-incident"] if design == "cohort" else []
    read = ["--phecode-map", MAP, "--default-source", "physician"]
    run("ingest", "pophr", raw, *place, *read, *choices)
    run("train", "counts", "--data", "pophr", *place)
    ids = tmp_path / "ids.csv"
    run("predict", "counts-pophr", raw, *place, "--as-of", "2014-06-30", "--keep-ids", ids)
    table = pl.read_csv(ids)
    has_risk = dict(table.select("subject_id", pl.col("risk_diabetes").is_not_null()).iter_rows())
    days: dict[str, list[date]] = {who: [] for who in has_risk}
    for who, day, code in rows:
        if code == "250.00" and day <= date(2014, 6, 30):
            days[who].append(day)
    pairs = {who: zip(sorted(set(n)), sorted(set(n))[1:], strict=False) for who, n in days.items()}
    had = {who: any(b - a <= timedelta(730) for a, b in n) for who, n in pairs.items()}
    assert has_risk == {who: not value for who, value in had.items()}
    assert 10 < sum(had.values()) < 190
    status = table.filter(pl.col("status") == "had the outcome by the index day")
    if design == "cohort":  # the landmark has other labels, too
        assert set(status["subject_id"]) == {who for who, value in had.items() if value}
        return
    first: dict[str, date] = {}  # of the codes that are left in the input
    for who, day, code in rows:
        if code not in ("250.00", "496"):  # of the rules of diabetes and COPD
            first[who] = min(day, first.get(who, day))
    long = table.filter(pl.col("status") == "a longer history than in the training")
    like = table.filter(pl.col("status") == "as in the training")
    limit = date(2014, 6, 30) - timedelta(400)
    assert long.height > 10
    assert all(first[who] < limit for who in long["subject_id"])
    assert all(first[who] >= limit for who in like["subject_id"])


@slow
@pytest.mark.parametrize("options", [["--as-of", "2014-06-30"], []])
def test_who_left_before_the_index_day_is_named(tmp_path: Path, options: list[str]) -> None:
    """A tenth left the day before, a tenth leaves on the day; of the others no end is known."""
    raw, place, ids = tmp_path / "raw", ["-w", tmp_path / "w"], tmp_path / "ids.csv"
    rows = write_diabetes(raw)
    read = ["--phecode-map", MAP, "--default-source", "physician"]
    choices = ["--min-codes", "2", "--no-select", "--cohort", "diabetes-incident"]
    run("ingest", "pophr", raw, *place, *read, *choices)
    run("train", "counts", "--data", "pophr", *place)
    index = date(2014, 6, 30) if options else max(day for _, day, _ in rows)
    ends = {f"p{i}": index - timedelta(int(i < 20)) for i in range(40)}
    people = pl.read_csv(raw / "patients.csv")
    end = pl.col("patient_id").replace_strict(ends, default=None).alias("obs_end")
    people.with_columns(end).write_csv(raw / "patients.csv")
    run("predict", "counts-pophr", raw, *place, *options, "--keep-ids", ids)
    table = pl.read_csv(ids)
    left = table.filter(pl.col("status") == "left the observation before the index day")
    had = table.filter(pl.col("status") == "had the outcome by the index day")["subject_id"]
    assert set(left["subject_id"]) == {f"p{i}" for i in range(20)} - set(had)
    assert left["risk_diabetes"].null_count() == 0


@slow
def test_risks_are_not_calibrated_on_people_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, place = tmp_path / "raw", ["-w", tmp_path / "w"]
    write_diabetes(raw)
    read = ["--phecode-map", MAP, "--default-source", "physician"]
    choices = ["--min-codes", "2", "--no-select", "--cohort", "diabetes-incident"]
    run("ingest", "pophr", raw, *place, *read, *choices)
    run("train", "counts", "--data", "pophr", *place)
    labelled: list[int] = []

    def note(head: object, rows: Any, *_: object) -> list[None]:
        labelled.extend(map(int, rows.subjects()))
        return [None]

    workflow = importlib.import_module("bitimely_core.workflows.predict")
    monkeypatch.setattr(workflow, "fit_recalibrations", note)
    run("predict", "counts-pophr", raw, *place, "--calibrate-on", "pophr")
    shards = (tmp_path / "w/tokens/pophr").glob("sequences-*.parquet")
    people = pl.concat([pl.read_parquet(path) for path in shards])
    validation = people.filter(pl.col("split").cast(pl.String) == "validation")["subject_id"]
    assert len(labelled) > 5
    assert set(labelled) == set(validation)


@slow
def test_who_may_have_had_the_outcome_has_no_risk(tmp_path: Path) -> None:
    """MEDS has no kinds of claims: that of the training holds. Where the physicians of the training
    are absent, claims of another kind may be theirs; without births any age may be.
    """
    raw, place = tmp_path / "raw", ["-w", tmp_path / "w"]
    rows = write_diabetes(raw)
    read = ["--phecode-map", MAP, "--default-source", "physician"]
    choices = ["--min-codes", "2", "--no-select", "--cohort", "diabetes-incident"]
    run("ingest", "pophr", raw, *place, *read, *choices)
    run("train", "counts", "--data", "pophr", *place)
    days = pl.DataFrame(rows, schema=["id", "day", "code"], orient="row")
    days = days.filter(pl.col("code") == "250.00", pl.col("day") <= date(2014, 6, 30)).unique()
    near = pl.col("day").diff().over("id", order_by="day") <= timedelta(730)
    had = set(days.filter(near)["id"])
    assert 10 < len(had) < 190
    meds = tmp_path / "meds"
    write_as_meds(raw, meds)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(raw / "claims.csv", alone)
    doubt = "may have had the outcome by the index day (age or kind of claims unknown)"
    for number, (source, more, status, people) in enumerate(
        (
            (meds, [], "had the outcome by the index day", had),
            (raw, ["--default-source", "other"], doubt, had),
            (alone, [], doubt, had),
        )
    ):
        ids = tmp_path / f"ids{number}.csv"
        out = ["--out", tmp_path / f"out{number}", "--as-of", "2014-06-30", "--keep-ids", ids]
        run("predict", "counts-pophr", source, *place, *more, *out)
        table = pl.read_csv(ids).with_columns(pl.col("subject_id").cast(pl.String))
        names = pl.format("p{}", pl.col("subject_id").str.strip_prefix("p"))
        table = table.with_columns(subject_id=names)
        assert set(table.filter(pl.col("risk_diabetes").is_null())["subject_id"]) == people
        assert set(table.filter(pl.col("status") == status)["subject_id"]) == people


@slow
def test_a_label_that_nobody_of_the_training_has_has_no_risk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, place = tmp_path / "made", ["-w", tmp_path / "w"]
    write_cohort(made, subjects=200, seed=0)
    (made / "labels.csv").unlink()
    claims = pl.read_csv(made / "claims.csv", infer_schema=False)
    is_copd = pl.col("icd").str.contains("^(49[126]|J4[1-4])")
    claims.filter(~is_copd).write_csv(made / "claims.csv")
    read = ["--phecode-map", made / "icd_phecode_demo.csv", "--no-select"]
    run("ingest", "pophr", made, *place, *read, code=Exit.PARTIAL)
    run("train", "trees", "--data", "pophr", *place)
    run("export", "trees-pophr", *place, "--out", tmp_path / "out")
    capsys.readouterr()
    run("predict", tmp_path / "out", made, *place, "--json", code=Exit.PARTIAL)
    notices = json.loads(capsys.readouterr().out)["notices"]
    assert notices == ["Nobody of the training has copd: no risk of it is given."]
    risks = bitimely.from_pretrained(tmp_path / "out", workspace=tmp_path).predict(made)
    assert risks["risk_copd"].is_null().all()
    assert risks["risk_diabetes"].is_between(0, 1).all()


@slow
def test_tokens_of_others_have_the_ids_of_the_run(site: Path) -> None:
    mine = pl.read_parquet(site / "a/tokens/pophr/vocab.parquet")
    theirs = pl.read_parquet(site / "b/tokens/pophr-risk/vocab.parquet")
    assert theirs.select("id", "code").equals(mine.select("id", "code"))
    assert not pl.read_parquet(site / "b/tokens/pophr/vocab.parquet")["code"].equals(mine["code"])
    shards = (site / "b/tokens/pophr-risk").glob("sequences-*.parquet")
    splits = pl.concat([pl.read_parquet(path) for path in shards])["split"].cast(pl.String)
    assert set(splits) == {"test"}


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p) - np.log1p(-p)


@slow
def test_scores_of_others_are_those_of_scikit_learn(site: Path) -> None:
    words = ["--calibrate-on", "pophr", "--bootstrap", "0"]
    run("evaluate", site / "a/runs/risk", "--data", "pophr", "-w", site / "b", *words)
    scores = json.loads((site / "a/runs/risk/scores.json").read_text())
    table = pl.read_parquet(site / "a/runs/risk/predictions.parquet")
    record = json.loads((site / "a/runs/risk/run.json").read_text())
    train = tokens.open_tokens(site / "a/tokens" / record["data"][0]["name"])["train"]
    others = tokens.open_tokens(site / "b/tokens/pophr-risk")["test"]
    by_length = length_baseline(
        "multilabel", train.lengths(), train.targets(None), others.lengths()
    )
    assert others.index["subject_id"].to_list() == table["subject_id"].to_list()
    for label in LABELS:
        part = table.filter(pl.col(f"target_{label}").is_not_nan())
        y = part[f"target_{label}"].to_numpy().astype(int)
        p = part[f"p_{label}"].to_numpy().astype(np.float64)
        stored = scores["risk_calibration"][label]
        is_known = table[f"target_{label}"].is_not_nan().to_numpy()
        wanted = sklearn.metrics.roc_auc_score(y, by_length[is_known, LABELS.index(label)])
        stated = scores["baselines"]["length_only"]["by_class"][label]["auroc"]["value"]
        assert stated == pytest.approx(wanted, abs=1e-9), "fitted on the people of the training"
        auroc = sklearn.metrics.roc_auc_score(y, p)
        assert scores["by_class"][label]["auroc"]["value"] == pytest.approx(auroc, abs=1e-9)
        brier = sklearn.metrics.brier_score_loss(y, p)
        assert stored["brier"]["value"] == pytest.approx(brier, abs=1e-9)
        z = logit(p)[:, None]
        model = sklearn.linear_model.LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000)
        slope = float(model.fit(z / z.std(), y).coef_[0, 0] / z.std())
        assert stored["slope"]["value"] == pytest.approx(slope, rel=1e-3)
        large = scipy.optimize.brentq(
            lambda a, z=z, y=y: scipy.special.expit(a + z[:, 0]).mean() - y.mean(), -20, 20
        )
        assert stored["intercept"]["value"] == pytest.approx(large, abs=1e-8)
        after = stored["recalibrated"]
        assert abs(after["intercept"]["value"]) < abs(stored["intercept"]["value"]) or large < 0.2
        assert after["brier"]["value"] <= stored["brier"]["value"] + 0.02


def test_recalibration_recovers_what_distorted_the_risks() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(-1, 1.5, 200_000)
    y = (rng.random(len(z)) < scipy.special.expit(0.4 + 0.5 * z)).astype(float)
    p, subjects = scipy.special.expit(z), np.arange(len(z))
    fitted = risk_calibration.fit_recalibration(p, y)
    assert fitted is not None
    assert fitted == pytest.approx((0.4, 0.5), abs=0.03)
    before = risk_calibration.measure_calibration(p, y, subjects)
    assert before.slope.lo is not None
    assert before.slope.hi is not None
    assert before.slope.lo < 0.5 < before.slope.hi
    after = risk_calibration.measure_calibration(fitted.apply(p), y, subjects)
    assert after.slope.value == pytest.approx(1, abs=1e-6)
    assert after.intercept.value == pytest.approx(0, abs=1e-6)
    crossed = risk_calibration.cross_recalibrate(p, y, subjects)
    assert crossed is not None
    assert risk_calibration.measure_calibration(crossed, y, subjects).slope.value == pytest.approx(
        1, abs=0.02
    )


def test_intervals_of_the_slope_hold_it_in_95_percent() -> None:
    rng, held = np.random.default_rng(1), []
    for _ in range(300):
        z = rng.normal(0, 1, 300)
        y = (rng.random(300) < scipy.special.expit(0.2 + 0.8 * z)).astype(float)
        slope = risk_calibration.measure_calibration(
            scipy.special.expit(z), y, np.arange(300)
        ).slope
        assert slope.lo is not None
        assert slope.hi is not None
        held.append(slope.lo <= 0.8 <= slope.hi)
    assert 0.91 <= np.mean(held) <= 0.98


def test_labels_that_cannot_be_calibrated_say_why() -> None:
    few = risk_calibration.measure_calibration(
        np.full(20, 0.3), np.array([1.0] * 3 + [0.0] * 17), np.arange(20)
    )
    assert few.slope.value is None
    assert "fewer than 10" in (few.slope.undefined_reason or "")
    assert few.brier.value == pytest.approx(0.3**2 * 17 / 20 + 0.7**2 * 3 / 20)
    apart = risk_calibration.measure_calibration(
        np.repeat([0.2, 0.8], 15), np.repeat([0.0, 1.0], 15), np.arange(30)
    )
    assert apart.slope.value is None


@pytest.mark.parametrize(
    ("cases", "expected"), [(20, "nearly the same for all people"), (3, "no label has 10 people")]
)
def test_risks_that_cannot_be_recalibrated_say_why(
    cases: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = (np.arange(40) < cases).astype(float)[:, None]
    monkeypatch.setattr(calibrate, "predict_windows", lambda *_, **__: np.full((40, 1), 0.3))
    rows: Any = SimpleNamespace(targets=lambda _: target)
    with pytest.raises(UserError, match=expected):
        calibrate.fit_recalibrations(cast("Any", None), rows, "north", Computation())


ROWS = """patient_id,date,icd9
p1,2008-01-05,428.0
p1,2008-02-05,E999.9
p1,2008-03-05,250.00
p1,2010-01-05,401.9
p2,2008-01-05,999.9999
p2,2008-02-05,796.9
p3,2009-12-01,496
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Plain claims of three people."""
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "claims.csv").write_text(ROWS)
    return folder


@slow
def test_codes_that_are_not_known_are_counted_and_hidden(
    site: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words: list[Any] = ["--as-of", CUT, "--out", tmp_path / "out", "--json"]
    words += ["-w", tmp_path / "w"]
    run("predict", site / "a/runs/risk", folder, *words, code=Exit.PARTIAL)
    result = json.loads(capsys.readouterr().out)
    table = pl.read_parquet(tmp_path / "out/predictions.parquet")
    with MAP.open(newline="", encoding="utf-8-sig") as file:
        phecodes = {row["code"]: row["phecode"] for row in csv.DictReader(file)}
    vocabulary = set(pl.read_parquet(site / "a/tokens/pophr/vocab.parquet")["code"])
    read = {
        "428.0": codes.roll_up_phecode(phecodes["428.0"], "integer") in vocabulary,
        "250.00": codes.roll_up_phecode(phecodes["250.00"], "integer") in vocabulary,
    }
    # p1 has four rows, of which one is behind the index day; p3 has none before it
    assert sorted(table["events"]) == sorted([sum(read.values()), 0, 0])
    assert set(table["status"]) == {
        "fewer codes than in the training",
        "no known code",
        "no row up to the index day",
    }
    assert table["risk_chf"].is_between(0, 1).all()
    assert result["n"] is None  # three people
    assert set(result["people"]["status"].values()) == {None}
    page = (tmp_path / "out/report.html").read_text()
    assert "p1" not in page
    assert "withheld" in page


@slow
def test_tables_of_new_people_in_another_encoding_are_read_as_the_refusal_advises(
    site: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = "patient_id,date,icd9\nJürgen,2009-01-01,428.0\nZoë,2009-05-01,250.00\n"
    risks = []
    for encoding, words in (("utf-8", []), ("cp1252", ["--encoding", "cp1252"])):
        file, out = tmp_path / f"{encoding}.csv", tmp_path / encoding
        file.write_text(rows, encoding)
        place = ["-w", tmp_path / "w", "--as-of", CUT]
        if words:
            run("predict", site / "a/runs/risk", file, *place, code=Exit.REFUSED)
            assert "--encoding" in capfd.readouterr().err
        run("predict", site / "a/runs/risk", file, *place, *words, "--out", out)
        risks.append(pl.read_parquet(out / "predictions.parquet").select("events", "risk_chf"))
    assert risks[0].sort("events", "risk_chf").equals(risks[1].sort("events", "risk_chf"))


@slow
def test_one_file_is_read_and_its_options_are_those_of_ingest(
    site: Path, folder: Path, tmp_path: Path
) -> None:
    file = folder / "claims.csv"
    file.write_text(ROWS.replace("patient_id,date,icd9", "who,day,dx"))
    run("predict", site / "a/runs/risk", file, "-w", tmp_path / "w", code=Exit.REFUSED)
    columns = ["--col", "subject=who", "--col", "date=day", "--col", "code=dx"]
    columns += ["-w", tmp_path / "w"]
    run("predict", site / "a/runs/risk", file, *columns, code=Exit.PARTIAL)
    table = pl.read_parquet(tmp_path / "w/reports/predict-risk/predictions.parquet")
    # without --as-of the index day is the last of the data, as the run was trained with index days
    assert set(table["index_date"].cast(pl.String)) == {"2010-01-05"}


@slow
def test_an_export_predicts_as_the_run_without_its_workspace(
    site: Path, risks: pl.DataFrame, tmp_path: Path
) -> None:
    run("export", "risk", "-w", site / "a", "--out", tmp_path / "out")
    model = bitimely.from_pretrained(tmp_path / "out", workspace=tmp_path)
    table = model.predict(site / "raw-b", as_of=CUT)
    for label in LABELS:
        np.testing.assert_allclose(
            np.sort(table[f"risk_{label}"].drop_nulls()),
            np.sort(risks[f"risk_{label}"].drop_nulls()),
            atol=1e-6,
        )


@slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [({"channel_map": ["a=b"]}, "recordings"), ({"as_of": "soon"}, "YYYY-MM-DD")],
)
def test_wrong_options_name_what_fits(
    site: Path, tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        bitimely.predict(site / "a/runs/risk", [site / "raw-b"], workspace=tmp_path, **options)
    assert caught.value.exit_code == Exit.USAGE


@slow
def test_fine_tuning_keeps_the_weights_of_a_code_by_its_text(site: Path) -> None:
    words = ["--steps", "1", "--lr", "1e-30", "--set", "finetune.freeze=true"]
    run(
        "pretrain",
        "--model",
        "timelygpt",
        "--data",
        "pophr",
        "-w",
        site / "a",
        "--run",
        "pre",
        *RUN,
    )
    run("finetune", site / "a/runs/pre", "--data", "pophr", "-w", site / "b", "--run", "ft", *words)
    from safetensors.numpy import load_file

    names = ("a/runs/pre", "b/runs/ft")
    before, after = (load_file(site / name / "model/model.safetensors") for name in names)
    key = "adapter.embedding.weight"
    vocabularies = [
        pl.read_parquet(site / name / "tokens/pophr/vocab.parquet")["code"].to_list()
        for name in "ab"
    ]
    shared = set(vocabularies[0]) & set(vocabularies[1])
    assert 100 < len(shared) < len(vocabularies[1])
    (changed,) = [name for name in after if name.endswith(key)]
    for code in shared:
        old, new = (vocabulary.index(code) + 1 for vocabulary in vocabularies)
        np.testing.assert_array_equal(after[changed][new], before[key][old])
    new = [code for code in vocabularies[1] if code not in shared]
    assert not any(
        (after[changed][vocabularies[1].index(code) + 1] == row).all()
        for code in new
        for row in before[key][:20]
    )


@slow
def test_a_label_without_a_case_is_not_trained(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--no-select", "--landmark-date", "2010-12-30", "--landmark", "0,1", "--name", "late"]
    run("tokenize", "pophr", "-w", site / "b", *words)
    for verb in (["train", "timelygpt"], ["finetune", site / "a/runs/risk"]):
        capsys.readouterr()
        run(*verb, "--data", "late", "-w", site / "b", *RUN, code=Exit.REFUSED)
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error[class_missing]")
        assert "label" in line
