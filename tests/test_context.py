"""Context between windows: who reads whom, in training and in prediction."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from short_nights import write_nights

from bitimely_cli.main import main
from bitimely_core import models
from bitimely_core.data import batch_sequences, collate, order_sequences
from bitimely_core.errors import UserError
from bitimely_core.evaluate.prediction import Computation, predict, predict_rows
from bitimely_core.heads import Head, losses
from bitimely_core.models.context import Context, choose_distances, find_sides
from bitimely_core.run import Run
from bitimely_core.train import fit
from bitimely_core.types import RECORDING, Batch
from bitimely_core.workflows.finetune import complete_settings
from bitimely_core.workflows.predict import Predictor, from_pretrained

REACH = 5
# two recordings, the first with gaps, in no order
PLACES = torch.tensor([3, 0, 1, 12, 2, 7, 8, 20, *(RECORDING + k for k in range(6))])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a run with context, evaluated and exported."""
    root = tmp_path_factory.mktemp("context")
    work = ["-w", str(root / "ws")]
    data = ["--data", "generic/staging", "--context", "3"]
    options = [*data, "--steps", "3", "--batch-size", "32"]
    clock = ["--set", "finetune.context_clock=true"]
    write_nights(root / "raw", 6)
    assert main(["ingest", "generic", str(root / "raw"), *work]) == 0
    assert main(["train", "resnet", *options, *clock, "--run", "stager", *work]) == 0
    assert main(["evaluate", "stager", "--bootstrap", "0", "--baselines", "cheap", *work]) == 0
    assert main(["export", "stager", "--out", str(root / "model"), *work]) == 0
    return root


def open_head(home: Path) -> tuple[Run, Head]:
    run = Run.open("stager", home / "ws")
    head = run.load_head()
    assert isinstance(head, Head)
    return run, head


@pytest.mark.parametrize("reach", [*range(1, 20), 100])
def test_distances_of_the_layers_sum_to_the_reach(reach: int) -> None:
    assert sum(choose_distances(reach)) == reach


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_sides_are_the_windows_at_that_distance(distance: int) -> None:
    table = PLACES.tolist()
    wanted = [
        [table.index(p + d) if p + d in table else len(table) for d in (-distance, distance)]
        for p in table
    ]
    assert find_sides(PLACES, distance).tolist() == wanted


def test_a_window_reads_those_of_its_recording_within_reach_and_no_other() -> None:
    torch.manual_seed(0)
    context = Context(4, REACH).double().eval()
    vectors = torch.randn(len(PLACES), 4, dtype=torch.float64, requires_grad=True)
    out = context(vectors, PLACES)
    for row, place in enumerate(PLACES.tolist()):
        (slope,) = torch.autograd.grad(out[row].square().sum(), vectors, retain_graph=True)
        is_read = slope.abs().sum(1) > 0
        assert not is_read[(PLACES - place).abs() > REACH].any()
        assert is_read[(PLACES - place).abs() <= 1].all()
    # all the way to the edge where nothing is missing
    (slope,) = torch.autograd.grad(out[8].square().sum(), vectors)
    assert (slope.abs().sum(1) > 0).tolist() == [False] * 8 + [True] * 6


