"""What differs between Triton 3.6 and 3.9: renamed functions and compiler behaviour.

Kernels call these names as they would call Gluon's own. The newer one is tried first: 3.9 keeps the
old one, but it only raises.
"""

import triton
from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# Asynchronous copy from a tile of pointers to shared memory: async_load(tile, at, mask).
if hasattr(async_copy, "async_load"):
    async_load = async_copy.async_load  # 3.8
else:
    async_load = async_copy.async_copy_global_to_shared

# A box of a tensor behind a TMA descriptor into shared memory: bulk_load(rows, at, barrier, tile).
if hasattr(tma, "async_load"):
    bulk_load = tma.async_load  # 3.8
else:
    bulk_load = tma.async_copy_global_to_shared

# Shared memory viewed as another type: reinterpret(tile, dtype, shape, layout).
if hasattr(shared_memory_descriptor, "reinterpret"):
    reinterpret = shared_memory_descriptor.reinterpret  # 3.9
else:
    reinterpret = shared_memory_descriptor._reinterpret

RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))

# Whether a loop's disable_licm stops Triton's own passes too, not only LLVM's: loop-invariant
# tiles, such as queries, are then kept in registers and stored to shared memory in every iteration.
DISABLE_LICM_STOPS_TRITON = RELEASE >= (3, 9)

# Targets with products of e4m3 for which Triton widens the operands to 16 bits in shared memory.
WIDENS_EIGHT_BITS = (121,) if RELEASE <= (3, 7) else ()

# Whether LLVM merges branches that other versions keep apart: values of both then take registers.
JOINS_BRANCHES = RELEASE == (3, 8)
