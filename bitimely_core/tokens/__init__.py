"""Cache to training windows: cut, split, stored for memory mapping, normalised on reading. No torch.

On disk, `tokens/<name>/`: `windows-*.arrow` (uncompressed Arrow files, each one record batch of fixed-size binary: T x V values, time
before channel, int16 digital or float32 physical), `index.parquet` (window, subject_id, recording_id, start, label, split),
`recordings.parquet` (recording_id, channel, scale, offset), `statistics.json` (training split), `manifest.json` (written last).
"""

from bitimely_core.tokens.building import build, plan
from bitimely_core.tokens.splits import assign_splits
from bitimely_core.tokens.windows import Windows, open_tokens

__all__ = ["Windows", "assign_splits", "build", "open_tokens", "plan"]
