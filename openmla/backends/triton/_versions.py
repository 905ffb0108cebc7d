"""What differs from Triton 3.6 to 3.9: names the installed version has, and habits.

Kernels call the names as they would call Gluon's own. The newer one is looked for first: 3.9 keeps
an old one that only raises.
"""

import triton
from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import async_copy

# Values behind a tile of pointers into shared memory, without waiting: async_load(tile, at, mask).
if hasattr(async_copy, "async_load"):
    async_load = async_copy.async_load  # 3.8
else:
    async_load = async_copy.async_copy_global_to_shared

# Shared memory as a tile of another type: reinterpret(tile, dtype, shape, layout).
if hasattr(shared_memory_descriptor, "reinterpret"):
    reinterpret = shared_memory_descriptor.reinterpret  # 3.9
else:
    reinterpret = shared_memory_descriptor._reinterpret

RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
# What follows no name tells.

# Whether a loop's disable_licm stops Triton's own passes too, not only LLVM's: then tiles that are
# the same in every round, such as queries, are kept in registers and stored to shared memory in
# each of them.
DISABLE_LICM_STOPS_TRITON = RELEASE >= (3, 9)

# Whether LLVM joins branches that other versions keep apart, so that values of both take registers.
JOINS_BRANCHES = RELEASE == (3, 8)
