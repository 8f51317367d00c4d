"""Everything is written through `storage`, where faults can be injected: no other module changes
the disk.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGES = ("bitimely", "bitimely_cli", "bitimely_core")
ROOT = Path(__file__).parent.parent
METHODS = {  # of paths, frames, arrays and figures, whatever the object is called
    *(
        "write_text",
        "touch",
        "mkdir",
        "unlink",
        "rmdir",
        "symlink_to",
        "hardlink_to",
        "savefig",
        "to_parquet",
        "to_csv",
        "write_csv",
    ),
    *("write_ipc", "sink_parquet", "sink_csv", "tofile", "savetxt", "savez", "savez_compressed"),
}
FUNCTIONS = {
    *(
        "os.replace",
        "os.rename",
        "os.unlink",
        "os.remove",
        "os.mkdir",
        "os.makedirs",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
    ),
    *(
        "os.ftruncate",
        "os.write",
        "shutil.rmtree",
        "shutil.copy",
        "shutil.copy2",
        "shutil.copyfile",
        "shutil.copytree",
    ),
    *(
        "shutil.move",
        "torch.save",
        "np.save",
        "safetensors.torch.save_file",
        "pickle.dump",
        "json.dump",
        "tempfile.mkdtemp",
    ),
}
ALLOWED = {  # place -> why
    "bitimely_core/store/locks.py:ftruncate": "the name of the holder of a lock, for messages",
    "bitimely_core/store/locks.py:unlink": "the file that stands in for a lock",
    "bitimely_core/datasets/synthetic.py:write_bytes": "a copy in a TemporaryDirectory of the system",
    "bitimely_core/recordings/mne_files.py:write_bytes": "in a TemporaryDirectory of the system",
    "bitimely_core/recordings/table_blocks.py:write_bytes": "in a TemporaryDirectory of the system",
    "bitimely_core/recordings/mne_files.py:symlink_to": "in a TemporaryDirectory of the system",
    "bitimely_core/report/svg.py:savefig": "into memory",
    "bitimely_core/claims/subjects.py:write_csv": "into a string",
    "bitimely_core/workflows/predict.py:write_csv": "into a string",
    "bitimely_core/workflows/new_subjects.py:write_csv": "into a string",
    "bitimely_core/claims/new_histories.py:symlink_to": "in a TemporaryDirectory of the system",
    "bitimely_cli/main.py:open": "of the null device",
    "bitimely_cli/signals.py:write": "to a pipe",
    "bitimely_core/workflows/prepare.py:symlink_to": "in a TemporaryDirectory of the system",
    "bitimely_cli/data_help.py:write_text": "of the help of a command",
}


def name_writes(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and name of each call that writes."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        arguments = [
            *node.args,
            *(keyword.value for keyword in node.keywords if keyword.arg == "mode"),
        ]
        texts = [
            one.value
            for one in arguments
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        opens = (called == "open" or method == "open") and any(
            set(text) <= set("wxarbt+") and set(text) & set("wxa+") for text in texts
        )
        through_storage = called.startswith("storage.")
        if opens or called in FUNCTIONS or (method in METHODS and not through_storage):
            found.append((node.lineno, method or called))
        elif method == "write_bytes" and not through_storage:
            found.append((node.lineno, method))
        elif (
            method in {"rename", "replace"}
            and len(node.args) == 1
            and not node.keywords
            and not through_storage
        ):
            if isinstance(node.args[0], ast.Dict) or called.startswith("pl.col"):
                continue  # of frames
            if method == "replace" or "path" in called:
                found.append((node.lineno, method))
    return found


@pytest.mark.slow
def test_only_storage_writes() -> None:
    paths = [
        path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "storage.py"
    ]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        for line, name in name_writes(ast.parse(path.read_text()))
        if f"{path.relative_to(ROOT)}:{name}" not in ALLOWED
    ]
    assert found == []


def test_the_search_finds_writes() -> None:
    lines = [
        "open(p, 'w')",
        "p.open('ab')",
        "p.write_text(x)",
        "f.savefig(p)",
        "np.save(p, x)",
        "shutil.rmtree(p)",
        "p.unlink()",
        "path.rename(q)",
        "p.replace(q)",
    ]
    assert len(name_writes(ast.parse("\n".join(lines)))) == len(lines)
    assert (
        name_writes(
            ast.parse(
                "open(p)\np.read_text()\nstorage.write_bytes(p, x)\nframe.rename({'a': 'b'})\ntext.replace('a', 'b')"
            )
        )
        == []
    )
