"""The verbs that read a trained run: evaluate and embed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bitimely_core import registry, settings, store
from bitimely_core.batch import Progress
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.runs import folders, pages
from bitimely_core.runs.training import described, finished, subject_marks
from bitimely_core.tokens import tasks

if TYPE_CHECKING:
    from torch import nn

    from bitimely_core.tokens import Windows

EVALUATION_BATCH = 64
Unit = Literal["subject", "window"]


def evaluate(
    run: str | Path,
    *,
    data: str | None = None,
    split: str = "test",
    bootstrap: int = 1000,
    by: Unit = "subject",
    compare: str | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    predictions: Path | None = None,
    ids: Path | None = None,
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score `run` on one split: scores.json, predictions.parquet and report.html in its folder; returns the scores.

    A fine-tuned run is scored by its task; a pre-trained one by the held-out loss and loss / Var(target) of its objective. Intervals
    come from a bootstrap over subjects (`by="window"` is stamped). A split without windows gives null metrics that say why. Of sequences up
    to prediction times `predictions` is written in the schema of MEDS-evaluation, `ids` is the table of the ingest (`tokens.tasks`).

    Raises UserError: subject_leakage (4), incomplete (4), integrity (5), config (2).
    """
    folder = folders.run_folder(run, workspace)
    body = folders.read(folder)
    finished(folder, body)
    if split not in {"train", "validation", "test"}:
        raise registry.unknown("split", split, ["train", "validation", "test"])
    if by not in {"subject", "window"}:
        raise registry.unknown("unit of --by", by, ["subject", "window"])
    name = data or body["data"][0]["name"]
    windows = folders.windows_for(name, workspace, settings.DataConfig(), verify=verify, progress=progress)
    _fitting(windows, body, folder)
    if predictions is not None:
        tasks.refuse_others(windows, body["kind"])
    shared = leaked(folder, windows, split)
    chosen = windows[split]
    if dry_run:
        return {
            "run": body["run"],
            "data": windows.name,
            "split": split,
            "n": len(chosen),
            "n_subjects": len(set(chosen.subjects())),
            "folder": str(folder),
        }
    scores: dict[str, Any] = {
        "format_version": folders.FORMAT,
        "run": body["run"],
        "data": windows.name,
        "split": split,
        "n": len(chosen),
        "n_subjects": len(set(chosen.subjects())),
        "metrics": {},
        "baselines": {},
        "by_class": {},
        "settings": {
            "bootstrap": bootstrap,
            "by": by,
            "seed": 0,
            "model": body["model"],
            "preset": body["preset"],
            "verified": verify and body["verified"],
        },
        "leak_free": body["leak_free"],
        "subjects_shared_with_training": shared,
        "notices": _notices(body, windows, by, shared, split, verify),
    }
    model = load(folder, body, windows)
    columns: dict[str, Any] = {}
    if body["kind"] == "pretrain":
        scores["metrics"] = _held_out(model, chosen, body, batch_size, device, progress)
    else:
        scores |= _scored(model, windows, chosen, body, bootstrap, by, batch_size, device, progress, columns)
        _write_predictions(folder / "predictions.parquet", chosen, windows, columns)
        if predictions is not None:
            tasks.write_predictions(predictions, chosen, columns["prediction"], ids)
    if compare is not None:
        scores["comparison"] = _compared(folder, compare, workspace, windows, split, bootstrap, by)
    store.write_json(folder / "scores.json", scores)
    report = pages.evaluation(folder, body, scores, windows, columns)
    return {**scores, "report": str(report)}


def load(folder: Path, body: dict[str, Any], windows: Windows) -> nn.Module:
    """The trained model of a run folder, with its head when it was fine-tuned; of a mixed pre-training with the adapter for `windows`.

    Raises UserError (config, exit 2) where the run has none for their channels.
    """
    from bitimely_core import heads, models

    at = _fitting(windows, body, folder)
    path = folders.weights(folder, body)
    if body["kind"] == "finetune":
        return heads.load(path)
    model = models.load(path)
    model.settle(at)
    return model


def leaked(folder: Path, windows: Windows, split: str) -> int:
    """How many subjects of `split` were in the training of `folder` (fine-tuning or the pre-training before it).

    Raises UserError (subject_leakage, exit 4) for a held-out split cut by subject.
    """
    path = folder / "train_subjects.json"
    if split == "train" or not path.is_file():
        return 0
    shared = set(json.loads(path.read_bytes())["marks"]) & set(subject_marks([windows], split))
    if shared and windows.split not in {"random-window", "time"}:
        raise UserError(
            Reason.SUBJECT_LEAKAGE,
            f"{len(shared)} subjects of the {split} split were in the training of this run",
            wanted="expected none",
            action="Tokenize all views with the same --seed and train again",
            file=str(windows.name),
        )
    return len(shared)


