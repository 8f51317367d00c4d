"""Operations on recordings (signals on a regular clock), see `registry.DATA_KINDS`."""

from __future__ import annotations

from bitimely_core.cache.ingest import ingest_recordings
from bitimely_core.registry import DataKind
from bitimely_core.tokens import building, windows

KIND = DataKind(
    pin_options=lambda options, folder: options, ingest=ingest_recordings, open_tokens=windows.open_windows, tokenize=building.build
)
