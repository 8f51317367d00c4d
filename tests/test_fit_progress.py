"""`bt.fit` shows its steps to somebody who looks, and is silent in a pipe; `bt.pretrain` takes its
data as `bt.train` does.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from test_train import Rows, Tiny, config, squares

import bitimely as bt

pytestmark = pytest.mark.usefixtures("one_thread")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_steps_are_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    rows = Rows()
    result = bt.fit(Tiny(), rows, squares, config=config(log_every=1))
    assert f"{result['steps']}/{result['steps']}" in screen.getvalue()
    assert "loss" in screen.getvalue()


def test_nothing_is_shown_in_a_pipe_nor_beside_a_log_of_ones_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bt.fit(Tiny(), Rows(), squares, config=config())
    assert capfd.readouterr() == ("", "")
    screen, lines = Terminal(), []
    monkeypatch.setattr("sys.stderr", screen)
    bt.fit(Tiny(), Rows(), squares, config=config(log_every=1), log=lines.append)
    assert screen.getvalue() == ""
    assert len(lines) > 1


def test_a_bar_changes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for stream in (io.StringIO(), Terminal()):
        torch.manual_seed(0)
        model = Tiny()
        monkeypatch.setattr("sys.stderr", stream)
        bt.fit(model, Rows(), squares, config=config())
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_pretrain_takes_the_name_of_its_data(tmp_path: Path) -> None:
    with pytest.raises(bt.UserError, match="unknown data set 'syn'"):
        bt.pretrain("syn", workspace=tmp_path)
    with pytest.raises(bt.UserError, match="unknown data set 'syn'"):
        bt.pretrain(data=["syn", "synthetic"], workspace=tmp_path)
