"""Readers of file formats, one module per format. Damaged or hostile files raise `UserError`,
nothing else. Imports no torch.
"""
