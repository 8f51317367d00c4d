"""Recipes: the shipped smoke test runs, a second run does nothing, a failing cell is reported and
the others go on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small import SMALL_RECIPE

from bitimely_core import catalog, pipeline, registry
from bitimely_core.errors import UserError
from bitimely_core.pipeline import stage_workers
from bitimely_core.pipeline.graph import StageState
from bitimely_core.pipeline.plan import plan_experiment
from bitimely_core.train.devices import use_threads

TINY = (
    'title = "Two cells"'
    + SMALL_RECIPE
    + """
patch = 50
layers = 2

[matrix]
model = ["bitimelygpt", "gpt"]
seed = [0, 1]
"""
)


@pytest.mark.long
def test_smoke_runs_and_a_second_run_finds_it_done(tmp_path: Path) -> None:
    first = pipeline.run("smoke", workspace=tmp_path)
    assert first["exit_code"] == 0, first["stages"]
    assert {s["state"] for s in first["stages"]} == {"done"}
    assert Path(first["report"]).is_file()
    again = pipeline.run("smoke", workspace=tmp_path)
    assert {s["state"] for s in again["stages"]} == {"already done"}
    assert again["exit_code"] == 0


def test_a_matrix_is_a_product_and_shards_partition_it(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(TINY)
    planned = pipeline.run(str(path), workspace=tmp_path, dry_run=True)
    cells = [s["stage"] for s in planned["stages"] if s["stage"].startswith("pretrain")]
    assert cells == [
        f"pretrain two-{model}-{seed}" for model in ("bitimelygpt", "gpt") for seed in (0, 1)
    ]
    parts = [
        pipeline.run(str(path), workspace=tmp_path, dry_run=True, shard=(k, 3))["stages"]
        for k in (1, 2, 3)
    ]
    assert sorted(
        s["stage"] for part in parts for s in part if s["stage"].startswith("pretrain")
    ) == sorted(cells)
    only = pipeline.run(str(path), workspace=tmp_path, dry_run=True, only=["gpt-0", "bitimelygpt"])[
        "stages"
    ]
    assert [s["stage"] for s in only if s["stage"].startswith("pretrain")] == cells[:2]
    assert list(tmp_path.iterdir()) == [path]


SHIPPED = sorted(p.stem for p in registry.RECIPES.glob("*.toml"))
LIKE_OTHERS = {  # recipes whose kinds of stages others have too, each a second or more
    *("open", "open-epilepsy", "open-ieee-ppg", "open-ptb-xl", "zoo"),
    *("emg", "models", "models-bidmc", "models-epilepsy", "ptb-xl", "open-bidmc", "synpuf"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LIKE_OTHERS else ()) for n in SHIPPED]
)
def test_every_shipped_recipe_can_be_planned_without_its_data(name: str, tmp_path: Path) -> None:
    found = pipeline.run(name, workspace=tmp_path, dry_run=True, on="h200")  # no step is timed here
    assert not list(tmp_path.iterdir())
    trainings = [s for s in found["stages"] if s["stage"].startswith(("pretrain", "finetune"))]
    assert found["total"]["trainings"] == len(trainings)
    assert all(s["parameters"] > 0 for s in trainings)
    for s in trainings:
        if s["flops"]:  # no training is cheaper than one pass of its weights over what it sees
            assert s["flops"] >= 6 * s["parameters"] * s["windows"]


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("table2", 18, 8), ("table3", 11, 3), ("ablation", 4, 2), ("probing", 8, 2)],
)
def test_recipes_of_the_papers_tables_hold_its_numbers(
    name: str, rows: int, columns: int, tmp_path: Path
) -> None:
    recipe = pipeline.load(name)
    plan = plan_experiment(recipe, name, tmp_path, assignments=[])
    assert len(recipe.paper) == rows
    assert {len(cells) for cells in recipe.paper.values()} == {columns}
    assert set(recipe.paper) == {entry.row for entry in plan.table}
    assert {column.partition(":")[0] for cells in recipe.paper.values() for column in cells} == {
        entry.column for entry in plan.table
    }


def test_the_papers_variant_is_the_default_and_the_leak_free_one_a_switch(tmp_path: Path) -> None:
    stages = {}
    for leak_free in (False, True):
        plan = plan_experiment(
            pipeline.load("table2", leak_free=leak_free), "t", tmp_path, assignments=[]
        )
        stages[leak_free] = plan
    split = {
        leak_free: {
            n.settings.get("split") for n in plan.nodes.values() if n.label.startswith("tokenize")
        }
        for leak_free, plan in stages.items()
    }
    assert split == {False: {"random-window"}, True: {None}}
    objective = {
        leak_free: plan.trainings["pretrain t-sleep-bitimelygpt"]
        .flags.get("objective", {})
        .get("name", registry.models["bitimelygpt"].facts.objective)
        for leak_free, plan in stages.items()
    }
    assert objective == {False: "next-previous", True: "next-previous-strict"}
    assert "objective" not in stages[True].trainings["pretrain t-sleep-patchtst"].flags
    with pytest.raises(UserError, match="literal"):
        pipeline.load("smoke", leak_free=True)


def test_flags_of_the_fine_tuning_alone_share_one_pre_training(tmp_path: Path) -> None:
    plan = plan_experiment(pipeline.load("probing"), "probing", tmp_path, assignments=[])
    names = [label for label in plan.nodes if label.startswith("pretrain")]
    assert names == ["pretrain probing-sleep", "pretrain probing-pophr"]
    assert sum(label.startswith("finetune probing-sleep") for label in plan.nodes) == 8
    probing = next(
        node
        for label, node in plan.nodes.items()
        if label.startswith("analyze probing-probing-sleep")
    )
    assert len(probing.settings["runs"]) == 9
    assert len(probing.needs) == 9


def test_a_cell_that_cannot_be_is_left_out_with_its_reason(tmp_path: Path) -> None:
    plan = plan_experiment(pipeline.load("ablation-crossed"), "x", tmp_path, assignments=[])
    why = {entry.row: entry.why for entry in plan.table if entry.why}
    assert set(why) == {
        "timelygpt next-previous-strict", "timelygpt next-previous", "timelybert next-previous-strict", "timelybert next-previous", "timelybert next",
    }  # fmt: skip
    none = plan.trainings["pretrain x-bitimelygpt-none-0-init"]
    assert none.flags["train"]["steps"] == 0
    assert (
        plan.trainings["finetune x-bitimelygpt-none-0-staging"].flags["finetune"]["from_scratch"]
        is True
    )


@pytest.mark.slow
def test_set_changes_the_recipe_itself(tmp_path: Path) -> None:
    found = pipeline.run(
        "emg",
        workspace=tmp_path,
        dry_run=True,
        assignments=["matrix.seed=[3]", "train.batch_size=4"],
    )
    assert {
        s["stage"].split("-")[-1] for s in found["stages"] if s["stage"].startswith("pretrain")
    } <= {"3", "init"}
    for wrong in ("matrix=3", "train.lrr=1", "nothing.here=1", "matrix.sed=1 2"):
        with pytest.raises(UserError) as caught:
            pipeline.run("smoke", workspace=tmp_path, assignments=[wrong])
        assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def rows(folder: Path) -> str:
    return (folder / "reports" / "two" / "results.csv").read_text()


def started(path: Path, workspace: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bitimely_cli", "run", str(path), "-w", str(workspace), *more]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A recipe that two processes ran at once on one workspace, and the log of each."""
    folder = tmp_path_factory.mktemp("shared")
    path = folder / "two.toml"
    path.write_text(TINY.replace('model = ["bitimelygpt", "gpt"]', 'model = ["gpt"]'))
    pair = [started(path, folder / "whole") for _ in range(2)]
    logs = [process.communicate(timeout=500)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], logs
    return path, folder / "whole", logs