def predict(
    model: Any, windows: Windows, *, batch_size: int | None = None, device: str = "auto", progress: Progress | None = None
) -> np.ndarray:
    """Predictions of a fine-tuned run, in the order of the rows: probabilities [n, K], or values [n] in the target's unit."""
    import torch

    from bitimely_core import data, train

    place = train.device(device)
    model = model.to(place).eval()
    out: list[np.ndarray] = []
    batches = data.batches(windows, batch_size or EVALUATION_BATCH, shuffle=False)
    with torch.inference_mode():
        for step, batch in enumerate(batches(0)):
            out.append(model.predict(data.moved(batch, place)).float().cpu().numpy())
            if progress is not None:
                progress(f"predict {windows.name}", step + 1, batches.steps)
    return np.concatenate(out) if out else np.zeros((0, max(windows.classes, 1)), np.float32)


def _fitting(windows: Windows, body: dict[str, Any], folder: Path) -> int:
    """Which adapter of the run reads `windows`. Raises UserError (config, exit 2) where none does."""
    at = folders.adapter(windows, body)
    if at is None:
        raise UserError(
            Reason.CONFIG,
            f"{windows.name} has {'another vocabulary' if folders.vocabulary(windows) else f'{windows.channels} channels'}",
            wanted=f"the run reads {'its own' if folders.vocabulary(windows) else ' or '.join(str(n) for n in folders.channels(body))}",
            file=str(folder),
            action=f"Fine-tune on it first: bitimely finetune {body['run']} --data {windows.name}",
            exit_code=Exit.USAGE,
        )
    return at


def _notices(body: dict[str, Any], windows: Windows, by: str, shared: int, split: str, verify: bool) -> list[str]:
    out = list(body["notices"])
    out += [line for line in windows.manifest.get("notices", []) if line not in out]
    here, there = described(windows), body["data"][0]
    told = {key: (there.get(key), here[key]) for key in ("rate", "reading") if key in there and there[key] != here[key]}
    out += [f"The run was trained with {key} {before}; these were made with {now}." for key, (before, now) in told.items()]
    if by == "window":
        out.append(
            "Intervals are over windows, not subjects (--by window): windows of one subject are not independent, so they are too narrow."
        )
    if shared:
        out.append(f"{shared} subjects of the {split} split were also in the training (split: {windows.split}).")
    if not verify or not body["verified"]:
        out.append("Checksums were not compared (--no-verify).")
    if split != "test":
        out.append(f"These are scores on the {split} split, not on the test split.")
    return out


def _held_out(
    model: Any, windows: Windows, body: dict[str, Any], batch_size: int | None, device: str, progress: Progress | None
) -> dict[str, Any]:
    """Mean held-out loss and rel of the pre-training objective, weighted by windows, no interval."""
    import torch

    from bitimely_core import data, objectives, train

    undefined = {"value": None, "se": None, "lo": None, "hi": None, "n_defined": 0, "undefined_reason": "the split has no windows"}
    least = registry.objectives[body["settings"]["objective"]["name"]].facts.rows
    if len(windows) < least:
        return {"loss": undefined, "rel": undefined}
    place = train.device(device)
    model = model.to(place).eval()
    objective = objectives.get(settings.ObjectiveConfig(**body["settings"]["objective"]))
    batches = data.batches(windows, batch_size or EVALUATION_BATCH, shuffle=False, least=least)
    sums: dict[str, float] = {}
    seen = 0
    with torch.no_grad():
        for step, batch in enumerate(batches(0)):
            found = objective(model, data.moved(batch, place), torch.Generator().manual_seed(step))
            rows = len(batch.values)
            seen += rows
            for key, value in {"loss": found["loss"], "rel": found["rel"], **found["parts"]}.items():
                sums[key] = sums.get(key, 0.0) + float(value) * rows
            if progress is not None:
                progress(f"evaluate {windows.name}", step + 1, batches.steps)
    return {
        key: {"value": total / seen, "se": None, "lo": None, "hi": None, "n_defined": 0, "undefined_reason": None}
        for key, total in sums.items()
    }


def _scored(
    model: Any,
    windows: Windows,
    chosen: Windows,
    body: dict[str, Any],
    bootstrap: int,
    by: Unit,
    batch_size: int | None,
    device: str,
    progress: Progress | None,
    columns: dict[str, Any],
) -> dict[str, Any]:
    from bitimely_core import evaluate as scoring

    prediction = predict(model, chosen, batch_size=batch_size, device=device, progress=progress)
    target = chosen.targets(None)
    assert target is not None, "a view with a task has targets"
    columns |= {"target": target, "prediction": prediction}
    train_target = windows["train"].targets(None) if len(windows["train"]) else None
    return scoring.score(
        windows.task,
        target,
        prediction,
        chosen.subjects(),
        class_names=windows.class_names,
        train_target=train_target,
        baselines=_of_events(windows, chosen) if folders.vocabulary(windows) and train_target is not None and len(chosen) else None,
        bootstrap=bootstrap,
        by=by,
        seed=0,
    )


