"""Vectors of any encoder: the file format, what is refused, the probe against scikit-learn, our own
vectors against `analyze probing`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import (
    accuracy_score,
    cohen_kappa_score,
    log_loss,
    mean_absolute_error,
    roc_auc_score,
)
from sklearn.preprocessing import StandardScaler

from bitimely_cli.main import main
from bitimely_core import cache, tokens

PENALTIES = (1e4, 1e3, 1e2, 1e1, 1e0, 1e-1)
DEFAULT_PENALTY = 1e2  # where validation cannot choose
VIEW = small.VIEW
DATA = "generic-classification"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A pre-trained and a fine-tuned run on one window of each of 30 subjects, and the index of the
    windows.
    """
    home = small.copy_data(tmp_path_factory.mktemp("home"))
    for verb in ("pretrain", "finetune"):
        small.call(home, verb)
    return home


@pytest.fixture
def index(home):
    return pl.read_parquet(home / "tokens" / DATA / "index.parquet")


def call(capsys, home, file, *more, code=0, data=VIEW):
    capsys.readouterr()
    argv = [
        "evaluate",
        "--data",
        data,
        *(word for one in np.atleast_1d(file) for word in ("--vectors", str(one))),
        *more,
        "-w",
        str(home),
        "--json",
    ]
    assert main(argv) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return (
        json.loads(out)
        if code == 0
        else next(line for line in err.splitlines() if line.startswith("error["))
    )


def draw_vectors(index, width=4, seed=0):
    """Noise, in which the first column shows the label a little."""
    classes = index["label"].rank("dense").to_numpy().astype(float)
    noise = np.random.default_rng(seed).normal(size=(index.height, width))
    noise[:, 0] += classes
    return noise


def write(path, index, vectors):
    frame = index.select("window", "recording_id", "start").with_columns(
        vector=pl.Series([list(row) for row in vectors])
    )
    frame.write_parquet(path)
    return path


def split_of(index, x):
    return {
        split: x[(index["split"] == split).to_numpy()] for split in ("train", "validation", "test")
    }


@pytest.mark.slow
def test_own_vectors_through_the_file_equal_probing(home, capsys, tmp_path):
    for run, readout in (("plain", "sos"), ("plain", "mean")):
        file = tmp_path / f"{readout}.parquet"
        assert (
            main(
                [
                    "embed",
                    run,
                    "--data",
                    VIEW,
                    "--readout",
                    readout,
                    "--out",
                    str(file),
                    "-w",
                    str(home),
                ]
            )
            == 0
        )
        found = call(capsys, home, file, "--run", "plain")
        assert (found["encoder"]["pretrained_on"], found["subjects_shared_with_training"]) == (
            ["generic"],
            0,
        )
        assert not any("not declared" in notice for notice in found["notices"])
        capsys.readouterr()
        assert (
            main(
                [
                    "analyze",
                    "probing",
                    run,
                    "--data",
                    VIEW,
                    "--readouts",
                    readout,
                    "-w",
                    str(home),
                    "--json",
                ]
            )
            == 0
        )
        probing = json.loads(capsys.readouterr().out)["summary"]
        cell = probing["cells"][readout]["last"]
        assert found["encoder"]["penalty"] == cell["penalty"]
        for name, metric in cell["metrics"].items():
            for key in ("value", "se", "lo", "hi"):
                assert found["metrics"][name][key] == (
                    metric[key]
                    if metric[key] is None
                    else pytest.approx(metric[key], abs=1e-12, rel=0)
                ), name
        if readout == probing["default"]["readout"]:
            assert found["baselines"]["random_weights"]["accuracy"]["value"] == pytest.approx(
                cell["random"], abs=1e-12
            )
            assert found["compared"]["plain (probe)"]["accuracy"]["difference"]["difference"] == 0
        raw = probing["controls"]["raw"]
        assert found["baselines"]["simple_features"]["accuracy"]["value"] == pytest.approx(
            raw["value"], abs=1e-12
        )


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """1,600 windows of five stages of 40 subjects, without any run."""
    home = small.copy_nights(tmp_path_factory.mktemp("cohort"))
    assert main(["tokenize", "synthetic/staging", "--channels", "EEG Fpz-Cz", "-w", str(home)]) == 0
    return home


