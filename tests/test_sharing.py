"""A run for others, and the same numbers again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import small
import torch

from bitimely_cli.main import main
from bitimely_core import models, workflows
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.progress import show_progress
from bitimely_core.store.records import write_results
from bitimely_core.train.devices import use_threads
from bitimely_core.types import Batch

SMALL = {
    "model": {"tokenizer": "patch", "patch": 50, "layers": 2},
    "train": {"steps": 3, "batch_size": 8},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small.copy_nights(tmp_path_factory.mktemp("sharing"))
    workflows.pretrain(
        preset="tiny", flags={**SMALL, "data": {"names": ("synthetic/staging",)}}, workspace=folder
    )
    workflows.finetune(
        "tiny",
        data="synthetic/staging",
        flags={"train": SMALL["train"]},
        run="tuned",
        workspace=folder,
    )
    return folder


@pytest.mark.slow
def test_what_is_exported_is_the_model(home: Path, tmp_path: Path) -> None:
    exported = workflows.export("tiny", out=tmp_path / "tiny", workspace=home)
    assert {"config.json", "model.safetensors", "run.json", "model_card.md"} <= set(
        exported["files"]
    )
    batch = Batch(torch.randn(2, 3000, 1))
    ours = models.load(home / "runs" / "tiny" / "model")(batch).hidden[-1]
    assert torch.equal(models.load(tmp_path / "tiny")(batch).hidden[-1], ours)
    assert (
        workflows.export("tiny", out=tmp_path / "tiny", workspace=home)["sha256"]
        == exported["sha256"]
    )
    again = workflows.pretrain(
        preset="tiny",
        flags={**SMALL, "data": {"names": ("synthetic/staging",)}},
        init=tmp_path / "tiny",
        run="from-export",
        workspace=home,
    )
    assert again["steps"] == 3
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="other files") as caught:
        workflows.export("tiny", out=tmp_path / "full", workspace=home)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("run", ["tiny", "tuned"])
def test_a_run_is_the_same_again(home: Path, run: str) -> None:
    assert workflows.reproduce(run, workspace=home, dry_run=True)["differences"] == []
    found = workflows.reproduce(run, workspace=home)
    assert found["reproduced"]
    assert found["same_weights"]
    assert found["loss"][0] == found["loss"][1]


def test_differences_are_reported(home: Path) -> None:
    path = home / "runs" / "tiny" / "run.json"
    original = path.read_bytes()
    body = json.loads(original)
    body["versions"]["torch"] = "1.0"
    body["data"][0]["fingerprint"] = "0" * 64
    write_results(path.parent, {path.name: json.dumps(body).encode()})
    try:
        differences = workflows.reproduce("tiny", workspace=home, dry_run=True)["differences"]
    finally:
        write_results(path.parent, {path.name: original})
    assert any(line.startswith("torch") and line.endswith("1.0") for line in differences)
    assert any("fingerprint" in line for line in differences)


def test_a_run_states_where_it_was_computed(home: Path) -> None:
    record = json.loads((home / "runs" / "tiny" / "run.json").read_bytes())
    environment = record["environment"]
    assert environment["threads"] == torch.get_num_threads()
    assert (environment["device"], environment["processes"]) == (
        "cuda" if torch.cuda.is_available() else "cpu",
        1,
    )
    assert environment["deterministic"] is (environment["device"] == "cpu")
    assert environment["matmul"] == torch.get_float32_matmul_precision()
    assert environment["hardware"]
    assert record["versions"]["torch"] == torch.__version__
    assert (
        f"{torch.get_num_threads()} thread" in (home / "runs" / "tiny" / "report.html").read_text()
    )


def test_another_number_of_threads_is_named(home: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        found = workflows.reproduce("tuned", workspace=home, dry_run=True)
    finally:
        torch.set_num_threads(before)
    assert found["differences"] == [f"threads {before + 1}, it was {before}"]


@pytest.mark.slow
def test_a_run_that_is_continued_elsewhere_names_both(home: Path) -> None:
    """Stopped after two of four steps with one thread, continued with two."""
    before = torch.get_num_threads()
    arguments: dict[str, Any] = {
        "preset": "tiny",
        "flags": {
            **SMALL,
            "train": {"steps": 4, "batch_size": 8, "checkpoint_every": 2},
            "data": {"names": ("synthetic/staging",)},
        },
        "run": "moved",
        "workspace": home,
    }

    def stop(what: str, done: int, total: int | None) -> None:
        if done == 3 or done == total:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, UserError)), show_progress(stop):
        workflows.pretrain(**arguments)
    torch.set_num_threads(before + 1)
    try:
        workflows.pretrain(**arguments)
    finally:
        torch.set_num_threads(before)
    record = json.loads((home / "runs" / "moved" / "run.json").read_bytes())
    assert [
        record["environment"]["threads"],
        *(one["threads"] for one in record["earlier_environments"]),
    ] == [before + 1, before]
    differences = workflows.reproduce("moved", workspace=home, dry_run=True)["differences"]
    assert any(line.startswith("threads") for line in differences)
    assert any("continued elsewhere" in line for line in differences)


@pytest.mark.long
def test_scores_that_are_not_the_same_again_are_on_the_page(home: Path) -> None:
    """The stored run is made to differ: another seed in the place of what a machine does."""
    for run, seed in (("first", 0), ("other", 1)):
        flags = {"train": {**SMALL["train"], "steps": 6, "lr": 1e-2, "seed": seed}}
        workflows.finetune("tiny", data="synthetic/staging", flags=flags, run=run, workspace=home)
        workflows.evaluate(run, workspace=home, bootstrap=20)
    path = home / "runs" / "first" / "run.json"
    same = workflows.reproduce("first", workspace=home)
    assert (same["changes"], same["same_weights"]) == ([], True)
    assert all(a == b for a, b in same["metrics"].values())
    page = home / "runs" / "first" / "report.html"
    assert "cannot decide" not in page.read_text()
    shutil.rmtree(home / "runs" / "first-again")
    record = json.loads(path.read_bytes())
    record["settings"]["train"]["seed"], record["environment"]["threads"] = 1, 64
    write_results(path.parent, {path.name: json.dumps(record).encode()})
    found = workflows.reproduce("first", workspace=home)
    accuracy = [
        json.loads((home / "runs" / run / "scores.json").read_bytes())["metrics"]["accuracy"][
            "value"
        ]
        for run in ("first", "other")
    ]
    assert found["metrics"]["accuracy"] == accuracy
    assert found["reproduced"] is False
    assert found["differences"] == [f"threads {torch.get_num_threads()}, it was 64"]
    assert accuracy[0] != accuracy[1]
    assert f"accuracy {accuracy[1]:.3f}, it was {accuracy[0]:.3f}" in found["changes"]
    assert "one seed cannot decide between two methods" in page.read_text()
    assert f"accuracy {accuracy[1]:.3f}, it was {accuracy[0]:.3f}" in page.read_text()
    compared = workflows.report(["first", "other"], workspace=home)
    assert "one seed cannot decide" in Path(compared["report"]).read_text()
    assert workflows.verify(home / "runs" / "first")["exit_code"] == Exit.OK
    assert workflows.reproduce("first", workspace=home)["trained"] is False


@pytest.mark.slow
def test_another_number_of_threads_through_the_command_line(home: Path) -> None:
    """A training whose large steps magnify the order of additions, with one thread, and again in a
    process with two.
    """

    def read(run: str, file: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((home / "runs" / run / file).read_bytes())
        return found

    tuned = [
        "--data",
        "synthetic/staging",
        "--steps",
        "40",
        "--batch-size",
        "8",
        "--lr",
        "0.02",
        "--run",
        "threaded",
    ]
    with use_threads(1):
        assert main(["finetune", "tiny", *tuned, "-w", str(home)]) == 0
        assert (
            main(
                [
                    "evaluate",
                    "threaded",
                    "--bootstrap",
                    "20",
                    "--baselines",
                    "cheap",
                    "-w",
                    str(home),
                ]
            )
            == 0
        )
    page = home / "runs" / "threaded" / "report.html"
    assert "cannot decide" not in page.read_text()
    command = [sys.executable, "-m", "bitimely_cli", "reproduce", "threaded", "-w", str(home)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "2"}
    )
    assert done.returncode == Exit.INTEGRITY, done.stderr
    assert [
        read(run, "run.json")["environment"]["threads"] for run in ("threaded", "threaded-again")
    ] == [1, 2]
    before, after = (read(run, "scores.json")["metrics"] for run in ("threaded", "threaded-again"))
    texts = {
        name.replace("_", " "): [f"{metrics[name]['value']:.3f}" for metrics in (after, before)]
        for name in before
    }
    lines = [f"{name} {b}, it was {a}" for name, (b, a) in texts.items() if a != b]
    assert lines, "the scores of this training depend on the order of additions"
    differing = [
        line.removeprefix("differs: ")
        for line in done.stdout.splitlines()
        if line.startswith("differs: ")
    ]
    assert differing == ["threads 2, it was 1", *lines]
    assert "one seed cannot decide" in done.stdout
    assert f"Trained again (threads 2, it was 1): {'; '.join(lines)}. " in page.read_text()
    assert "one seed cannot decide between two methods" in page.read_text()


COMMIT = "0123456789" * 4


class Hub:
    """What bitimely uses of huggingface_hub, over a folder; remembers the calls."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        remote: Path | None = None,
        fault: Exception | None = None,
    ) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.remote, self.fault, self.head = remote, fault, COMMIT
        module = ModuleType("huggingface_hub")
        module.HfApi = lambda: self  # type: ignore[attr-defined]
        module.snapshot_download = self.snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)

    def _note(self, name: str, **given: Any) -> None:
        self.calls.append((name, given))
        if self.fault is not None:
            raise self.fault

    def model_info(self, repo: str, revision: str | None = None) -> SimpleNamespace:
        self._note("model_info", repo=repo, revision=revision)
        return SimpleNamespace(sha=self.head)

    def snapshot_download(self, repo_id: str, revision: str, allow_patterns: list[str]) -> str:
        self._note(
            "snapshot_download", repo_id=repo_id, revision=revision, allow_patterns=allow_patterns
        )
        return str(self.remote)

    def create_repo(self, repo_id: str, repo_type: str, private: bool, exist_ok: bool) -> None:
        self._note(
            "create_repo", repo_id=repo_id, repo_type=repo_type, private=private, exist_ok=exist_ok
        )

    def upload_folder(
        self, repo_id: str, folder_path: str, repo_type: str, allow_patterns: list[str]
    ) -> SimpleNamespace:
        sent = sorted(
            path.name for path in Path(folder_path).iterdir() if path.name in allow_patterns
        )
        self._note("upload_folder", repo_id=repo_id, repo_type=repo_type, sent=sent)
        return SimpleNamespace(oid=COMMIT)


