"""Folders on disk: caches, tokens, runs, reports and exports.

storage       files that appear whole or not at all, and survive a crash
locks         one process at a time changes a folder
manifests     the list of a folder's files with their hashes, written last
records       stored records, and folders of results that change in one step
workspace     where the folders lie, and what they are called
"""