def test_classes_are_scored_as_by_scikit_learn(cohort, capsys, tmp_path):
    index = pl.read_parquet(cohort / "tokens" / "synthetic-staging" / "index.parquet")
    # rows of the file may stand in any order
    order = np.random.default_rng(1).permutation(index.height)
    x = draw_vectors(index, 12)
    file = write(tmp_path / "stages.parquet", index[order], x[order])
    found = call(capsys, cohort, file, "--baselines", "cheap", data="synthetic/staging")
    parts, names = (
        split_of(index, x),
        tokens.open_tokens(cohort / "tokens" / "synthetic-staging").class_names,
    )
    y = {
        split: np.array([names.index(name) for name in of])
        for split, of in split_of(index, index["label"].to_numpy()).items()
    }
    scaled = {
        split: StandardScaler().fit(parts["train"]).transform(of) for split, of in parts.items()
    }
    fitted = {
        p: LogisticRegression(C=1 / p, max_iter=5000, tol=1e-8).fit(scaled["train"], y["train"])
        for p in PENALTIES
    }
    best = min(
        PENALTIES,
        key=lambda p: log_loss(y["validation"], fitted[p].predict_proba(scaled["validation"])),
    )
    predicted = fitted[best].predict(scaled["test"])
    assert found["encoder"]["penalty"] == [best]
    assert found["metrics"]["accuracy"]["value"] == pytest.approx(
        accuracy_score(y["test"], predicted), abs=0.005
    )
    assert found["metrics"]["kappa"]["value"] == pytest.approx(
        cohen_kappa_score(y["test"], predicted), abs=0.005
    )
    assert found["n"] == 320
    assert found["n_subjects"] == found["intervals"]["units"] == 8
    assert set(found["baselines"]) == {"majority", "prior"}
    gap = found["baselines"]["majority"]["accuracy"]["difference"]
    assert gap["difference"] == pytest.approx(
        found["metrics"]["accuracy"]["value"]
        - np.bincount(y["test"])[np.bincount(y["train"]).argmax()] / 320
    )
    assert gap["lo"] < gap["difference"] < gap["hi"]


@pytest.mark.long
def test_a_better_encoder_is_found_and_seeds_limit_the_words(cohort, capsys, tmp_path):
    index = pl.read_parquet(cohort / "tokens" / "synthetic-staging" / "index.parquet")
    x = draw_vectors(index, 12)
    good, noise = (
        write(tmp_path / "good.parquet", index, x),
        write(tmp_path / "noise.parquet", index, x[:, 1:]),
    )
    found = call(capsys, cohort, [good, noise], data="synthetic/staging")
    gap = found["compared"]["noise"]["accuracy"]["difference"]
    assert gap["difference"] == pytest.approx(
        found["metrics"]["accuracy"]["value"] - found["compared"]["noise"]["accuracy"]["value"]
    )
    assert gap["lo"] > 0
    assert "On synthetic-staging these trained models differ by" in found["verdict"]
    assert "good is better" not in found["verdict"]
    assert "simple_features" in found["baselines"]
    page = (cohort / "reports" / "vectors-good-synthetic-staging" / "report.html").read_text()
    assert "Other models on the same windows" in page
    part = call(capsys, cohort, good, "--sequences", "100", data="synthetic/staging")
    assert part["n"] == 100
    assert part["encoder"]["fitted_on"] == {"train": 100, "validation": 100}


