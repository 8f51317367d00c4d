"""The figures of docs/analyses.md, measured: every analysis on the planted cohort, through the
command line.

    python docs/analyses.py [WORKSPACE]

A WORKSPACE is kept, and what it holds is not trained again. About a quarter of an hour on two quiet
cores.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("analyses.md")
TOKENS = "--set model.tokenizer=patch --set model.patch=24"
COHORT = (
    "ingest synthetic --size planted",
    "tokenize synthetic/staging",
    f"pretrain --preset tiny --data synthetic/staging {TOKENS} --objective next-previous-strict --epochs 4 --lr 1e-3 --run bitimelygpt",
    "finetune bitimelygpt --data synthetic/staging --fraction 1 --epochs 12 --lr 1e-3 --run tuned",
    "evaluate tuned",
    f"pretrain --preset tiny --model patchtst --data synthetic/staging {TOKENS} --epochs 2 --lr 1e-3 --run patchtst",
)
FOUND = "--shapelets {workspace}/reports/shapelets-synthetic-staging"
Row = tuple[str, ...]


def format_mean(mean: dict[str, Any] | None, digits: int = 2) -> str:
    """A value with its interval."""
    value = None if mean is None else mean.get("value", mean.get("difference"))
    if mean is None or value is None:
        return "–"
    text = f"{value:.{digits}f}"
    return text + (
        f" ({mean['lo']:.{digits}f} to {mean['hi']:.{digits}f})"
        if mean.get("lo") is not None
        else ""
    )


def count_planted(summary: dict[str, Any], workspace: Path) -> str:
    """How many of the shapelets lie on a waveform that was planted, by the annotations of the
    cache.
    """
    import polars as pl

    from bitimely_core import tokens

    index = tokens.open_tokens(workspace / "tokens" / "synthetic-staging").whole_index
    notes = pl.concat(
        [
            pl.read_parquet(p)
            for p in sorted((workspace / "cache" / "synthetic").glob("annotations-*.parquet"))
        ]
    )
    notes = notes.filter(pl.col("label").str.starts_with("shapelet "))
    hits = []
    for one in summary["shapelets"]:
        row = index.row(one["window"], named=True)
        start = row["start"] + one["start"] / one["rate"]
        stop = start + len(one["values"]) / one["rate"]
        over = notes.filter(
            (pl.col("recording_id") == row["recording_id"])
            & (pl.col("onset") < stop)
            & (pl.col("onset") + pl.col("duration") > start)
        )
        hits += over["label"].str.strip_prefix("shapelet ").to_list()[:1]
    return f"{len(hits)} of {len(summary['shapelets'])} on a planted waveform ({', '.join(sorted(set(hits)))})"


def list_shapelets(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """Scores on the windows they were mined from and on held-out ones."""
    yield (
        "shapelet",
        "closest to class",
        "seconds",
        "gain, bits",
        "p",
        "gain, held out",
        "p, held out",
    )
    for k, (one, held) in enumerate(
        zip(summary["shapelets"], summary["held_out"]["shapelets"], strict=True)
    ):
        length = f"{len(one['values']) / one['rate']:g}"
        yield (
            str(k + 1),
            one["klass"],
            length,
            f"{one['gain']:.2f}",
            f"{one['p']:.3f}",
            f"{held['gain']:.2f}",
            f"{held['p']:.3f}",
        )
    yield (count_planted(summary, workspace), *[""] * 6)


def list_region(name: str, about: dict[str, Any]) -> Row:
    """One row of what was measured on shapelets."""
    draws = ", ".join("–" if value is None else f"{value:.2f}" for value in about["random_draws"])
    p = "–" if about["p_places"] is None else f"{about['p_places']:.3f}"
    return (
        name,
        format_mean(about["ratio"]),
        draws,
        format_mean(about["beyond_random_weights"]),
        p,
    )


def list_saliency(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """Ratios at the embeddings and the input of each run."""
    yield (
        "run, gradient at",
        "ratio (95 % CI over subjects)",
        "random weights, each draw",
        "beyond random weights",
        "p, random places",
    )
    for name, one in summary.items():
        for wrt in ("embeddings", "input") if "by_layer" in one else ():
            if wrt in one:
                yield list_region(f"{name}, {wrt}", one[wrt])
    yield ("magnitude of the signal", format_mean(summary["signal_size"]), "", "", "")


def list_attention(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """Ratios of each run."""
    yield (
        "run",
        "ratio (95 % CI over subjects)",
        "random weights, each draw",
        "beyond random weights",
        "p, random places",
    )
    for name, one in summary.items():
        if "shapelets" in one:
            yield list_region(name, one["shapelets"])
    yield ("magnitude of the signal", format_mean(summary["signal_size"]), "", "", "")


def list_spectra(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """Measures of the last layer with its controls."""
    yield ("run", "layer", "matrix", "effective rank / N", "n90", "AUC")
    for name, one in summary.items():
        layers = [key for key in one if key.isdigit()]
        for matrix, found in one[layers[-1]]["mean"].items() if layers else ():
            yield (
                name,
                layers[-1],
                matrix.replace("_", ", "),
                *(f"{found[key]:.3f}" for key in ("effective_rank", "n90", "auc")),
            )


def list_probes(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """The paper's probing table."""
    yield (
        "readout",
        "layers",
        "frozen probe (95 % CI over subjects)",
        "minus the default, paired",
        "random weights",
    )
    for readout, layers in summary["cells"].items():
        for at in ("last", "last-two"):
            if at in layers and readout in {"sos", "eos", "sos+eos", "mean"}:
                cell = layers[at]
                yield (
                    readout,
                    at,
                    format_mean(cell, 3),
                    format_mean(cell["difference"], 3),
                    f"{cell['random']:.3f}",
                )
    for name, one in summary.get("fine_tuned", {}).items():
        yield (
            f"{one['readout']}, fine-tuned ({name})",
            one["layers"],
            format_mean(one, 3),
            format_mean(one["difference"], 3),
            "",
        )
    yield ("means and spectra, no model", "", format_mean(summary["controls"]["raw"], 3), "", "")


