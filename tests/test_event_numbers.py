"""Numbers of events (`tokenize --values raw`) reach every model that reads events one by one,
standardised by the training split; without them nothing changes.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from test_event_inputs import GRID, OWN, histories, read
from test_other_codes import LAB, START, build, draw_history, ingest, write_meds
from test_sequences import CODES, cohort

from bitimely_cli.main import main
from bitimely_core import data, heads, models, tokens, workflows
from bitimely_core.models.tokenizers import NumberScale
from bitimely_core.run import describe_data
from bitimely_core.schemas.tokens import PredictionStatistics, SequenceManifest
from bitimely_core.tokens import sequences
from bitimely_core.types import Batch

torch.set_num_threads(1)

MOMENTS = {code: (10.0 * code, 2.0) for code in range(5, 12)}  # mean and standard deviation


def read_numbers(name: str, **options: object) -> heads.Head:
    head = read(name, numbers=True, **options)
    head.model.fit_numbers(MOMENTS)
    return head


def with_numbers() -> Batch:
    """Every event of `histories` one standard deviation above its mean; padding has none."""
    batch = histories()
    assert batch.mask is not None
    return batch._replace(numbers=torch.where(batch.mask, batch.values * 10.0 + 2.0, torch.nan))


@pytest.mark.parametrize("name", [*OWN, *GRID])
def test_a_number_and_a_missing_one_change_every_prediction(name: str) -> None:
    batch, head = with_numbers(), read_numbers(name)
    assert batch.numbers is not None
    one, mean, none = (batch.numbers.clone() for _ in range(3))
    one[:, 1] += 2.0
    mean[:, 1] = batch.values[:, 1] * 10.0
    none[:, 1] = torch.nan
    with torch.no_grad():
        found = [
            head(batch._replace(numbers=numbers)) for numbers in (batch.numbers, one, mean, none)
        ]
        for at, left in enumerate(found):
            for right in found[:at]:
                assert ((left - right).abs().amax(1) > 1e-9).all()
        nothing = head(batch._replace(numbers=torch.full_like(one, torch.nan)))
        torch.testing.assert_close(nothing, head(batch._replace(numbers=None)), rtol=0, atol=1e-12)
        blind = read(name)
        assert torch.equal(blind(batch), blind(batch._replace(numbers=None)))


@pytest.mark.parametrize("name", [*OWN, *GRID])
def test_padding_and_company_change_nothing(name: str) -> None:
    head, batch = read_numbers(name), with_numbers()
    with torch.no_grad():
        together = head(batch)
        for row, length in enumerate((9, 6, 3)):
            part = slice(row, row + 1)
            cut = {
                key: getattr(batch, key)[part, :length] for key in ("values", "times", "numbers")
            }
            alone = Batch(**cut, end=batch.end[part], person=batch.person[part])  # type: ignore[index]
            torch.testing.assert_close(together[part], head(alone), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [*OWN, *GRID])
def test_a_model_without_numbers_has_the_weights_of_one_with_them(name: str) -> None:
    way = {"tokenizer": "codes"} if name in OWN else {"events": "grid", "horizon": 60}
    torch.manual_seed(0)
    plain = models.build(name, preset="tiny", codes=12, **way)
    after = torch.rand(())
    assert not plain.describe()["model"]["numbers"]
    assert not [key for key in plain.state_dict() if "numbers" in key]
    # their maps have other shapes
    if name in {"gru-d", "mtand", "mtand-enc", "seft"} or name in GRID:
        return
    torch.manual_seed(0)
    other = models.build(name, preset="tiny", codes=12, numbers=True, **way)
    assert torch.equal(torch.rand(()), after)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[key], rtol=0, atol=0, equal_nan=True)


def test_numbers_are_standardised_by_their_code() -> None:
    scale = NumberScale(8)
    scale.fit({5: (100.0, 20.0), 6: (-3.0, 0.0)})
    ids = torch.tensor([[5, 5, 5, 6, 7, 4, 5]])
    z, known = scale(ids, torch.tensor([[100.0, 140.0, 2e7, -2.0, 1.0, 1.0, torch.nan]]))
    # a code without moments has no numbers
    assert known.tolist() == [[True, True, True, True, False, False, False]]
    expected = [0.0, math.asinh(2.0), math.asinh((2e7 - 100) / 20), math.asinh(1.0), 0, 0, 0]
    np.testing.assert_allclose(z[0].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", [*OWN, *GRID])
def test_moments_are_those_of_the_training_until_the_vocabulary_changes(name: str) -> None:
    head, batch = read_numbers(name), with_numbers()
    others = dict.fromkeys(range(5, 15), (3.0, 7.0))
    with torch.no_grad():
        before = head(batch)
        head.model.fit_numbers(others)
        assert torch.equal(head(batch), before)
        shape = (
            {"channels": 3 * 10, "length": 60}
            if name in GRID
            else {"channels": 1, "length": head.model.config.length}
        )
        head.model.reset_adapter(**shape, codes=15)
        scales = [part for part in head.model.modules() if isinstance(part, NumberScale)]
        assert all(part.mean.isnan().all() for part in scales)
        head.model.fit_numbers(others)
        assert [part.mean[5:].tolist() for part in scales] == [[3.0] * 10]
        low, high = (
            head.model(batch._replace(numbers=torch.full_like(batch.numbers, value))).hidden[-1]
            for value in (1.0, 9.0)
        )
        assert low.isfinite().all()
        assert not torch.equal(low, high)


def planted(out: Path, n: int = 400) -> Path:
    """Histories of the same codes; chf is 1 where the numbers of code 6 are high. Code 7 has a
    number in half of its events, 8 a heavy tail.
    """
    codes, draw = [6, 7, 8, 6, 9, 6], np.random.default_rng(3)
    manifest = SequenceManifest.read(cohort(out, n=50))
    rows = []
    for subject in range(n):
        high = int(draw.integers(2))
        tails = {7: draw.normal() if draw.random() < 0.5 else np.nan, 8: draw.pareto(0.8)}
        numbers = [
            140 + 40 * (2 * high - 1) + draw.normal(0, 15) if code == 6 else tails.get(code, np.nan)
            for code in codes
        ]
        times = np.sort(draw.uniform(0, 40, len(codes)))
        split = ["train", "train", "train", "validation", "test"][subject % 5]
        row = {
            "subject_id": subject,
            "codes": codes,
            "times": (times - times[0]).tolist(),
            "values": numbers,
            "split": split,
        }
        rows.append(
            row | {"age0_months": 700, "sex": 1, "y_chf": high, "y_copd": None, "t_index": None}
        )
    lists = {
        "codes": pl.List(pl.Int32),
        "times": pl.List(pl.Float32),
        "values": pl.List(pl.Float32),
    }
    frame = pl.DataFrame(
        rows, schema_overrides=lists | {"y_chf": pl.Int8, "y_copd": pl.Int8, "t_index": pl.Float32}
    )
    train = np.array(
        [number for row in rows if row["split"] == "train" for number in row["values"]]
    ).reshape(-1, len(codes))
    fitted = [(f"{100 + code - 5}", train[:, [one == code for one in codes]]) for code in (6, 7, 8)]
    sequences.publish_sequences(
        out,
        manifest.model_copy(
            update={
                "options": manifest.options.model_copy(update={"values": "raw"}),
                "class_names": ["chf"],
                "events": n * len(codes),
            }
        ),
        shards=sequences.write_shard(out, 0, frame.drop("y_copd")),
        vocabulary=pl.read_parquet(out / "vocab.parquet"),
        ratios=pl.DataFrame({"target": ["chf"]}),
        statistics=PredictionStatistics(
            rows=n, without_codes=0, not_in_cache=0, events=n * len(codes)
        ),
        values=pl.DataFrame(
            {
                "code": [code for code, _ in fitted],
                **{f.__name__[3:]: [f(of) for _, of in fitted] for f in (np.nanmean, np.nanstd)},
            }
        ),
    )
    return out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    planted(folder / "tokens" / "pophr")
    return folder


def score(home: Path, name: str, **model: object) -> float:
    """AUROC on the test split of a model that is trained by the product's commands, without
    pre-training.
    """
    flags = {
        "model": {"name": name, **model},
        "data": {"names": ("pophr",)},
        "train": {"steps": 1, "batch_size": 32},
    }
    run = f"{name}-{len(model)}"
    workflows.pretrain(preset="tiny", flags=flags, workspace=home, run=run)
    train = {"steps": 80, "batch_size": 32, "lr": 3e-3}
    tuned = workflows.finetune(
        run,
        data="pophr",
        flags={"train": train, "finetune": {"from_scratch": True}, "data": {"fraction": 1.0}},
        workspace=home,
    )
    return float(
        workflows.evaluate(tuned["run"], workspace=home, baselines="cheap")["metrics"]["auroc"][
            "value"
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("bitimelygpt", marks=pytest.mark.slow), "gru-d"])
def test_a_label_of_numbers_alone_is_learnt_from_the_numbers_alone(home: Path, name: str) -> None:
    assert score(home, name) > 0.95
    assert 0.3 < score(home, name, numbers=False) < 0.7
    for number, wanted in ((0, True), (1, False)):
        for run in (f"{name}-{number}", f"{name}-{number}-pophr-scratch"):
            record = json.loads((home / "runs" / run / "run.json").read_bytes())
            assert record["settings"]["model"]["numbers"] is wanted
            assert wanted is not any(
                "are not read by this model" in notice for notice in record["notices"]
            )
            assert record["data"][0]["reading"]["numbers"] is True


@pytest.mark.slow
def test_models_on_a_grid_read_numbers_as_channels(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "model": {"name": "crt", "horizon": 48},
        "data": {"names": ("pophr",)},
        "train": {"steps": 1, "batch_size": 32},
    }
    workflows.pretrain(preset="tiny", flags=flags, workspace=home, run="grid")
    model = models.load(home / "runs" / "grid" / "model")
    one = tokens.open_tokens(home / "tokens" / "pophr")
    assert isinstance(one, tokens.EventSequences)
    assert model.config.channels == 3 * CODES
    batch = data.collate(one, one.rows[:20])
    values = model.expand_channels(batch).values
    assert batch.times is not None
    assert batch.numbers is not None
    code, (mean, std) = 6, one.moments()[6]
    for row in range(20):
        for month in range(48):
            here = (batch.values[row] == code) & (batch.times[row].floor() == month)
            expected = np.arcsinh((batch.numbers[row][here].double().numpy() - mean) / std)
            found = values[row, month].view(3, CODES)[:, code - 5].tolist()
            assert found == pytest.approx(
                [
                    float(bool(len(expected))),
                    expected.mean() if len(expected) else 0.0,
                    float(bool(len(expected))),
                ],
                abs=1e-5,
            )
    argv = [
        "pretrain",
        "--preset",
        "tiny",
        "--model",
        "crt",
        "--data",
        "pophr",
        "-w",
        str(home),
        "--dry-run",
        "--set",
        "model.numbers=false",
    ]
    assert main(argv) == 0
    assert "numbers of events (--values raw) are not read" in "".join(capsys.readouterr())


def test_numbers_that_are_not_there_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cohort(tmp_path / "tokens" / "pophr")
    argv = [
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        "pophr",
        "-w",
        str(tmp_path),
        "--set",
        "model.numbers=true",
        "--dry-run",
    ]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "model.numbers" in error
    assert "--values raw" in error


def test_ties_in_a_new_order_keep_their_numbers(tmp_path: Path) -> None:
    one = tokens.open_tokens(planted(tmp_path / "pophr", n=50))
    assert isinstance(one, tokens.EventSequences)
    assert one.numbers is not None
    codes = np.tile(np.arange(5, 11, dtype=np.int32), 50)
    tied = tokens.EventSequences(
        **{
            **vars(one),
            "clock": np.zeros_like(one.clock),
            "flat": codes,
            "numbers": codes.astype(np.float32),
        }
    )
    drawn = tied.arrays(draw=(0, 1))
    assert (drawn["values"] == drawn["numbers"]).all()
    assert (drawn["values"] != tied.arrays()["values"]).any()
    cut = replace(tied, limit=3).arrays()
    assert cut["numbers"].tolist() == [[8.0, 9.0, 10.0]] * 50


def test_numbers_of_large_sets_are_mapped_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = planted(tmp_path / "pophr", n=50)
    one = tokens.open_tokens(folder)
    monkeypatch.setattr(sequences, "IN_MEMORY", 0)
    mapped = tokens.open_tokens(folder)
    assert isinstance(mapped, tokens.EventSequences)
    assert isinstance(mapped.numbers, np.memmap)
    for name, of in one.arrays().items():
        np.testing.assert_array_equal(of, mapped.arrays()[name])
    stored = pl.concat([pl.read_parquet(path) for path in folder.glob("sequences-*")])
    np.testing.assert_array_equal(
        mapped.arrays()["numbers"], np.array(stored["values"].to_list(), np.float32)
    )


def test_a_stream_reads_numbers_as_one_pass_does(home: Path) -> None:
    one = tokens.open_tokens(home / "tokens" / "pophr")
    torch.manual_seed(0)
    model = models.build(
        "timelygpt", preset="tiny", tokenizer="codes", codes=one.codes, numbers=True
    ).eval()
    model.fit_numbers(one.moments())
    batch = data.collate(one, one.rows[:4])._replace(mask=None)
    stream, parts = models.open_stream(model), []
    for cut in (slice(0, 1), slice(1, 4), slice(4, 6)):
        piece = {key: getattr(batch, key)[:, cut] for key in ("values", "times", "numbers")}
        parts.append(stream.feed(Batch(**piece, person=batch.person)).hidden[-1])
    with torch.no_grad():
        torch.testing.assert_close(
            torch.cat(parts, 1), model(batch).hidden[-1][:, 1:-1], rtol=1e-4, atol=1e-5
        )


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up MEDS folder whose numbers are far higher in the test split, ingested with all
    codes.
    """
    folder = tmp_path_factory.mktemp("meds")
    write_meds(folder / "raw", draw_history())
    kinds = ("--default-source", "physician")  # so that there are cases of diabetes
    ingest(folder, "w", "--codes", "all", "--values", "raw", "--dedupe", "none", *kinds)
    return folder


