"""The first minutes at a terminal: tables at its width, names that the shell completes, listings,
reports and scores of methods without torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small

from bitimely_cli.main import main
from bitimely_cli.screen import fit_columns
from bitimely_core import catalog
from bitimely_core.claims.sources import recognize_layout
from bitimely_core.formats.source import scan_folder


def run(*arguments: str, **variables: str) -> str:
    """What `bitimely` prints."""
    command = [sys.executable, "-m", "bitimely_cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **variables}
    ).stdout


@pytest.mark.parametrize("kind", [kind for kind in catalog.COLUMNS if kind != "runs"])
def test_tables_fit_80_columns_with_whole_names(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", kind, "-w", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith(" ")]
    assert max(map(len, table)) <= 80
    words = {word for line in table for word in line.split()}
    assert {row["name"] for row in catalog.list_rows(kind, tmp_path)} <= words


def test_columns_that_do_not_fit_are_named() -> None:
    cells = [["name", "much longer heading", "last"], ["a" * 20, "two words", "b" * 30]]
    assert fit_columns(cells, 80) == [20, 19, 30]
    assert len(fit_columns(cells, 50)) == 2
    assert fit_columns(cells, 10) == [10]
    # whole beside a long cell
    assert fit_columns([["took", "why"], ["0.00 s", "words " * 40]], 40)[0] == len("0.00 s")
    assert "Not shown at 80 columns: readout, attention" in run("list", "models", COLUMNS="80")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ingest sl", ["sleep-edf"]),
        ("tokenize ptb-xl/m", ["ptb-xl/multilabel"]),
        pytest.param(
            "pretrain --model ti", ["timelygpt", "timelybert", "timesnet"], marks=pytest.mark.slow
        ),
        pytest.param("pretrain --precision b", ["bf16"], marks=pytest.mark.slow),
        pytest.param("analyze sal", ["saliency"], marks=pytest.mark.slow),
        pytest.param("run zo", ["zoo"], marks=pytest.mark.slow),
        pytest.param("list pre", ["pretrained", "presets"], marks=pytest.mark.slow),
        ("evaluate night", ["night-1"]),
        ("predict ppg-h", ["ppg-heart-rate"]),
        ("train --augment gain,m", ["gain,mask-spans", "gain,mixup"]),
        ("evaluate unknown", []),
    ],
)
def test_the_shell_completes_names(
    typed: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small.find_workspace() / "runs" / "plain", tmp_path / "runs" / "night-1")
    words = f"bitimely {typed}"
    output = run(
        _BITIMELY_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
        BITIMELY_WORKSPACE=str(tmp_path),
    )
    assert output.split() == offered


@pytest.mark.slow
def test_listings_do_without_torch(tmp_path: Path) -> None:
    kinds = list(catalog.COLUMNS)
    program = f"import sys; from bitimely_cli.main import main; [main(['list', k, '-w', {str(tmp_path)!r}]) for k in {kinds}]; print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.split()[-1] == "False"


@pytest.mark.slow
def test_reports_and_scores_without_a_network_do_without_torch(tmp_path: Path) -> None:
    """The predictions of a network that was scored before are stored, on that device."""
    home = small.copy_workspace(tmp_path / "home")
    assert main(["evaluate", "tuned", "-w", str(home)]) == 0
    assert (
        main(["train", "features", "--data", small.VIEW, "--run", "simple", "-w", str(home)]) == 0
    )
    program = """
import sys
from bitimely_cli.main import main
scored = ("evaluate simple", "evaluate tuned", "evaluate tuned --device cpu")
for words in ("report tuned", "report tuned scratch", *scored):
    code = main([*words.split(), "-w", sys.argv[1]])
    print(code, "torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(home)], capture_output=True, text=True, check=True
    )
    found = [line for line in done.stderr.splitlines() if line.startswith("0 ")]
    assert found == ["0 False"] * 4 + ["0 True"], done.stderr


@pytest.mark.slow
def test_the_training_is_imported_from_its_package_on_first_use() -> None:
    program = """
import sys
import bitimely_core.train
before = "torch" in sys.modules
from bitimely_core.train import estimate, fit
print(before, "torch" in sys.modules, fit.__module__, estimate.__module__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "False",
        "True",
        "bitimely_core.train.loop",
        "bitimely_core.train.step_cost",
    ]


def test_the_version_does_without_numpy() -> None:
    program = "import sys; from bitimely_cli.main import main; main(['--version']); print('numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == "False"


@pytest.mark.slow
def test_a_model_that_a_program_registers_is_listed(tmp_path: Path) -> None:
    import bitimely_core.models  # noqa: F401  registers them
    from bitimely_core.registry import models

    entry = models["gpt"]
    models._items["gpt-of-a-program"] = entry
    try:
        assert "gpt-of-a-program" in [row["name"] for row in catalog.list_rows("models", tmp_path)]
    finally:
        del models._items["gpt-of-a-program"]


@pytest.mark.slow
def test_importing_the_models_leaves_the_compiler_out() -> None:
    program = "import gc, sys; import bitimely_core.models, bitimely_core.objectives; print('torch._dynamo' in sys.modules or not gc.isenabled())"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["False"]


@pytest.mark.slow
def test_tables_of_a_page_and_corrected_intervals_leave_pandas_and_all_distributions_out() -> None:
    program = """
import io, sys
import numpy as np, pyarrow.parquet as pq
from bitimely_core.evaluate import holm_correct
from bitimely_core.report.numbers import to_parquet
from bitimely_core.schemas.scores import MeanDifference
columns = {"name": np.array(["a", "\u00e9", ""], str), "value": np.array([1.5, np.nan, -2.0]), "n": np.arange(3), "none": np.array(["", "", ""], str)}
found = to_parquet(columns)
corrected = holm_correct([MeanDifference(difference=1.0, total_se=0.5, df=7.0, p=0.01)])
print({"pandas", "scipy.stats"} & set(sys.modules))
table, (one,) = pq.read_table(io.BytesIO(found)), corrected
assert [table[name].to_pylist() for name in ("name", "n", "none")] == [["a", "\u00e9", ""], [0, 1, 2], ["", "", ""]]
assert str(table["value"].to_pylist()) == "[1.5, nan, -2.0]" and table.schema.field("name").type == "string"
from scipy import stats
assert abs(one.corrected_hi - 1.0 - stats.t.isf(0.025, 7.0) * 0.5) < 1e-12, one
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )


@pytest.mark.parametrize(
    ("files", "layout"),
    [
        ({"DE1_0_2008_to_2010_Inpatient_Claims_Sample_1.csv": "DESYNPUF_ID"}, "synpuf"),
        (
            {"PATIENTS.csv": "subject_id,dob", "ADMISSIONS.csv.gz": "", "DIAGNOSES_ICD.csv": ""},
            "mimic3",
        ),
        (
            {
                "hosp/patients.csv": "subject_id,anchor_year",
                "hosp/admissions.csv": "",
                "hosp/diagnoses_icd.csv": "",
            },
            "mimic4",
        ),
        ({"person.csv": "", "condition_occurrence.csv": "", "death.csv": ""}, "omop"),
        ({"data/train/0.parquet": "", "metadata/codes.parquet": ""}, "meds"),
        ({"claims.parquet": "", "patients.csv": ""}, "claims"),
        ({"claims.csv": "", "person.csv": "", "condition_occurrence.csv": ""}, ""),
        ({"table.csv": ""}, ""),
    ],
)
def test_the_layout_of_claims_is_recognized_by_its_files(
    files: dict[str, str], layout: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n1\n")
    assert recognize_layout(scan_folder(tmp_path)) == layout