def begun(home: Path, init: str, run: str, **more: Any) -> dict[str, Any]:
    return workflows.pretrain(
        preset="tiny",
        flags={**SMALL, "data": {"names": ("synthetic/staging",)}},
        init=init,
        run=run,
        workspace=home,
        **more,
    )


def test_a_run_is_pushed_to_a_private_repository(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    assert (
        workflows.export(
            "tiny", out=tmp_path / "dry", push="lab/tiny", workspace=home, dry_run=True
        )["pushed"]
        == "lab/tiny"
    )
    assert hub.calls == []
    assert not (tmp_path / "dry").exists()
    exported = workflows.export("tiny", out=tmp_path / "out", push="lab/tiny", workspace=home)
    (made, repo), (sent, upload) = hub.calls
    assert (made, sent, exported["revision"]) == ("create_repo", "upload_folder", COMMIT)
    assert repo == {"repo_id": "lab/tiny", "repo_type": "model", "private": True, "exist_ok": True}
    assert upload["sent"] == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "model_card.md",
        "run.json",
    ]
    Hub(monkeypatch, fault=ConnectionError("no route\nto host"))
    with pytest.raises(UserError, match="lab/tiny: ConnectionError: no route") as caught:
        workflows.export("tiny", out=tmp_path / "out", push="lab/tiny", workspace=home)
    assert (caught.value.exit_code, caught.value.field) == (4, "--push")


