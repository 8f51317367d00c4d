"""How do time and memory grow with the length of a sequence? Retention in its three forms, softmax attention, and a whole model, measured.

One call is a forward and a backward pass on one sequence of N tokens. All candidates of all lengths are measured in rounds, each once a
round, in CPU time of one thread, so that a busy machine changes little and slows all of them alike; the medians over the rounds are shown. A slope is that of a line through the
logarithms: 1 = linear, 2 = quadratic. Memory is counted, not sampled: the largest number of bytes in tensors that are alive at one time,
beyond the inputs (parameters and their gradients of the whole model included); what a kernel keeps inside itself is not seen.

Legend: N tokens, H heads, K key width of a head, V value width of a head, R rounds.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitimely_core import models as building
from bitimely_core.config import ModelConfig, build_model_config
from bitimely_core.errors import safe_text, usage_error
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.ops.retention import retention
from bitimely_core.page import Figure, Page, Table
from bitimely_core.registry import AnalysisFacts, analyses, models
from bitimely_core.types import Batch, Progress

if TYPE_CHECKING:
    from bitimely_core.analyses import LoadedRun

Array = npt.NDArray[np.float64]
Call = Callable[[], Any]

DEFAULT_LENGTHS = "256,512,1024,2048"
DEFAULT_ROUNDS = 5
DEFAULT_SLOWEST = 4.0  # seconds of one call; longer ones, and longer sequences of the same candidate, are left out
CHANNELS = 1
CODES = 100  # vocabulary of an events model that is timed
PARALLEL, CHUNKWISE, RECURRENT = "retention, parallel", "retention, chunkwise", "retention, recurrent"
SOFTMAX, FUSED = "softmax attention", "softmax attention, fused"
EXPECTED = {PARALLEL: (2.0, 2.0), CHUNKWISE: (1.0, 1.0), RECURRENT: (1.0, 1.0), SOFTMAX: (2.0, 2.0), FUSED: (2.0, 1.0)}  # time, memory


# --- measuring ----------------------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make and that are still alive, and their largest sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._note(tensor, new=False)  # what was there before does not count
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self._note(tensor, new=True)
        return out

    def _note(self, tensor: Any, *, new: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key not in self._known:
            self.live += size
            self.peak = max(self.peak, self.live)
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live -= size


def peak_bytes(call: Call) -> int:
    """Largest number of bytes that are alive during a call, beyond what was alive before it."""
    with LiveBytes() as counted:
        kept = call()
    del kept
    return counted.peak


def time_calls(
    calls: Mapping[Any, Call], rounds: int, clock: Callable[[], float] = time.process_time, tell: Callable[[int], None] | None = None
) -> dict[Any, list[float]]:
    """CPU seconds of each call in each round; in a round every call runs twice, one after the other; the second is timed."""
    taken: dict[Any, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            call()  # not timed: caches and the allocator still hold what the call before it left
            begin = clock()
            call()
            taken[name].append(clock() - begin)
        if tell is not None:
            tell(number + 1)
    return taken


def fit_slope(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """Of the least-squares line through the logarithms; None below two lengths or for values that are not positive."""
    if len(lengths) < 2 or min(values) <= 0:
        return None
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def fit_slopes(lengths: Sequence[int], rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What times [lengths][R] say: `value` slope of the medians, `lo` and `hi` the smallest and largest slope of a round, `last` between the two longest."""
    medians = [float(np.median(of)) for of in rounds]
    each = [s for r in range(min(map(len, rounds), default=0)) if (s := fit_slope(lengths, [of[r] for of in rounds])) is not None]
    ends = {"lo": min(each), "hi": max(each)} if each else {"lo": None, "hi": None}
    return {"value": fit_slope(lengths, medians), **ends, "last": fit_slope(lengths[-2:], medians[-2:])}


# --- candidates ---------------------------------------------------------------------------------------------------------------------------


