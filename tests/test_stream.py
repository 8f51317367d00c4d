"""Streams of one-way models against one pass in float64 over the sequence so far."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from planted import lively, seeded, tiny

from bitimely_core.errors import Reason, UserError
from bitimely_core.heads import pool
from bitimely_core.models import open_stream
from bitimely_core.registry import models
from bitimely_core.types import Batch

torch.set_num_threads(1)

SIGNALS = {
    "conv": {},
    "patch": {"tokenizer": "patch"},
    "overlap": {"tokenizer": "patch", "stride": 3},
    "network": {"tokenizer": "patch-cnn", "patch": 8},
    "steps": {"tokenizer": "steps"},
    "channels": {"tokenizer": "patch", "channel_independent": True},
}
RETENTION = (
    {"xpos_scale": True},
    {"temporal_conv": "causal"},
    {"retention_norm": "rms", "form": "recurrent"},
    {"form": "parallel"},
)
KINDS = [(name, options) for name in ("timelygpt", "s4", "lstm") for options in SIGNALS.values()]
KINDS += [("timelygpt", {"tokenizer": "patch", **options}) for options in RETENTION]
KINDS += [
    (
        "timelygpt",
        {
            "tokenizer": "steps",
            "decay": {"kind": "learnable"},
            "xpos_scale": True,
            "temporal_conv": "causal",
        },
    )
]
KINDS += [
    ("lstm", {"connections": "residual-norm"}),
    ("s4", {"norm_first": True, "encoder_norm": "layer"}),
]
EVENTS = [
    ("timelygpt", {}),
    ("timelygpt", {"rotary": "time"}),
    ("timelygpt", {"clock": "index"}),
    ("s4", {}),
    ("lstm", {}),
    ("lstm", {"exact_times": False}),
]


def make(name, **options):
    """The same weights in float32 and float64."""
    wide = lively(tiny(name, layers=2, **options))
    narrow = copy.deepcopy(wide).float()
    wide.load_state_dict({key: weight.double() for key, weight in narrow.state_dict().items()})
    return narrow.requires_grad_(False), wide.requires_grad_(False)


def feed_in_pieces(stream, batch, sizes):
    """Batch fields along time in pieces of these sizes, then the rest."""
    sizes = [*sizes, batch.values.shape[1] - sum(sizes)]
    fields = {
        name: getattr(batch, name)
        for name in ("values", "times", "mask")
        if getattr(batch, name) is not None
    }
    pieces = zip(*(x.split(sizes, 1) for x in fields.values()), strict=True)
    return [
        stream.feed(Batch(**dict(zip(fields, piece, strict=True)), person=batch.person))
        for piece in pieces
    ]


def check(narrow, wide, batch, sizes, end=None):
    full = wide(
        batch._replace(
            **{
                k: v.double()
                for k, v in batch._asdict().items()
                if v is not None and v.is_floating_point()
            }
        )
    )
    stream = open_stream(narrow)
    parts = feed_in_pieces(stream, batch._replace(end=None), sizes)
    count = stream.tokens
    last, again = stream.finish(end), stream.finish(end)
    assert torch.equal(last.hidden[-1], again.hidden[-1])
    assert (
        full.tokens.shape[1]
        == count + last.tokens.shape[1]
        == sum(part.tokens.shape[1] for part in parts) + int(last.eos[0])
    )
    tokens = torch.cat([part.tokens for part in (*parts, last)], 1)
    torch.testing.assert_close(tokens.to(full.tokens), full.tokens, rtol=0, atol=1e-5)
    for layer, states in enumerate(full.hidden):
        found = torch.cat([part.hidden[layer] for part in (*parts, last)], 1).double()
        torch.testing.assert_close(
            found, states[:, 1:], rtol=1e-5, atol=1e-5 * float(states.abs().max())
        )


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_a_stream_of_signals_is_the_full_pass(name, options):
    """To 1e-5 over windows five times as long as the model's, in uneven pieces, with missing
    samples and an incomplete last token.
    """
    narrow, wide = make(name, **options)
    x = torch.randn(2, 257, 3, generator=seeded())
    check(narrow, wide, Batch(x), [1, 2, 5, 0, 64, 3, 1, 1, 90])
    mask = torch.rand(2, 257, 3, generator=seeded(1)) > 0.2
    mask[:, -1] = True  # a row ends with its last observed sample
    check(narrow, wide, Batch(x, mask=mask), [100, 7])


@pytest.mark.parametrize(("name", "options"), EVENTS)
def test_a_stream_of_events_is_the_full_pass(name, options):
    """With their times, the person and the index day."""
    narrow, wide = make(name, tokenizer="codes", codes=20, **options)
    codes = torch.randint(5, 20, (2, 70), generator=seeded())
    times = torch.rand(2, 70, generator=seeded(1)).mul(3).floor().cumsum(1) / 3 + 7
    person = torch.randn(2, 4, generator=seeded(2))
    end = times[:, -1] + 5
    check(narrow, wide, Batch(codes, times=times, person=person), [1, 3, 30])
    check(narrow, wide, Batch(codes, times=times, person=person, end=end), [20, 20], end)


@pytest.mark.slow
def test_pieces_beyond_those_of_the_stream():
    """More tokens at a time than go through the layers at a time, and one at a time."""
    narrow, wide = make("timelygpt", tokenizer="steps", xpos_scale=True)
    batch = Batch(torch.randn(1, 1800, 3, generator=seeded()))
    check(narrow, wide, batch, [1100])
    check(narrow, wide, batch, [1] * 300)


def test_the_xpos_scale_has_no_end():
    """Beyond the positions over which a full pass is refused: as a pass that begins later, since
    the decay has forgotten what was before.
    """
    narrow, wide = make(
        "timelygpt", tokenizer="steps", xpos_scale=True, decay={"from": 8, "to": 64}
    )
    x = torch.randn(1, 20_000, 3, generator=seeded())
    with pytest.raises(UserError):
        wide(Batch(x.double()))
    found = open_stream(narrow).feed(x).hidden[-1][:, -5:].double()
    torch.testing.assert_close(
        found, wide(Batch(x[:, -3000:].double())).hidden[-1][:, -6:-1], rtol=1e-5, atol=1e-5
    )


def count_kept(value):
    """Entries of the tensors that an object holds."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    parts = (
        value
        if isinstance(value, tuple)
        else vars(value).values()
        if hasattr(value, "__dict__")
        else ()
    )
    return sum(count_kept(part) for part in parts)


