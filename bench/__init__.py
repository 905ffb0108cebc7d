"""Benchmarks, one file per op: python -m bench.<op>. A number is a ratio inside one run."""
