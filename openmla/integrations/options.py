"""AttachOptions: the arguments of attach() as one value, for the checks and the setup."""

from __future__ import annotations

from typing import Any, NamedTuple

from openmla.backends.choice import BackendChoice
from openmla.integrations.scales import KvScale


class AttachOptions(NamedTuple):
    """The options of attach(), by the same names and with the same defaults."""

    cache_format: str | None = None
    kv_scale: KvScale | None = None
    index_format: str = "index_fp32"
    block_size: int | None = None
    num_blocks: int | None = None
    backend: BackendChoice = "auto"
    workspace: int | None = None
    capture: bool | None = None
    absorbed_format: str | None = None
    batch_invariant: bool = False
    query_dtype: str | None = None
    prefill_dtype: str | None = None
    group: Any = None
