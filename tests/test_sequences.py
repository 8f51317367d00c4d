"""Event sequences from the disk to a score: cutting, clocks, ties, missing labels, the full
workflow on a synthetic cohort.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import small
import torch

from bitimely_core import data, models, objectives, tokens, workflows
from bitimely_core.errors import UserError
from bitimely_core.schemas.tokens import PredictionStatistics, SequenceManifest, SequenceOptions
from bitimely_core.store import storage
from bitimely_core.tokens import sequences
from bitimely_core.types import Batch

CODES = 6
LABELS = ["chf", "copd"]


def cohort(out: Path, n: int = 60, seed: int = 0, names: list[str] | None = None) -> Path:
    """n subjects of 3 to 12 events over CODES codes; chf follows code 5 (the first), copd is known
    for two thirds of them.
    """
    draw = np.random.default_rng(seed)
    rows = []
    for subject in range(n):
        size = int(draw.integers(3, 13))
        times = np.sort(draw.uniform(0, 40, size)).round(1)
        codes = draw.integers(5, 5 + CODES, size)
        rows.append(
            {
                "subject_id": subject,
                "codes": codes.astype(np.int32).tolist(),
                "times": (times - times[0]).astype(np.float32).tolist(),
                "split": ["train", "train", "train", "validation", "test"][subject % 5],
                "age0_months": 700,
                "sex": 1,
                "y_chf": int((codes == 5).any()),
                "y_copd": None if subject % 3 == 0 else int(draw.random() < 0.4),
                "t_index": float(times[-1] - times[0]) + 5.0 if subject % 2 else None,
            }
        )
    schema = {
        "codes": pl.List(pl.Int32),
        "times": pl.List(pl.Float32),
        "y_chf": pl.Int8,
        "y_copd": pl.Int8,
        "t_index": pl.Float32,
    }
    frame = pl.DataFrame(rows, schema_overrides=schema)
    storage.make_folder(out)
    vocabulary = pl.DataFrame(
        {"id": range(5, 5 + CODES), "code": names or [f"{100 + c}" for c in range(CODES)]}
    )
    task = {
        "dataset": "pophr",
        "view": "",
        "task": "multilabel",
        "split": "subject",
        "seed": 0,
        "normalise": "none",
    }
    choices = {
        "preset": "paper",
        "split_file": None,
        "landmark": None,
        "leakage": "keep",
        "level": "integer",
    }
    choices |= {
        "asked": "labels",
        "time_to_event": None,
        "values": "none",
        "small_counts": True,
        "individual_timelines": False,
        "cohort": None,
    }
    manifest = SequenceManifest(
        cache="",
        base="base",
        options=SequenceOptions(**task, **choices),
        class_names=LABELS,
        notices=[],
        findings=[],
        shards=[],
        events=0,
    )
    sequences.publish_sequences(
        out,
        manifest,
        shards=sequences.write_shard(out, 0, frame[:40])
        | sequences.write_shard(out, 1, frame[40:]),
        vocabulary=vocabulary,
        ratios=pl.DataFrame({"target": ["chf"]}),
        statistics=PredictionStatistics(rows=len(frame), without_codes=0, not_in_cache=0, events=0),
    )
    return out


def test_a_sequence_is_what_was_written(tmp_path: Path) -> None:
    one = tokens.open_tokens(cohort(tmp_path / "pophr"))
    frame = pl.concat(
        [pl.read_parquet(p) for p in sorted(tmp_path.glob("pophr/sequences-*.parquet"))]
    )
    arrays = one.arrays()
    for row in range(60):
        n = len(frame["codes"][row])
        assert arrays["values"][row, :n].tolist() == frame["codes"][row].to_list()
        assert arrays["times"][row, :n] == pytest.approx(frame["times"][row].to_list())
        assert arrays["mask"][row].sum() == n
        assert not arrays["values"][row, n:].any()
        assert arrays["end"][row] == pytest.approx(
            frame["times"][row][-1] + (5.0 if row % 2 else 0.0), abs=1e-4
        )
    target = one.targets()
    assert np.isnan(target[::3, 1]).all()
    assert not np.isnan(target[:, 0]).any()
    assert one.codes == 5 + CODES
    assert len(one["train"]) == 36


def test_the_last_events_are_kept_and_their_clock_restarts(tmp_path: Path) -> None:
    full = tokens.open_tokens(cohort(tmp_path / "pophr"))
    cut = replace(full, limit=4)
    long, short = full.arrays(), cut.arrays()
    assert short["values"].shape[1] == 4
    for row in range(60):
        n = int(long["mask"][row].sum())
        kept = min(n, 4)
        assert short["values"][row, :kept].tolist() == long["values"][row, n - kept : n].tolist()
        shift = long["times"][row, n - kept]
        assert short["times"][row, :kept] == pytest.approx(
            long["times"][row, n - kept : n] - shift, abs=1e-4
        )
        assert short["end"][row] == pytest.approx(long["end"][row] - shift, abs=1e-4)


def test_only_ties_are_reshuffled_each_epoch(tmp_path: Path) -> None:
    out = cohort(tmp_path / "pophr", n=10)
    one = tokens.open_tokens(out)
    tied = tokens.EventSequences(**{**vars(one), "clock": np.floor(one.clock / 20) * 20})
    plain = tied.arrays()
    orders = [tied.arrays(draw=(0, epoch))["values"] for epoch in range(6)]
    assert any((orders[0] != other).any() for other in orders[1:])
    assert (tied.arrays(draw=(0, 3))["values"] == orders[3]).all()
    for values in orders:
        for row in range(10):
            for time in np.unique(plain["times"][row][plain["mask"][row]]):
                here = plain["mask"][row] & (plain["times"][row] == time)
                assert sorted(values[row, here]) == sorted(plain["values"][row, here])
    batches = data.batches(tied, 4, seed=0, shuffle=False, ties="shuffle")
    assert torch.equal(
        next(iter(batches(2))).values,
        torch.from_numpy(orders[2][:4, : next(iter(batches(2))).values.shape[1]]),
    )


def test_eos_stands_at_the_index_day() -> None:
    """A longer wait until the index day weakens what [EOS] hears of the events, by the decay:
    states of events stay.
    """
    torch.manual_seed(0)
    model = models.build(
        "bitimelygpt",
        preset="tiny",
        tokenizer="codes",
        codes=5 + CODES,
        decay={"kind": "half-life"},
    ).eval()
    codes, times = torch.tensor([[5, 6, 7]]), torch.tensor([[0.0, 3.0, 4.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    plain = model(Batch(codes, times, mask), directions=["forward"] * 4)
    same = model(Batch(codes, times, mask, end=torch.tensor([4.0])), directions=["forward"] * 4)
    later = model(Batch(codes, times, mask, end=torch.tensor([40.0])), directions=["forward"] * 4)
    assert torch.equal(plain.hidden[-1], same.hidden[-1])
    torch.testing.assert_close(plain.hidden[-1][:, :4], later.hidden[-1][:, :4])
    assert (plain.hidden[-1][:, 4] - later.hidden[-1][:, 4]).abs().max() > 1e-4


@pytest.mark.slow
def test_the_line_from_sequences_to_scores(tmp_path: Path) -> None:
    cohort(tmp_path / "tokens" / "pophr", n=200)
    run = workflows.pretrain(
        preset="tiny",
        flags={"data": {"names": ("pophr",)}, "train": {"steps": 3, "batch_size": 16}},
        workspace=tmp_path,
    )
    stored = json.loads((tmp_path / "runs" / run["run"] / "run.json").read_bytes())
    assert stored["settings"]["model"]["tokenizer"] == "codes"
    assert stored["settings"]["model"]["decay"]["kind"] == "half-life"
    assert stored["settings"]["model"]["codes"] == 5 + CODES
    fine = workflows.finetune(
        "tiny",
        data="pophr",
        flags={"train": {"steps": 60, "batch_size": 32, "lr": 3e-3}, "data": {"fraction": 1.0}},
        workspace=tmp_path,
    )
    scores = workflows.evaluate(fine["run"], workspace=tmp_path, bootstrap=50)
    assert set(scores["metrics"]) >= {"auprc", "auroc"}
    assert set(scores["by_class"]) == set(LABELS)
    assert scores["by_class"]["chf"]["auprc"]["value"] > scores["by_class"]["chf"]["base_rate"]
    assert scores["by_class"]["copd"]["unknown"] > 0
    assert {"length_only", "single_code", "prior"} <= set(scores["baselines"])
    assert scores["n_subjects"] == 40


def test_a_split_without_subjects_has_no_scores_and_more_heads_more_half_lives(
    tmp_path: Path,
) -> None:
    out = cohort(tmp_path / "tokens" / "pophr", n=4)
    assert len(tokens.open_tokens(out)["test"]) == 0
    flags = {
        "data": {"names": ("pophr",)},
        "train": {"steps": 1, "batch_size": 2},
        "model": {"heads": 8, "dim": 64},
    }
    workflows.pretrain(preset="tiny", flags=flags, workspace=tmp_path)
    stored = json.loads((tmp_path / "runs" / "tiny" / "run.json").read_bytes())["settings"]["model"]
    months = stored["decay"]["months"]
    assert (len(months), months[0], months[-1]) == (8, 6.0, 384.0)
    assert np.diff(np.log(months)) == pytest.approx(np.log(64) / 7, abs=1e-3)
    fine = workflows.finetune(
        "tiny",
        data="pophr",
        flags={"train": {"steps": 1, "batch_size": 2}, "data": {"fraction": 1.0}},
        workspace=tmp_path,
    )
    scores = workflows.evaluate(fine["run"], workspace=tmp_path, bootstrap=10)
    assert scores["n"] == 0
    assert all(
        metric["value"] is None and metric["undefined_reason"]
        for metric in scores["metrics"].values()
    )


def test_other_codes_renew_the_adapter_though_they_are_as_many(tmp_path: Path) -> None:
    cohort(tmp_path / "tokens" / "pophr")
    cohort(tmp_path / "tokens" / "others", names=[f"{300 + c}" for c in range(CODES)])
    small = {"train": {"steps": 1, "batch_size": 8}}
    workflows.pretrain(
        preset="tiny", flags={**small, "data": {"names": ("pophr",)}}, workspace=tmp_path
    )
    run = workflows.finetune(
        "tiny",
        data="others",
        flags={**small, "data": {"fraction": 1.0}},
        run="moved",
        workspace=tmp_path,
    )
    stored = json.loads((tmp_path / "runs" / run["run"] / "run.json").read_bytes())
    assert stored["renewed"]
    assert any("another vocabulary" in line for line in stored["notices"])
    with pytest.raises(UserError, match="another vocabulary"):
        workflows.evaluate("tiny", data="others", workspace=tmp_path)


def test_signals_and_events_do_not_mix(tmp_path: Path) -> None:
    cohort(tmp_path / "tokens" / "pophr")
    with pytest.raises(UserError, match="expected codes for events") as caught:
        workflows.pretrain(
            preset="tiny",
            assignments=["model.tokenizer=patch"],
            flags={"data": {"names": ("pophr",)}},
            workspace=tmp_path,
        )
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_a_run_on_events_refuses_signals_of_one_channel(tmp_path: Path) -> None:
    cohort(tmp_path / "tokens" / "pophr")
    flags = {"train": {"steps": 1, "batch_size": 8}, "data": {"names": ("pophr",)}}
    workflows.pretrain(preset="tiny", flags=flags, workspace=tmp_path)
    small.copy_nights(tmp_path)
    with pytest.raises(UserError, match="1 channels, the run reads events") as caught:
        workflows.evaluate("tiny", data="synthetic/staging", workspace=tmp_path)
    assert caught.value.exit_code == 2


def test_loss_of_codes_against_the_definition(tmp_path: Path) -> None:
    """Cross-entropy of each next code and [EOS], and of each previous code, averaged over what
    counts (method notes, section 4).
    """
    one = tokens.open_tokens(cohort(tmp_path / "pophr"))
    batch = data.collate(one, one.rows[:5])
    torch.manual_seed(0)
    model = (
        models.build(
            "bitimelygpt",
            preset="tiny",
            tokenizer="codes",
            codes=one.codes,
            decay={"kind": "half-life"},
        )
        .double()
        .eval()
    )
    batch = batch._replace(times=batch.times.double(), end=batch.end.double())
    result = objectives.get("next-previous-strict")(model, batch, torch.Generator().manual_seed(0))
    forward, backward = (
        model(batch, directions=[d] * 4).hidden[-1] for d in ("forward", "backward")
    )
    following, former = [], []
    for row in range(5):
        codes = batch.values[row][batch.mask[row]] - 5
        n = len(codes)
        log = model.output(forward[row : row + 1, : n + 1]).log_softmax(-1)[0]
        following += [-log[p, codes[p]] for p in range(n)] + [-log[n, CODES]]
        log = model.output(backward[row : row + 1], "previous").log_softmax(-1)[0]
        former += [-log[p + 2, codes[p]] for p in range(n)]
    assert float(result["parts"]["next"]) == pytest.approx(
        float(torch.stack(following).mean().detach()), rel=1e-6
    )
    assert float(result["parts"]["previous"]) == pytest.approx(
        float(torch.stack(former).mean().detach()), rel=1e-6
    )
