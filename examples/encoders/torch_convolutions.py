"""Vectors of a small convolution network: python torch_convolutions.py TOKENS OUT [EPOCHS]; without
epochs its weights are random.
"""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import bitimely

tokens, out, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0
torch.manual_seed(0)
windows = bitimely.open_tokens(tokens)
encoder = nn.Sequential(
    *(
        nn.Conv1d(windows.channels, 32, 50, 10),
        nn.ReLU(),
        nn.Conv1d(32, 64, 8, 4),
        nn.ReLU(),
        nn.Conv1d(64, 64, 8, 2),
        nn.ReLU(),
    ),
    *(nn.AdaptiveAvgPool1d(1), nn.Flatten()),
)
network = nn.Sequential(encoder, nn.Linear(64, windows.classes))
optimizer = torch.optim.Adam(network.parameters(), 1e-3)


def read(rows):
    """Normalised windows, [rows, channels, samples]."""
    return torch.from_numpy(windows.values(rows)).transpose(1, 2)


train = torch.from_numpy(windows["train"].rows)
for _ in range(epochs):  # on the labels of the training split
    for rows in train[torch.randperm(len(train))].split(64):
        loss = nn.functional.cross_entropy(
            network(read(rows.numpy())), torch.from_numpy(windows.targets(rows.numpy()))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
with torch.inference_mode():
    vectors = torch.cat(
        [encoder.eval()(read(rows.numpy())) for rows in torch.from_numpy(windows.rows).split(256)]
    )
table = windows.index.select("window", "recording_id", "start").to_arrow()
table = table.append_column(
    "vector",
    pa.FixedSizeListArray.from_arrays(pa.array(vectors.flatten().numpy()), vectors.shape[1]),
)
seen = [f"{windows.dataset}:train"] if epochs else []
about = {
    "encoder": f"convolutions, {epochs} epochs",
    "pretrained_on": json.dumps(seen),
    "tokens": windows.fingerprint,
}
pq.write_table(table.replace_schema_metadata(about), out)
print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers in {out}")
