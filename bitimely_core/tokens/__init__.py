"""Makes training windows of a cache: cut, split, stored for memory mapping, normalised on reading.

It imports no torch. On disk, `tokens/<name>/`: `windows-*.arrow` (uncompressed Arrow files, each
one record batch of fixed-size binary: T x V values, time before channel, int16 digital or float32
physical), `index.parquet` (window, subject_id, recording_id, start, label, split),
`recordings.parquet` (recording_id, channel, scale, offset), `statistics.json` (training split),
`manifest.json` (written last).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitimely_core import registry
from bitimely_core.cache import Cache, open_cache
from bitimely_core.store import manifests
from bitimely_core.tokens.building import plan
from bitimely_core.tokens.sequences import EventSequences
from bitimely_core.tokens.sets import TokenSet, find_token_kind
from bitimely_core.tokens.splits import assign_splits
from bitimely_core.tokens.windows import Windows


def build(
    cache: str | Path | Cache,
    *,
    out: str | Path,
    verify: bool = True,
    force_new: bool = False,
    **choices: Any,
) -> Any:
    """Windows or sequences from a cache.

    Raises UserError as `building.build_windows` and `claims.sequence_plan.resolve_plan`.
    """
    opened = open_cache(cache, verify=False) if isinstance(cache, str | Path) else cache
    kind = registry.data_kinds[opened.manifest.kind]
    kind.write_tokens(cache, out=Path(out), verify=verify, force_new=force_new, **choices)
    return open_tokens(out, verify=False)  # every file was compared when it was written or found


def open_tokens(folder: str | Path, verify: bool = True) -> Any:
    """Open the windows or event sequences in `folder`.

    With `verify` every file is compared with the manifest first. Raises UserError: not_found,
    incomplete or unsupported_format (exit 4), integrity (exit 5) for a damaged file,
    subject_leakage (exit 4) when a subject is in two splits of a set that was split by subject.
    """
    folder = Path(folder)
    kind = find_token_kind(folder)
    with manifests.require_agreement(folder):
        return kind.open_tokens(folder, verify=verify)


__all__ = ["EventSequences", "TokenSet", "Windows", "assign_splits", "build", "open_tokens", "plan"]
