"""Your own csv files with a mapping file: four people, two recordings each, one table that says who
is ill.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bitimely_core import cache, tokens

MAP = """
[[files]]
pattern = "data/*.csv"
rate = 50
unit = "mV"
channels = ["I", "II"]

[table]
path = "recordings.csv"
file = "recording"
subject = "person"
label = "diagnosis"
"""

with TemporaryDirectory() as home:
    raw = Path(home) / "raw"
    (raw / "data").mkdir(parents=True)
    rows = ["recording,person,diagnosis"]
    for i in range(8):
        waves = np.random.default_rng(i).normal(size=(1000, 2)).cumsum(axis=0)
        np.savetxt(
            raw / "data" / f"r{i}.csv", waves, delimiter=",", header="I,II", comments="", fmt="%.4f"
        )
        rows.append(f"r{i},p{i // 2},{'ill' if i < 4 else 'well'}")
    (raw / "recordings.csv").write_text("\n".join(rows) + "\n")
    (Path(home) / "map.toml").write_text(MAP)
    report = cache.ingest(
        "generic", raw, Path(home) / "cache", options={"map": str(Path(home) / "map.toml")}
    )
    windows = tokens.build(
        Path(home) / "cache", view="classification", out=Path(home) / "tokens", window=250
    )
    print(report["status"], report["counts"])
    print(
        windows.class_names,
        {
            split: sorted(set(windows[split].subjects()))
            for split in ("train", "validation", "test")
        },
    )
