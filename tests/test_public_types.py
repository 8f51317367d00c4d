"""The public names are typed: what a user writes passes `mypy --strict`, and mistakes are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USER = '''"""What a user's module does."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bitimely as bt


def train(folder: Path) -> dict[str, pl.DataFrame]:
    windows: bt.tokens.Windows = bt.open_tokens(folder)
    rows = windows["train"]
    array: npt.NDArray[np.float32] = np.asarray(rows)
    model = bt.build_model("bitimelygpt", preset="tiny", channels=rows.channels, length=rows.length, layers=2)
    bt.fit(model, bt.batches(rows, 32, seed=0), bt.get_objective("next-previous"), epochs=2)
    head = bt.Classifier(model, outputs=rows.classes)
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(rows, batch_size=32, num_workers=2)
    losses = [nn.functional.cross_entropy(head(x), y) for x, y in loader]
    encoded: bt.Encoded = model(bt.collate(rows))
    vectors = bt.Encoder("timelygpt", random_state=0).fit(array, rows.targets()).transform(array)
    print(len(losses), len(encoded.hidden), vectors.shape)
    return bt.read_tables(bt.evaluate("run", workspace=Path("workspace")))


def predict(run: str, files: list[Path]) -> Iterator[pl.DataFrame]:
    try:
        stager = bt.from_pretrained(run)
    except bt.UserError as error:
        raise SystemExit(error.exit_code) from error
    for file in files:
        yield stager.predict(file)
'''
MISTAKES = {  # line -> what mypy says of it
    "bt.evaluate(3.5)": "arg-type",
    'bt.evalute("run")': 'maybe "evaluate"?',
    'bt.Classifier("model", outputs=2)': "arg-type",
    'bt.read_tables("run")["metrics"].no_such_method()': "attr-defined",
    'bt.Run.open("run", 3)': 'expected "str | Path"',
    "bt.batches(3, 32)": 'expected "',
}


@pytest.mark.slow
def test_a_module_of_a_user_passes_strict_and_its_mistakes_are_found(tmp_path: Path) -> None:
    assert (ROOT / "bitimely" / "py.typed").is_file()
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mistakes.py").write_text("\n".join(["import bitimely as bt", *MISTAKES, ""]))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        sys.executable,
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(
        [*command, "user.py", "mistakes.py"], capture_output=True, text=True, cwd=tmp_path
    )
    lines = done.stdout.splitlines()[:-1]
    for at, message in enumerate(MISTAKES.values(), 2):
        assert any(
            line.startswith(f"mistakes.py:{at}: error:") and message in line for line in lines
        ), done.stdout + done.stderr
    assert [line for line in lines if not line.startswith("mistakes.py:")] == []