@pytest.mark.slow
def test_numbers_are_probed_by_ridge_regression(capsys, tmp_path):
    raw, rng = tmp_path / "raw", np.random.default_rng(0)
    (raw / "data").mkdir(parents=True)
    lines = ["recording,person,dose"]
    for i in range(60):
        np.savetxt(
            raw / "data" / f"r{i}.csv",
            rng.normal(size=(100, 1)),
            delimiter=",",
            header="I",
            comments="",
            fmt="%.4f",
        )
        lines.append(f"r{i},p{i // 2},{rng.normal():.3f}")
    (raw / "recordings.csv").write_text("\n".join(lines) + "\n")
    table = (
        '[table]\npath = "recordings.csv"\nfile = "recording"\nsubject = "person"\nvalue = "dose"\n'
    )
    (tmp_path / "map.toml").write_text(
        f'[[files]]\npattern = "data/*.csv"\nrate = 50\nunit = "mV"\nchannels = ["I"]\n{table}'
    )
    cache.ingest(
        "generic", raw, tmp_path / "cache" / "generic", options={"map": str(tmp_path / "map.toml")}
    )
    windows = tokens.build(
        tmp_path / "cache" / "generic",
        view="regression",
        out=tmp_path / "tokens" / "generic-regression",
        window=100,
    )
    x = np.random.default_rng(2).normal(size=(len(windows), 3))
    x[:, 0] += windows.targets()
    file = write(tmp_path / "dose.parquet", windows.index, x)
    found = call(capsys, tmp_path, file, data="generic/regression")
    parts = split_of(windows.index, x)
    y = {split: windows[split].targets().astype(float) for split in parts}
    scaled = {
        split: StandardScaler().fit(parts["train"]).transform(of) for split, of in parts.items()
    }
    fitted = {p: Ridge(alpha=p).fit(scaled["train"], y["train"]) for p in PENALTIES}
    best = min(
        PENALTIES,
        key=lambda p: np.square(fitted[p].predict(scaled["validation"]) - y["validation"]).mean(),
    )
    assert found["encoder"]["penalty"] == [best]
    assert found["metrics"]["mae"]["value"] == pytest.approx(
        mean_absolute_error(y["test"], fitted[best].predict(scaled["test"])), abs=1e-6
    )


CUTS = {  # name -> change of the frame, what the message says
    "missing": (lambda f: f.filter(pl.col("window") != 7), "1 of 30 windows have no vector, for example 7"),
    "doubled": (lambda f: pl.concat([f, f[3:5]]), "2 of 30 windows occur more than once, for example 3"),
    "null id": (lambda f: f.with_columns(window=pl.when(pl.col("window") == 4).then(None).otherwise(pl.col("window"))), "1 of 30 rows have no window id, for example 5"),
    "nan id": (lambda f: f.with_columns(window=pl.when(pl.col("window") > 27).then(np.nan).otherwise(pl.col("window").cast(pl.Float64))), "2 of 30 rows have no window id"),
    "unknown": (lambda f: f.with_columns(window=pl.col("window") + 2), "2 of 30 window ids are unknown, for example 30"),
    "negative": (lambda f: f.with_columns(window=pl.col("window") - 1), "1 of 30 window ids are unknown, for example -1"),
    "fraction": (lambda f: f.with_columns(window=pl.col("window") + 0.5), "30 of 30 window ids are unknown, for example 0.5"),
    "text ids": (lambda f: f.with_columns(pl.col("window").cast(pl.String)), "window ids are of type"),
    "no ids": (lambda f: f.drop("window"), "no column window"),
    "other recordings": (lambda f: f.with_columns(recording_id=pl.col("recording_id").reverse()), "30 of 30 windows differ"),
    "other starts": (lambda f: f.with_columns(start=pl.col("start") + (pl.col("window") == 9)), "1 of 30 windows differ, for example 9"),
    "no vectors": (lambda f: f.drop("vector"), "has the columns"),
    "two kinds": (lambda f: f.with_columns(v0=1.0), "has the columns"),
    "gap": (lambda f: f.drop("vector").with_columns(v0=1.0, v2=1.0), "v1 is missing"),
    "text": (lambda f: f.with_columns(vector=pl.col("vector").cast(pl.List(pl.String))), "expected lists of numbers"),
    "no list": (lambda f: f.with_columns(vector=pl.lit(1.0)), "expected lists of numbers"),
    "null": (lambda f: f.with_columns(vector=pl.when(pl.col("window") != 8).then(pl.col("vector"))), "1 of 30 windows have no vector or one of another length, for example 8"),
    "width": (lambda f: f.with_columns(vector=pl.when(pl.col("window") < 28).then(pl.col("vector")).otherwise(pl.col("vector").list.head(3))), "2 of 30 windows have no vector or one of another length, for example 28, expected 4 numbers"),
    "empty": (lambda f: f.with_columns(vector=pl.col("vector").list.head(0)), "all vectors are empty"),
    "no rows": (lambda f: f.head(0), "30 of 30 windows have no vector"),
}  # fmt: skip