def test_neither_the_order_nor_other_recordings_change_a_prediction() -> None:
    torch.manual_seed(0)
    context = Context(4, REACH, clock=True).double().eval()
    vectors = torch.randn(len(PLACES), 4, dtype=torch.float64)
    whole = context(vectors, PLACES)
    order = torch.randperm(len(PLACES), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(context(vectors[order], PLACES[order]), whole[order])
    torch.testing.assert_close(context(vectors[:8], PLACES[:8]), whole[:8])


def test_an_epoch_holds_every_window_once_in_sequences_of_a_recording() -> None:
    places = np.concatenate([np.arange(100), RECORDING + np.arange(60)])[::-1].copy()
    assert order_sequences(places, 10, None).tolist() == np.argsort(places).tolist()
    starts = []
    for seed in range(2):
        order = order_sequences(places, 10, np.random.default_rng(seed))
        assert sorted(order) == list(range(160))
        firsts = np.flatnonzero(np.diff(places[order], prepend=-1) != 1)
        # 10 windows each but for those at the edges; two may be drawn one after the other
        assert 12 <= len(firsts) <= 18
        starts.append(set(places[order][firsts]))
    assert starts[0] != starts[1], "the cuts move from epoch to epoch"


def test_places_are_counted_in_windows_from_the_first_of_the_recording(home: Path) -> None:
    windows = open_head(home)[0].windows()
    table = windows.index.with_columns(
        place=(pl.col("start") - pl.col("start").min().over("recording_id")) / 30
    )
    places = windows.find_places()
    assert (places % RECORDING).tolist() == table["place"].to_list()
    assert len(np.unique(places)) == len(windows)
    batch = next(iter(batch_sequences(windows["train"], 8, 4)(0)))
    assert batch.place is not None
    assert batch.index is not None
    assert batch.place.tolist() == places[batch.index.numpy()].tolist()


def test_a_prediction_is_that_of_the_head_on_its_whole_recording(home: Path) -> None:
    run, head = open_head(home)
    windows = run.windows()
    rows = np.flatnonzero(windows.recording == windows.recording[0])
    place = torch.from_numpy(windows.find_places()[rows])
    with torch.inference_mode():
        whole = head.predict(collate(windows, rows)._replace(place=place)).numpy()
    np.testing.assert_allclose(predict_rows(head, windows, rows, "p"), whole, atol=1e-6)


def test_batch_size_order_and_the_rows_beside_it_do_not_matter(home: Path) -> None:
    run, head = open_head(home)
    test = run.windows()["test"]
    whole = predict(head, test)
    np.testing.assert_allclose(predict(head, test, Computation(5)), whole, atol=1e-6)
    draw = np.random.default_rng(0).permutation(len(test))[:9]
    np.testing.assert_allclose(
        predict_rows(head, test, test.rows[draw], "p"), whole[draw], atol=1e-6
    )


def test_a_window_farther_away_than_the_context_changes_nothing(home: Path) -> None:
    run, head = open_head(home)
    windows = run.windows()
    rows = np.flatnonzero(windows.recording == windows.recording[0])
    # the same windows, the first one with the values of another one
    shard = np.array(windows.shards[0])
    shard[rows[0]] = shard[rows[10]][::-1]
    changed = replace(windows, shards=(shard, *windows.shards[1:]))
    before, after = (predict_rows(head, part, rows, "p") for part in (windows, changed))
    is_same = np.abs(before - after).max(1) < 1e-7
    assert is_same[4:].all()
    assert not is_same[:4].any()


def test_predict_and_an_exported_folder_give_the_predictions_of_evaluate(home: Path) -> None:
    scored = pl.read_parquet(home / "ws" / "runs" / "stager" / "predictions.parquet")
    cache = home / "ws" / "cache" / "generic"
    for name in ("stager", str(home / "model")):
        model = from_pretrained(name, workspace=home / "ws")
        assert isinstance(model, Predictor)
        table = scored.join(model.predict(cache), on=["recording_id", "start"], suffix="_new")
        assert table.height == scored.height
        for stage in ("W", "N2", "REM"):
            difference = table[f"p_{stage}"] - table[f"p_{stage}_new"]
            assert difference.abs().max() < 1e-5  # type: ignore[operator]


def test_a_run_says_its_context_and_has_no_graph(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((home / "model" / "config.json").read_text())
    assert (config["head"]["context"], config["head"]["context_clock"]) == (3, True)
    out = ["--out", str(home / "graph"), "-w", str(home / "ws")]
    assert main(["export", "stager", "--format", "onnx", *out]) == 2
    assert "without --context" in capsys.readouterr().err


def test_data_without_neighbours_are_refused(home: Path) -> None:
    run, head = open_head(home)
    windows = run.windows()
    single = windows.subset(windows.index["recording_id"].is_first_distinct().to_numpy())
    with pytest.raises(UserError, match="more than one window"):
        complete_settings(run.record.settings, head.model, single)


class NoisyNights:
    """Batches of recordings of noise, where the class of a window is the sign of the mean two
    windows before it.
    """

    steps, size = 40, 64

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        for step in range(start, self.steps):
            draw = torch.Generator().manual_seed(1000 * epoch + step)
            level = torch.randn(66, generator=draw)
            values = level[2:, None, None] + 0.1 * torch.randn(64, 16, 1, generator=draw)
            yield Batch(values, target=(level[:-2] > 0).long(), place=torch.arange(64))


@pytest.mark.parametrize(("reach", "low", "high"), [(0, 0.3, 0.7), (2, 0.85, 1.0)])
def test_a_label_that_lies_in_an_earlier_window_is_learnt_with_context_alone(
    reach: int, low: float, high: float
) -> None:
    torch.manual_seed(0)
    model = models.build("resnet", preset="tiny", channels=1, length=16)
    head = Head(model, task="classification", outputs=2, context=reach)
    fit(head, NoisyNights(), losses["classification"], epochs=1, lr=1e-2)
    batch = next(iter(NoisyNights()(9)))
    assert batch.target is not None
    with torch.inference_mode():
        accuracy = (head.eval()(batch).argmax(1) == batch.target)[2:].float().mean()
    assert low <= accuracy <= high
