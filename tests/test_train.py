"""The loop: schedule, optimizer, accumulation, logging, faults. Devices are in test_devices,
resuming in test_resume, several processes in test_ddp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from torch import Tensor, nn

from bitimely_core import objectives
from bitimely_core.config import TrainConfig, validate
from bitimely_core.errors import Exit, Reason, UserError, input_error
from bitimely_core.train import checkpoints, loop, losses, metrics_log, optimizer
from bitimely_core.train.batches import read_ahead
from bitimely_core.train.faults import is_divisible, out_of_memory_error
from bitimely_core.types import Batch

Outcome = dict[str, Any]


pytestmark = pytest.mark.usefixtures("one_thread")


class Tiny(nn.Module):
    """[B, T, 2] -> [B, T, 2]; a norm, dropout and batch statistics on the way."""

    def __init__(
        self, seed: int = 0, dropout: float = 0.2, batch_norm: bool = True, width: int = 6
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.enter, self.leave = nn.Linear(2, width), nn.Linear(width, 2)
        self.norm = nn.LayerNorm(width)
        self.statistics = nn.BatchNorm1d(width) if batch_norm else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.norm(torch.tanh(self.enter(batch.values)))
        if self.statistics is not None:
            hidden = self.statistics(hidden.transpose(1, 2)).transpose(1, 2)
        return self.leave(self.dropout(hidden))


class Rows:
    """Batches of rows of an AR(1) signal [rows, length, 2]; the order depends on (seed, epoch)."""

    def __init__(
        self,
        rows: int = 22,
        size: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        length: int = 5,
    ) -> None:
        noise = torch.randn(
            rows, length, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        for t in range(1, length):
            noise[:, t] = 0.9 * noise[:, t - 1] + 0.4 * noise[:, t]
        self.values, self.size, self.seed = noise.to(dtype), size, seed
        self.mask = torch.arange(length)[None] < length - 3 + torch.arange(rows)[:, None] % 4
        self.steps = math.ceil(rows / size)

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        order = torch.randperm(
            len(self.values), generator=torch.Generator().manual_seed(1000 * self.seed + epoch)
        )
        for at in range(start, self.steps):
            mine = order[at * self.size : (at + 1) * self.size][rank::world]
            yield Batch(self.values[mine], mask=self.mask[mine], index=mine)


def is_finished(folder: Path) -> bool:
    """Whether the last step of the run in `folder` is done and validated."""
    checkpoint = checkpoints.load_latest_checkpoint(folder)
    return checkpoint is not None and checkpoint.meta.finished


def squares(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """The next value, all positions."""
    error = (model(batch)[:, :-1] - batch.values[:, 1:]).square()
    return {
        "loss": error.mean(),
        "rel": error.detach().mean() / 0.5,
        "parts": {"first": error[:, 0].mean(), "rest": error[:, 1:].mean()},
    }


def valid(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """A mean over the observed positions of the batch."""
    assert batch.mask is not None
    error = (model(batch) - batch.values).square().mean(-1)[batch.mask]
    return {"loss": error.mean(), "rel": error.mean(), "parts": {}, "count": int(batch.mask.sum())}


def drawn(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """Guess hidden positions that are drawn by the generator."""
    hide = torch.rand(batch.values.shape[:2], generator=generator) < 0.4
    hide[:, 0] = True
    guess = model(batch._replace(values=batch.values.masked_fill(hide[..., None], 0.0)))
    loss = (guess - batch.values)[hide].square().mean()
    return {
        "loss": loss,
        "rel": math.nan,
        "parts": {"hidden": hide.float().mean()},
        "count": hide.sum(),
    }


def config(**changes: Any) -> TrainConfig:
    return validate(
        TrainConfig, {"epochs": 2, "lr": 1e-2, "log_every": 1, "device": "cpu", **changes}
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_schedule_is_linear_then_cosine() -> None:
    assert [optimizer.compute_schedule_factor(s, 100, 0.05) for s in range(5)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0]
    )
    for step in range(5, 101):
        assert optimizer.compute_schedule_factor(step, 100, 0.05) == pytest.approx(
            math.cos(math.pi * (step - 5) / 190) ** 2
        )
    assert optimizer.compute_schedule_factor(100, 100, 0.05) == pytest.approx(0.0, abs=1e-15)
    assert optimizer.compute_schedule_factor(0, 10, 0.0) == 1.0
    assert optimizer.compute_schedule_factor(0, 1, 0.5) == 1.0


def test_norms_biases_and_vectors_do_not_decay() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.sos = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
            self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)

    class HeadNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(2, 3))

    model = nn.ModuleDict({"tiny": Tiny(), "odd": Odd(), "heads": HeadNorm()})
    decayed, plain = optimizer.group_parameters(model, 0.1)
    assert decayed["names"] == ["tiny.enter.weight", "tiny.leave.weight", "odd.matrix"]
    assert set(plain["names"]) == {
        "tiny.enter.bias",
        "tiny.leave.bias",
        "tiny.norm.weight",
        "tiny.norm.bias",
        "tiny.statistics.weight",
        "tiny.statistics.bias",
        "odd.sos",
        "heads.scale",
    }
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def by_hand(
    model: nn.Module,
    batches: Rows,
    epochs: int,
    lr: float,
    clip: float,
    decay: float,
    warmup: float,
) -> nn.Module:
    """AdamW with decoupled decay, bias correction and clipping, from its definition."""
    total, step = epochs * batches.steps, 0
    rising = round(warmup * total)
    moments = {
        name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()
    }
    for epoch in range(epochs):
        for batch in batches(epoch):
            model.zero_grad()
            squares(model, batch)["loss"].backward()
            norm = math.sqrt(
                sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
            )
            rate = lr * (
                (step + 1) / rising
                if step < rising
                else (1 + math.cos(math.pi * (step - rising) / (total - rising))) / 2
            )
            step += 1
            with torch.no_grad():
                for name, p in model.named_parameters():
                    assert p.grad is not None
                    grad = p.grad * min(1.0, clip / (norm + 1e-6))
                    first, second = moments[name]
                    first.mul_(0.9).add_(0.1 * grad)
                    second.mul_(0.999).add_(0.001 * grad**2)
                    if p.ndim == 2:
                        p.mul_(1 - rate * decay)
                    p.sub_(
                        rate
                        * (first / (1 - 0.9**step))
                        / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
                    )
    return model


def test_fit_is_adamw_from_its_definition() -> None:
    batches = Rows(dtype=torch.float64)
    expected = by_hand(
        Tiny(dropout=0.0, batch_norm=False).double(),
        batches,
        3,
        lr=0.02,
        clip=0.3,
        decay=0.1,
        warmup=0.2,
    )
    model = Tiny(dropout=0.0, batch_norm=False).double()
    loop.fit(
        model,
        batches,
        squares,
        config=config(epochs=3, lr=0.02, clip=0.3, weight_decay=0.1, warmup=0.2),
    )
    for name, value in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("objective", [squares, valid, drawn])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_accumulated_gradient_is_that_of_the_full_batch(
    objective: loop.Objective, parts: int
) -> None:
    batches = Rows(rows=20, size=7, dtype=torch.float64)  # the last batch has 6 rows: uneven parts
    lines: list[list[Outcome]] = [[], []]
    models = [Tiny(dropout=0.0, batch_norm=False).double() for _ in range(2)]
    for model, accumulate, log in zip(models, (1, parts), lines, strict=True):
        loop.fit(model, batches, objective, config=config(accumulate=accumulate), log=log.append)
    for name, value in weights(models[0]).items():
        torch.testing.assert_close(weights(models[1])[name], value, rtol=1e-9, atol=1e-12)
    for a, b in zip(*lines, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-9)


def test_lines_of_the_log(tmp_path: Any) -> None:
    seen: list[Outcome] = []
    batches = Rows()
    result = loop.fit(
        Tiny(),
        batches,
        squares,
        validation=Rows(rows=9),
        folder=tmp_path,
        log=seen.append,
        config=config(log_every=4),
    )
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (
        lines
        == [{key: value for key, value in line.items() if key != "of"} for line in seen]
        == metrics_log.read_metrics(tmp_path)
    )
    assert [(line["step"], line["split"]) for line in lines] == [
        (1, "train"),
        (4, "train"),
        (6, "train"),
        (6, "validation"),
        (8, "train"),
        (12, "train"),
        (12, "validation"),
    ]
    assert set(lines[0]) == {
        "step",
        "epoch",
        "split",
        "loss",
        "rel",
        "first",
        "rest",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "data_wait",
    }
    assert [line["epoch"] for line in lines] == [1, 1, 1, 1, 2, 2, 2]
    assert all(
        line["loss"]
        == pytest.approx((line["first"] + 3 * line["rest"]) / 4)
        == pytest.approx(line["rel"] / 2)
        for line in lines
    )
    assert all(line["of"] == 12 for line in seen)
    best = min(
        (line for line in lines if line["split"] == "validation"),
        key=lambda line: float(line["loss"]),
    )
    assert result["best"].items() <= best.items()
    assert set(result["best"]) == {"loss", "rel", "step", "epoch"}
    assert (
        result["steps"],
        result["epochs"],
        result["finished"],
        result["resumed"],
        result["device"],
    ) == (12, 2.0, True, None, "cpu")
    assert result["loss"] == lines[-2]["loss"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-6",
        "step-12",
        "LATEST",
    }
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_validation_is_the_mean_over_its_rows_without_dropout_and_without_a_trace() -> None:
    held = Rows(rows=10, size=4)
    seen: list[Outcome] = []
    model, other = Tiny(), Tiny()
    loop.fit(model, Rows(), squares, validation=held, config=config(), log=seen.append)
    loop.fit(other, Rows(), squares, config=config())
    assert same(weights(model), weights(other))
    with torch.no_grad():
        expected = squares(model.eval(), Batch(held.values))["loss"]
    assert [line["loss"] for line in seen if line["split"] == "validation"][-1] == pytest.approx(
        float(expected), rel=1e-5
    )


def test_the_loss_falls() -> None:
    seen: list[Outcome] = []
    loop.fit(Tiny(dropout=0.0), Rows(), squares, epochs=20, lr=3e-2, log=seen.append)
    assert seen[-1]["loss"] < 0.5 * seen[0]["loss"]


def test_shortcuts_win_over_the_configuration() -> None:
    batches = Rows()
    assert loop.fit(Tiny(), batches, squares, config=config(steps=3))["steps"] == 3
    assert (
        loop.fit(Tiny(), batches, squares, config=config(steps=3), epochs=1)["steps"]
        == batches.steps
    )
    assert loop.fit(Tiny(), batches, squares, config=config(), epochs=9, steps=2)["steps"] == 2
    with pytest.raises(UserError) as refused:
        loop.fit(Tiny(), batches, squares, lr=-1.0)
    assert (refused.value.code, refused.value.exit_code) == (Reason.CONFIG, Exit.USAGE)


def test_the_same_seed_gives_the_same_bits_and_leaves_no_trace() -> None:
    def trained(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(torch.seed() if seed else 5)  # what was drawn before does not matter
        model = Tiny()
        before = torch.get_rng_state()
        loop.fit(model, Rows(), drawn, config=config(seed=seed))
        assert torch.equal(before, torch.get_rng_state())
        return weights(model)

    first = trained(3)
    assert same(first, trained(3))
    assert not same(first, trained(4))
    assert not torch.are_deterministic_algorithms_enabled()


def test_each_step_draws_other_numbers() -> None:
    seen: list[float] = []

    def watched(
        model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Outcome:
        seen.extend([float(torch.rand(())), float(torch.rand((), generator=generator))])
        return squares(model, batch)

    loop.fit(Tiny(), Rows(), watched, config=config(accumulate=2))
    assert len(set(seen)) == len(seen) == 2 * 2 * 12


def test_bf16_autocast_stays_near_fp32() -> None:
    seen: list[torch.dtype] = []

    def watched(
        model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Outcome:
        out = model(batch)
        seen.append(out.dtype)
        return {"loss": (out.float() - batch.values).square().mean(), "rel": 1.0, "parts": {}}

    losses = [
        loop.fit(Tiny(dropout=0.0), Rows(), watched, config=config(precision=precision))["loss"]
        for precision in ("fp32", "bf16")
    ]
    assert seen[0] == torch.float32
    assert seen[-1] == torch.bfloat16
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_a_batch_that_is_not_finite_stops_at_its_step_and_is_named(tmp_path: Any) -> None:
    batches = Rows()
    (bad,) = [batch for at, batch in enumerate(batches(1)) if at == 2]
    assert bad.index is not None
    batches.values[bad.index[1], 3, 0] = math.nan
    first = next(
        epoch_step + 1 for epoch_step, batch in enumerate(batches(0)) if batch.values.isnan().any()
    )
    with pytest.raises(UserError) as stopped:
        loop.fit(
            Tiny(batch_norm=False),
            batches,
            squares,
            folder=tmp_path,
            config=config(checkpoint_every=1),
        )
    rows = next(batch.index for at, batch in enumerate(batches(0)) if at + 1 == first)
    assert rows is not None
    assert stopped.value.code is Reason.NON_FINITE_LOSS
    assert f"step {first}, batch rows {', '.join(map(str, rows.tolist()))}" in stopped.value.problem
    assert f"not finite in rows {int(bad.index[1])}" in stopped.value.problem
    former = checkpoints.load_latest_checkpoint(tmp_path)
    assert (0 if former is None else former.step) == first - 1


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(tmp_path: Any) -> None:
    def rooted(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
        out = squares(model, batch)
        # 0 with an infinite slope
        return {**out, "loss": out["loss"] + torch.sqrt((model(batch) * 0).square().sum())}

    model = Tiny(batch_norm=False)
    before = weights(model)
    with pytest.raises(UserError, match="non-finite gradient norm"):
        loop.fit(model, Rows(), rooted, config=config())
    assert same(weights(model), before)


def test_divergence_stops_and_keeps_the_last_finite_checkpoint(tmp_path: Any) -> None:
    with pytest.raises(UserError) as stopped:
        loop.fit(
            Tiny(),
            Rows(),
            squares,
            epochs=20,
            lr=1e6,
            folder=tmp_path,
            config=config(checkpoint_every=1, warmup=0.0),
        )
    assert stopped.value.code is Reason.NON_FINITE_LOSS
    assert "step" in stopped.value.problem
    former = checkpoints.load_latest_checkpoint(tmp_path)
    assert former is not None
    assert checkpoints.is_finite(checkpoints.load_tensors(former, "model"))
    assert checkpoints.is_finite(checkpoints.load_tensors(former, "optimizer"))


class Overflowing(nn.Module):
    """Batch statistics of values whose variance no float32 holds: what is read with it is 0, so
    that loss and gradients are finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(2)

    def forward(self, batch: Batch) -> Tensor:
        return self.statistics(batch.values.transpose(1, 2) * 1e25).transpose(1, 2)


