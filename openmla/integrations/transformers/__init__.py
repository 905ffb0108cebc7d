"""attach(): run the MLA layers of a loaded Hugging Face model on openmla.

Only public interfaces of transformers are used. Every MLA attention module projects, normalizes,
rotates and computes its output as before. In between it asks its cache to store the new latents and
calls a named attention function. attach() registers that function ("openmla", with a mask function
that never builds a square mask), puts paged layers into the cache objects of each call, and names
the function in the model's config. Each module's expand_kv is shadowed on the instance: where a
paged layer has stored latents, they stay latents. No class is patched and no parameter is copied.

Sparse models (with an indexer) score every key in one matrix and expand every cached latent in
every step (5.17 caches them expanded; every later version caches latents). Their indexers are
watched: see indexer.py. DeepSeek V4's compressors are shadowed: see compressed.py.
"""

from __future__ import annotations

from openmla.config.families import REFUSED, SUPPORTED
from openmla.integrations import attach, attachment_of, detach
from openmla.integrations.transformers.attachment import Attachment
from openmla.integrations.transformers.check import supported_text_config
from openmla.integrations.transformers.memory import MemoryReport
from openmla.integrations.transformers.paged_layer import PagedLayer

__all__ = [
    "REFUSED",
    "SUPPORTED",
    "Attachment",
    "MemoryReport",
    "PagedLayer",
    "attach",
    "attachment_of",
    "detach",
    "supported_text_config",
]
