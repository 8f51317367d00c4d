"""Schemas of the JSON files that are stored: records of runs, caches, tokens, scores and reports.

Each record is one frozen pydantic model, read by `load` and written by `save`, nowhere else. Keys
that this version does not know are kept, so that nothing is lost when an older version writes a
record again; keys of later versions are tolerated. `upgrade_v1` brings what version 0.1 wrote to
the present form while it is read; the file itself is left as it is.
"""
