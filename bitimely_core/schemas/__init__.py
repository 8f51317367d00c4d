"""Schemas of the JSON files that are stored: records of runs, caches, tokens, scores and reports.

Each record is one frozen pydantic model, read by `load` and written by `save`, nowhere else. Keys
that this version does not know are kept when it writes a record again.
"""
