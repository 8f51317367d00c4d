"""Runs the notebooks in examples/ in a kernel of Jupyter and stores their outputs: `python
docs/notebooks.py` (extra `docs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_notebook(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of its cells, run in `folder`. Raises CellExecutionError with
    the traceback of a cell that fails.
    """
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)  # the client adds the version of Python
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(metadata)
    return notebook


def main() -> None:
    """Rewrite all."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        notebook = run_notebook(path, EXAMPLES)
        path.write_text(nbformat.writes(notebook, ensure_ascii=False) + "\n")
        print(path.name, len(notebook.cells), "cells")


if __name__ == "__main__":
    main()
