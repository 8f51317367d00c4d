"""Recordings as people have them: files of any format, their channels, subjects and labels, by a
mapping file or a BIDS folder.
"""
