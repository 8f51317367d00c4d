"""How time and memory grow with the length of a sequence: retention in its three forms, softmax
attention, and a complete model.

One call is a forward and a backward pass on one sequence of N tokens. Every candidate is measured
at every length once a round, in CPU time of one thread, so that load on the machine affects all of
them alike; medians over the rounds are shown. A slope is that of the log-log regression line: 1 =
linear, 2 = quadratic. Memory is counted, not sampled: the largest number of bytes in tensors alive
at one time, beyond the inputs (parameters of the model and their gradients included); memory inside
a kernel is not counted.

Legend: N tokens, H heads, K key width of a head, V value width of a head, R rounds.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitimely_core import models as building
from bitimely_core.config import ModelConfig, build_model_config
from bitimely_core.errors import safe_text, usage_error
from bitimely_core.models.factory import complete_config
from bitimely_core.models.tokenizers import FIRST, samples_per_token
from bitimely_core.ops.retention import retention
from bitimely_core.page import Line, LinePlot, Page, PageBuilder
from bitimely_core.privacy import Sharing
from bitimely_core.progress import report_progress
from bitimely_core.registry import AnalysisFacts, analyses, models
from bitimely_core.run import Run
from bitimely_core.types import Batch

Call = Callable[[], Any]

CHANNELS = 1
CODES = 100  # vocabulary of an events model that is timed
PARALLEL, CHUNKWISE, RECURRENT = (
    "retention, parallel",
    "retention, chunkwise",
    "retention, recurrent",
)
SOFTMAX, FUSED = "softmax attention", "softmax attention, fused"
# time, memory
EXPECTED = {
    PARALLEL: (2.0, 2.0),
    CHUNKWISE: (1.0, 1.0),
    RECURRENT: (1.0, 1.0),
    SOFTMAX: (2.0, 2.0),
    FUSED: (2.0, 1.0),
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make and that are still alive, and their largest
    sum.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._note(tensor, new=False)  # tensors that exist already do not count
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self._note(tensor, new=True)
        return out

    def _note(self, tensor: Any, *, new: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key not in self._known:
            self.live += size
            self.peak = max(self.peak, self.live)
            self._known[key] = weakref.ref(storage, lambda _: self._release(key, size))

    def _release(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live -= size


def peak_bytes(call: Call) -> int:
    """Largest number of bytes that are alive during a call, beyond what was alive before it."""
    with LiveBytes() as counter:
        result = call()
    del result
    return counter.peak


def time_calls(
    calls: Mapping[Any, Call],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    report: Callable[[int], None] | None = None,
) -> dict[Any, list[float]]:
    """CPU seconds of each call in each round; in a round every call runs twice, one after the
    other; the second is timed.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            call()  # not timed: caches and the allocator still hold what the call before it left
            begin = clock()
            call()
            seconds[name].append(clock() - begin)
        if report is not None:
            report(number + 1)
    return seconds


