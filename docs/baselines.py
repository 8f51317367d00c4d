"""A table of what needs no network, over all test folds: python docs/baselines.py WORKSPACE DATA
[--folds N] [--stratify ATTRIBUTE] [--fraction F --seed S] [--json FILE].

DATA is a view, ingested in the workspace. Without --folds its own split, with 5 or 10 dealt folds
by subject, with 0 the ten official ones. All training labels (of long windows, what is fitted reads
at most 20 million samples), or with --fraction those of the training subjects that a run with this
share and seed gets.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


def predict_fold(windows: Any, kind: str, fraction: float = 1.0, seed: int = 0) -> np.ndarray:
    """Predictions of the test rows by one baseline, fitted on the training labels, or on those of a
    share of the training subjects.
    """
    from bitimely_core.evaluate import baselines
    from bitimely_core.tokens.drawing import sample_subjects

    parts = {split: windows[split] for split in ("train", "validation", "test")}
    parts["train"] = sample_subjects(parts["train"], fraction, seed)
    most = baselines.count_fitted(windows)
    for name in ("train", "validation"):
        parts[name] = baselines.draw_windows(parts[name], most)
    return baselines.fit_and_predict(kind, parts, seed)


def main() -> None:
    """Print one row a baseline: the main metric with its 95 % interval."""
    from bitimely_core import evaluate, tokens, workflows
    from bitimely_core.evaluate import baselines, folds
    from bitimely_core.schemas.scores import EvaluationSettings
    from bitimely_core.store.workspace import name_tokens
    from bitimely_core.tokens.drawing import sample_subjects

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("data")
    parser.add_argument("--folds", type=int)
    parser.add_argument("--stratify")
    parser.add_argument(
        "--fraction",
        type=float,
        default=1.0,
        help="share of the training subjects whose labels are known",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="which of them, and which random kernels"
    )
    parser.add_argument("--json", type=Path, help="also into this file, beside what it has")
    given = parser.parse_args()
    options: list[dict[str, Any]] = [{}]
    if given.folds is not None:
        dealt = (
            {"split": "subject", "folds": given.folds}
            | ({"stratify": given.stratify} if given.stratify else {})
            if given.folds
            else {}
        )
        options = [{**dealt, "test_fold": k} for k in range(1, (given.folds or 10) + 1)]
    made: dict[str, list[Any]] = {}
    task, unit = "", "subject"
    for k, one in enumerate(options):
        name = f"baselines-{k}-{name_tokens(given.data)}"
        workflows.tokenize(given.data, workspace=given.workspace, name=name, options=one)
        windows: Any = tokens.open_tokens(given.workspace / "tokens" / name, verify=False)
        test = windows["test"]
        target = np.asarray(test.targets(None))
        task, unit = windows.task, windows.subject_unit
        train = np.asarray(
            sample_subjects(windows["train"], given.fraction, given.seed).targets(None)
        )
        constant = evaluate.constant_baselines(task, train, len(test), windows.class_names)
        every = {kind: v for kind, (_, v, decisions) in constant.items() if decisions is None}
        kinds = baselines.list_baselines(windows)
        every |= {kind: predict_fold(windows, kind, given.fraction, given.seed) for kind in kinds}
        for kind, found in every.items():
            made.setdefault(kind, []).append(
                evaluate.predictions_frame(test.index, task, windows.class_names, target, found)
            )
    import polars as pl

    print(
        f"| {given.data} | {evaluate.NAMES[evaluate.MAIN[task]]} | 95 % CI | windows | {unit}s |\n|---|---|---|---|---|"
    )
    numbers: dict[str, dict[str, Any]] = {}
    for kind, frames in made.items():
        score = folds.score_pooled(task, pl.concat(frames), EvaluationSettings(bootstrap=1000))
        m = score.metrics[str(score.main)]
        numbers[baselines.title_baseline(kind)] = {
            "value": m.value,
            "lo": m.lo,
            "hi": m.hi,
            "n": score.n,
            "units": score.n_subjects,
        }
        interval = "none" if m.lo is None or m.hi is None else f"{m.lo:.3f} to {m.hi:.3f}"
        print(
            f"| {baselines.title_baseline(kind)} | {m.value:.3f} | {interval} | {score.n:,} | {score.n_subjects:,} |"
        )
    if given.json:
        known = json.loads(given.json.read_bytes()) if given.json.is_file() else {}
        given.json.write_text(json.dumps({**known, given.data: numbers}, indent=1))


if __name__ == "__main__":
    main()
