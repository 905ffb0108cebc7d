"""Comparisons with other packages on a GPU, and results: python3 -m bench.<name>.

The benchmarks of `openmla bench` are part of the package, in openmla/bench; python3 -m bench.rope
finds them.
"""

from openmla import bench

__path__ += bench.__path__
