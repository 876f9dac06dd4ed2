"""Measurements with targets: each `python -m benchmarks.NAME` ends with one line of JSON."""
