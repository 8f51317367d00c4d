"""Operators on tensors: `retention` in its three forms, and `rotary`, the rotation of queries and
keys by their position.
"""
