"""Windows to batches: order, exact resume, processes, fractions, dtypes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import planted
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitimely
from bitimely_core import data
from bitimely_core.errors import UserError
from bitimely_core.schemas.tokens import WindowManifest, WindowOptions, WindowStatistics
from bitimely_core.tokens import Windows, drawing
from bitimely_core.tokens.windows import encode_targets
from bitimely_core.train.batches import scale_values
from bitimely_core.types import Batch

T, V = 6, 2


def windows(
    n: int,
    *,
    subjects: int = 5,
    task: str = "classification",
    missing: bool = False,
    train: float = 1.0,
) -> Windows:
    """n windows in memory, row r filled with r; classes cycle; with `missing`, the first value of
    every odd row is.
    """
    block = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None], (n, T, V)).copy()
    if missing:
        block[1::2, 0, 0] = np.nan
    labels = {
        "classification": pl.Series(["ab"[r % 2] for r in range(n)], dtype=pl.String),
        "regression": pl.Series([r / 2 for r in range(n)], dtype=pl.Float64),
        "multilabel": pl.Series([["b"] * (r % 2) for r in range(n)], dtype=pl.List(pl.String)),
        "none": pl.Series([None] * n, dtype=pl.String),
    }[task]
    index = pl.DataFrame(
        {
            "window": pl.Series(range(n), dtype=pl.Int64),
            "subject_id": pl.Series([f"s{r % subjects}" for r in range(n)], dtype=pl.String),
            "recording_id": pl.Series(["r"] * n, dtype=pl.String),
            "start": pl.Series([float(r) for r in range(n)], dtype=pl.Float64),
            "label": labels,
            "split": pl.Series(
                ["train" if r % subjects < train * subjects else "test" for r in range(n)],
                dtype=pl.String,
            ),
        }
    )
    options = WindowOptions.model_construct(
        window=T, channels=("x", "y"), normalise="channel", task=task, split="subject", clock=None
    )
    return Windows(
        folder=Path("tokens/tiny"),
        manifest=WindowManifest.model_construct(
            options=options, missing=missing, class_names=["a", "b"]
        ),
        statistics=WindowStatistics.model_construct(),
        rows=np.arange(n),
        whole_index=index,
        target=encode_targets(index["label"], task, ["a", "b"]),
        shards=(block[: n // 3], block[n // 3 :]),
        firsts=np.array([0, n // 3, n]),
        recording=np.zeros(n, np.int32),
        centre=np.zeros((1, V), np.float32),
        factor=np.ones((1, V), np.float32),
    )


def narrow_windows(n: int, **options: Any) -> Windows:
    """The same with random int16 values of two recordings with scales of their own."""
    draw = np.random.default_rng(n)
    block = draw.integers(-(2**15), 2**15, (n, T, V)).astype(np.int16)
    centre, factor = (draw.normal(size=(2, V)).astype(np.float32) * size for size in (1e3, 1e-3))
    return dataclasses.replace(
        windows(n, **options),
        shards=(block[: n // 3], block[n // 3 :]),
        recording=np.arange(n, dtype=np.int32) % 2,
        centre=centre,
        factor=factor,
    )


def rows(batch: Batch) -> list[int]:
    assert batch.index is not None
    # every row holds its own number
    np.testing.assert_array_equal(batch.values.nan_to_num()[:, -1, -1], batch.index)
    return batch.index.tolist()


@given(
    n=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 3), epoch=st.integers(0, 3)
)
@settings(max_examples=50, deadline=None)
def test_an_epoch_is_one_permutation_of_all_rows(n: int, size: int, seed: int, epoch: int) -> None:
    batches = data.batches(windows(n), size, seed=seed)
    found = [rows(batch) for batch in batches(epoch)]
    flat = [row for batch in found for row in batch]
    assert len(found) == batches.steps == -(-n // size)
    assert all(len(batch) == size for batch in found[:-1])
    assert sorted(flat) == list(range(n))
    assert flat == np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n).tolist()
    assert [rows(batch) for batch in data.batches(windows(n), size, seed=seed)(epoch)] == found


@given(
    n=st.integers(1, 40), size=st.integers(1, 12), world=st.integers(1, 5), start=st.integers(0, 6)
)
@settings(max_examples=50, deadline=None)
def test_resume_and_processes_see_parts_of_the_same_order(
    n: int, size: int, world: int, start: int
) -> None:
    batches = data.batches(windows(n), size, seed=1)
    expected = [rows(batch) for batch in batches(2)]
    assert [rows(batch) for batch in batches(2, start=start)] == expected[start:]
    parts = [
        [rows(batch) for batch in batches(2, start=start, rank=rank, world=world)]
        for rank in range(world)
    ]
    for step, batch in enumerate(expected[start:]):
        assert [part[step] for part in parts] == [batch[rank::world] for rank in range(world)]


def test_orders_differ_between_epochs_and_seeds_and_can_be_the_stored_one() -> None:
    one = windows(30)

    def order(seed: int, epoch: int, *, shuffle: bool = True) -> list[int]:
        return [
            row
            for batch in data.batches(one, 7, seed=seed, shuffle=shuffle)(epoch)
            for row in rows(batch)
        ]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(0, 5, shuffle=False) == list(range(30))


def test_a_subset_gives_its_own_rows_under_their_numbers_in_the_index() -> None:
    test = windows(30, train=0.6)["test"]
    found = [row for batch in data.batches(test, 4)(0) for row in rows(batch)]
    assert sorted(found) == test.rows.tolist()
    assert {row % 5 for row in found} == {3, 4}


def test_empty_sets_and_more_processes_than_rows() -> None:
    empty = data.batches(windows(10)["validation"], 4)
    assert (empty.steps, list(empty(0))) == (0, [])
    last = list(data.batches(windows(10), 9)(0, rank=3, world=4))[-1]
    assert last.values.shape == (0, T, V)
    with pytest.raises(ValueError, match="at least 1"):
        data.batches(windows(10), 0)


@pytest.mark.parametrize(
    ("task", "dtype", "wanted"),
    [
        ("classification", torch.int64, [0, 1, 0, 1]),
        ("regression", torch.float32, [0.0, 0.5, 1.0, 1.5]),
        ("multilabel", torch.float32, [[0, 0], [0, 1], [0, 0], [0, 1]]),
        ("none", None, None),
    ],
)
def test_targets(task: str, dtype: torch.dtype | None, wanted: Any) -> None:
    batch = data.collate(windows(4, task=task))
    assert batch.values.dtype == torch.float32
    assert batch.index is not None
    assert batch.index.dtype == torch.int64
    assert (batch.times, batch.mask) == (None, None)
    if wanted is None:
        assert batch.target is None
    else:
        assert batch.target is not None
        assert batch.target.dtype == dtype
        assert batch.target.tolist() == wanted


def test_missing_values_come_with_a_mask() -> None:
    batch = data.collate(windows(8, missing=True), [5, 2])
    assert batch.mask is not None
    assert batch.mask.dtype == torch.bool
    assert (~batch.mask).nonzero().tolist() == [[0, 0, 0]]
    assert batch.values[0, 0].tolist() == [0.0, 5.0]
    before = batch.values.clone()
    batch.values.add_(1)  # a copy, not the map
    assert torch.equal(data.collate(windows(8, missing=True), [5, 2]).values, before)


@given(n=st.integers(1, 20), share=st.floats(0.01, 1.0), seed=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_fraction_draws_training_subjects_once_per_seed(n: int, share: float, seed: int) -> None:
    one = windows(4 * n, subjects=n, train=0.5)
    m = len(set(one["train"].subjects()))
    part = drawing.sample_subjects(one, share, seed)
    drawn = set(part["train"].subjects())
    assert len(drawn) == (m if share == 1 else max(1, round(share * m)))
    assert part["test"].rows.tolist() == one["test"].rows.tolist()
    assert part["train"].rows.tolist() == [
        row for row in range(4 * n) if one.index["subject_id"][row] in drawn
    ]
    assert (
        drawing.sample_subjects(one["train"], share, seed).rows.tolist()
        == part["train"].rows.tolist()
    )
    assert drawn <= set(
        drawing.sample_subjects(one, min(1.0, share * 1.5), seed)["train"].subjects()
    )


def test_fraction_in_batches_and_refused_fractions() -> None:
    one = windows(40, subjects=10)
    found = [row for batch in data.batches(one, 8, seed=3, fraction=0.2)(0) for row in rows(batch)]
    assert sorted(found) == drawing.sample_subjects(one, 0.2, 3).rows.tolist()
    assert len(found) == 8
    assert len({tuple(drawing.sample_subjects(one, 0.2, seed).rows) for seed in range(8)}) > 1
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="fraction"):
            drawing.sample_subjects(one, wrong, 0)


def test_a_limit_draws_so_many_windows_of_each_split() -> None:
    one = windows(40, subjects=10, train=0.7)
    part = drawing.limit_windows(one, 5, seed=1)
    assert (len(part["train"]), len(part["test"])) == (5, 5)
    assert (
        part.rows.tolist()
        == drawing.limit_windows(one, 5, seed=1).rows.tolist()
        != drawing.limit_windows(one, 5, seed=2).rows.tolist()
    )
    assert drawing.limit_windows(one, None, seed=1) is one
    assert len(drawing.limit_windows(one, 1000, seed=1)) == 40


def test_mixed_sets_take_turns_and_every_row_comes_once() -> None:
    first, second = windows(7), windows(12, missing=True, train=0.5)["test"]
    batches = data.mix_batches([first, second], 3, seed=2)
    found = list(batches(1))
    assert (batches.steps, len(found)) == (3 + -(-len(second.rows) // 3), batches.steps)
    own = [*range(7), *(7 + second.rows)]
    assert sorted(row for batch in found for row in batch.index.tolist()) == own  # type: ignore[union-attr]
    for batch in found:
        at = set(batch.source.tolist())  # type: ignore[union-attr]
        assert batch.target is None
        assert len(at) == 1
        for i, row in enumerate(batch.index.tolist()):  # type: ignore[union-attr]
            assert at == {int(row >= 7)}
            assert batch.values[i, -1, -1] == (row if row < 7 else row - 7)
            assert batch.mask is None or batch.mask[i, 0, 0].item() == ((row - 7) % 2 == 0)
    turns = [int(batch.source[0]) for epoch in range(6) for batch in batches(epoch)]  # type: ignore[index]
    assert turns != sorted(turns)
    assert turns[: batches.steps] != turns[batches.steps : 2 * batches.steps]
    resumed = [batch.index.tolist() for batch in batches(1, start=2, rank=1, world=2)]  # type: ignore[union-attr]
    assert resumed == [batch.index.tolist()[1::2] for batch in found[2:]]  # type: ignore[union-attr]


def test_mixed_of_one_set_is_that_set() -> None:
    one = windows(11)
    assert [rows(batch) for batch in data.mix_batches([one], 4, seed=3)(2)] == [
        rows(batch) for batch in data.batches(one, 4, seed=3)(2)
    ]


def test_values_that_travel_as_stored_are_scaled_to_the_same_bits() -> None:
    one = narrow_windows(11)
    for batches in (
        data.batches(one, 4, seed=1),
        data.mix_batches([one, narrow_windows(7)], 4, seed=1),
    ):
        for plain, narrow in zip(
            batches(2, start=1, world=2), batches.read_narrow(2, start=1, world=2), strict=True
        ):  # type: ignore[attr-defined]
            assert (plain.values.dtype, narrow.values.dtype) == (torch.float32, torch.int16)
            scaled = scale_values(narrow)
            assert scaled.affine is None
            assert torch.equal(scaled.values, plain.values)
            assert torch.equal(scaled.index, plain.index)  # type: ignore[arg-type]


def test_values_that_are_missing_or_not_int16_never_travel_as_stored() -> None:
    for one in (narrow_windows(6, missing=True), windows(6)):
        assert not one.narrow
        for batch in data.batches(one, 4).read_narrow(0):  # type: ignore[attr-defined]
            assert batch.affine is None
            assert batch.values.dtype == torch.float32


def test_batches_of_rows_on_a_device_are_those_of_the_host() -> None:
    batches: Any = data.mix_batches(
        [narrow_windows(11, train=0.8)["train"], narrow_windows(7), windows(5)], 4, seed=1
    )
    with batches.keep_on(torch.device("cpu"), 1e9):
        assert sorted(batches.resident) == [0, 1]
        for plain, narrow in zip(
            batches(2, start=1, rank=1, world=2),
            batches.read_narrow(2, start=1, rank=1, world=2),
            strict=True,
        ):
            assert all(
                a is b is None or torch.equal(a, b)
                for a, b in zip(scale_values(narrow), plain, strict=True)
            )
    assert not batches.resident
    # not less:
    with batches.keep_on(torch.device("cpu"), sum(map(len, batches.sets[:2])) * T * V * 2):
        assert not batches.resident


def test_arrays_in_the_place_of_windows_and_batches_are_refused_in_words() -> None:
    """What a notebook tries first ends in a line that names the argument and what reads arrays."""
    array = np.zeros((8, 40, 2), np.float32)
    model = planted.tiny("timelygpt", channels=2)
    with pytest.raises(UserError, match=r"windows: found ndarray.*bitimely\.Encoder"):
        bitimely.batches(array, 4)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"batches: found ndarray.*bitimely\.Encoder"):
        bitimely.fit(model, array, bitimely.get_objective("next"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"objective: found 'next'.*get_objective"):
        bitimely.fit(model, data.batches(windows(4), 2), "next")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"outputs: found \['a', 'b'\]"):
        bitimely.Classifier(model, outputs=["a", "b"])  # type: ignore[arg-type]


def test_models_read_arrays_as_tensors() -> None:
    model = planted.tiny("timelygpt", channels=2).eval()
    array = np.random.default_rng(0).standard_normal((2, 40, 2))
    array[0, 3] = np.nan
    from_array, from_tensor = model(array), model(torch.tensor(array))
    torch.testing.assert_close(from_array.hidden[-1], from_tensor.hidden[-1])
