"""Estimates of what a candidate saves.

Responsible for being a package; the code is in `kernels`. Must never import anything. Called by
`candidates`.
"""
