"""Curves for TensorBoard: what its own reader finds is what `metrics.jsonl` holds, also after a
kill.
"""

import json
import sys

import numpy as np
import pytest
from faults import Killed
from small import VERBS, copy_data

import bitimely
from bitimely_cli.main import main
from bitimely_core.train import event_file

pytest.importorskip("tensorboard")
KEYS = ("step", "epoch", "split")


def train(home, *more):
    return main(
        [*VERBS["pretrain"], "--track", "--set", "train.log_every=1", *more, "-w", str(home)]
    )


def read_scalars(run):
    """(tag, step) -> value, by the reader of TensorBoard; every pair occurs once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = [
        ((tag, one.step), one.value)
        for tag in reader.Tags()["scalars"]
        for one in reader.Scalars(tag)
    ]
    assert len(dict(found)) == len(found), "a step is doubled"
    return dict(found)


def read_lines(run):
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (f"{name}/{line['split']}", line["step"]): float(np.float32(value))
        for line in lines
        for name, value in line.items()
        if name not in KEYS and value is not None
    }


def test_events_are_the_lines_of_the_log(tmp_path):
    home = copy_data(tmp_path)
    assert train(home) == 0
    run = home / "runs" / "plain"
    scalars = read_scalars(run)
    assert scalars == read_lines(run)
    assert {step for (tag, step) in scalars if tag == "loss/train"} == {1, 2, 3, 4}
    assert (
        f"tensorboard/{event_file.NAME}" in json.loads((run / "manifest.json").read_text())["files"]
    )
    assert bitimely.verify(run)["exit_code"] == 0
    assert main([*VERBS["pretrain"], "--set", "train.log_every=1", "-w", str(home)]) == 0, (
        "the curves are no setting of the result"
    )


@pytest.mark.parametrize("written", [True, False])
def test_killed_training_continues_the_curve_without_doubled_steps(tmp_path, monkeypatch, written):
    home = copy_data(tmp_path)
    run, append, calls = home / "runs" / "plain", event_file.append_event, []

    def kill(folder, line):
        calls.append(line)
        if len(calls) == 3:
            if written:
                append(folder, line)
                with (folder / "tensorboard" / event_file.NAME).open("ab") as file:
                    file.write(b"\x40\0\0\0\0\0\0\0half of a record")
            raise Killed
        append(folder, line)

    monkeypatch.setattr(event_file, "append_event", kill)
    assert train(home) == 1
    assert len(calls) == 3
    monkeypatch.undo()
    assert bitimely.verify(run)["exit_code"] == 4, "unfinished, not damaged"
    assert train(home) == 0
    assert read_scalars(run) == read_lines(run)


def test_continued_training_is_tracked_from_its_first_step(tmp_path):
    home = copy_data(tmp_path)
    run = home / "runs" / "plain"
    run.mkdir(parents=True)
    lines = [
        {"step": step, "epoch": 1, "split": "train", "loss": 1 / step, "rel": None}
        for step in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    event_file.restore_events(run, lines)
    event_file.restore_events(run, lines[:2])
    event_file.append_event(run, lines[2])
    assert read_scalars(run) == read_lines(run)


def test_missing_extra_is_one_line_before_any_work(tmp_path, monkeypatch, capsys):
    home = copy_data(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    assert train(home) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert "bitimely[track]" in err[0]
    assert not (home / "runs").exists()
