"""Token sets as torch, numpy and data frames take them: items, workers of both kinds, arrays,
models, tables of results.
"""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import small
import test_data
import torch
from torch.utils.data import DataLoader, random_split

import bitimely as bt
from bitimely_core.errors import UserError

SIGNALS, EVENTS = "generic-classification", "synthetic-claims"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def windows() -> Any:
    return bt.open_tokens(small.find_tokens(SIGNALS))


def read_shards(folder: Path) -> np.ndarray:
    """The stored windows [n, T, V], by pyarrow alone."""
    manifest = json.loads((folder / "manifest.json").read_text())
    parts = []
    for shard in manifest["shards"]:
        column = pa.ipc.open_file(pa.memory_map(str(folder / shard["name"]))).read_all().column(0)
        shape = len(column), manifest["options"]["window"], len(manifest["options"]["channels"])
        parts.append(np.frombuffer(b"".join(column.to_pylist()), shard["dtype"]).reshape(shape))
    return np.concatenate(parts)


def standardise_stored(folder: Path) -> np.ndarray:
    """Physical values of every window, less the mean of their channel over the training windows,
    over its standard deviation there.
    """
    stored, index = (
        read_shards(folder).astype(np.float64),
        pl.read_parquet(folder / "index.parquet"),
    )
    affine = (
        pl.read_parquet(folder / "recordings.parquet")
        .group_by("recording_id", maintain_order=True)
        .agg("scale", "offset")
    )
    found = {
        name: (np.array(scale), np.array(offset)) for name, scale, offset in affine.iter_rows()
    }
    physical = np.stack(
        [
            x * found[name][0] + found[name][1]
            for x, name in zip(stored, index["recording_id"], strict=True)
        ]
    )
    train = physical[(index["split"] == "train").to_numpy()].reshape(-1, physical.shape[2])
    return (physical - train.mean(0)) / train.std(0)


def test_an_array_is_what_is_stored(windows: Any) -> None:
    array = np.asarray(windows)
    assert array.dtype == np.float32
    assert array.shape == (len(windows), windows.length, windows.channels)
    np.testing.assert_allclose(
        array, standardise_stored(small.find_tokens(SIGNALS)), rtol=1e-4, atol=1e-5
    )
    split = (windows.whole_index["split"] == "train").to_numpy()
    np.testing.assert_array_equal(np.asarray(windows["train"]), array[split])
    assert np.asarray(windows["test"], dtype=np.float64).dtype == np.float64
    np.testing.assert_array_equal(np.array(windows["test"]), windows["test"].values())
    with pytest.raises(ValueError, match="normalised on reading"):
        np.array(windows, copy=False)