def make_operators(config: ModelConfig, n: int, seed: int) -> dict[str, Call]:
    """One forward and backward pass of each mixer on one sequence of n tokens, at the widths of `config`."""
    heads = config.heads
    key, value, plain = config.dim // heads, (config.value_dim or config.dim) // heads, config.dim // heads
    draw = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).requires_grad_()

    q, k, v, out = leaf(1, n, heads, key), leaf(1, n, heads, key), leaf(1, n, heads, value), torch.randn(1, n, heads, value, generator=draw)
    sq, sk, sv, s_out = (leaf(1, heads, n, plain) for _ in range(4))
    s_out = s_out.detach()
    decay = torch.log1p(-torch.exp(torch.linspace(-np.log(32), -np.log(512), heads)))
    mask = torch.ones(n, n, dtype=torch.bool).tril()

    def ours(form: Any) -> Call:
        return lambda: torch.autograd.grad(retention(q, k, v, log_decay=decay, form=form), (q, k, v), out)

    def softmax() -> Any:
        scores = (sq @ sk.mT * plain**-0.5).masked_fill(~mask, -torch.inf)
        return torch.autograd.grad(scores.softmax(-1) @ sv, (sq, sk, sv), s_out)

    return {
        PARALLEL: ours("parallel"),
        CHUNKWISE: ours("chunkwise"),
        RECURRENT: ours("recurrent"),
        SOFTMAX: softmax,
        FUSED: lambda: torch.autograd.grad(scaled_dot_product_attention(sq, sk, sv, is_causal=True), (sq, sk, sv), s_out),
    }