def test_numbers_are_standardised_by_the_training_split_alone(claims: Path) -> None:
    made = tokens.open_tokens(claims / "w" / "tokens" / "pophr")
    assert isinstance(made, tokens.EventSequences)
    train = np.array(
        [
            v
            for s, _, code, v in draw_history()
            if code == LAB and v is not None and np.isfinite(v) and s % 10 > 1
        ]
    )
    assert made.moments() == {
        made.vocabulary.index(LAB): (
            pytest.approx(train.mean(), rel=1e-6),
            pytest.approx(train.std(), rel=1e-6),
        )
    }
    model = models.build("gpt", preset="tiny", tokenizer="codes", codes=made.codes, numbers=True)
    model.fit_numbers(made.moments())
    batch = data.collate(made["test"])
    assert model.adapter.numbers is not None
    z, known = model.adapter.numbers.scale(batch.values, batch.numbers)
    assert (known == (batch.values == made.vocabulary.index(LAB))).all()
    assert z[known].min() > math.asinh(5), "the test split is not standardised by itself"


@pytest.mark.slow
def test_a_full_pass_from_raw_files_to_scores(
    claims: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["-w", str(claims / "w")]
    assert main(
        ["tokenize", "pophr", "--no-select", "--min-codes", "1", "--name", "codes", *home]
    ) in {0, 3}
    assert main(
        [
            "tokenize",
            "pophr",
            "--no-select",
            "--min-codes",
            "1",
            "--values",
            "raw",
            "--name",
            "numbers",
            *home,
        ]
    ) in {0, 3}
    small = ["--set", "train.batch_size=16", "--set", "train.steps=4"]
    assert main(["pretrain", "--preset", "tiny", "--data", "numbers", *small, *home]) == 0
    assert main(["finetune", "tiny", "--data", "numbers", *small, *home]) == 0
    capsys.readouterr()
    assert main(["evaluate", "tiny-numbers", "--baselines", "cheap", "--json", *home]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]
    assert main(["embed", "tiny", "--data", "numbers", *home]) == 0
    assert main(["evaluate", "tiny-numbers", "--data", "codes", *home]) == 2
    assert "has no numbers of events" in capsys.readouterr().err
    run = claims / "w" / "runs" / "tiny-numbers" / "model"
    head = heads.load(run)
    batch = data.collate(tokens.open_tokens(claims / "w" / "tokens" / "numbers")["test"])
    with torch.no_grad():
        assert (head.predict(batch) != head.predict(batch._replace(numbers=None))).any(
            1
        ).sum() > len(batch.values) / 2


def test_a_run_of_codes_alone_scores_a_set_with_numbers_as_without(claims: Path) -> None:
    home = claims / "w"
    for name, values in (("plain", "none"), ("raw", "raw"), ("deciles", "deciles")):
        build(claims, "w", name, values=values)
    flags = {
        "model": {"name": "lstm"},
        "data": {"names": ("plain",)},
        "train": {"steps": 2, "batch_size": 16},
    }
    run = workflows.pretrain(preset="tiny", flags=flags, workspace=home, run="blind")["run"]
    stored = json.loads((home / "runs" / run / "run.json").read_bytes())
    assert not stored["settings"]["model"]["numbers"]
    assert (
        describe_data(tokens.open_tokens(home / "tokens" / "deciles")).reading
        == describe_data(tokens.open_tokens(home / "tokens" / "plain")).reading
    )
    model = models.load(home / "runs" / run / "model").eval()
    one, other = (
        data.collate(tokens.open_tokens(home / "tokens" / name)["test"])
        for name in ("plain", "raw")
    )
    assert one.numbers is None
    assert other.numbers is not None
    with torch.no_grad():
        assert torch.equal(model(one).hidden[-1], model(other).hidden[-1])
    tuned = workflows.finetune(
        run, data="raw", flags={"train": {"steps": 2, "batch_size": 16}}, workspace=home
    )["run"]
    notices = json.loads((home / "runs" / tuned / "run.json").read_bytes())["notices"]
    assert any("are not read by this model" in notice for notice in notices)


@pytest.mark.slow
def test_sequences_up_to_prediction_times_have_the_numbers_before_them(tmp_path: Path) -> None:
    write_meds(tmp_path / "raw", draw_history())
    home = ingest(
        tmp_path, "w", "--codes", "all", "--values", "raw", "--dedupe", "none", "--keep-dates"
    )
    (tmp_path / "labels").mkdir()
    # on day 0 nothing is known yet
    times = [
        (s, START + timedelta(days=days), s % 3 == 0) for s in range(1, 121) for days in (0, 500)
    ]
    schema = {
        "subject_id": pl.Int64,
        "prediction_time": pl.Datetime("us"),
        "boolean_value": pl.Boolean,
    }
    pl.DataFrame(times, schema=schema, orient="row").write_parquet(
        tmp_path / "labels" / "0.parquet"
    )
    w, ids = ["-w", str(home)], ["--ids", str(tmp_path / "w.csv")]
    assert (
        main(["tokenize", "pophr", "--task", str(tmp_path / "labels"), *ids, "--name", "task", *w])
        == 0
    )
    made, base = (tokens.open_tokens(home / "tokens" / name) for name in ("task", "pophr"))
    assert isinstance(made, tokens.EventSequences)
    assert isinstance(base, tokens.EventSequences)
    assert made.moments() == base.moments()
    old = dict(pl.read_csv(tmp_path / "w.csv").select("new", "subject_id").iter_rows())
    stored = pl.concat([pl.read_parquet(made.folder / shard) for shard in made.manifest.shards])
    silent = 0
    for row, (pseudonym, when) in enumerate(
        stored.select("subject_id", "prediction_time").iter_rows()
    ):
        found = made.arrays([row])["numbers"][0]
        before = [
            v
            for s, t, code, v in draw_history()
            if s == old[pseudonym] and code == LAB and np.isfinite(v) and t.date() < when.date()
        ]
        np.testing.assert_allclose(
            np.sort(found[~np.isnan(found)]), np.sort(np.array(before, np.float32))
        )
        silent += len(before) == 0
    assert silent >= 120
    small = ["--set", "train.batch_size=16", "--set", "train.steps=2"]
    assert (
        main(["pretrain", "--preset", "tiny", "--model", "gru-d", "--data", "pophr", *small, *w])
        == 0
    )
    assert main(["finetune", "tiny-gru-d", "--data", "task", *small, *w]) == 0
    predictions = tmp_path / "predictions.parquet"
    assert (
        main(
            [
                "evaluate",
                "tiny-gru-d-task",
                "--baselines",
                "cheap",
                "--predictions",
                str(predictions),
                *ids,
                *w,
            ]
        )
        == 0
    )
    assert np.isfinite(
        pl.read_parquet(predictions)["predicted_boolean_probability"].to_numpy()
    ).all()