def test_items_are_the_rows_of_the_array_with_their_labels(windows: Any) -> None:
    train = windows["train"]
    array, labels = np.asarray(train), train.index["label"].to_list()
    assert len(train) == len(array) == len(list(train))
    for at in (0, 3, -1, np.int64(2), torch.tensor(1)):
        x, y = train[at]
        assert x.dtype == torch.float32
        np.testing.assert_array_equal(x, array[int(at)])
        assert windows.class_names[int(y)] == labels[int(at)]
    np.testing.assert_array_equal(np.asarray(train[2:9:3]), array[2:9:3])
    np.testing.assert_array_equal(np.asarray(train[::-1]), array)  # the rows of a set are ascending
    mask = np.arange(len(train)) % 3 == 1
    for choice in (mask, mask.tolist(), np.flatnonzero(mask), torch.tensor(mask)):
        chosen = train[choice]
        np.testing.assert_array_equal(np.asarray(chosen), array[mask])
        assert chosen.index["label"].to_list() == np.array(labels)[mask].tolist()
    for positions in ([3, 1], [2, 2]):
        with pytest.raises(UserError, match="ascending"):
            train[positions]
    with pytest.raises(IndexError):
        train[len(train)]
    with pytest.raises(UserError, match="validation"):
        windows["valid"]


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression", "none"])
def test_missing_values_are_nan_and_models_mask_them(task: str) -> None:
    held = test_data.windows(9, missing=True, task=task)
    array, items = np.asarray(held), list(held)
    assert np.isnan(array[1::2, 0, 0]).all()
    assert np.isnan(array).sum() == 4
    xs = torch.stack([item if task == "none" else item[0] for item in items])
    np.testing.assert_array_equal(xs, array)
    if task != "none":
        np.testing.assert_array_equal(torch.stack([y for _, y in items]), held.targets())
    model = bt.build_model(
        "bitimelygpt", preset="tiny", channels=2, length=6, tokenizer="steps", layers=2
    ).eval()
    batch = bt.collate(held)
    assert batch.mask is not None
    with torch.inference_mode():
        for one, other in zip(model(xs).hidden, model(batch).hidden, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_give_the_rows_in_the_order_of_the_seed(windows: Any, method: str) -> None:
    train = windows["train"]
    array, labels = np.asarray(train), train.targets()
    loader = DataLoader(
        train,
        batch_size=4,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=method,
        generator=torch.Generator().manual_seed(3),
    )
    order = torch.randperm(len(train), generator=_skip_seed(torch.Generator().manual_seed(3)))
    xs, ys = (torch.cat(part) for part in zip(*loader, strict=True))
    assert sorted(map(float, xs[:, 0, 0])) == sorted(map(float, array[:, 0, 0]))
    np.testing.assert_array_equal(
        ys, labels[[int(np.flatnonzero((array == np.asarray(x)).all((1, 2)))[0]) for x in xs]]
    )
    np.testing.assert_array_equal(xs, array[order])


def _skip_seed(generator: torch.Generator) -> torch.Generator:
    """The loader draws the seed of its workers first."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator


def test_a_set_prints_as_one_line() -> None:
    for name in (SIGNALS, EVENTS):
        held = bt.open_tokens(small.find_tokens(name))
        assert repr(held).startswith(f"{type(held).__name__}({held.name!r}: {len(held):,} rows")
        assert len(repr(held)) < 120


def test_events_are_dicts_of_one_length_that_models_read() -> None:
    events = replace(bt.open_tokens(small.find_tokens(EVENTS)), limit=40)
    loader = DataLoader(events["test"], batch_size=3)
    model = bt.build_model(
        "bitimelygpt",
        preset="3m",
        codes=events.codes,
        length=40,
        layers=2,
        dim=16,
        value_dim=16,
        ffn_dim=16,
    ).eval()
    at = 0
    for batch in loader:
        rows = events["test"].rows[at : at + len(batch["values"])]
        expected, at = bt.collate(events, rows), at + len(rows)
        width = expected.values.shape[1]
        assert batch["values"].shape == (len(rows), 40)
        torch.testing.assert_close(batch["values"][:, :width], expected.values)
        torch.testing.assert_close(batch["times"][:, :width], expected.times)
        assert not batch["mask"][:, width:].any()
        np.testing.assert_array_equal(batch["target"], events.targets(rows))
        with torch.inference_mode():
            mean = [bt.heads.pool(model(one), model, "mean") for one in (batch, expected)]
        torch.testing.assert_close(mean[0], mean[1], rtol=1e-4, atol=1e-5)
    assert at == len(events["test"])
    with pytest.raises(UserError, match="a time for every value"):
        np.asarray(events)


@pytest.mark.parametrize("missing", [False, True])
def test_rows_at_irregular_times_are_dicts(missing: bool) -> None:
    held = test_data.windows(6)
    times = np.sort(np.random.default_rng(0).uniform(0, 6, (6, 6, 1)), axis=1).astype(np.float32)
    values = np.concatenate([held.values(), times], axis=2)
    if missing:
        values[1, 4:] = np.nan
    options = held.options.model_copy(
        update={"channels": ("x", "y", "time"), "clock": "time", "grid": False, "rate": 2.0}
    )
    manifest = held.manifest.model_copy(update={"options": options, "missing": missing})
    ones = np.ones((1, 3), np.float32)
    held = replace(
        held,
        manifest=manifest,
        shards=(values,),
        firsts=np.array([0, 6]),
        centre=0 * ones,
        factor=ones,
    )
    (batch,) = DataLoader(held, batch_size=6)
    assert batch.keys() == {"values", "times", "target"} | ({"mask"} if missing else set())
    np.testing.assert_allclose(batch["times"], np.nan_to_num(2 * values[..., 2]))
    np.testing.assert_array_equal(batch["values"], np.nan_to_num(values[..., :2]))
    model = bt.build_model("gru-d", preset="tiny", channels=2, length=6).eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(batch).hidden[-1], model(bt.collate(held)).hidden[-1])
    with pytest.raises(UserError, match="a time for every value"):
        np.asarray(held)


def test_a_pickle_holds_the_place_and_no_data(windows: Any, tmp_path: Path) -> None:
    part = windows["train"][3:11]
    data = pickle.dumps(part)
    assert len(data) < 4000 < np.asarray(part).nbytes
    code = f"import sys, pickle, numpy as np; np.save({str(tmp_path / 'x.npy')!r}, np.asarray(pickle.load(sys.stdin.buffer)))"
    subprocess.run([sys.executable, "-c", code], input=data, check=True, cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), np.asarray(part))
    limited = replace(bt.open_tokens(small.find_tokens(EVENTS)), limit=7)
    events = pickle.loads(pickle.dumps(limited["test"]))
    assert events.limit == 7
    np.testing.assert_array_equal(
        events.rows, bt.open_tokens(small.find_tokens(EVENTS))["test"].rows
    )
    held = test_data.windows(5)
    np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(held))), np.asarray(held))


def test_a_pickle_of_a_set_that_was_replaced_is_refused(tmp_path: Path) -> None:
    home = small.copy_data(tmp_path)
    data = pickle.dumps(bt.open_tokens(home / "tokens" / SIGNALS))
    bt.tokens.build(
        home / "cache" / "generic",
        out=home / "tokens" / SIGNALS,
        view="classification",
        window=50,
        force_new=True,
    )
    with pytest.raises(UserError, match="another set") as caught:
        pickle.load(io.BytesIO(data))
    assert caught.value.exit_code == 5


def test_a_loop_of_torch_trains_a_head(windows: Any) -> None:
    torch.manual_seed(0)
    train, held = random_split(
        windows, [len(windows) - 4, 4], generator=torch.Generator().manual_seed(0)
    )
    model = bt.build_model(
        "bitimelygpt",
        preset="tiny",
        channels=windows.channels,
        length=windows.length,
        tokenizer="patch",
        patch=20,
        layers=2,
    )
    head = bt.Classifier(model, outputs=windows.classes, readout="mean")
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        for x, y in DataLoader(train, batch_size=8):
            loss = torch.nn.functional.cross_entropy(head(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    x = torch.stack([held[i][0] for i in range(len(held))])
    torch.testing.assert_close(head.predict(x).sum(1), torch.ones(4))


@pytest.mark.slow
def test_tables_of_results_are_frames(tmp_path: Path) -> None:
    home = small.copy_data(tmp_path)
    small.call(home, "pretrain")
    small.call(home, "finetune")
    small.call(home, "scratch")
    options: dict[str, Any] = {"workspace": home, "bootstrap": 20}
    scored = bt.evaluate("tuned", **options)
    tables = bt.read_tables(scored)
    assert (
        tables.keys()
        == bt.read_tables(home / "runs" / "tuned").keys()
        >= {"metrics", "predictions"}
    )
    metrics = dict(tables["metrics"].select("metric", "value").iter_rows())
    assert metrics["accuracy"] == pytest.approx(scored["metrics"]["accuracy"]["value"])
    predictions = tables["predictions"]
    assert (predictions["target"] == predictions["prediction"]).mean() == pytest.approx(
        metrics["accuracy"]
    )
    bt.evaluate("scratch", **options)
    compared = bt.read_tables(bt.report(["tuned", "scratch"], workspace=home))
    assert dict(compared["all-scores"].select("run", "accuracy").iter_rows())[
        "tuned"
    ] == pytest.approx(metrics["accuracy"])
    assert compared["differences"]["row"].to_list() == ["scratch"]
    vectors = bt.read_tables(bt.embed("tuned", split="test", workspace=home))
    (frame,) = vectors.values()
    assert (
        frame["window"].to_list() == bt.open_tokens(home / "tokens" / SIGNALS)["test"].rows.tolist()
    )
    assert frame["embedding"].to_numpy().ndim == 2
    with pytest.raises(UserError, match="no table"):
        bt.read_tables(tmp_path / "nothing")


@pytest.mark.parametrize("name", [SIGNALS, EVENTS])
def test_a_batch_of_rows_is_each_of_them(name: str) -> None:
    held = bt.open_tokens(small.find_tokens(name))["train"]
    positions = [5, 0, 5, len(held) - 1]
    batch = held.__getitems__(positions)
    assert len(batch) == len(positions)
    for row, position in zip(batch, positions, strict=True):
        torch.testing.assert_close(row, held[position], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(IndexError):
        held.__getitems__([0, len(held)])