def fit_slope(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """Slope of the log-log regression line; None below two lengths or for values that are not
    positive.
    """
    if len(lengths) < 2 or min(values) <= 0:
        return None
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


class TimeSlope(NamedTuple):
    """Log-log slope of times against lengths."""

    value: float | None  # of the medians
    lo: float | None  # smallest and largest slope of a single round
    hi: float | None
    last: float | None  # between the two longest lengths


class MemorySlope(NamedTuple):
    """Log-log slope of bytes against lengths."""

    value: float | None
    last: float | None  # between the two longest lengths


class Growth(NamedTuple):
    """Measurements of one candidate; the keys of `seconds`, `quartiles` and `bytes` are lengths."""

    lengths: list[int]
    seconds: dict[str, float]
    quartiles: dict[str, list[float]]
    bytes: dict[str, int]
    slope: TimeSlope
    memory_slope: MemorySlope


def fit_slopes(lengths: Sequence[int], rounds: Sequence[Sequence[float]]) -> TimeSlope:
    """Slopes of times [lengths][R]."""
    medians = [float(np.median(times)) for times in rounds]
    each = [fit_slope(lengths, times) for times in zip(*rounds, strict=True)]
    slopes = [slope for slope in each if slope is not None]
    return TimeSlope(
        fit_slope(lengths, medians),
        min(slopes, default=None),
        max(slopes, default=None),
        fit_slope(lengths[-2:], medians[-2:]),
    )


def summarize_growth(
    lengths: list[int], rounds: Sequence[Sequence[float]], sizes: Sequence[int]
) -> Growth:
    """The growth of one candidate, from seconds [lengths][R] and bytes [lengths]."""
    names = list(map(str, lengths))
    medians = np.median(rounds, axis=1).tolist()
    quartiles = np.percentile(rounds, [25, 75], axis=1).T.tolist()
    return Growth(
        lengths,
        dict(zip(names, medians, strict=True)),
        dict(zip(names, quartiles, strict=True)),
        dict(zip(names, sizes, strict=True)),
        fit_slopes(lengths, rounds),
        MemorySlope(fit_slope(lengths, sizes), fit_slope(lengths[-2:], sizes[-2:])),
    )


def make_operators(config: ModelConfig, n: int, seed: int) -> dict[str, Call]:
    """One forward and backward pass of each mixer on one sequence of n tokens, at the widths of
    `config`.
    """
    heads = config.heads
    key, value = config.dim // heads, (config.value_dim or config.dim) // heads
    draw = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).requires_grad_()

    q, k = leaf(1, n, heads, key), leaf(1, n, heads, key)
    v, out = leaf(1, n, heads, value), leaf(1, n, heads, value).detach()
    # queries, keys and values of softmax attention
    sq, sk, sv, s_out = (leaf(1, heads, n, key) for _ in range(4))
    s_out = s_out.detach()
    decay = torch.log1p(-torch.exp(torch.linspace(-np.log(32), -np.log(512), heads)))
    mask = torch.ones(n, n, dtype=torch.bool).tril()

    def retain(form: Any) -> Call:
        return lambda: torch.autograd.grad(
            retention(q, k, v, log_decay=decay, form=form), (q, k, v), out
        )

    def softmax() -> Any:
        scores = (sq @ sk.mT * key**-0.5).masked_fill(~mask, -torch.inf)
        return torch.autograd.grad(scores.softmax(-1) @ sv, (sq, sk, sv), s_out)

    return {
        PARALLEL: retain("parallel"),
        CHUNKWISE: retain("chunkwise"),
        RECURRENT: retain("recurrent"),
        SOFTMAX: softmax,
        FUSED: lambda: torch.autograd.grad(
            scaled_dot_product_attention(sq, sk, sv, is_causal=True), (sq, sk, sv), s_out
        ),
    }


def make_model_call(config: ModelConfig, n: int, seed: int) -> Call:
    """One forward and backward pass of the model of `config`, made for n tokens, on one
    sequence.
    """
    is_codes = config.tokenizer == "codes"
    length = n if is_codes else n * samples_per_token(config)
    update: dict[str, object] = {
        "length": length,
        "channels": CHANNELS,
        "others": (),
        "dropout": 0.0,
    }
    if is_codes:
        update["codes"] = FIRST + CODES
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = building.from_config(config.model_copy(update=update)).train()
    draw = torch.Generator().manual_seed(seed)
    if is_codes:
        codes = torch.randint(FIRST, FIRST + CODES, (1, n), generator=draw)
        batch = Batch(codes, torch.arange(n, dtype=torch.float32)[None])
    else:
        batch = Batch(torch.randn(1, length, CHANNELS, generator=draw))
    weights = [p for p in model.parameters() if p.requires_grad]

    def call() -> Any:
        encoded = model(batch)
        states = encoded.hidden[-1] if encoded.hidden else encoded.pooled
        assert states is not None
        return torch.autograd.grad(states.square().mean(), weights, allow_unused=True)

    return call


