"""Recordings as people have them: files of any format, with their channels, subjects and labels.

A mapping file or a BIDS folder says what the files do not state.
"""
