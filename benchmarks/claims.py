"""Claims to sequences: bitimely against the straightforward pandas pipeline, on the same made-up
rows, in one run.

    python benchmarks/claims.py                                               # 10 million rows, polars and pandas
    python benchmarks/claims.py --rows 10000000 100000000 --skip pandas       # does memory grow with the rows?
    python benchmarks/claims.py --rows 800000 --engines polars spark --skip pandas
    PYSPARK_SUBMIT_ARGS="--master local-cluster[2,1,1024] pyspark-shell" python benchmarks/claims.py
    --rows 1000000 4000000 --engines spark --skip pandas

Both do the same steps: read text, normalise ICD-9 codes, parse dates, count what is left out by
reason, look codes up with their parents, label by rules (a stay, or two claims in 730 days), split
by a hash, prevalence ratios on the training split, roll up, drop copies of a code on one day, leave
out subjects with fewer than 10 codes, sort, sequences as lists, leak probe, Parquet. bitimely also
checks the csv's structure, hashes what it reads and writes, makes pseudonyms and draws a page;
pandas does none of these.
Every contestant runs in a process of its own: CPU seconds with its children (Spark's Java too), and
the peak of the larger one's resident memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import Row, make_parser, report

CODES = 400  # distinct ICD-9 codes; every fifth belongs to no PheCode
PER_SUBJECT = 40


def make_claims(folder: Path, rows: int, seed: int = 0) -> None:
    """claims.csv and icd9_phecode.csv: about 40 rows a subject over 16 years."""
    import polars as pl

    draw = np.random.default_rng(seed)
    codes = np.array(
        sorted(
            {
                f"{n:03d}.{d}"
                for n, d in zip(
                    draw.integers(1, 999, CODES * 2), draw.integers(0, 10, CODES * 2), strict=True
                )
            }
        )[:CODES]
    )
    codes[:3] = ["250.0", "428.0", "496.0"]
    mapped = [(code, f"{int(code[:3]) % 180 + 8:03d}") for i, code in enumerate(codes) if i % 5]
    pl.DataFrame(mapped, schema=["icd9", "phecode"], orient="row").write_csv(
        folder / "icd9_phecode.csv"
    )
    weights = 1 / np.arange(1, CODES + 1) ** 0.9
    days = np.array([str(np.datetime64("1998-01-01") + d) for d in range(16 * 365)])
    with (folder / "claims.csv").open("wb") as out:
        out.write(b"patient_id,date,icd9,source\n")
        done = 0
        while done < rows:
            n = min(1_000_000, rows - done)
            frame = pl.DataFrame(
                {
                    "patient_id": [
                        f"P{i:09d}" for i in draw.integers(0, max(rows // PER_SUBJECT, 1), n)
                    ],
                    "date": days[draw.integers(0, len(days), n)],
                    "icd9": codes[draw.choice(CODES, n, p=weights / weights.sum())],
                    "source": np.array(["physician", "inpatient", "outpatient"])[
                        draw.choice(3, n, p=[0.8, 0.05, 0.15])
                    ],
                }
            )
            out.write(frame.write_csv(include_header=False).encode())
            done += n


def build_by_pandas(folder: Path) -> int:
    """The steps as one would write them with pandas, vectorised, distinct codes normalised once.
    Returns the sequences.
    """
    import hashlib

    import pandas as pd

    frame = pd.read_csv(folder / "claims.csv", dtype=str)
    phecodes = pd.read_csv(folder / "icd9_phecode.csv", dtype=str)
    code = frame["icd9"].str.replace(r"[\s'\"]", "", regex=True).str.upper().str.rstrip(".")
    missing = code.isna() | code.isin(
        ["", "NA", "N/A", "NAN", "NULL", "NONE", "-", "UNK", "UNKNOWN", "OTHER"]
    )
    parts = code.str.extract(
        r"^(?:(E\d{3}|V\d{2}|\d{1,3})\.(\d{1,2})|(E\d{3}|V\d{2}|\d{3})(\d{0,2}))$"
    )
    head, tail = parts[0].fillna(parts[2]), parts[1].fillna(parts[3]).fillna("")
    numeric = head.str.isdigit().fillna(value=False).astype(bool)
    head = head.where(~numeric, head.str.zfill(3))
    frame["code"] = head + ("." + tail).where(tail != "", "")
    frame["date"] = pd.to_datetime(frame["date"], format="%Y-%m-%d", errors="coerce")
    counts = {
        "rows": len(frame),
        "missing": int(missing.sum()),
        "bad_format": int((frame["code"].isna() & ~missing).sum()),
        "bad_date": int(frame["date"].isna().sum()),
    }
    frame = frame[frame["code"].notna() & frame["date"].notna()]
    counts["duplicates"] = int(frame.duplicated(["patient_id", "date", "icd9", "source"]).sum())
    frame = frame.drop_duplicates(["patient_id", "date", "icd9", "source"])
    table = dict(phecodes.itertuples(index=False))

    def find_phecode(text: str) -> str | None:
        while text not in table and "." in text:
            text = text[:-1].rstrip(".")
        return table.get(text)

    found = {text: find_phecode(text) for text in frame["code"].unique()}
    frame["phecode"] = frame["code"].map(found)
    counts["unmapped"] = int(frame["phecode"].isna().sum())
    labels = {}
    plain = frame["code"].str.replace(".", "", regex=False)
    for name, prefixes in (
        ("chf", ("428",)),
        ("copd", ("491", "492", "496")),
        ("diabetes", ("250",)),
    ):
        own = frame[plain.str.startswith(prefixes)]
        stays = own[own["source"] == "inpatient"].groupby("patient_id")["date"].min()
        claims = (
            own.loc[own["source"] == "physician", ["patient_id", "date"]]
            .drop_duplicates()
            .sort_values(["patient_id", "date"])
        )
        gap = claims.groupby("patient_id")["date"].diff()
        twice = claims[gap <= pd.Timedelta(days=730)].groupby("patient_id")["date"].min()
        labels[name] = pd.concat([stays, twice]).groupby(level=0).min()
    subjects = frame["patient_id"].unique()
    share = np.array(
        [
            int.from_bytes(hashlib.sha256(f"0|{s}".encode()).digest()[:8], "big") / 2**64
            for s in subjects
        ]
    )
    split = pd.Series(
        np.select([share < 0.8, share < 0.9], ["train", "validation"], "test"), index=subjects
    )
    frame = frame[frame["phecode"].notna()]
    frame["phecode"] = frame["phecode"].str.split(".").str[0]
    carried = frame[["patient_id", "phecode"]].drop_duplicates()
    carried = carried[carried["patient_id"].map(split) == "train"]
    n_train = int((split == "train").sum())
    ratios = {}
    for name, onset in labels.items():
        case = carried["patient_id"].isin(onset.index)
        n_case = int(split[split.index.isin(onset.index)].eq("train").sum())
        ratios[name] = (carried[case].groupby("phecode").size() / n_case) / (
            carried.groupby("phecode").size() / n_train
        )
    frame = frame.drop_duplicates(["patient_id", "date", "phecode"])
    size = frame.groupby("patient_id")["phecode"].transform("size")
    frame = frame[size >= 10].sort_values(["patient_id", "date", "phecode"])
    ids = {text: i for i, text in enumerate(sorted(frame["phecode"].unique()), 5)}
    frame["id"] = frame["phecode"].map(ids)
    first = frame.groupby("patient_id")["date"].transform("min")
    frame["months"] = (frame["date"] - first).dt.days / 30.4375
    grouped = frame.groupby("patient_id")
    sequences = grouped.agg(codes=("id", list), times=("months", list))
    for name, onset in labels.items():
        sequences[name] = sequences.index.isin(onset.index)
    sequences["split"] = split.reindex(sequences.index)
    once = pd.crosstab(frame["patient_id"], frame["phecode"])
    from sklearn.metrics import average_precision_score

    probe = {}
    train = sequences["split"] == "train"
    for name in labels:
        y = sequences[name].to_numpy()
        best = max(
            once.columns, key=lambda c: average_precision_score(y[train], once[c].to_numpy()[train])
        )
        probe[name] = (
            best,
            average_precision_score(y, once[best]),
            average_precision_score(y, sequences["codes"].str.len()),
        )
    sequences.to_parquet(folder / "pandas.parquet")
    (folder / "pandas.json").write_text(
        json.dumps(
            {"funnel": counts, "probe": {k: [v[0], *map(float, v[1:])] for k, v in probe.items()}}
        )
    )
    return len(sequences)


def build_by_bitimely(folder: Path, engine: str) -> int:
    """`ingest pophr` with the sequences. Returns the sequences."""
    import polars as pl

    from bitimely_core.workflows.ingest import ingest

    with tempfile.TemporaryDirectory(dir=folder) as home:
        ingest(
            "pophr",
            folder,
            Path(home) / "cache" / "pophr",
            options={"engine": engine},
            build={"select": False, "engine": engine},
        )
        return int(
            pl.scan_parquet(f"{home}/tokens/pophr/sequences-*.parquet")
            .select(pl.len())
            .collect()
            .item()
        )


def _end_spark() -> float:
    """End the Java process of the driver: what it cost is known when it is gone. Returns its peak
    of resident memory in GiB.
    """
    from pyspark import SparkContext

    context, gateway = SparkContext._active_spark_context, SparkContext._gateway
    assert context is not None
    assert gateway is not None
    status = Path(f"/proc/{gateway.proc.pid}/status").read_text()
    context.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def measure_child(name: str, folder: Path) -> None:
    """One contestant; prints its cost as JSON."""
    begun = time.perf_counter()
    n = build_by_pandas(folder) if name == "pandas" else build_by_bitimely(folder, name)
    java = _end_spark() if name == "spark" else 0.0
    own, children = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in (own, children))
    peak = max(own.ru_maxrss, children.ru_maxrss) / 2**20
    cost = {
        "name": name,
        "sequences": n,
        "cpu": cpu,
        "wall": time.perf_counter() - begun,
        "peak_gib": peak,
    }
    print(json.dumps(cost | {"driver_gib": own.ru_maxrss / 2**20, "java_gib": java}))


def run_contestant(name: str, folder: Path) -> dict[str, Any]:
    """`measure_child` in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, "--child", name, "--folder", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    costs: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return costs


