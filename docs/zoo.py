"""The table of docs/models/README.md, from the runs of `bitimely run zoo`.

bitimely run zoo -w FOLDER && python docs/zoo.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "models" / "README.md"
MARK = "<!-- measured by docs/zoo.py: {} -->"


def main(home: Path, recipe: str = "zoo", view: str = "staging") -> None:
    """Read the scores and write the table."""
    from bitimely_core import pipeline
    from bitimely_core.pipeline.cells import list_matrix_points

    rows = [
        "| model | parameters | objective | accuracy (95 % over subjects) | macro AUROC |",
        "|---|---|---|---|---|",
    ]
    baseline = ""
    for cell in list_matrix_points(pipeline.load(recipe)):
        base = f"{recipe}-{cell['model']}"
        tuned = home / "runs" / f"{base}-{view}"
        if not (tuned / "scores.json").is_file():
            rows.append(f"| {cell['model']} | not run | | | |")
            continue
        run = json.loads((home / "runs" / base / "run.json").read_bytes())
        scores = json.loads((tuned / "scores.json").read_bytes())
        accuracy, auroc = (scores["metrics"][name] for name in ("accuracy", "auroc"))
        held = f"{accuracy['value']:.3f}" + (
            f" ({accuracy['lo']:.3f} to {accuracy['hi']:.3f})" if accuracy["lo"] is not None else ""
        )
        area = "not defined" if auroc["value"] is None else f"{auroc['value']:.3f}"
        rows.append(
            f"| {cell['model']} | {run['parameters']:,} | {run['settings']['objective']['name']} | {held} | {area} |"
        )
        baseline = f"Majority class: {scores['baselines']['majority']['accuracy']['value']:.3f}; {scores['n']:,} windows of {scores['n_subjects']} test subjects."
    mark = MARK.format(recipe)
    head, _, rest = PAGE.read_text().partition(mark)
    _, _, tail = rest.partition(mark)
    PAGE.write_text(f"{head}{mark}\n\n" + "\n".join(rows) + f"\n\n{baseline}\n\n{mark}{tail}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
