"""What Triton 3.6 to 3.9 call differently: the names the installed version has.

Kernels call these as they would call Gluon's own. The newer name is looked for first: 3.9 keeps one
of the old ones, which only raises.
"""

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