def test_running_statistics_that_are_not_finite_are_never_saved(tmp_path: Any) -> None:
    model = Overflowing()
    with pytest.raises(UserError, match="running statistics after step 2") as stopped:
        loop.fit(model, Rows(), squares, folder=tmp_path, config=config(checkpoint_every=2))
    assert not torch.isfinite(model.statistics.running_var).any()  # type: ignore[arg-type]
    assert stopped.value.code is Reason.NON_FINITE_LOSS
    assert checkpoints.list_steps(tmp_path / "checkpoints") == []


def test_losses_of_micro_batches_add_up_on_the_host_as_on_a_device() -> None:
    """Loss and part are means over 1 and 3, rel over 10 and 2: (1 x 4 + 3 x 8) / 4, (10 x 0.5 + 2 x
    2) / 12.
    """
    sums, parts, zero = [0.0] * 4, losses.Parts(), torch.zeros(())
    on_device = losses.DeviceLosses(zero, zero.new_full((4,), -1.0), zero.new_zeros(4))
    for loss, count, rel, rel_count in ((4.0, 1, 0.5, 10), (8.0, 3, 2.0, 2)):
        out = losses.BatchLoss(
            torch.tensor(loss), count, torch.tensor(rel), {"half": loss / 2}, rel_count
        )
        losses.accumulate(sums, parts, out)
        on_device.add(out)
    assert sums == on_device.last.tolist()[:4]
    assert (sums[1] / sums[0], sums[2] / sums[3]) == (7.0, 0.75)
    assert parts["half"] == (4.0, 14.0) == (on_device.last.tolist()[0], on_device.last.tolist()[4])


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_exhausted_memory_names_the_batch_and_what_to_try(fault: Exception, tmp_path: Any) -> None:
    calls = 0

    def greedy(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise fault
        return squares(model, batch)

    with pytest.raises(UserError) as stopped:
        loop.fit(Tiny(), Rows(), greedy, folder=tmp_path, config=config(checkpoint_every=2))
    assert (stopped.value.code, stopped.value.exit_code) == (Reason.RESOURCE_LIMIT, Exit.RESOURCES)
    assert "out of memory at batch 5" in stopped.value.problem
    assert "--batch-size 2" in stopped.value.hint
    former = checkpoints.load_latest_checkpoint(tmp_path)
    assert former is not None
    assert former.step == 4


@pytest.mark.parametrize(
    ("name", "options", "settings", "divisible"),
    [
        ("gpt", {}, {}, True),
        ("gpt", {"target": "tokens"}, {}, False),
        ("ts2vec", {}, {}, False),
        ("tf-c", {}, {}, False),
        ("patchtst", {}, {}, False),
        ("autoformer", {}, {}, True),
        ("timesnet", {}, {}, True),
        ("s4", {"encoder_norm": "layer"}, {"source": "rows"}, False),
    ],
)
def test_accumulation_is_offered_as_the_same_gradient_only_where_it_is(
    name: str, options: dict[str, Any], settings: dict[str, Any], divisible: bool
) -> None:
    """Not where rows are compared with each other, and not where they or their targets are read by
    statistics of the batch.
    """
    from bitimely_core import registry

    torch.manual_seed(0)
    model = planted.tiny(name, channels=2, length=48, dropout=0.0, **options).train()
    objective = objectives.get(registry.models[name].facts.objective, **settings)
    x = torch.randn(4, 48, 2)

    def gradient(parts: int) -> torch.Tensor:
        model.train().zero_grad()
        draw, counts = torch.Generator().manual_seed(0), []
        for rows in x.chunk(parts):
            out = objective(model, Batch(rows), draw)
            (out["loss"] * out["count"]).backward()
            counts.append(int(out["count"]))
        return torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        ) / sum(counts)

    at_once, in_parts = gradient(1), gradient(2)
    assert torch.allclose(at_once, in_parts, rtol=1e-3, atol=1e-5) == divisible
    error = out_of_memory_error(
        MemoryError(), Rows(), config(), 1, divisible=is_divisible(model, objective)
    )
    assert error is not None
    assert "--accumulate 2" in error.hint
    assert ("same gradient" in error.hint) == divisible


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ZeroDivisionError(),
    ],
)
def test_memory_that_is_exhausted_while_the_scale_is_measured(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:

    def measure(model: nn.Module, batches: Any) -> None:
        raise fault

    monkeypatch.setattr(objectives, "measure_scale", measure)
    model = Tiny()
    model.register_buffer("target_scale", torch.tensor(math.nan, dtype=torch.float64))
    with pytest.raises(
        ZeroDivisionError if isinstance(fault, ZeroDivisionError) else UserError
    ) as stopped:
        loop.fit(model, Rows(), squares, config=config())
    if isinstance(stopped.value, UserError):
        assert stopped.value.exit_code == Exit.RESOURCES
        assert "out of memory at batch 1" in stopped.value.problem
        assert "--batch-size 2" in stopped.value.hint


def test_other_exceptions_pass_through() -> None:
    def broken(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.fit(Tiny(), Rows(), broken, config=config())


def test_a_finished_run_returns_at_once_with_its_weights(tmp_path: Any) -> None:
    model = Tiny()
    first = loop.fit(
        model, Rows(), drawn, folder=tmp_path, validation=Rows(rows=6), config=config()
    )
    assert is_finished(tmp_path)

    def never(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
        raise AssertionError

    again = Tiny(seed=9)
    files = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    second = loop.fit(
        again,
        Rows(),
        never,
        folder=tmp_path,
        validation=Rows(rows=6),
        config=config(),
        identity=None,
    )
    assert same(weights(model), weights(again))
    assert second == {**first, "resumed": 12}
    assert files == {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_no_steps_and_no_batches(tmp_path: Any) -> None:
    model = Tiny()
    before = weights(model)
    assert loop.fit(model, Rows(), squares, epochs=0, folder=tmp_path)["steps"] == 0
    assert is_finished(tmp_path)
    assert same(weights(model), before)
    with pytest.raises(UserError) as refused:
        loop.fit(model, Rows(rows=0), squares)
    assert refused.value.code is Reason.NO_INPUT


def test_a_run_is_locked_while_it_trains(tmp_path: Any) -> None:
    def nested(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
        loop.fit(Tiny(), Rows(), squares, folder=tmp_path, config=config())
        raise AssertionError

    with pytest.raises(UserError) as refused:
        loop.fit(Tiny(), Rows(), nested, folder=tmp_path, config=config())
    assert (refused.value.code, refused.value.exit_code) == (Reason.LOCKED, Exit.LOCKED)


def test_frozen_and_unused_parameters_stay(tmp_path: Any) -> None:
    model = Tiny()
    model.enter.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, 2)))
    before = weights(model)
    loop.fit(model, Rows(), squares, folder=tmp_path, config=config())
    for name in ("enter.weight", "enter.bias", "unused"):
        assert torch.equal(model.get_parameter(name), before[name])
    assert not torch.equal(model.leave.weight, before["leave.weight"])
    again = Tiny()
    again.enter.requires_grad_(False)
    again.register_parameter("unused", nn.Parameter(torch.ones(2, 2)))
    loop.fit(again, Rows(), squares, folder=tmp_path, config=config())
    assert same(weights(again), weights(model))


def test_the_model_comes_back_in_its_mode() -> None:
    for mode in (True, False):
        model = Tiny().train(mode)
        loop.fit(model, Rows(), squares, steps=1)
        assert model.training is mode


def test_unmeasured_scale_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:

    calls: list[Any] = []

    def measure(model: nn.Module, batches: Any, limit: int = 256) -> None:
        calls.append(batches)
        model.get_buffer("target_scale").fill_(2.5)

    monkeypatch.setattr(objectives, "measure_scale", measure)

    def scaled() -> nn.Module:
        model = Tiny()
        model.register_buffer("target_scale", torch.tensor(math.nan, dtype=torch.float64))
        return model

    batches, first, second = Rows(), scaled(), scaled()
    loop.fit(first, batches, squares, folder=tmp_path, config=config())
    loop.fit(second, batches, squares, folder=tmp_path, config=config())
    assert calls == [batches]
    assert float(second.get_buffer("target_scale")) == 2.5
    loop.fit(Tiny(), batches, squares, config=config())
    assert calls == [batches]


def test_reading_ahead_keeps_order_errors_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    batches, gpu = Rows(), torch.device("cuda")
    for a, b in zip(read_ahead(batches(3), gpu), batches(3), strict=True):
        assert torch.equal(a.values, b.values)

    def broken() -> Iterator[Batch]:
        yield next(batches(0))
        raise input_error(Reason.INTEGRITY, "damaged")

    stream = read_ahead(broken(), gpu)
    next(stream)
    with pytest.raises(UserError, match="damaged"):
        next(stream)
    stream = read_ahead(batches(0), gpu)
    next(stream)
    stream.close()
    for thread in threading.enumerate():
        if thread.name == "batches":
            thread.join(5)
            assert not thread.is_alive()