@pytest.mark.slow
def test_a_run_starts_from_a_model_of_the_hub_and_keeps_its_commit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = workflows.export("tiny", out=tmp_path / "remote", workspace=home)
    hub = Hub(monkeypatch, tmp_path / "remote")
    begun(home, "lab/tiny", "dry", dry_run=True)
    assert hub.calls == []
    begun(home, "lab/tiny", "from-hub")
    assert hub.calls == [
        ("model_info", {"repo": "lab/tiny", "revision": None}),
        (
            "snapshot_download",
            {
                "repo_id": "lab/tiny",
                "revision": COMMIT,
                "allow_patterns": ["*.safetensors", "*.json", "*.md"],
            },
        ),
    ]
    body = json.loads((home / "runs" / "from-hub" / "run.json").read_bytes())
    assert body["init_from"] == {"repo": "lab/tiny", "revision": COMMIT}
    assert body["init"] == exported["sha256"]["model.safetensors"]
    begun(home, "tiny", "from-run")
    local = json.loads((home / "runs" / "from-run" / "run.json").read_bytes())
    assert (local["init_from"], local["weights"]) == ({"run": "tiny"}, body["weights"])
    hub.head, hub.calls = "f" * 40, []
    assert begun(home, "lab/tiny", "from-hub")["trained"] is False, (
        "the branch moved on, the run did not"
    )
    assert [call[1]["revision"] for call in hub.calls] == [COMMIT]
    for run in ("from-hub", "from-run"):
        assert workflows.reproduce(run, workspace=home)["same_weights"]
    hub.calls = []
    begun(home, "lab/tiny@v1", "tagged", force_new=True)
    assert hub.calls[0] == ("model_info", {"repo": "lab/tiny", "revision": "v1"})