@analyses(
    AnalysisFacts(
        takes="model",
        help="Time and memory against length: "
        "retention in three forms, softmax attention, a complete model",
    )
)
def complexity(
    runs: list[Run] | None = None,
    *,
    model: str = "bitimelygpt",
    objective: str | None = None,
    preset: str = "tiny",
    lengths: str = "256,512,1024,2048",
    rounds: int = 5,
    slowest: float = 4.0,
    seed: int = 0,
) -> Page:
    """Measured CPU seconds and bytes of a forward and backward pass against the number of tokens,
    with fitted log-log slopes.

    The model is that of the one run of `runs`, with the widths that it was trained at, else `model`
    with the widths of `preset`; `objective` is not used (leakage takes the same arguments).
    `lengths` are ascending numbers of tokens, separated by commas; medians over `rounds`
    repetitions are shown. A candidate of which one call takes more than `slowest` seconds at a
    length is excluded there and at longer ones.

    Returns a page; its summary holds, for each candidate, `seconds` and `bytes` by length and their
    `slope`. Raises UserError: lengths that are no ascending numbers, more than one run, unknown
    names (exit 2).
    """
    numbers = _parse_lengths(lengths)
    if rounds < 1:
        raise usage_error(f"{rounds} rounds", "expected at least 1", field="--rounds")
    config, name = _choose_config(runs, model, preset)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls, excluded = _make_calls(config, numbers, slowest, seed)
        seconds = time_calls(calls, rounds, report=lambda r: report_progress("rounds", r, rounds))
        memory = {key: peak_bytes(call) for key, call in calls.items()}
    finally:
        torch.set_num_threads(threads)
    growths: dict[str, Growth] = {}
    for candidate in dict.fromkeys(name for name, _ in calls):
        timed = [n for n in numbers if (candidate, n) in calls]
        rounds_by_length = [seconds[candidate, n] for n in timed]
        sizes = [memory[candidate, n] for n in timed]
        growths[candidate] = summarize_growth(timed, rounds_by_length, sizes)
    page = PageBuilder(f"Time and memory against sequence length, {config.name}")
    page.notice(*excluded)
    _add_facts(page, config, name, numbers[-1], rounds, seed)
    _add_blocks(page, growths)
    summary = {
        "candidates": growths,
        "left_out": excluded,
        "lengths": numbers,
        "rounds": rounds,
        "seed": seed,
        "model": config.name,
    }
    return page.finish(_verdict(growths), summary)


def _parse_lengths(text: str) -> list[int]:
    try:
        numbers = list(map(int, text.split(",")))
    except ValueError:
        numbers = []
    if len(numbers) < 2 or numbers != sorted(set(numbers)) or numbers[0] < 8:
        raise usage_error(
            f"lengths {safe_text(text)}",
            "expected two or more ascending numbers of tokens from 8 on",
            "For example --lengths 128,256,512",
            field="--lengths",
        )
    return numbers


def _choose_config(runs: list[Run] | None, model: str, preset: str) -> tuple[ModelConfig, str]:
    if runs:
        if len(runs) > 1:
            raise usage_error(f"{len(runs)} runs", "complexity takes one")
        config: Any = runs[0].model().config
        return config, runs[0].name
    config = build_model_config(models[model].name, preset, channels=CHANNELS)
    if config.tokenizer == "codes" and config.codes is None:
        config = config.model_copy(update={"codes": FIRST + CODES})
    if config.tokenizer == "patch-cnn":  # the layers are compared: tokens that cost little
        config = build_model_config(config.name, preset, channels=CHANNELS, tokenizer="conv")
    return complete_config(config), preset


def _make_calls(
    config: ModelConfig, lengths: Sequence[int], slowest: float, seed: int
) -> tuple[dict[tuple[str, int], Call], list[str]]:
    """The calls that are fast enough, warmed up, and a notice of each candidate that is not."""
    calls: dict[tuple[str, int], Call] = {}
    too_slow: dict[str, int] = {}
    for k, n in enumerate(lengths):
        candidates = make_operators(config, n, seed)
        candidates[f"whole model, {config.name}"] = make_model_call(config, n, seed)
        for candidate, call in candidates.items():
            if candidate in too_slow:
                continue
            begin = time.perf_counter()
            call()
            if time.perf_counter() - begin > slowest:
                too_slow[candidate] = n
            else:
                calls[candidate, n] = call
        report_progress("warm-up", k + 1, len(lengths))
    return calls, [
        f"{candidate} from {n:,} tokens on: one call took more than {slowest:g} s (--slowest)."
        for candidate, n in too_slow.items()
    ]


HOW_TO_READ = (
    "The paper calls its model linear in the sequence length. That holds for the recurrent and the "
    "chunkwise form of retention; the parallel form computes an N x N map, as plain softmax "
    "attention does, and is quadratic. The cost per token differs between the forms by more than "
    "the slopes suggest at practical lengths, because the recurrent form takes one small step "
    "after the other. Fused attention stores no map, so its memory is linear while its time is "
    "quadratic."
)
TIME = (
    "Medians over the rounds with interquartile bands. On these axes a linear form has slope 1, a "
    "quadratic one 2. At small N the fixed costs of a call flatten every line, so only the longest "
    "lengths show the growth. Evidence against a linear chunkwise form: its line is as steep there "
    "as that of the parallel form."
)
MEMORY = (
    "Largest number of bytes in tensors alive at one time, beyond the inputs; counted, so the same "
    "on every machine. Evidence against a linear form: its line bends up towards slope 2."
)
TABLE = (
    "Slope: of the log-log regression line through the medians, with the range over single rounds. "
    "Last slope: between the two longest lengths, where fixed costs matter least. Expected: from "
    "the operation count of long sequences."
)
COLUMNS = [
    "candidate",
    "slope of time",
    "last slope",
    "expected",
    "slope of memory",
    "last slope of memory",
    "expected of memory",
    "ms at the longest",
    "MiB at the longest",
    "longest N",
]


