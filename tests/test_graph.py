"""Stages: each once, in the order of their needs, again only when something changed; failures cost
what hangs on them and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bitimely_core.errors import Exit, Reason, UserError, input_error
from bitimely_core.pipeline import graph
from bitimely_core.pipeline.graph import Node, StageResult


class Workplace:
    """Stages that write a file and note that they ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran, self.broken = folder, [], set()  # type: ignore[var-annotated]

    def node(
        self,
        label: str,
        *needs: str,
        settings: Mapping[str, Any] | None = None,
        after: tuple[str, ...] = (),
        reads: tuple[Path, ...] = (),
        wait: float = 0.0,
    ) -> Node:
        def call(_: graph.States) -> StageResult:
            if label in self.broken:
                raise input_error(Reason.CONFIG, f"{label} is broken")
            time.sleep(wait)
            self.ran.append(label)
            (self.folder / f"{label}.json").write_text(
                f"{label} {len(self.ran) if label == 'clock' else ''}"
            )
            return StageResult()

        return Node(
            label=label,
            settings=settings or {},
            call=call,
            output=self.folder / f"{label}.json",
            needs=needs,
            after=after,
            inputs=reads,
        )

    def go(self, *nodes: Node, **given: Any) -> dict[str, str]:
        self.ran.clear()
        states = graph.execute(
            {node.label: node for node in nodes}, self.folder / "stages", **given
        )
        return {label: state.state for label, state in states.items()}


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def test_a_stage_waits_for_what_it_needs_and_a_second_run_does_nothing(work: Workplace) -> None:
    nodes = [work.node("c", "b"), work.node("b", "a"), work.node("a")]
    assert work.go(*nodes) == {"c": "done", "b": "done", "a": "done"}
    assert work.ran == ["a", "b", "c"]
    assert work.go(*nodes) == {"c": "already done", "b": "already done", "a": "already done"}
    assert work.ran == []


@pytest.mark.parametrize("change", ["settings", "made", "deleted", "read"])
def test_a_change_reruns_the_node_and_its_dependents(work: Workplace, change: str) -> None:
    read = work.folder / "raw"
    read.write_text("1")

    def nodes(value: int = 0) -> list[Node]:
        return [
            work.node("clock", settings={"x": value}, reads=(read,)),
            work.node("b", "clock"),
            work.node("other"),
        ]

    work.go(*nodes())
    changes: dict[str, Callable[[], object]] = {
        "settings": lambda: None,
        "made": lambda: (work.folder / "clock.json").write_text("of somebody else"),
        "deleted": (work.folder / "clock.json").unlink,
        "read": lambda: read.write_text("2"),
    }
    changes[change]()
    work.ran.clear()
    again = nodes(1 if change == "settings" else 0)
    work.go(*again)
    assert work.ran[0] == "clock"
    assert "other" not in work.ran
    made_anew = (work.folder / "clock.json").read_text()
    assert made_anew == "clock 1"
    assert work.go(*again) == {
        "clock": "already done",
        "b": "already done",
        "other": "already done",
    }


def test_a_failure_costs_what_needs_it_and_is_tried_again(work: Workplace) -> None:
    nodes = [
        work.node("a"),
        work.node("b", "a"),
        work.node("c", "b"),
        work.node("d"),
        work.node("page", after=("c", "d")),
    ]
    work.broken = {"a"}
    states = graph.execute({n.label: n for n in nodes}, work.folder / "stages")
    assert {label: state.state for label, state in states.items()} == {
        "a": "failed",
        "b": "left out",
        "c": "left out",
        "d": "done",
        "page": "done",
    }
    assert "a is broken" in states["a"].detail
    assert states["a"].exit_code == Exit.REFUSED
    assert states["c"].detail == "needs b"
    work.broken = set()
    # the page reads what is new
    assert work.go(*nodes) == {
        "a": "done",
        "b": "done",
        "c": "done",
        "d": "already done",
        "page": "done",
    }


def test_a_page_is_made_again_when_a_stage_fails_and_when_it_no_longer_does(
    work: Workplace,
) -> None:
    def nodes(value: int) -> list[Node]:
        return [work.node("a", settings={"x": value}), work.node("page", after=("a",))]

    work.go(*nodes(0))
    work.broken = {"a"}
    # the file of the former success is still there
    assert work.go(*nodes(1)) == {"a": "failed", "page": "done"}
    work.broken = set()
    assert work.go(*nodes(0)) == {"a": "already done", "page": "done"}