@pytest.mark.long
def test_two_processes_share_a_workspace_and_no_stage_is_run_twice(
    shared: tuple[Path, Path, list[str]],
) -> None:
    ran = [
        line.removeprefix("running: ").split(";")[0]
        for text in shared[2]
        for line in text.splitlines()
        if line.startswith("running: ")
    ]
    assert len(ran) == len(set(ran))
    assert {"ingest synthetic", "finetune two-gpt-1-staging", "results"} <= set(ran)


@pytest.mark.long
def test_a_run_that_was_killed_five_times_ends_in_the_same_results(
    shared: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    path, reference, _ = shared
    draw = random.Random(0)
    shutil.copytree(reference / "cache", tmp_path / "cache")
    for _ in range(5):
        process = started(path, tmp_path)
        time.sleep(draw.uniform(3, 9))
        process.kill()
        process.communicate()
    last = started(path, tmp_path)
    last.communicate(timeout=500)
    assert last.returncode == 0
    assert rows(tmp_path) == rows(reference)


@pytest.mark.long
def test_jobs_give_the_same_table(shared: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    path, reference, _ = shared
    found = pipeline.run(str(path), workspace=tmp_path, jobs=2)
    assert found["exit_code"] == 0, found["stages"]
    assert rows(tmp_path) == rows(reference)


def test_two_blocks_of_one_name_are_refused_unless_they_share_a_pre_training(
    tmp_path: Path,
) -> None:
    path = tmp_path / "two.toml"
    block = '[[block]]\npretrain = { preset = "tiny", data = "synthetic", epochs = %d }\nfinetune = { data = "synthetic/staging" }\n'
    path.write_text(block % 1 + block % 2)
    with pytest.raises(UserError, match="different settings"):
        pipeline.run(str(path), workspace=tmp_path, dry_run=True)
    path.write_text(block % 1 + (block % 1).replace("synthetic/staging", "emg"))
    found = pipeline.run(str(path), workspace=tmp_path, dry_run=True)
    assert [s["stage"].split()[0] for s in found["stages"]].count("pretrain") == 1


COMPARED = (
    '[pretrain]\npreset = "tiny"\ndata = "synthetic"\n[finetune]\ndata = ["synthetic/staging"]\n'
    '[matrix]\nobjective = ["masked", "next"]\n[evaluate]\ncompare = "next"\n'
)


def test_the_compared_run_is_found_although_the_recipe_is_named_as_a_value(tmp_path: Path) -> None:
    (tmp_path / "masked.toml").write_text("folds = [1, 2]\n" + COMPARED)
    plan = plan_experiment(
        pipeline.load(str(tmp_path / "masked.toml")), "masked", tmp_path, assignments=[]
    )
    for fold in (1, 2):
        evaluation = plan.nodes[f"evaluate masked-fold-{fold}-masked-staging"]
        assert evaluation.settings["compare"] == f"masked-fold-{fold}-next-staging"
        assert f"evaluate masked-fold-{fold}-next-staging" in evaluation.needs
        assert plan.nodes[f"evaluate masked-fold-{fold}-next-staging"].settings["compare"] is None


def refuse_recipe(folder: Path, text: str, message: str) -> UserError:
    """The error that a recipe of this text ends with before anything runs."""
    path = folder / "one.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        pipeline.run(str(path), workspace=folder, dry_run=True)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            COMPARED + '[[leave_out]]\nwhere = { objective = ["next"] }\nwhy = "too dear"\n',
            "masked is to be compared with next, which is left out",
        ),
        (
            COMPARED.replace('compare = "next"', 'compare = "nxt"'),
            "'nxt' is no value of the matrix",
        ),
    ],
)
def test_a_comparison_with_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert refuse_recipe(tmp_path, text, message).field == "evaluate.compare"


