"""The operations of histories of events (claims, EHR) that verbs look up in `registry.DATA_KINDS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitimely_core.cache import Cache, open_cache
from bitimely_core.claims import tokenize
from bitimely_core.claims.ingest import ingest_events, pin_options
from bitimely_core.registry import DataKind
from bitimely_core.tokens.sequences import EventSequences, open_sequences
from bitimely_core.types import Progress


def tokenize_events(
    cache: str | Path | Cache, *, out: Path, verify: bool = True, force_new: bool = False, progress: Progress | None = None, **choices: Any
) -> EventSequences:
    """Sequences of a cache of events, with the choices of `tokenize.resolved`. Raises UserError: as that and `tokenize.build`."""
    opened = open_cache(cache, verify=False) if isinstance(cache, str | Path) else cache
    plan = tokenize.resolve_plan(opened, **{name: value for name, value in choices.items() if name != "view"})
    return tokenize.open_built(plan, out, verify=verify, force_new=force_new, progress=progress)


KIND = DataKind(pin_options=pin_options, ingest=ingest_events, open_tokens=open_sequences, tokenize=tokenize_events)