def test_an_interruption_stops_the_graph_and_is_no_failure(work: Workplace) -> None:
    def stop(_: graph.States) -> Mapping[str, Any]:
        raise UserError(Reason.INCOMPLETE, "stopped", exit_code=Exit.INTERRUPTED)

    nodes = {
        "a": work.node("a"),
        "b": Node(label="b", settings={}, call=stop, output=work.folder / "b.json"),
    }
    with pytest.raises(UserError) as caught:
        graph.execute(nodes, work.folder / "stages")
    assert caught.value.exit_code == Exit.INTERRUPTED
    assert work.go(work.node("a"), work.node("b")) == {"a": "already done", "b": "done"}


@pytest.mark.slow
def test_several_at_once_do_each_stage_once(work: Workplace) -> None:
    nodes = {
        f"s{i}": work.node(f"s{i}", *([f"s{i - 4}"] if i >= 4 else []), wait=0.02)
        for i in range(16)
    }
    found: list[dict[str, dict[str, Any]]] = []
    began = time.time()
    threads = [
        threading.Thread(
            target=lambda: found.append(graph.execute(nodes, work.folder / "stages", began=began))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(work.ran) == sorted(nodes)
    assert [{state.state for state in states.values()} for states in found] == [{"done"}] * 4


def test_a_part_says_of_the_others_only_what_they_did(work: Workplace) -> None:
    nodes = [work.node("a"), work.node("b", "a"), work.node("c")]
    by_label = {n.label: n for n in nodes}
    assert graph.closure(by_label, {"b"}) == {"a", "b"}
    assert work.go(*nodes, selected={"a", "b"}) == {"a": "done", "b": "done", "c": "not run"}
    assert work.go(*nodes, selected={"c"}) == {
        "a": "already done",
        "b": "already done",
        "c": "done",
    }


def test_a_bug_costs_one_stage_and_says_where_without_values(work: Workplace) -> None:
    def bug(_: graph.States) -> Mapping[str, Any]:
        raise KeyError("Jane Doe")

    nodes = {
        "a": Node(label="a", settings={}, call=bug, output=work.folder / "a.json"),
        "b": work.node("b"),
    }
    states = graph.execute(nodes, work.folder / "stages")
    assert (states["a"].state, states["a"].exit_code, states["b"].state) == (
        "failed",
        Exit.INTERNAL_ERROR,
        "done",
    )
    written = (work.folder / "stages" / nodes["a"].key / "stage.json").read_text()
    assert "test_graph.py" in written
    assert "KeyError" in states["a"].detail
    assert "Jane" not in written + states["a"].detail


def test_a_stage_that_ends_without_memory_is_no_bug(work: Workplace) -> None:
    def fail(_: graph.States) -> StageResult:
        raise MemoryError

    states = graph.execute(
        {"a": Node(label="a", settings={}, call=fail, output=work.folder / "a.json")},
        work.folder / "stages",
    )
    assert states["a"].exit_code == Exit.RESOURCES
    assert "out of memory" in states["a"].detail


def test_stages_stay_done_where_their_folder_is_moved(work: Workplace) -> None:
    (work.folder / "raw.json").write_text("1")
    work.go(
        work.node("a", reads=(work.folder / "raw.json",)),
        work.node("b", "a"),
        work.node("page", after=("b",)),
    )
    moved = Workplace(work.folder.rename(work.folder.with_name("moved")))
    nodes = [
        moved.node("a", reads=(moved.folder / "raw.json",)),
        moved.node("b", "a"),
        moved.node("page", after=("b",)),
    ]
    assert set(moved.go(*nodes).values()) == {"already done"}
    (moved.folder / "raw.json").write_text("2")
    assert moved.go(*nodes)["a"] == "done"


@pytest.mark.parametrize("shift", [-86400.0, 86400.0])
def test_a_clock_that_was_set_changes_nothing(
    work: Workplace, monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    real = time.time
    monkeypatch.setattr(graph.time, "time", lambda: real() - shift)
    work.broken.add("b")
    nodes = [work.node("a"), work.node("b", "a")]
    assert work.go(*nodes) == {"a": "done", "b": "failed"}
    monkeypatch.setattr(graph.time, "time", real)
    assert work.go(*nodes) == {"a": "already done", "b": "failed"}
    work.broken.clear()
    assert work.go(*nodes) == {"a": "already done", "b": "done"}
    assert work.ran == ["b"]