def make_model_call(config: ModelConfig, n: int, seed: int) -> Call:
    """One forward and backward pass of the model of `config`, made for n tokens, on one sequence."""
    codes = config.tokenizer == "codes"
    step = 1 if codes else {"conv": 4, "steps": 1}.get(config.tokenizer, config.stride or config.patch)
    sized = config.model_copy(
        update={"length": n * step, "channels": CHANNELS, "others": (), "dropout": 0.0, **({"codes": FIRST + CODES} if codes else {})}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = building.made(sized).train()
    draw = torch.Generator().manual_seed(seed)
    batch = (
        Batch(torch.randint(FIRST, FIRST + CODES, (1, n), generator=draw), torch.arange(n, dtype=torch.float32)[None])
        if codes
        else Batch(torch.randn(1, n * step, CHANNELS, generator=draw))
    )
    weights = [p for p in model.parameters() if p.requires_grad]

    def call() -> Any:
        encoded = model(batch)
        states = encoded.hidden[-1] if encoded.hidden else encoded.pooled
        return torch.autograd.grad(states.square().mean(), weights, allow_unused=True)

    return call


# --- the analysis -------------------------------------------------------------------------------------------------------------------------


@analyses(
    AnalysisFacts(
        takes="model", help="How time and memory grow with the length: retention in three forms, softmax attention, a whole model"
    )
)
def complexity(
    runs: list[LoadedRun] | None = None,
    *,
    model: str = "bitimelygpt",
    objective: str | None = None,
    preset: str = "tiny",
    lengths: str = DEFAULT_LENGTHS,
    rounds: int = DEFAULT_ROUNDS,
    slowest: float = DEFAULT_SLOWEST,
    seed: int = 0,
    progress: Progress | None = None,
) -> Page:
    """Measured CPU seconds and bytes of a forward and backward pass against the number of tokens, with fitted log-log slopes.

    Args:
        runs: one run, whose model is measured with the widths that it was trained at; None = that of the next two.
        model: name of a model.
        objective: not read; it is there because leakage takes it.
        preset: gives the widths.
        lengths: numbers of tokens, separated by commas, ascending.
        rounds: repetitions; medians are shown.
        slowest: seconds of one call; a candidate that is slower at a length is left out there and at longer ones.
        seed: of weights and inputs.
        progress: told about the calls.

    Returns:
        A page; its summary holds, for each candidate, `seconds` and `bytes` by length and their `slope`.

    Raises:
        UserError: lengths that are no ascending numbers, more than one run, unknown names (exit 2).
    """
    numbers = _parse_lengths(lengths)
    if rounds < 1:
        raise usage_error(f"{rounds} rounds", "expected at least 1", field="--rounds")
    config, name = _choose_config(runs, model, preset)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls, left = _make_calls(config, numbers, slowest, seed, progress)
        taken = time_calls(calls, rounds, tell=None if progress is None else lambda r: progress("rounds", r, rounds))
        memory = {key: peak_bytes(call) for key, call in calls.items()}
    finally:
        torch.set_num_threads(threads)
    found: dict[str, dict[str, Any]] = {}
    for candidate in dict.fromkeys(c for c, _ in calls):
        at = [n for n in numbers if (candidate, n) in calls]
        bytes_ = [memory[candidate, n] for n in at]
        found[candidate] = {
            "lengths": at,
            "seconds": {str(n): float(np.median(taken[candidate, n])) for n in at},
            "quartiles": {str(n): [float(q) for q in np.percentile(taken[candidate, n], [25, 75])] for n in at},
            "bytes": {str(n): b for n, b in zip(at, bytes_, strict=True)},
            "slope": fit_slopes(at, [taken[candidate, n] for n in at]),
            "memory_slope": {"value": fit_slope(at, bytes_), "last": fit_slope(at[-2:], bytes_[-2:])},
        }
    return _page(config, name, found, left, numbers, rounds, seed)


def _parse_lengths(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in str(text).split(",")]
    except ValueError:
        numbers = []
    if len(numbers) < 2 or numbers != sorted(set(numbers)) or numbers[0] < 8:
        raise usage_error(
            f"lengths {safe_text(str(text))}",
            "expected two or more ascending numbers of tokens from 8 on",
            "For example --lengths 128,256,512",
            field="--lengths",
        )
    return numbers


def _choose_config(runs: list[LoadedRun] | None, model: str, preset: str) -> tuple[ModelConfig, str]:
    if runs:
        if len(runs) > 1:
            raise usage_error(f"{len(runs)} runs", "complexity takes one")
        config: Any = runs[0].model.config
        return config, runs[0].name
    entry = models[model]
    config = build_model_config(entry.name, entry.facts.family, preset, channels=CHANNELS)
    if config.tokenizer == "codes" and config.codes is None:
        config = config.model_copy(update={"codes": FIRST + CODES})
    with torch.device("meta"):
        config = building.made(config).config  # as the model reads it
    return config, preset


def _make_calls(
    config: ModelConfig, lengths: Sequence[int], slowest: float, seed: int, progress: Progress | None
) -> tuple[dict[tuple[str, int], Call], list[str]]:
    """The calls that are fast enough, warmed up; and which were left out."""
    calls: dict[tuple[str, int], Call] = {}
    left: dict[str, int] = {}
    for k, n in enumerate(lengths):
        made = make_operators(config, n, seed)
        made[f"whole model, {config.name}"] = make_model_call(config, n, seed)
        for candidate, call in made.items():
            if candidate in left:
                continue
            begin = time.perf_counter()
            call()
            if time.perf_counter() - begin > slowest:
                left[candidate] = n
            else:
                calls[candidate, n] = call
        if progress is not None:
            progress("warm-up", k + 1, len(lengths))
    return calls, [f"{candidate} from {n:,} tokens on: one call took more than {slowest:g} s (--slowest)." for candidate, n in left.items()]


HOW_TO_READ = (
    "The paper calls its model linear in the length. The operator is, in its recurrent and its chunkwise form; the parallel form makes an "
    "N x N map, as plain softmax attention does, and grows with the square. What a form costs per token differs by far more than the "
    "slope tells at lengths of practice: the recurrent form takes one small step after the other. Fused attention keeps no map, so its "
    "memory is linear while its time is not."
)
TIME = (
    "Medians over the rounds, bands from quartile to quartile. A linear form has slope 1 on these axes, a quadratic one 2. At small N fixed "
    "costs of a call flatten every line: only the longest lengths speak of the growth. A chunkwise line as steep as the parallel one there would refute that it is linear."
)
MEMORY = (
    "Largest number of bytes in tensors alive at one time, beyond the inputs; counted, so the same on every machine. A chunkwise or "
    "recurrent line that bends up towards slope 2 would refute that it is linear."
)
TABLE = (
    "Slope: of the line through the logarithms of the medians; its range is the smallest and the largest slope of a single round. Last slope: between the two longest "
    "lengths, nearer to the growth without fixed costs. Expected: what counting operations gives for long sequences."
)


def _page(
    config: ModelConfig, name: str, found: dict[str, dict[str, Any]], left: list[str], lengths: Sequence[int], rounds: int, seed: int
) -> Page:
    import os
    import platform

    series: dict[str, list[dict[str, Any]]] = {"seconds": [], "bytes": []}
    rows = []
    for candidate, facts in found.items():
        at = facts["lengths"]
        milli = [1e3 * facts["seconds"][str(n)] for n in at]
        lo, hi = (np.array([1e3 * facts["quartiles"][str(n)][k] for n in at]) for k in (0, 1))
        series["seconds"].append({"name": candidate, "x": at, "y": milli, "lo": lo, "hi": hi})
        if any(facts["bytes"].values()):
            series["bytes"].append({"name": candidate, "x": at, "y": [facts["bytes"][str(n)] / 2**20 for n in at]})
        time_slope, expected = facts["slope"], EXPECTED.get(candidate, (None, None))
        shown = {"value": time_slope["value"], "lo": time_slope["lo"], "hi": time_slope["hi"]}
        rows.append(
            [
                candidate,
                shown,
                time_slope["last"],
                expected[0],
                facts["memory_slope"]["value"],
                facts["memory_slope"]["last"],
                expected[1],
                milli[-1],
                facts["bytes"][str(at[-1])] / 2**20,
                at[-1],
            ]
        )
    axes = {"xlabel": "tokens N", "logx": True, "logy": True}
    blocks: list[Figure | Table | str] = [
        HOW_TO_READ,
        Figure(
            name="time",
            title="Time of a forward and backward pass",
            caption=TIME,
            kind="lines",
            data={"series": series["seconds"], "ylabel": "milliseconds", **axes},
        ),
        Figure(
            name="memory",
            title="Memory of a forward and backward pass",
            caption=MEMORY,
            kind="lines",
            data={"series": series["bytes"], "ylabel": "MiB", **axes},
        ),
        Table(
            name="slopes",
            title="How they grow",
            caption=TABLE,
            columns=[
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
            ],
            rows=rows,
        ),
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    notices = list(left)
    cores = os.cpu_count() or 1
    if load is not None and load > cores:
        notices.append(
            f"The machine was busy ({load:.0f} processes on {cores} cores): compare times of one page only, never those of two pages."
        )
    if lengths[-1] < 4096:
        notices.append(
            f"The longest sequence is {lengths[-1]:,} tokens, so fixed costs still weigh; --lengths 1024,2048,4096,8192 asks further."
        )
    widths = f"{config.heads} heads; retention K = {config.dim // config.heads}, V = {(config.value_dim or config.dim) // config.heads}; softmax {config.dim // config.heads}"
    return Page(
        title=f"Time and memory against length, {config.name}",
        verdict=_verdict(found),
        notices=notices,
        blocks=blocks,
        facts={
            "Model": f"{config.name}, {name}: {config.layers} layers, width {config.dim}",
            "Operators": widths,
            "Rows": "1 sequence, float32, CPU, causal",
            "Rounds": f"{rounds}, interleaved",
            "Clock": "CPU time of one thread",
            "Machine": f"{platform.machine()}, {cores} cores",
            "Versions": f"torch {torch.__version__}, python {platform.python_version()}",
            "Seed": str(seed),
        },
        summary={"candidates": found, "left_out": left, "lengths": list(lengths), "rounds": rounds, "seed": seed, "model": config.name},
    )


def _verdict(found: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{candidate} {found[candidate]['slope']['last']:.2f} in time and {found[candidate]['memory_slope']['last']:.2f} in memory"
        for candidate in (CHUNKWISE, PARALLEL, SOFTMAX)
        if candidate in found and found[candidate]["slope"]["last"] is not None
    ]
    if not parts:
        return "Too few lengths were fast enough to fit a slope."
    longest = found[CHUNKWISE]["lengths"][-1] if CHUNKWISE in found else 0
    text = f"Slopes between the two longest lengths (1 linear, 2 quadratic): {'; '.join(parts)}."
    both = [c for c in (CHUNKWISE, PARALLEL) if c in found and str(longest) in found[c]["seconds"]]
    if len(both) == 2:
        ratio = found[PARALLEL]["seconds"][str(longest)] / found[CHUNKWISE]["seconds"][str(longest)]
        text += f" At {longest:,} tokens the chunkwise form takes 1 / {ratio:.1f} of the time of the parallel one."
    return text
