"""A selection of codes that nobody asked for and that keeps almost nothing is refused, with the
settings that keep more.
"""

import re
import shlex

import pytest

from bitimely_cli.main import main

CODES = 30
RARE = 3  # subjects with the code that the ratios select


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Ninety subjects of 30 common codes; the label's code is in three histories, of which one has
    enough of it.
    """
    root = tmp_path_factory.mktemp("little")
    raw = root / "raw"
    raw.mkdir()
    common = [f"{401 + k}.1" for k in range(CODES)]
    (raw / "map.csv").write_text(
        "icd9,phecode\n"
        + "".join(f"{code},{600 + k}\n" for k, code in enumerate(common))
        + "250.01,250.2\n"
    )
    claims, patients, labels = [], [], []
    for subject in range(90):
        patients.append(f"p{subject},1950-01-01,")
        labels.append(f"p{subject},{int(subject < RARE)}")
        claims += [
            f"p{subject},{2000 + k // 12}-{1 + k % 12:02d}-11,{code}"
            for k, code in enumerate(common)
        ]
        claims += [f"p{subject},2005-{1 + k:02d}-11,250.01" for k in range(12 * (subject < RARE))]
    (raw / "claims.csv").write_text("patient_id,date,icd9\n" + "\n".join(claims) + "\n")
    (raw / "patients.csv").write_text(
        "patient_id,birth_date,death_date\n" + "\n".join(patients) + "\n"
    )
    (raw / "labels.csv").write_text("patient_id,rare\n" + "\n".join(labels) + "\n")
    assert main(
        ["ingest", "pophr", str(raw), "--phecode-map", str(raw / "map.csv"), "-w", str(root / "w")]
    ) in {0, 3}
    return root / "w"


def test_default_selection_that_keeps_almost_nothing_is_refused(home, capsys):
    assert not (home / "tokens" / "pophr" / "manifest.json").exists()
    capsys.readouterr()
    assert main(["tokenize", "pophr", "-w", str(home)]) == 4
    screen = capsys.readouterr().err
    assert re.search(r"keeps 3 of 90 subjects, with 1 PheCodes", screen), "its owner sees it"
    assert main(["tokenize", "pophr", "--json", "-w", str(home)]) == 4
    shown = capsys.readouterr()
    assert "keeps 3 of" not in shown.out + shown.err
    error = shown.err
    assert "error[min_codes]" in error
    assert re.search(r"--no-select keeps at most 90 subjects, with 31 PheCodes", error)
    assert "--preset paper" in error
    assert not list((home / "tokens" / "pophr").glob("*.parquet"))
    assert "keeps at most 10 of at most 90 subjects, with 1 PheCodes" in error, (
        "a count of people below 11 is not printed"
    )


@pytest.mark.parametrize(
    "given", [["--no-select"], ["--preset", "paper"], ["--ratio-threshold", "4"]]
)
def test_selection_that_was_asked_for_is_built(home, given):
    assert main(["tokenize", "pophr", "--name", given[0].strip("-"), *given, "-w", str(home)]) == 0
    assert (home / "tokens" / given[0].strip("-") / "manifest.json").exists()


def test_the_next_command_after_a_refused_selection_is_built(home, capsys):
    raw = home.parent / "raw"
    words = ["ingest", "pophr", str(raw), "--phecode-map", str(raw / "map.csv"), "-w", str(home)]
    assert main(words) in {0, 3}
    following = capsys.readouterr().out.splitlines()[-1]
    assert main(shlex.split(following.removeprefix("next: bitimely "))) == 0