FAMILY = {
    "name": "F",
    "question": "?",
    "row": "strict 0.2",
    "rivals": ["scratch 0.2"],
    "columns": ["bidmc/hr"],
}


def write_family(**changes: object) -> str:
    lines = [
        f"{key} = {json.dumps(value).replace(': ', ' = ')}"
        for key, value in (FAMILY | changes).items()
    ]
    return "\n".join(["[[family]]", *lines, ""])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (write_family(), "expected `recipes`"),
        (
            'recipes = ["emg"]\n[pretrain]\npreset = "tiny"\n[matrix]\nseed = [1]\n',
            "found pretrain, matrix beside `recipes`",
        ),
        ('recipes = ["open"]\n', "lists recipes itself"),
        (
            'recipes = ["open-bidmc"]\n' + write_family(row="strikt 0.2"),
            "'strikt 0.2' in the family F",
        ),
        (
            'recipes = ["open-bidmc"]\n' + write_family(rivals=["kernles"]),
            "'kernles' in the family F",
        ),
        ('recipes = ["open-bidmc"]\n' + write_family(columns=["bidmc"]), "'bidmc' in the family F"),
        (
            'recipes = ["open-bidmc"]\n' + write_family(margin={"bidmc/rr": 3.0}),
            "expected margins of the columns alone",
        ),
        (
            'recipes = ["open-bidmc"]\n' + write_family(rivals=["strict 0.2"]),
            "expected rivals other than the row",
        ),
        ('recipes = ["open-bidmc"]\n' + write_family() * 2, "expected families of different names"),
    ],
)
def test_a_recipe_of_recipes_is_checked_before_anything_runs(
    tmp_path: Path, text: str, message: str
) -> None:
    refuse_recipe(tmp_path, text, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing to do"),
        ('[finetune]\ndata = ["synthetic/staging"]\n[matrix]\nseed = [0]\n', "found no preset"),
        (COMPARED + "[paper]\nmasked = { synthetic = nan }\n", "found nan"),
        (COMPARED.replace('preset = "tiny"', 'preset = "tinny"'), "tinny"),
        (
            COMPARED.replace("[matrix]", "[matrix]\nseed = [0, 0, 1]"),
            "expected each value of seed once",
        ),
        (COMPARED.replace("synthetic/staging", "synthetic"), "synthetic has no labels"),
        (COMPARED.replace("[matrix]", "[matrix]\nseed = []"), "expected each value of seed once"),
        (
            COMPARED + '[[arm]]\nname = "a"\n[[arm]]\nname = "a"\n',
            "expected arms of different names",
        ),
        (COMPARED + '[[leave_out]]\nwhere = {}\nwhy = "?"\n', "leave_out"),
        (
            COMPARED + '[[leave_out]]\nwhere = { objectiv = ["next"] }\nwhy = "?"\n',
            "'objectiv' in leave_out.where",
        ),
        (COMPARED + '[[leave_out]]\nwhere = { objective = ["nxt"] }\nwhy = "?"\n', "'nxt'"),
        (COMPARED + 'margin = { "synthetic" = 3.0 }\n', "found 'synthetic'"),
        (COMPARED + 'columns = ["synthetic"]\n', "expected DATA:METRIC or DATA:CLASS"),
        (
            COMPARED + 'columns = ["synthetic/staging:mae"]\n',
            "expected one of synthetic/staging:accuracy",
        ),
        (COMPARED + 'columns = ["synthetic/staging:N9"]\n', "found 'synthetic/staging:N9'"),
        (
            COMPARED
            + 'columns = ["synthetic/staging:auroc"]\nmargin = { "synthetic/staging" = 3.0 }\n',
            "found 'synthetic/staging'",
        ),
        ("folds = [6]\n" + COMPARED + "[tokenize]\nfolds = 5\n", "fold 6 of tokenize.folds = 5"),
        (
            "folds = [1, 2]\n" + COMPARED + "[tuning]\nfold = 7\n",
            "expected tuning.fold to be one of the folds",
        ),
        (
            "folds = [1, 2]\n" + COMPARED + "[tuning]\nseed = 99\n",
            "expected tuning.fold to be one of the folds",
        ),
    ],
)
def test_a_recipe_that_would_do_something_else_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    refuse_recipe(tmp_path, text, message)


