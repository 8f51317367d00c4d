"""Logarithms of band powers by MNE as vectors, with pyarrow alone: python mne_band_power.py TOKENS
OUT, for example workspace/tokens/synthetic-staging.
"""

import json
import sys
from pathlib import Path

import mne
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# Hz: delta, theta, alpha, sigma, beta
BANDS = ((0.5, 4.0), (4.0, 8.0), (8.0, 12.0), (12.0, 16.0), (16.0, 30.0))


def read_shard(path):
    """The windows of one file as stored [n, samples, channels], and their rate in Hz."""
    with pa.ipc.open_file(pa.memory_map(str(path))) as file:
        facts = {key.decode(): value.decode() for key, value in file.schema.metadata.items()}
        column = file.get_batch(0).column(0)
        values = np.frombuffer(column.buffers()[1], facts["dtype"]).reshape(
            len(column), int(facts["window"]), -1
        )
        return values.astype(float), float(facts["rate"])


def main(tokens, out):
    """Logarithms of the power of every channel in five bands."""
    index, affine = (
        pq.read_table(tokens / "index.parquet"),
        pq.read_table(tokens / "recordings.parquet").to_pydict(),
    )
    stored, rates = zip(*map(read_shard, sorted(tokens.glob("windows-*.arrow"))), strict=True)
    values = np.concatenate(stored)
    place = {name: k for k, name in enumerate(dict.fromkeys(affine["recording_id"]))}
    rows = [place[name] for name in index["recording_id"].to_pylist()]
    scale, offset = (
        np.array(affine[name]).reshape(len(place), 1, -1)[rows] for name in ("scale", "offset")
    )
    # physical values, [windows, channels, samples]
    signals = np.nan_to_num(values * scale + offset).swapaxes(1, 2)
    power, hertz = mne.time_frequency.psd_array_welch(
        signals, rates[0], fmin=0.5, fmax=30.0, n_fft=256, verbose="error"
    )
    bands = [np.log(power[..., (hertz >= lo) & (hertz < hi)].mean(-1) + 1e-12) for lo, hi in BANDS]
    vectors = pa.array(np.concatenate(bands, axis=1).tolist(), pa.list_(pa.float64()))
    table = index.select(["window", "recording_id", "start"]).append_column("vector", vectors)
    pq.write_table(
        table.replace_schema_metadata(
            {"encoder": "MNE band powers", "pretrained_on": json.dumps([])}
        ),
        out,
    )
    print(f"{table.num_rows} vectors of {len(BANDS)} bands in {out}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
