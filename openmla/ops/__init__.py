"""What an op is: contract, schema, shape check; the arithmetic lives in backends/."""

from openmla.ops.cache_gather import cache_gather
from openmla.ops.cache_write import cache_write
from openmla.ops.merge_states import merge_states
from openmla.ops.mha_ragged import mha_ragged
from openmla.ops.mqa_paged import mqa_paged
from openmla.ops.rope import rope

__all__ = ["cache_gather", "cache_write", "merge_states", "mha_ragged", "mqa_paged", "rope"]