@pytest.mark.slow
def test_only_without_a_match_is_refused_and_narrows_recipes_of_recipes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no cell holds 'zzz'"):
        pipeline.run("emg", workspace=tmp_path, dry_run=True, only=["zzz"])
    found = pipeline.run(
        "open", workspace=tmp_path, dry_run=True, only=["saturation", "bidmc/spo2"]
    )
    assert {stage["stage"].rpartition("(")[2] for stage in found["stages"]} == {"open-bidmc)"}


@pytest.mark.slow
def test_only_narrows_to_the_fine_tunings_of_one_data_set_and_what_they_need(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError) as refused:
        pipeline.run("open-bidmc", workspace=tmp_path, dry_run=True, only=["zzz"])
    # what is offered can be given, as here
    assert "such as strict 0.2 bidmc/hr, strict 0.2 bidmc/rr" in str(refused.value)
    found = pipeline.run(
        "open-bidmc", workspace=tmp_path, dry_run=True, only=["strict 0.2 bidmc/rr"], on="h200"
    )["stages"]
    names = [
        stage["stage"].partition(" ")[2]
        for stage in found
        if stage["stage"].startswith(("pretrain", "finetune", "evaluate"))
    ]
    expected = {
        f"open-bidmc-fold-{fold}-strict-{seed}" for fold in range(1, 6) for seed in range(3)
    } | {"open-bidmc-fold-1-strict-99"}
    tuned = {name.replace("-strict-", "-strict-0.2-") + "-rr" for name in expected}
    assert set(names) == expected | tuned


