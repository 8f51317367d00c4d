"""The map of new recordings: which of their channels a run reads, and what files do not state."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pydantic import Field

from bitimely_core.config import SettingsLayer, read_toml, validate
from bitimely_core.errors import safe_text, usage_error
from bitimely_core.recordings.mapping import Clock, RecordingMap, check_map, check_match

OF_ALL = {"rate", "time", "clock", "delimiter", "match"}  # keys of `ChannelMap` for all files
# one item or several, or channel of the run -> channel of the files
MapItems: TypeAlias = str | Sequence[str] | Mapping[str, str]


class ChannelMap(RecordingMap):
    """`--map`: the channels of the run in the files, and what these do not state.

    The map of `ingest` is one, too. Its tables and labels count where labels are read.
    """

    channels: dict[str, str | tuple[str, ...]] = Field(
        default_factory=dict
    )  # name in the run -> name in the file or "PLUS - MINUS", or several; the first there is read
    rate: float | None = Field(None, gt=0)  # Hz, of tables and arrays
    time: str = ""  # column with the times of the rows, of tables; "": found
    clock: Clock = ""  # unit of these times; "": found
    delimiter: str = ""  # between cells; "": found
    # regular expression on the path below a folder; files of one group `recording` are joined
    match: str = ""

    def list_names(self, wanted: str) -> tuple[str, ...]:
        """Names under which a file may have the channel, in their order."""
        names = self.channels.get(wanted, ())
        return (names, wanted) if isinstance(names, str) else (*names, wanted)


def parse_map(items: MapItems, channels: Sequence[str]) -> ChannelMap:
    """The map of `WANTED=FOUND` items and TOML files, later ones added.

    `channels` are those of the run. Raises UserError (exit 2).
    """
    if isinstance(items, Mapping):
        items = [f"{wanted}={name}" for wanted, name in items.items()]
    mapping = ChannelMap()
    for item in [items] if isinstance(items, str) else items:
        wanted, sign, name = item.partition("=")
        values: SettingsLayer = {"channels": {wanted: name}}
        if not sign or (wanted not in channels and item.lower().endswith(".toml")):
            values = read_toml(Path(item))
        new = validate(ChannelMap, values, "--map" if sign else item)
        check_map(new, Path(item))
        check_match(new.match, "match")
        _check_mapped(new.channels, channels)
        merged = {
            name: (*mapping.list_names(name)[:-1], *new.list_names(name)[:-1])
            for name in {**mapping.channels, **new.channels}
        }
        layer = {**mapping.model_dump(exclude_unset=True), **values, "channels": merged}
        mapping = validate(ChannelMap, layer, "--map")
    return mapping


def _check_mapped(names: Iterable[str], channels: Sequence[str]) -> None:
    """Raises UserError (config, exit 2) for a name that is no channel of the run."""
    for name in names:
        if name not in channels:
            close = difflib.get_close_matches(name, channels, n=2, cutoff=0.3)
            raise usage_error(
                f"the run reads no channel {safe_text(name)}",
                f"it reads {', '.join(map(safe_text, channels))}",
                f"Did you mean {' or '.join(map(safe_text, close))}?" if close else "",
                field="--map",
            )
