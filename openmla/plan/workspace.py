"""Workspace: the buffers of chunked prefill, allocated once so that peak memory is known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.cache import LayerCache, shown_bytes
from openmla.config import MLAConfig
from openmla.errors import ConfigError

MOST_TOKENS = 65536
LOGITS_BYTES = 256 << 20  # bytes of indexer scores held at once
LATENT_BYTES = 256 << 20  # bytes of absorbed queries and outputs held at once
MASK_BYTES = 128 << 20  # bytes of a bit mask held at once: 32768 queries and as many keys


class Workspace(NamedTuple):
    """The buffers that warmup() allocates once, for make_plan(workspace=...).

    DeepSeek V4, which expands nothing, has only the selected entries.

    Attributes:
        rows: [n, D] gathered latent rows.
        expanded: [m, H * (P + V)] expanded keys and values, m >= n.
        keys: [m, H, P + R] whole keys, e4m3 in fp8 prefill. No rows if keys are read in two parts.
        selection: [T, K] int32 selected entries of DeepSeek V4.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3"]
    cache = openmla.allocate_cache(config, num_blocks=4, block_size=16, format="bf16")
    workspace = openmla.warmup(config, cache, max_requests=1, max_tokens=8, workspace_tokens=32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    batch = openmla.Batch([8], [20], table, torch.arange(12, 20))
    plan = openmla.make_plan(batch, config, cache, workspace=workspace)
    print(workspace)
    ```
    """

    rows: Tensor  # [n, D]
    expanded: Tensor  # [m, H * (P + V)], m >= n
    keys: Tensor  # [m, H, P + R], e4m3 in fp8 prefill; empty if keys are read in two parts
    selection: Tensor  # [T, K] i32; empty if it is not kept

    def __repr__(self) -> str:
        device, dtype = self.rows.device, str(self.rows.dtype).removeprefix("torch.")
        return (
            f"Workspace({self.num_rows} gathered rows, {self.expanded.shape[0]} expanded keys, "
            f"{dtype}, {shown_bytes(self.num_bytes)} on {device})"
        )

    @property
    def num_rows(self) -> int:
        """Context rows that can be gathered at once."""
        return self.rows.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(part.numel() * part.element_size() for part in self)


def default_workspace_tokens(config: MLAConfig, *, max_requests: int, block_size: int) -> int:
    """Return the default number of context rows that prefill gathers at once.

    It is room for eight contexts of max_positions, or for four blocks per request if that is more,
    at most 65536, rounded up to whole blocks.
    """
    tokens = min(max(8 * config.max_positions, 4 * max_requests * block_size), MOST_TOKENS)
    return -(-max(tokens, block_size) // block_size) * block_size


def step_bytes(
    config: MLAConfig, *, max_tokens: int, context_rows: int, itemsize: int, absorbed: bool = False
) -> int:
    """The peak memory of one layer in a step of max_tokens new tokens, besides inputs, outputs and
    caches; not for V4. Context is gathered and expanded `context_rows` at a time. Keys are counted
    whole, for backends that do not read them in two parts. `absorbed`: prefill is absorbed as well,
    so that all queries and outputs are in latent space at once."""
    H, E, V = config.num_heads, config.qk_head_dim, config.v_head_dim
    expanded = config.qk_nope_head_dim + V + E
    rows = max(context_rows, max_tokens)
    dense = itemsize * (rows * H * expanded + context_rows * config.latent_dim)
    dense += max_tokens * H * (2 * V * itemsize + 8)  # two partial outputs and their lse
    if config.indexer is None:
        latent = config.latent_dim + 2 * config.kv_lora_rank  # queries, outputs, partial outputs
        return max(dense, max_tokens * H * latent * itemsize) if absorbed else dense
    selection = 2 * 4 * config.indexer.topk * max_tokens  # positions, and slots
    return selection + max(LOGITS_BYTES, dense + MASK_BYTES, LATENT_BYTES)


def reserve(
    config: MLAConfig,
    cache: LayerCache,
    *,
    max_requests: int,
    max_tokens: int,
    workspace_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    keys_apart: bool = False,
    prefill_dtype: str | None = None,
) -> Workspace:
    """Allocate the workspace of prefill steps of up to max_tokens new tokens, for all layers.

    warmup() calls this and compiles kernels too.

    Args:
        config: the model's dimensions.
        cache: the cache of any of the layers.
        max_requests: requests in a step.
        max_tokens: new tokens in a step.
        workspace_tokens: context rows gathered at once. Defaults to default_workspace_tokens().
        dtype: dtype of the queries.
        keys_apart: whether dense prefill reads keys in two parts, so that no whole keys are stored.
        prefill_dtype: "fp8" stores whole keys in e4m3.
    """
    for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens)):
        if value < 1:
            raise ConfigError(f"warmup: {name} must be at least 1, got {value}.")
    if config.compressor is not None:
        return _reserve_compressed(config, cache, max_tokens, dtype)
    latent = cache.latent
    if latent is None:
        raise ConfigError(
            "warmup: cache has no latent rows. Call allocate_cache() with the config of the model."
        )
    BS = latent.block_size
    if workspace_tokens is None:
        workspace_tokens = default_workspace_tokens(
            config, max_requests=max_requests, block_size=BS
        )
    if workspace_tokens < BS:
        raise ConfigError(
            f"warmup: workspace_tokens must be at least 1 block of {BS} rows, got "
            f"{workspace_tokens}."
        )
    H, device = config.num_heads, latent.data.device
    most = max(workspace_tokens, max_tokens)
    both = config.qk_nope_head_dim + config.v_head_dim
    whole = 0 if keys_apart and config.indexer is None else most
    keys = torch.float8_e4m3fn if prefill_dtype is not None else dtype
    return Workspace(
        rows=torch.empty(workspace_tokens, config.latent_dim, dtype=dtype, device=device),
        expanded=torch.empty(most, H * both, dtype=dtype, device=device),
        keys=torch.empty(whole, H, config.qk_head_dim, dtype=keys, device=device),
        selection=torch.empty((0, 0), dtype=torch.int32, device=device),
    )


def _reserve_compressed(
    config: MLAConfig, cache: LayerCache, max_tokens: int, dtype: torch.dtype
) -> Workspace:
    if cache.window is None:
        raise ConfigError(
            "warmup: cache has no window rows. Call allocate_cache() with the config of the model."
        )
    device = cache.window.data.device
    nothing = torch.empty((0, 0), dtype=dtype, device=device)
    if cache.index is None or config.indexer is None:
        return Workspace(nothing, nothing, nothing, nothing.int())
    entries = cache.index.num_blocks * cache.index.block_size
    most = min(4 * max_tokens * entries, LOGITS_BYTES)
    torch.empty(most, dtype=torch.uint8, device=device)  # and returned to the allocator
    shape = (max_tokens, config.indexer.topk)
    selection = torch.empty(shape, dtype=torch.int32, device=device)
    return Workspace(nothing, nothing, nothing, selection)