def _add_facts(
    page: PageBuilder, config: ModelConfig, name: str, longest: int, rounds: int, seed: int
) -> None:
    cores, width = os.cpu_count() or 1, config.dim // config.heads
    load = os.getloadavg()[0]
    if load > cores:
        page.notice(
            f"The machine was busy ({load:.0f} processes on {cores} cores): compare times within "
            "this page only."
        )
    if longest < 4096:
        page.notice(
            f"The longest sequence has {longest:,} tokens, so fixed costs still matter. For longer "
            "ones: --lengths 1024,2048,4096,8192"
        )
    values = (config.value_dim or config.dim) // config.heads
    facts = {
        "Model": f"{config.name}, {name}: {config.layers} layers, width {config.dim}",
        "Operators": f"{config.heads} heads; retention K = {width}, V = {values}; softmax {width}",
        "Rows": "1 sequence, float32, CPU, causal",
        "Rounds": f"{rounds}, interleaved",
        "Clock": "CPU time of one thread",
        "Machine": f"{platform.machine()}, {cores} cores",
        "Versions": f"torch {torch.__version__}, python {platform.python_version()}",
        "Seed": seed,
    }
    page.add_facts(facts, Sharing.OPEN)


def _add_blocks(page: PageBuilder, growths: Mapping[str, Growth]) -> None:
    time_lines, memory_lines, rows = [], [], []
    for candidate, growth in growths.items():
        times = [1e3 * seconds for seconds in growth.seconds.values()]
        sizes = [size / 2**20 for size in growth.bytes.values()]
        lo, hi = 1e3 * np.array(list(growth.quartiles.values())).T
        time_lines.append(Line(candidate, growth.lengths, times, lo, hi))
        if any(sizes):
            memory_lines.append(Line(candidate, growth.lengths, sizes))
        time_order, memory_order = EXPECTED.get(candidate, (None, None))
        slope = growth.slope
        rows.append(
            [
                candidate,
                {"value": slope.value, "lo": slope.lo, "hi": slope.hi},
                slope.last,
                time_order,
                *growth.memory_slope,
                memory_order,
                times[-1],
                sizes[-1],
                growth.lengths[-1],
            ]
        )
    page.text(HOW_TO_READ)
    _add_growth(page, "time", TIME, time_lines, "milliseconds")
    _add_growth(page, "memory", MEMORY, memory_lines, "MiB")
    page.table("slopes", "Growth", TABLE, COLUMNS, rows, Sharing.OPEN)


def _add_growth(
    page: PageBuilder, name: str, caption: str, lines: Sequence[Line], unit: str
) -> None:
    plot = LinePlot(lines, xlabel="tokens N", ylabel=unit, logx=True, logy=True)
    title = f"{name.capitalize()} of a forward and backward pass"
    page.figure(name, title, caption, plot, Sharing.OPEN)


def _verdict(growths: Mapping[str, Growth]) -> str:
    chosen = [name for name in (CHUNKWISE, PARALLEL, SOFTMAX) if name in growths]
    parts = [
        f"{name} {growths[name].slope.last:.2f} in time and "
        f"{growths[name].memory_slope.last:.2f} in memory"
        for name in chosen
        if growths[name].slope.last is not None
    ]
    if not parts:
        return "Too few lengths were fast enough to fit a slope."
    text = f"Slopes between the two longest lengths (1 linear, 2 quadratic): {'; '.join(parts)}."
    if CHUNKWISE not in growths or PARALLEL not in growths:
        return text
    longest, chunkwise = list(growths[CHUNKWISE].seconds.items())[-1]
    if longest in growths[PARALLEL].seconds:
        ratio = growths[PARALLEL].seconds[longest] / chunkwise
        text += (
            f" At {int(longest):,} tokens the chunkwise form is {ratio:.1f} times as fast as the "
            "parallel one."
        )
    return text
