"""The page of training windows before and after augmentation."""

import json
from pathlib import Path

import numpy as np
import pytest
from short_nights import write_nights

from bitimely_cli.main import main
from bitimely_core.augment.augmented_batches import augment_batches
from bitimely_core.data import batches
from bitimely_core.run import Run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a run that was trained with two augmentations, and one without."""
    root = tmp_path_factory.mktemp("augmentation")
    work = ["--steps", "1", "-w", str(root)]
    write_nights(root / "raw", 3)
    assert main(["ingest", "generic", str(root / "raw"), "-w", str(root)]) == 0
    for run, names in (("loud", "gain,noise"), ("plain", "none")):
        options = ["--data", "generic/staging", "--augment", names, "--run", run]
        assert main(["train", "resnet", *options, *work]) == 0
    return root


@pytest.mark.slow
def test_windows_are_shown_before_and_after(home: Path) -> None:
    assert main(["analyze", "augmentation", "loud", "--sequences", "4", "-w", str(home)]) == 0
    folder = home / "reports" / "augmentation-loud"
    page = (folder / "report.html").read_text()
    for row in range(1, 5):
        assert f"Window {row}, EEG" in page
    assert page.count("<svg") >= 4
    changes = json.loads((folder / "summary.json").read_text())["changes"]
    run = Run.open("loud", home)
    train, tuned = run.windows()["train"], run.record.settings.finetune
    stored = batches(train, 4, seed=0)
    before = next(iter(stored(0))).values.numpy()
    after = next(iter(augment_batches(stored, train, tuned, 0)(0))).values.numpy()
    wanted = np.sqrt(np.mean((after - before) ** 2) / np.mean(before**2))
    assert changes["together"] == pytest.approx(wanted, rel=1e-5)
    assert set(changes) == {"together", "gain", "noise"}


@pytest.mark.slow
def test_a_run_without_augmentation_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", "augmentation", "plain", "-w", str(home)]) == 2
    assert "--augment default" in capsys.readouterr().err