def compare(sizes: list[int], engines: list[str], others: list[str]) -> Iterator[Row]:
    """Each engine on each number of rows, beside the others on the same and the first number."""
    first: dict[str, dict[str, Any]] = {}
    for rows in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_claims(Path(folder), rows)
            costs = {name: run_contestant(name, Path(folder)) for name in [*engines, *others]}
        for name, cost in costs.items():
            yield from describe_contestant(name, rows, cost)
        for name in engines:
            for other in others:
                yield from compare_costs(name, rows, costs[name], costs[other])
            if name in first:
                yield from compare_memory(name, rows, costs[name], sizes[0], first[name])
        first = first or costs


def describe_contestant(name: str, rows: int, cost: dict[str, Any]) -> Iterator[Row]:
    """What it took; bounds are those of polars on 10 million rows."""
    is_bound = (name, rows) == ("polars", 10_000_000)
    figure = f"{name}, {rows:,} rows"
    yield Row(figure=figure, value=cost["cpu"], unit="CPU s", most=16.0 if is_bound else None)
    yield Row(figure=figure, value=cost["peak_gib"], unit="GiB", most=0.8 if is_bound else None)


def compare_costs(
    name: str, rows: int, cost: dict[str, Any], other: dict[str, Any]
) -> Iterator[Row]:
    """Time and memory beside another contestant's."""
    for key, what in (("cpu", "CPU time"), ("peak_gib", "memory")):
        times = other[key] / cost[key]
        figure = f"{name}, {rows:,} rows, {what}"
        yield Row(figure=figure, peer=other["name"], value=times, least=5.0)


def compare_memory(
    name: str, rows: int, cost: dict[str, Any], fewer: int, before: dict[str, Any]
) -> Iterator[Row]:
    """How the memory grows with the rows; of Spark that of its driver."""
    keys = ("driver_gib", "java_gib") if name == "spark" else ("peak_gib",)
    for key in keys:
        figure = f"{name}, {key} at {rows:,} rows over that at {fewer:,}"
        growth, most = cost[key] / before[key], 1.1 if key == "driver_gib" else None
        yield Row(figure=figure, value=growth, most=most)


def main() -> int:
    """Run the contestants one after another."""
    parser = make_parser(__doc__, "100,000 rows")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[10_000_000],
        help="one after another, each generated again",
    )
    parser.add_argument("--engines", nargs="+", default=["polars"])
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure_child(options.child, options.folder)
        return 0
    sizes = [100_000] if options.quick else options.rows
    others = [name for name in ("pandas",) if name not in options.skip]
    return report("claims to sequences", compare(sizes, options.engines, others), options)


if __name__ == "__main__":
    sys.exit(main())