def _of_events(windows: Any, chosen: Any) -> dict[str, np.ndarray]:
    """What needs no model: the number of events of a sequence, and for each label how often the one most telling code occurs."""
    from bitimely_core import evaluate as scoring
    from bitimely_core.datasets.pophr import probe

    train = windows["train"]
    labels = train.targets(None)
    lengths, codes, own = train.lengths(), train.counts(), chosen.counts()
    best = []
    for label in labels.T:
        known = np.isfinite(label)
        told = [probe.average_precision(codes[known, c], label[known]) or 0.0 for c in range(codes.shape[1])]
        best.append(int(np.argmax(told)))
    single = [scoring.length_only("multilabel", codes[:, c], labels[:, k : k + 1], own[:, c]) for k, c in enumerate(best)]
    return {"length_only": scoring.length_only("multilabel", lengths, labels, chosen.lengths()), "single_code": np.hstack(single)}


def _write_predictions(path: Path, chosen: Windows, windows: Windows, columns: dict[str, Any]) -> None:
    """One row a window: window, subject_id, recording_id, start, target, prediction, and one probability a class."""
    from bitimely_core import evaluate as scoring

    frame = scoring.frame(chosen.index, windows.task, windows.class_names, columns["target"], columns["prediction"])
    store.write_file(path, lambda out: frame.write_parquet(out, compression="zstd"))


def _compared(folder: Path, other: str, workspace: Path, windows: Windows, split: str, bootstrap: int, by: Unit) -> dict[str, Any]:
    """Paired differences to the predictions of another run on the same windows."""
    import polars as pl

    from bitimely_core import evaluate as scoring

    second = folders.run_folder(other, workspace)
    path = second / "predictions.parquet"
    scores = json.loads((second / "scores.json").read_bytes()) if (second / "scores.json").is_file() else {}
    if not path.is_file() or (scores.get("data"), scores.get("split")) != (windows.name, split):
        raise UserError(
            Reason.INCOMPLETE,
            f"no predictions on {windows.name}, split {split}",
            wanted="expected those of a former evaluate",
            file=str(second),
            action=f"Run: bitimely evaluate {other} --split {split}",
        )
    ours, theirs = pl.read_parquet(folder / "predictions.parquet"), pl.read_parquet(path)
    return {
        "run": folders.read(second)["run"],
        "metrics": scoring.compare_frames(windows.task, ours, theirs, windows.class_names, bootstrap=bootstrap, by=by),
    }


def embed(
    run: str | Path,
    *,
    data: str | None = None,
    readout: str | None = None,
    layers: str = "last",
    split: str = "all",
    out: Path | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write `embeddings-<data>.parquet` beside the run (or `out`): window, subject_id, recording_id, start, label, split, embedding.

    The vector is what a head would read: `readout` over the last layer or the last two. Returns out, n, width.
    """
    import polars as pl
    import torch

    from bitimely_core import data as loading
    from bitimely_core import heads, train

    folder = folders.run_folder(run, workspace)
    body = folders.read(folder)
    finished(folder, body)
    windows = folders.windows_for(data or body["data"][0]["name"], workspace, settings.DataConfig(), verify=verify, progress=progress)
    _fitting(windows, body, folder)
    if split not in {"train", "validation", "test", "all"}:
        raise registry.unknown("split", split, ["train", "validation", "test", "all"])
    chosen = windows if split == "all" else windows[split]
    kind = readout or body["settings"]["finetune"]["readout"] or registry.models[body["model"]].facts.readout
    if kind not in heads.POOLS:
        raise registry.unknown("readout", kind, list(heads.POOLS))
    target = out or folder / f"embeddings-{windows.name}.parquet"
    if dry_run:
        return {"out": str(target), "n": len(chosen), "readout": kind, "layers": layers}
    loaded: Any = load(folder, body, windows)
    place = train.device(device)
    model = (loaded.model if body["kind"] == "finetune" else loaded).to(place).eval()
    batches = loading.batches(chosen, batch_size or EVALUATION_BATCH, shuffle=False)
    vectors: list[np.ndarray] = []
    with torch.inference_mode():
        for step, batch in enumerate(batches(0)):
            vectors.append(heads.vectors(model, loading.moved(batch, place), kind, layers).float().cpu().numpy())
            if progress is not None:
                progress(f"embed {windows.name}", step + 1, batches.steps)
    matrix = np.concatenate(vectors) if vectors else np.zeros((0, 1), np.float32)
    frame = chosen.index.with_columns(embedding=pl.Series(matrix, dtype=pl.Array(pl.Float32, matrix.shape[1])))
    store.write_file(target, lambda stream: frame.write_parquet(stream, compression="zstd"))
    return {
        "format_version": folders.FORMAT,
        "run": body["run"],
        "data": described(windows)["name"],
        "readout": kind,
        "layers": layers,
        "out": str(target),
        "n": len(chosen),
        "width": int(matrix.shape[1]),
    }
