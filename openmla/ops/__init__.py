"""What an op is: contract, signature, checks; the arithmetic lives in backends/."""

from openmla.ops.cache_gather import cache_gather
from openmla.ops.cache_write import cache_write
from openmla.ops.compress_kv import compress_kv
from openmla.ops.index_logits import index_logits
from openmla.ops.index_logits_ragged import index_logits_ragged
from openmla.ops.index_select import index_select
from openmla.ops.index_topk import index_topk
from openmla.ops.index_write import index_write
from openmla.ops.latent_write import latent_write
from openmla.ops.map_slots import map_slots
from openmla.ops.merge_quantize import merge_quantize
from openmla.ops.merge_states import merge_states
from openmla.ops.mha_masked import mha_masked
from openmla.ops.mha_ragged import mha_ragged
from openmla.ops.mqa_paged import mqa_paged
from openmla.ops.mqa_sparse import Segment, mqa_sparse
from openmla.ops.pack_mask import pack_mask
from openmla.ops.project_heads import project_heads
from openmla.ops.project_quantize import project_quantize
from openmla.ops.quantize_heads import quantize_heads
from openmla.ops.quantize_out import quantize_out
from openmla.ops.quantize_queries import quantize_queries
from openmla.ops.rope import rope

__all__ = [
    "Segment",
    "cache_gather",
    "cache_write",
    "compress_kv",
    "index_logits",
    "index_logits_ragged",
    "index_select",
    "index_topk",
    "index_write",
    "latent_write",
    "map_slots",
    "merge_quantize",
    "merge_states",
    "mha_masked",
    "mha_ragged",
    "mqa_paged",
    "mqa_sparse",
    "pack_mask",
    "project_heads",
    "project_quantize",
    "quantize_heads",
    "quantize_out",
    "quantize_queries",
    "rope",
]
