"""Records of reports and of the stages of a recipe."""

from __future__ import annotations

from typing import Any

from bitimely_core.store.records import Part, ResultRecord, StoredFile


class ReportInfo(Part):
    """The page of a report."""

    title: str
    verdict: str
    notices: list[str] = []
    facts: dict[str, str] = {}
    files: dict[str, StoredFile] = {}  # beside the page


class Summary(ResultRecord):
    """summary.json: the page, and the numbers of its figures under keys that depend on the kind of
    report (`model_extra`).
    """

    report: ReportInfo


class StageRecord(ResultRecord):
    """`stage.json`: how one stage of an experiment ended, with the hashes of its inputs and its
    output.
    """

    stage: str
    settings: dict[str, Any]
    time: float  # seconds since the epoch
    frames: list[str]  # of a defect: file, line and function, without values
    state: str
    detail: str
    exit_code: int
    seconds: float
    read: dict[str, str | None]
    made: str | None
