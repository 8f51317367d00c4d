"""The waist: raw files in, Parquet shards and a manifest out. Whatever comes later reads this and never a raw file.

`ingest` fills the cache of one data set, `open_cache` reads it back, `verify` compares everything with its checksums.

    cache/<dataset>/
      manifest.json            names every file below with its SHA-256; written last, so it is there only when all is whole
      recordings-<hash>.parquet, annotations-<hash>.parquet    shards: one row a recording, channel and segment; one row a label
      subjects-<hash>.parquet  one row a recording: subject and attributes (`subjects.parquet` is a copy for people)
      units-<hash>.json        what each unit was made of: the next `ingest` redoes only what has changed
      ingest_report.json       what became of every unit, at the last run
      report.html              the same for people, with the quality of the channels and a picture (written by `runs.ingest`)
      manifest-<N>.json        the generation before, which readers that opened it can still finish
      .progress/, .parts/      finished parts of an ingest that has not ended: of recordings, of claims
"""

from bitimely_core.cache.ingest import ingest
from bitimely_core.cache.ingest_run import PAGE
from bitimely_core.cache.reading import Cache, open_cache, verify
from bitimely_core.cache.report import list_findings

__all__ = ["PAGE", "Cache", "ingest", "list_findings", "open_cache", "verify"]
