"""What all benchmarks share: the clock, and the one table in which they print."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

HEAD = ("figure", "peer", "ratio", "bound")
LAYOUT = "{:<60}  {:<30}  {:>12}  {}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured figure with its bound.

    Beside a `peer` the `value` is the peer's cost over ours: above 1 bitimely is cheaper. Without
    one it is an amount in `unit`.
    """

    figure: str
    value: float
    peer: str = ""
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def is_missed(self) -> bool:
        """Whether the value is beyond its bound."""
        is_low = self.least is not None and self.value < self.least
        return is_low or (self.most is not None and self.value > self.most)

    def format_bound(self) -> str:
        """The bound as text, "" without one."""
        if self.least is not None:
            return f">= {self.least:.4g}"
        return "" if self.most is None else f"<= {self.most:.4g}"


def make_parser(documentation: str | None, quick: str) -> argparse.ArgumentParser:
    """The options of every benchmark; `quick`: what --quick does."""
    parser = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{quick}: it runs, bounds are not looked at"
    )
    parser.add_argument("--json", action="store_true", help="an object a line, not the table")
    return parser


def report(title: str, rows: Iterable[Row], options: argparse.Namespace) -> int:
    """Print the rows as they are measured. Returns the exit code: 1 where a bound is missed, which
    --quick does not look at.
    """
    if options.quick:
        title += "; quick, bounds are not looked at"
    if options.json:
        print(json.dumps({"title": title, "torch": torch.__version__}), flush=True)
    else:
        print(f"{title}\n{LAYOUT.format(*HEAD)}", flush=True)
    missed = False
    for row in rows:
        is_missed = row.is_missed and not options.quick
        missed |= is_missed
        print(json.dumps(asdict(row)) if options.json else _format(row, is_missed), flush=True)
    return int(missed)


def _format(row: Row, is_missed: bool) -> str:
    value = f"{row.value:.3g}" if row.value < 1000 else f"{row.value:,.0f}"
    text = LAYOUT.format(
        row.figure, row.peer or "-", f"{value} {row.unit}".strip(), row.format_bound()
    )
    return f"{text}  MISSED" if is_missed else text.rstrip()


def skip(reason: str) -> int:
    """Say on one line why nothing is measured here. Returns the exit code."""
    print(f"{Path(sys.argv[0]).name}: {reason}, nothing measured")
    return 0


def time_calls(
    calls: Mapping[str, Callable[[], object]], rounds: int, repeats: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Median CPU seconds of each call, in turns (`repeats` times each), after one that does not
    count.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times = (repeats or {}).get(name, 1)
            begin = time.process_time()
            for _ in range(times):
                call()
            taken[name].append((time.process_time() - begin) / times)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def read_memory(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def reset_peak() -> float:
    """VmHWM counts from here. Returns VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")
    return read_memory("VmRSS")