@pytest.mark.slow
def test_a_recipe_runs_at_the_papers_preset_under_a_name_of_its_own(tmp_path: Path) -> None:
    found = pipeline.run(
        "open", workspace=tmp_path, dry_run=True, preset="paper", on="h200", only=["strict 1.0 emg"]
    )
    widths = {row["name"]: row["parameters"] for row in catalog.list_rows("presets", tmp_path)}
    own = {
        stage["stage"]: stage["parameters"]
        for stage in found["stages"]
        if stage["stage"].startswith("pretrain")
    }
    # but for tokens and channels
    assert own["pretrain open-emg-paper-strict-0 (open-emg-paper)"] == pytest.approx(
        widths["7.5m"], rel=0.1
    )
    presets = {
        "open-epilepsy": "18m",
        "open-bidmc": "7.5m-regression",
        "open-ieee-ppg": "7.5m-regression",
        "open-ptb-xl": "7.5m",
    }
    assert {
        name: pipeline.load(name, preset="paper").pretrain.preset for name in presets
    } == presets
    plain = pipeline.run(
        "open-emg", workspace=tmp_path, dry_run=True, preset="tiny", on="h200", only=["scratch 1.0"]
    )["stages"]
    assert "pretrain open-emg-tiny-scratch-0-init" in {stage["stage"] for stage in plain}
    for recipe, preset, message in (
        ("emg", "paper", "paper_preset"),
        ("open-emg", "19m", "19m"),
        ("open-emg", "../x", "x"),
    ):
        with pytest.raises(UserError, match=message):
            pipeline.run(recipe, workspace=tmp_path, dry_run=True, preset=preset)


@pytest.mark.slow
def test_a_failing_cell_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(
        TINY.replace("seed = [0, 1]", "").replace("layers = 2", "layers = 3")
    )  # odd: alternating stacks refuse it, gpt does not
    done = pipeline.run(str(path), workspace=tmp_path)
    states = {s["stage"]: s["state"] for s in done["stages"]}
    assert states["pretrain odd-bitimelygpt"] == "failed"
    assert (
        states["finetune odd-bitimelygpt-staging"]
        == states["evaluate odd-bitimelygpt-staging"]
        == "left out"
    )
    assert states["evaluate odd-gpt-staging"] == "done"
    assert done["exit_code"] == 2