@pytest.mark.parametrize("case", CUTS)
def test_files_that_do_not_fit_are_refused_with_a_count_and_an_example(
    case, home, index, capsys, tmp_path
):
    change, text = CUTS[case]
    write(tmp_path / "faulty.parquet", index, draw_vectors(index))
    change(pl.read_parquet(tmp_path / "faulty.parquet")).write_parquet(tmp_path / "faulty.parquet")
    assert text in call(capsys, home, tmp_path / "faulty.parquet", code=4)
    assert not (home / "reports" / f"vectors-faulty-{DATA}").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, None])
@pytest.mark.parametrize("columns", [False, True])
def test_numbers_that_are_not_finite_are_refused(value, columns, home, index, capsys, tmp_path):
    x = [list(map(float, row)) for row in draw_vectors(index)]
    x[11][2] = value
    if columns:
        frame = index.select("window").with_columns(
            pl.DataFrame(x, schema=[f"v{k}" for k in range(4)], orient="row")
        )
        frame.write_parquet(tmp_path / "x.parquet")
    else:
        write(tmp_path / "x.parquet", index, x)
    line = call(capsys, home, tmp_path / "x.parquet", code=4)
    assert "[non_finite]" in line
    assert "1 of 30 windows have NaN" in line
    assert "for example 11" in line


@pytest.mark.slow
def test_all_forms_of_the_vectors_give_the_same_scores(home, index, capsys, tmp_path):
    x = draw_vectors(index).astype(np.float32)
    numbered = {f"v{k}": x[:, k] for k in range(4)}
    tables = {
        "list": {"vector": pa.array(list(x), pa.list_(pa.float32()))},
        "large": {"vector": pa.array(list(x), pa.large_list(pa.float64()))},
        "fixed": {"embedding": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)},
        "columns": {name: pa.array(numbered[name]) for name in ("v3", "v0", "v1", "v2")},
    }
    found = {}
    for name, columns in tables.items():
        pq.write_table(
            pa.table({"window": pa.array(index["window"].to_numpy()), **columns}),
            tmp_path / f"{name}.parquet",
            row_group_size=7,
        )
        found[name] = call(capsys, home, tmp_path / f"{name}.parquet")
        assert any("by number alone" in line for line in found[name]["notices"])
    first = found["list"]
    assert first["encoder"]["width"] == 4
    assert all(
        one["metrics"] == first["metrics"]
        and one["encoder"]["penalty"] == first["encoder"]["penalty"]
        for one in found.values()
    )


@pytest.mark.parametrize(
    ("content", "code"), [(b"", 4), (b"PAR1 nothing PAR1", 4), (b"window,v0\n0,1\n", 4), (None, 2)]
)  # fmt: skip
def test_what_is_not_parquet_is_refused(content, code, home, capsys, tmp_path):
    if content is not None:
        (tmp_path / "x.parquet").write_bytes(content)
    call(capsys, home, tmp_path / "x.parquet", code=code)
    call(capsys, home, tmp_path, code=2)  # a folder


@pytest.mark.slow
def test_damaged_bytes_never_end_with_a_traceback(home, index, capsys, tmp_path):
    whole = write(tmp_path / "x.parquet", index, draw_vectors(index)).read_bytes()
    rng = np.random.default_rng(3)
    for _ in range(25):
        data = bytearray(whole[: rng.integers(1, len(whole))] if rng.random() < 0.3 else whole)
        for at in rng.integers(0, len(data), 4):
            data[at] = rng.integers(256)
        (tmp_path / "y.parquet").write_bytes(data)
        capsys.readouterr()
        code = main(
            [
                "evaluate",
                "--data",
                VIEW,
                "--vectors",
                str(tmp_path / "y.parquet"),
                "--baselines",
                "cheap",
                "-w",
                str(home),
            ]
        )
        assert code in {0, 4}, capsys.readouterr()