def test_a_hub_that_cannot_be_used_is_one_clear_line(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflows.export("tiny", out=tmp_path / "remote", workspace=home)
    Hub(monkeypatch, fault=OSError("offline"))
    with pytest.raises(UserError, match="lab/tiny: OSError: offline") as caught:
        begun(home, "lab/tiny", "never")
    assert caught.value.exit_code == 4
    weights = tmp_path / "remote" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    Hub(monkeypatch, tmp_path / "remote")
    with pytest.raises(UserError, match=r"as in run\.json") as caught:
        begun(home, "lab/tiny", "never")
    assert caught.value.exit_code == 5
    (tmp_path / "remote" / "run.json").unlink()
    with pytest.raises(UserError, match="no weights with their hash") as caught:
        begun(home, "lab/tiny", "never")
    assert caught.value.exit_code == 5
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"bitimely\[hub\]") as caught:
        begun(home, "lab/tiny", "never")
    assert (caught.value.exit_code, caught.value.field) == (2, "--init")
    with pytest.raises(UserError, match=r"bitimely\[hub\]") as caught:
        workflows.export("tiny", out=tmp_path / "out", push="lab/tiny", workspace=home)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="OWNER/NAME") as caught:
        begun(home, "a/b/c", "never")
    assert caught.value.exit_code == 2
    assert not (home / "runs" / "never").exists()


def test_an_export_is_verified_and_damage_in_it_found(home: Path, tmp_path: Path) -> None:
    workflows.export("tiny", out=tmp_path / "tiny", workspace=home)
    result = workflows.verify(tmp_path / "tiny")
    assert result["exit_code"] == Exit.OK
    assert [one["state"] for one in result["checked"]] == ["good"]
    path = tmp_path / "tiny" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    result = workflows.verify(tmp_path / "tiny")
    assert result["exit_code"] == Exit.INTEGRITY
    assert [(one.code, one.file) for one in result["findings"]] == [(Reason.INTEGRITY, str(path))]