@pytest.mark.slow
def test_a_changed_recipe_is_told_what_a_recipe_can_do(tmp_path: Path) -> None:
    path = tmp_path / "twice.toml"
    text = TINY.replace("seed = [0, 1]", "").replace(
        'model = ["bitimelygpt", "gpt"]', 'model = ["gpt"]'
    )
    path.write_text(text)
    assert pipeline.run(str(path), workspace=tmp_path)["exit_code"] == 0
    path.write_text(text.replace("layers = 2", "layers = 1"))
    done = pipeline.run(str(path), workspace=tmp_path)
    stage = next(one for one in done["stages"] if one["state"] == "failed")
    run = tmp_path / "runs" / stage["stage"].partition(" ")[2]
    assert stage["detail"].endswith(f"Give the changed recipe another file name, or remove {run}.")
    assert "--" not in stage["detail"]
    shutil.rmtree(run)
    assert "done" in {
        one["state"]
        for one in pipeline.run(str(path), workspace=tmp_path)["stages"]
        if one["stage"] == stage["stage"]
    }


def test_unknown_recipes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="smoke"):
        pipeline.load("smok")
    path = tmp_path / "bad.toml"
    path.write_text('[pretrain]\nprest = "tiny"\n')
    with pytest.raises(UserError, match="preset"):
        pipeline.load(str(path))


def test_the_time_left_goes_by_what_trainings_of_that_model_took(tmp_path: Path) -> None:
    plan = plan_experiment(pipeline.load("emg"), "emg", tmp_path, assignments=[])
    estimates: list[float | None] = []
    watch = pipeline._add_time_left(
        plan, set(plan.nodes), lambda now: estimates.append(now.seconds_left), 1
    )
    shared = pipeline._add_time_left(
        plan, set(plan.nodes), lambda now: estimates.append(now.seconds_left), 2
    )
    assert watch is not None
    assert shared is not None
    gpt, lstm = StageState("done", seconds=10.0), StageState("done", seconds=100.0)
    watch({})
    watch({"pretrain emg-gpt-0": gpt})
    watch({"pretrain emg-gpt-0": gpt, "pretrain emg-lstm-0": lstm})
    trainings = sum(label.startswith("pretrain") for label in plan.nodes)
    assert estimates == [
        None,
        10.0 * (trainings - 1),
        4 * 10.0 + 4 * 100.0 + (trainings - 10) * 55.0,
    ]
    shared({"pretrain emg-gpt-0": gpt})
    assert estimates[-1] == 10.0 * (trainings - 1) / 2  # two processes at a time


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, 1, [["1"], ["2"], ["3"], ["0"]]),
        ("2,3,5,7", 2, [["5", "7"], ["2", "3"], ["5", "7"], ["2", "3"]]),
        ("GPU-aa,MIG-bb,GPU-cc,GPU-dd", 1, [["MIG-bb"], ["GPU-cc"], ["GPU-dd"], ["GPU-aa"]]),
    ],
)
def test_each_process_has_gpus_among_those_that_were_given(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: int, expected: list[list[str]]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    gpus = stage_workers.list_gpus()
    assert [stage_workers.choose_gpus(gpus, number, devices) for number in range(1, 5)] == expected
    assert stage_workers.choose_gpus(["0"], 1, 1) == stage_workers.choose_gpus([], 1, 1) == []


@pytest.mark.parametrize(
    ("jobs", "chosen", "expected"), [(1, None, 2), (2, None, 1), (5, None, 1), (5, "2", 2)]
)
def test_processes_beside_each_other_have_one_thread(
    monkeypatch: pytest.MonkeyPatch, jobs: int, chosen: str | None, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    with use_threads(2):
        with stage_workers.limit_threads(jobs):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2


def test_a_stage_of_several_devices_trains_under_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher has made this process one of its own: it trains instead of starting others, and of
    storing a stage without a run.
    """
    path = tmp_path / "one.toml"
    path.write_text('[pretrain]\npreset = "tiny"\ndata = "synthetic"\n')
    plan = plan_experiment(pipeline.load(str(path)), "one", tmp_path, assignments=[], devices=2)
    trained: list[str] = []
    monkeypatch.setattr(
        "bitimely_core.pipeline.stage_actions.run_training",
        lambda verb, arguments, **_: trained.append(arguments["run"]) or {},
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    plan.nodes["pretrain one"].call({})
    assert trained == ["one"]