def declare(home, index, capsys, path, *, split="test", **keys):
    """Scores of vectors with a TOML file beside them."""
    write(path, index, draw_vectors(index))
    path.with_suffix(".toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    )
    return call(capsys, home, path, "--baselines", "cheap")


@pytest.mark.slow
def test_declared_training_data_that_overlap_are_stamped(cohort, home, index, capsys, tmp_path):
    test = sorted(index.filter(split="test")["subject_id"].unique())
    train = sorted(index.filter(split="train")["subject_id"].unique())
    file = tmp_path / "x.parquet"
    found = declare(
        home,
        index,
        capsys,
        file,
        encoder="Big one",
        pretrained_on=["ours"],
        pretrained_subjects=[*test[:2], *train],
    )
    assert found["run"] == "Big one"
    assert found["subjects_shared_with_training"] == 2
    stamp = "2 of 5 subjects of the test split were in the declared pre-training of Big one"
    assert any(line.startswith(stamp) for line in found["notices"])
    folder = home / "reports" / f"vectors-big-one-{DATA}"
    assert stamp in (folder / "report.html").read_text()
    found = declare(home, index, capsys, file, pretrained_subjects=train)
    assert found["subjects_shared_with_training"] == 0
    assert not any("pre-training" in line for line in found["notices"])
    found = declare(home, index, capsys, file, pretrained_subjects=["nobody"])
    assert any("are these its subject_id?" in line for line in found["notices"])
    for keys in ({}, {"pretrained_on": ["TUEG"]}):  # a name says nothing about data of one's own
        assert any(
            "is unknown" in line for line in declare(home, index, capsys, file, **keys)["notices"]
        )
    # unless the tokens are named
    tokens_of = tokens.open_tokens(home / "tokens" / DATA).fingerprint
    for names, count in ((["generic:train"], 0), (["generic"], 5)):
        found = declare(
            home, index, capsys, file, encoder="plain", pretrained_on=names, tokens=tokens_of
        )
        assert found["subjects_shared_with_training"] == count
        assert not any("is unknown" in line for line in found["notices"])
    own = pl.read_parquet(cohort / "tokens" / "synthetic-staging" / "index.parquet")
    for names, count in (
        (["TUEG", "Sleep-EDF"], 0), (["Synthetic cohort"], 8), (["synthetic:train"], 0), (["synthetic:test"], 8), (["synthetics"], 0), ([], 0),
    ):  # fmt: skip
        frame = own.select("window", "recording_id", "start").with_columns(
            vector=pl.Series(draw_vectors(own).tolist())
        )
        frame.write_parquet(file, metadata={"encoder": "x", "pretrained_on": json.dumps(names)})
        file.with_suffix(".toml").unlink(missing_ok=True)
        found = call(capsys, cohort, file, "--baselines", "cheap", data="synthetic/staging")
        assert (found["subjects_shared_with_training"], found["encoder"]["pretrained_on"]) == (
            count,
            names,
        )


@pytest.mark.parametrize(
    "text",
    [
        "encoder = 3",
        "pretrained_on = 'sleep-edf'",
        "pretrain_on = []",
        "encoder = ",
        "pretrained_on = [1]",
    ],
)
def test_declarations_that_cannot_be_read_are_refused(text, home, index, capsys, tmp_path):
    write(tmp_path / "x.parquet", index, draw_vectors(index))
    (tmp_path / "x.toml").write_text(text)
    assert "x.toml" in call(capsys, home, tmp_path / "x.parquet", code=4)


def test_foreign_names_are_escaped_and_results_guarded(home, index, capsys, tmp_path):
    name = "<script>alert(1)</script>\u202e/../x"
    found = declare(home, index, capsys, tmp_path / "x.parquet", encoder=name, pretrained_on=[name])
    folder = Path(found["report"]).parent
    assert folder.parent == home / "reports"
    assert re.fullmatch(r"vectors-[a-z0-9-]+", folder.name)
    page = (folder / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert main(["verify", str(folder), "-w", str(home)]) == 0
    scores = folder / "scores.json"
    scores.write_text(scores.read_text().replace('"n": 5', '"n": 6').replace('"n":5', '"n":6'))
    assert main(["verify", str(folder), "-w", str(home)]) == 5


def test_options_that_do_not_fit_are_refused(home, index, capsys, tmp_path):
    file = write(tmp_path / "x.parquet", index, draw_vectors(index))
    assert "--compare" in call(capsys, home, file, "--compare", "tuned", code=2)
    assert "--split" in call(capsys, home, file, "--split", "validation", code=2)
    assert "two encoders" in call(capsys, home, [file, file], code=2)
    file.with_suffix(".toml").write_text('encoder = "plain (probe)"')
    assert "two encoders" in call(capsys, home, file, "--run", "plain", code=2)
    file.with_suffix(".toml").unlink()
    assert "given twice" in call(capsys, home, file, "--run", "plain", "--run", "plain", code=2)
    assert "no labels" in call(capsys, home, file, code=2, data="generic")
    for argv in (
        ["evaluate"],
        ["evaluate", "--vectors", str(file)],
        ["evaluate", "tuned", "--run", "plain"],
    ):
        assert main([*argv, "-w", str(home)]) == 2
    before = sorted(home.rglob("*"))
    plan = call(capsys, home, file, "--dry-run")
    assert (plan["n"], plan["encoders"]) == (5, ["x"])
    assert sorted(home.rglob("*")) == before


@pytest.mark.slow
def test_runs_stand_beside_the_encoder(home, index, capsys, tmp_path):
    file = write(tmp_path / "x.parquet", index, draw_vectors(index))
    found = call(
        capsys, home, file, "--run", "plain", "--run", "tuned", "--out", str(tmp_path / "out")
    )
    assert set(found["compared"]) == {"plain (probe)", "tuned (probe)", "tuned (fine-tuned)"}
    assert {
        "random_weights_of_plain",
        "random_weights_of_tuned",
        "simple_features",
        "majority",
    } <= set(found["baselines"])
    capsys.readouterr()
    assert main(["evaluate", "tuned", "-w", str(home), "--json", "--bootstrap", "20"]) == 0
    alone = json.loads(capsys.readouterr().out)
    for name in alone["metrics"]:
        assert (
            found["compared"]["tuned (fine-tuned)"][name]["value"]
            == alone["metrics"][name]["value"]
        ), name
    assert (
        found["verdict"].count("with fewer than 3 seeds nothing is said about the methods")
        + found["verdict"].count("no verdict")
        >= 3
    )
    shutil.rmtree(tmp_path / "out")


@pytest.mark.slow
def test_labels_of_histories_are_probed_one_by_one_and_counts_of_few_people_withheld(
    capsys, tmp_path
):
    home = tmp_path / "home"
    argv = ["ingest", "synthetic-claims", "--subjects", "150", "--seed", "1", "-w", str(home)]
    # some rows are faulty
    assert main([*argv, "--small-counts", "--no-select", "--min-codes", "1"]) == 3
    windows = tokens.open_tokens(home / "tokens" / "synthetic-claims")
    labels, split = windows.targets(), windows.index["split"].to_numpy()
    rng = np.random.default_rng(0)
    x = np.nan_to_num(labels) + rng.normal(size=labels.shape)
    frame = windows.index.select("window", "subject_id").with_columns(vector=pl.Series(x.tolist()))
    frame.write_parquet(tmp_path / "x.parquet", metadata={"encoder": "x", "pretrained_on": "[]"})
    found = call(capsys, home, tmp_path / "x.parquet", data="synthetic-claims")
    parts = {name: x[split == name] for name in ("train", "validation", "test")}
    scaled = {
        name: StandardScaler().fit(parts["train"]).transform(of) for name, of in parts.items()
    }
    for k, name in enumerate(windows.class_names):
        y = {part: labels[split == part, k] for part in parts}
        known = {part: np.isfinite(of) for part, of in y.items()}
        if len(np.unique(y["train"][known["train"]])) < 2:
            continue
        fitted = {
            p: LogisticRegression(C=1 / p, max_iter=5000, tol=1e-8).fit(
                scaled["train"][known["train"]], y["train"][known["train"]]
            )
            for p in PENALTIES
        }
        held, truth = (
            scaled["validation"][known["validation"]],
            y["validation"][known["validation"]],
        )
        loss = {p: log_loss(truth, fitted[p].predict_proba(held), labels=[0, 1]) for p in PENALTIES}
        chosen = found["encoder"]["penalty"][k]
        if len(np.unique(truth)) < 2:  # the least loss would have the most extreme risks
            assert chosen == DEFAULT_PENALTY, name
        else:  # fits end at their tolerance; two penalties may tie
            assert loss[chosen] == pytest.approx(min(loss.values()), abs=2e-3), name
        test, chance = (
            y["test"][known["test"]],
            fitted[chosen].predict_proba(scaled["test"][known["test"]])[:, 1],
        )
        value = found["by_class"][name]["auroc"]["value"]
        if 0 < test.mean() < 1:
            assert value == pytest.approx(roc_auc_score(test, chance), abs=0.02), name
        else:
            assert value is None
    assert {"length_only", "single_code", "simple_features", "random_weights"} <= set(
        found["baselines"]
    )
    few = small.copy_data(tmp_path / "few")
    chosen = ["--no-select", "--min-codes", "2", "--max-events", "24", "--no-small-counts"]
    assert main(["tokenize", "synthetic-claims", *chosen, "--force-new", "-w", str(few)]) == 0
    own = tokens.open_tokens(few / "tokens" / "synthetic-claims").index
    own.select("window").with_columns(
        vector=pl.Series(np.ones((own.height, 2)).tolist())
    ).write_parquet(tmp_path / "y.parquet")
    hidden = call(capsys, few, tmp_path / "y.parquet", data="synthetic-claims")
    assert (hidden["n"], hidden["n_subjects"], hidden["encoder"]["fitted_on"]) == (None, None, None)
    assert all(one["value"] is None for one in hidden["metrics"].values())
    page = (few / "reports" / "vectors-y-synthetic-claims" / "report.html").read_text()
    assert re.search(r"\b4 (test )?(windows|subjects)", page) is None
    call(capsys, few, tmp_path / "y.parquet", "--sequences", "2", data="synthetic-claims", code=2)


@pytest.mark.slow
def test_seeds_of_an_encoder_are_one_row_and_three_of_each_allow_a_verdict(
    cohort, capsys, tmp_path
):
    index = pl.read_parquet(cohort / "tokens" / "synthetic-staging" / "index.parquet")
    frame, files = index.select("window", "recording_id", "start"), []
    for name, skip in (("good", 0), ("noise", 1)):
        for seed in range(3):
            files.append(tmp_path / f"{name}{seed}.parquet")
            x = draw_vectors(index, 8, seed)[:, skip:]
            about = {"encoder": name, "seed": str(seed), "pretrained_on": "[]"}
            frame.with_columns(vector=pl.Series(x.tolist())).write_parquet(
                files[-1], metadata=about
            )
    found = call(capsys, cohort, files, "--baselines", "cheap", data="synthetic/staging")
    assert found["run"] == "good"
    assert list(found["compared_rows"]) == ["noise"]
    row, each = (
        found["compared_rows"]["noise"],
        {name: one["accuracy"]["value"] for name, one in found["compared"].items()},
    )
    good = np.array(
        [found["metrics"]["accuracy"]["value"], each["good, seed 1"], each["good, seed 2"]]
    )
    noise = np.array([each[f"noise, seed {seed}"] for seed in range(3)])
    assert row["models"] == [f"noise, seed {seed}" for seed in range(3)]
    assert row["difference"] == pytest.approx(good.mean() - noise.mean())
    assert row["total_se"] ** 2 == pytest.approx(
        row["se"] ** 2 + good.var(ddof=1) / 3 + noise.var(ddof=1) / 3
    )
    assert "good is better than noise on synthetic-staging" in found["verdict"]
    assert "3 seeds" in found["verdict"]
    two = call(capsys, cohort, files[:5], "--baselines", "cheap", data="synthetic/staging")
    assert "is better than noise" not in two["verdict"]
    assert "two encoders" in call(
        capsys, cohort, [files[0], files[0]], code=2, data="synthetic/staging"
    )


@pytest.mark.slow
def test_the_examples_write_files_that_are_scored(cohort, capsys, tmp_path):
    folder, examples = (
        cohort / "tokens" / "synthetic-staging",
        Path(__file__).parent.parent / "examples" / "encoders",
    )
    files = []
    for name, *more in (
        ("mne_band_power.py",),
        ("torch_convolutions.py",),
        ("torch_convolutions.py", "1"),
    ):
        files.append(tmp_path / f"{len(files)}.parquet")
        argv = [
            sys.executable,
            "-W",
            "error",
            str(examples / name),
            str(folder),
            str(files[-1]),
            *more,
        ]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(examples.parent.parent)},
        )
        assert done.returncode == 0, done.stderr
    found = call(capsys, cohort, files, "--baselines", "cheap", data="synthetic/staging")
    # stages of this cohort follow from band powers
    assert found["metrics"]["accuracy"]["value"] > 0.75
    assert list(found["compared"]) == ["convolutions, 0 epochs", "convolutions, 1 epochs"]
    assert found["notices"] == []