def list_calibration(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """Errors of the probabilities."""
    yield ("what", "value")
    (parts,) = summary["reliability"].values()
    yield ("expected calibration error", format_mean(parts["as_is"]["ece"], 3))
    yield ("of a perfectly calibrated model, by chance", f"{parts['as_is']['chance']['mean']:.3f}")
    yield ("with one temperature", format_mean(parts["tempered"]["ece"], 3))
    accuracies = sorted(one["accuracy"] for one in summary["subjects"])
    yield (
        "accuracy of the worst and of the best subject",
        f"{accuracies[0]:.2f}, {accuracies[-1]:.2f}",
    )


def list_neighbours(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """Neighbours and silhouettes."""
    yield (
        "vectors",
        "neighbours of the same label",
        "silhouette by label",
        "silhouette by subject",
    )
    for name, one in summary["spaces"].items():
        yield (
            name,
            *(
                format_mean(one[key])
                for key in ("label_agreement", "label_silhouette", "subject_silhouette")
            ),
        )


def list_costs(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """Fitted slopes."""
    yield ("candidate", "slope of time", "between the two longest", "slope of memory")
    for name, one in summary["candidates"].items():
        slopes = (one["slope"]["value"], one["slope"]["last"], one["memory_slope"]["value"])
        yield (name, *("–" if value is None else f"{value:.2f}" for value in slopes))


def list_leak(summary: dict[str, Any], workspace: Path) -> Iterator[Row]:
    """Stamp and measurement."""
    yield ("stamped leak-free", "measured leak-free", "held-out loss on white noise / variance")
    noise = summary.get("white_noise") or {}
    yield (
        str(summary["stamped"]),
        str(summary["leak_free"]),
        f"{noise.get('rel', float('nan')):.3f}",
    )


KINDS: dict[str, tuple[str, Callable[[dict[str, Any], Path], Iterator[Row]]]] = {
    "shapelets": ("--data synthetic/staging --lengths 0.5,1", list_shapelets),
    "saliency": (
        f"tuned bitimelygpt patchtst --data synthetic/staging --sequences 32 --masks 2 {FOUND}",
        list_saliency,
    ),
    "attention": (
        f"tuned bitimelygpt patchtst --data synthetic/staging --windows 32 {FOUND}",
        list_attention,
    ),
    "svd": ("bitimelygpt --sequences 8", list_spectra),
    "probing": ("bitimelygpt tuned --data synthetic/staging", list_probes),
    "calibration": ("tuned", list_calibration),
    "embedding": ("tuned", list_neighbours),
    "complexity": ("--lengths 256,512,1024 --rounds 3", list_costs),
    "leakage": ("--model bitimelygpt --objective next-previous-strict --steps 300", list_leak),
}


def run_command(line: str, workspace: Path) -> dict[str, Any]:
    """A command's JSON."""
    from bitimely_cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main([*line.split(), "-w", str(workspace), "--json"])
    if code not in (0, 3):
        raise SystemExit(f"bitimely {line}: exit {code}")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def format_table(rows: Iterator[Row]) -> str:
    """Rows as Markdown, the first one its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *body])


def main(workspace: Path) -> None:
    """Train, measure, and write what was found between the marks of each kind, as soon as it is
    known.
    """
    for line in COHORT:
        run_command(line, workspace)
    for kind in KINDS:
        measure(kind, workspace)


def measure(kind: str, workspace: Path) -> None:
    """One analysis of the trained runs, written into the page."""
    options, rows = KINDS[kind]
    found = run_command(f"analyze {kind} {options.format(workspace=workspace)}", workspace)
    said = f"`bitimely analyze {kind} {options.format(workspace='workspace')}`"
    said = f"{said}\n\n> {found['verdict']}\n\n{format_table(rows(found['summary'], workspace))}"
    mark = f"<!-- measured by docs/analyses.py: {kind} -->"
    PAGE.write_text(
        re.sub(
            f"{re.escape(mark)}.*?{re.escape(mark)}",
            lambda _: f"{mark}\n{said}\n{mark}",
            PAGE.read_text(),
            flags=re.S,
        )
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as home:
            main(Path(home))
