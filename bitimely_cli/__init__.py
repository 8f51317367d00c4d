"""The command line `bitimely`: each command parses its options and calls a function of
`bitimely_core`.
"""
