"""Comparisons with other packages on a GPU, and results: python3 -m bench.<name>.

The benchmarks of `openmla bench`, and the harness of both, are in openmla/bench.
"""
