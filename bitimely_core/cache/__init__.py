"""Cache of recordings: raw files in, Parquet shards and a manifest out.

All later steps read the cache, never a raw file. `ingest` fills the cache of one data set,
`open_cache` reads it back, `verify` compares everything with its checksums.

    cache/<dataset>/
      manifest.json     names every file below with its SHA-256; without it the cache is incomplete
      recordings-<hash>.parquet    one row a recording, channel and segment
      annotations-<hash>.parquet   one row a label
      subjects-<hash>.parquet      one row a recording: subject and attributes
      subjects.parquet             a copy of it to look at
      units-<hash>.json.gz   hashes and results of each unit: `ingest` reads only what has changed
      ingest_report.json  status of every unit, of the last ingest
      report.html         the same as a page, with the quality of the channels and a figure
      manifest-<N>.json   the previous generation, for readers that opened it
      .progress/, .parts/ finished parts of an unfinished ingest: of recordings, of claims
"""

from bitimely_core.cache.ingest_report import list_findings
from bitimely_core.cache.ingest_run import PAGE
from bitimely_core.cache.ingest_units import ingest
from bitimely_core.cache.reading import Cache, open_cache, verify

__all__ = ["PAGE", "Cache", "ingest", "list_findings", "open_cache", "verify"]
