"""Comparisons with other packages on a GPU, and results: python3 -m bench.<name>.

What `openmla bench` runs is part of the package, in openmla/bench; python3 -m bench.rope
finds it there.
"""

from openmla import bench

__path__ += bench.__path__
