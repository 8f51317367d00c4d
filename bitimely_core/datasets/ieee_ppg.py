"""IEEEPPG: heart rate while running, from two PPG and three acceleration channels, as .ts files of the regression archive."""

from __future__ import annotations

from collections.abc import Iterator

from bitimely_core.datasets import tser
from bitimely_core.errors import Finding, usage_error
from bitimely_core.formats.source import Source, require_source
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import IngestOptions, IngestUnit

RATE = 125.0  # Hz
NAMES = ("PPG 1", "PPG 2", "ACC x", "ACC y", "ACC z")
CHANNELS = tuple(tser.TserChannel(name, RATE, "", 1000) for name in NAMES)


@datasets(
    DatasetFacts(
        title="IEEEPPG: heart rate of runners from wrist PPG and acceleration",
        views={
            "": View(
                channels=NAMES,
                rate=RATE,
                window=1000,
                task="regression",
                target="hr",
                unit="/min",
                split="official",
                help="heart rate in beats a minute from 8 s of two PPG and three acceleration channels at 125 Hz",
            )
        },
        licence="CC-BY 4.0",
        url="https://zenodo.org/records/3902710",
        download="IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts from the url, into one folder",
        layout="IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts",
        paper={"": {"channels": 5, "timesteps": 3_100_000, "sequences": 3096, "length": 1000, "classes": None}},
        rules={
            **tser.RULES,
            "channels": "the files name no channels: the order is that of the challenge's recordings without the ECG, from which the label comes",
            "units": "the files name none",
        },
    )
)
def ieee_ppg(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """IEEEPPG (.ts of the regression archive): heart rate of runners from 5 channels."""
    source = require_source(source)
    found = tser.find_problems(source)
    if len(found) > 1:
        raise usage_error(f"{len(found)} problems in .ts files", "expected one", "Give the folder of IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts")
    yield from tser.report_unclaimed(source, found)
    for files in found.values():
        yield from tser.list_units(
            source, {"": files}, {"": tser.TserLayout(target="hr", channels=CHANNELS, subject="ieee-ppg", windows=True)}
        )
