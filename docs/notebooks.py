"""Runs the code cells of the notebooks in examples/ and stores what they print: `python docs/notebooks.py`. Needs no Jupyter."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_cells(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook (nbformat 4) with the outputs of its code cells: what each prints, then the repr of its last expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            cells.append(cell)
            continue
        count += 1
        tree = ast.parse("".join(cell["source"]), f"cell {count}")
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"cell {count}", "exec"), names)  # noqa: S102  cells of this repository
            value = None if last is None else eval(compile(last, f"cell {count}", "eval"), names)  # noqa: S307
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
        cells.append({**cell, "execution_count": count, "outputs": outputs})
    return {**notebook, "cells": cells}


def main() -> None:
    """Rewrite all."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        found = run_cells(json.loads(path.read_text()))
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(path.name, len(found["cells"]), "cells")


if __name__ == "__main__":
    main()