@pytest.mark.parametrize("name", ["timelygpt", "s4", "lstm"])
@pytest.mark.parametrize("tokenizer", ["conv", "patch", "steps"])
def test_what_a_stream_keeps_does_not_grow(name, tokenizer):
    model = tiny(
        name,
        layers=2,
        tokenizer=tokenizer,
        **({"temporal_conv": "causal"} if name == "timelygpt" else {}),
    )
    stream, kept = open_stream(model), []
    for size in (80, 160, 800):
        stream.feed(torch.randn(2, size, 3, generator=seeded()))
        kept.append(count_kept(stream._progress))
    assert 0 < kept[0] <= kept[1] == kept[2] < 1.01 * kept[0]


@pytest.mark.slow
def test_a_million_tokens_in_constant_memory():
    """The peak of the process does not grow behind the first hundred thousand tokens; the last
    states are those of a fresh full pass.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("the peak is read from /proc")
    narrow, wide = make(
        "timelygpt",
        tokenizer="steps",
        channels=1,
        heads=2,
        dim=8,
        value_dim=8,
        ffn_dim=8,
        decay={"from": 8, "to": 64},
    )
    stream, generator, peaks, tail = open_stream(narrow), seeded(), [], torch.zeros(1, 0, 1)
    for piece in range(1000):
        x = torch.randn(1, 1000, 1, generator=generator)
        last = stream.feed(x).hidden[-1]
        if piece in {100, 999}:
            peaks.append(int(status.read_text().split("VmHWM:")[1].split()[0]))
        tail = torch.cat((tail[:, -2000:], x), 1)
    assert stream.tokens == 1_000_000
    assert peaks[1] - peaks[0] < 4096  # KiB
    states = wide(Batch(tail.double())).hidden[-1]
    torch.testing.assert_close(last[:, -5:].double(), states[:, -6:-1], rtol=1e-5, atol=1e-5)


REFUSED = {
    "bitimelygpt": "future",
    "timelybert": "future",
    "gpt_baar": "future",
    "lstm-baar": "future",
    "elmo": "future",
    "gpt": "every token",
    "patchtst": "windows",
}


@pytest.mark.parametrize(
    "name", [name for name in models if name not in {"timelygpt", "s4", "lstm"}]
)
def test_other_models_refuse_by_name(name):
    model = tiny(name, length=96)
    with pytest.raises(UserError) as caught:
        open_stream(model)
    assert caught.value.exit_code == 2
    assert name in str(caught.value)
    assert REFUSED.get(name, "") in str(caught.value)


def test_what_a_stream_cannot_take_is_refused():
    build = partial(tiny, "timelygpt", layers=2)
    for model, words in (
        (build().train(), "eval"),
        (build(tokenizer="codes", codes=20, ties="group"), "ties"),
        (build(tokenizer="patch", crop="start"), "crop"),
    ):
        with pytest.raises(UserError, match=words):
            open_stream(model)
    stream = open_stream(build())
    with pytest.raises(UserError, match="without samples"):
        stream.finish()
    stream.feed(torch.zeros(2, 8, 3))
    with pytest.raises(UserError, match="as before"):
        stream.feed(torch.zeros(1, 8, 3))
    events = open_stream(build(tokenizer="codes", codes=20))
    events.feed(Batch(torch.full((1, 2), 6), times=torch.tensor([[1.0, 2.0]])))
    with pytest.raises(UserError, match="decrease"):
        events.feed(Batch(torch.full((1, 1), 6), times=torch.tensor([[1.5]])))
    with pytest.raises(UserError, match="all pieces"):
        events.feed(Batch(torch.full((1, 1), 6)))
    assert (
        events.feed(Batch(torch.full((1, 1), 6), times=torch.tensor([[2.0]]))).hidden[-1].shape[1]
        == 1
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("timelygpt", {}), ("s4", {}), ("lstm", {}), ("timelygpt", {"index_day": False})],
)
def test_the_index_day_of_the_pieces_is_that_of_the_end(name, options):
    """Fed or given at the end; a model without index days has none in a stream either."""
    narrow, wide = make(name, tokenizer="codes", codes=20, **options)
    codes = torch.randint(5, 20, (2, 30), generator=seeded())
    times = torch.rand(2, 30, generator=seeded(1)).mul(3).cumsum(1)
    end = times[:, -1] + 5
    check(narrow, wide, Batch(codes, times=times, end=end), [20], end)
    stream = open_stream(narrow)
    stream.feed(Batch(codes, times=times, end=end))
    assert torch.equal(stream.finish().hidden[-1], stream.finish(end).hidden[-1])
    early = stream.finish(end + 1).hidden[-1]
    assert torch.equal(early, stream.finish().hidden[-1]) is (options.get("index_day") is False)


@pytest.mark.parametrize("name", ["timelygpt", "s4", "lstm"])
def test_rows_that_end_with_padding_have_no_end(name):
    """[EOS] would stand behind the padding, where a full pass has it behind the last event; a gap
    within a row is one for both.
    """
    narrow, wide = make(name, tokenizer="codes", codes=20)
    codes = torch.randint(5, 20, (2, 30), generator=seeded())
    times = torch.rand(2, 30, generator=seeded(1)).mul(3).cumsum(1)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, 10:12] = False
    check(narrow, wide, Batch(codes * mask, times=times, mask=mask), [11, 5])
    stream = open_stream(narrow)
    stream.feed(Batch(codes[:, :11] * mask[:, :11], times=times[:, :11], mask=mask[:, :11]))
    stream.feed(Batch(codes[:, :0], times=times[:, :0]))
    with pytest.raises(UserError, match="end with padding") as caught:
        stream.finish()
    assert (caught.value.code, caught.value.exit_code) == (Reason.SHAPES_DIFFER, 2)
    stream.feed(Batch(codes[:, 11:13] * mask[:, 11:13], times=times[:, 11:13], mask=mask[:, 11:13]))
    assert stream.finish().hidden[-1].isfinite().all()


@pytest.mark.parametrize("name", ["timelygpt", "s4", "lstm"])
@pytest.mark.parametrize(
    "options",
    [{}, {"tokenizer": "steps"}, {"tokenizer": "patch", "channel_independent": True}],
    ids=str,
)
def test_rows_that_end_with_missing_samples_have_no_end(name, options):
    """A full pass has [EOS] before them; a channel by itself ends by itself. The next sample, or
    zeros for them, give an end again.
    """
    narrow, wide = make(name, **options)
    x = torch.randn(2, 40, 3, generator=seeded())
    x[1, 30:33] = torch.nan
    x[0, 20, 1] = torch.nan  # of the other channels there are samples
    stream = open_stream(narrow)
    for before, at, ends in (
        (0, 21, "channel_independent" not in options),
        (21, 31, False),
        (31, 33, False),
        (33, 40, True),
    ):
        stream.feed(x[:, before:at])
        if ends:
            full = wide(Batch(x[:, :at].nan_to_num().double(), mask=~x[:, :at].isnan()))
            torch.testing.assert_close(
                stream.finish().hidden[-1][:, -1].double(),
                full.hidden[-1][:, -1],
                rtol=1e-5,
                atol=1e-5,
            )
        else:
            with pytest.raises(UserError, match="end with padding or missing") as caught:
                stream.finish()
            assert (caught.value.code, caught.value.exit_code) == (Reason.SHAPES_DIFFER, 2)


@pytest.mark.parametrize("name", ["timelygpt", "s4", "lstm"])
@pytest.mark.parametrize("tokenizer", ["conv", "patch", "steps"])
def test_pieces_of_any_kind_are_read_as_the_same_numbers(name, tokenizer):
    """NaN are missing in tensors, batches and mappings, with a mask beside them or without; arrays
    of numpy are float64.
    """
    narrow, wide = make(name, tokenizer=tokenizer)
    x = torch.randn(2, 40, 3, generator=seeded())
    x[:, 5], x[0, 17, 1] = torch.nan, torch.nan
    mask = torch.ones(2, 40, 3, dtype=torch.bool)
    states = wide(Batch(x.nan_to_num().double(), mask=~x.isnan())).hidden[-1]
    for rows in (
        x,
        x.double(),
        Batch(x),
        Batch(x.double(), mask=mask),
        {"values": x},
        {"values": x.nan_to_num(), "mask": ~x.isnan()},
    ):
        stream = open_stream(narrow)
        found = torch.cat((stream.feed(rows).hidden[-1], stream.finish().hidden[-1]), 1)
        assert found.dtype == torch.float32
        torch.testing.assert_close(
            found.double(), states[:, 1:], rtol=1e-5, atol=1e-5 * float(states.abs().max())
        )


EVENT_CODES = {"tokenizer": "codes", "codes": 20}


@pytest.mark.parametrize(
    ("readout", "options"),
    [("eos", {}), ("eos", {"tokenizer": "patch"}), ("eos", EVENT_CODES), ("last", EVENT_CODES)],
)
@pytest.mark.parametrize("name", ["timelygpt", "s4", "lstm"])
def test_the_end_of_a_stream_has_the_readouts_of_a_full_pass(name, readout, options):
    narrow, wide = make(name, **options)
    x = (
        torch.randint(5, 20, (2, 30), generator=seeded())
        if "codes" in options
        else torch.randn(2, 30, 3, generator=seeded())
    )
    stream = open_stream(narrow)
    stream.feed(x)
    wanted = pool(wide(x if "codes" in options else x.double()), wide, readout)
    torch.testing.assert_close(
        pool(stream.finish(), narrow, readout).double(), wanted, rtol=1e-5, atol=1e-5
    )


def test_a_model_of_several_data_sets_has_no_stream():
    model = tiny("timelygpt", layers=2, tokenizer="patch", others=(2,))
    with pytest.raises(UserError, match=r"model\.others.*select_adapter"):
        open_stream(model)
    model.select_adapter(1)
    assert open_stream(model).feed(torch.zeros(1, 16, 2)).hidden[-1].shape[1] == 2


def test_training_after_the_start_of_a_stream_is_refused():
    """Before a statistic of a batch norm has changed."""
    model = tiny("timelygpt", layers=2, tokenizer="steps", temporal_conv="causal")
    stream = open_stream(model)
    stream.feed(torch.zeros(1, 4, 3))
    before = copy.deepcopy(model.state_dict())
    model.train()
    for call in (partial(stream.feed, torch.ones(1, 4, 3)), stream.finish):
        with pytest.raises(UserError, match="eval"):
            call()
    assert all(
        torch.equal(weight.nan_to_num(), before[name].nan_to_num())
        for name, weight in model.state_dict().items()
    )


@pytest.mark.parametrize("name", ["timelygpt", "s4", "lstm"])
def test_the_first_piece_is_checked_as_the_later_ones(name):
    model = tiny(name, layers=2, tokenizer="codes", codes=20)
    codes, stream = torch.full((1, 3), 6), open_stream(model)
    for times in ([3.0, 1.0, 2.0], [1.0, float("nan"), 2.0], [1.0, 2.0, float("inf")]):
        with pytest.raises(UserError, match="decrease or are not finite") as caught:
            stream.feed(Batch(codes, times=torch.tensor([times])))
        assert (caught.value.code, caught.value.exit_code) == (Reason.TIMESTAMPS, 2)
    stream.feed(Batch(codes, times=torch.tensor([[1.0, 2.0, 3.0]])))
    for end in (2.5, float("nan")):
        with pytest.raises(UserError, match="before the last event"):
            stream.finish(torch.tensor([end]))
    with pytest.raises(UserError, match="one a row"):
        stream.finish(torch.tensor([4.0, 5.0]))
    assert stream.finish(torch.tensor([3.0])).hidden[-1].isfinite().all()


@pytest.mark.parametrize("tokenizer", ["conv", "patch", "steps"])
@pytest.mark.parametrize("size", [0, 1, 24])
def test_a_first_piece_of_other_channels_is_refused(tokenizer, size):
    stream = open_stream(tiny("timelygpt", layers=2, tokenizer=tokenizer))
    with pytest.raises(UserError, match="reads") as caught:
        stream.feed(torch.zeros(1, size, 2))
    assert caught.value.code == Reason.SHAPES_DIFFER
    assert stream.tokens == 0
    stream.feed(torch.zeros(1, 8, 3))
