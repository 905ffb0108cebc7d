"""Checks of make_plan(): the cache, workspace and batch must fit the config and each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from openmla.cache import LayerCache, PagedCache
from openmla.cache.blocks import LONG, slots_of_blocks
from openmla.cache.format import get_format
from openmla.config import MLAConfig
from openmla.errors import ConfigError, ShapeError, UnsupportedError, check_kind
from openmla.hardware import capability
from openmla.ops._queries import EIGHT_BITS, check_chip
from openmla.ops._values import check_block_table, check_slots, within
from openmla.outputs import check_width, get_output_format
from openmla.plan.batch import Batch
from openmla.plan.places import last_blocks, last_slots
from openmla.plan.rows import integers
from openmla.plan.types import Call
from openmla.plan.workspace import Workspace
from openmla.ranks import Ranks

MANY = 16  # requests from which torch operations are faster than a Python loop
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_kinds(
    batch: object, config: object, cache: object, given: Sequence[object], workspace: object,
    ranks: object,
) -> None:  # fmt: skip
    """Check the types of make_plan()'s arguments; `given` are the values of its PlanOptions."""
    check_kind("plan", "batch", batch, Batch)
    check_kind("plan", "config", config, MLAConfig)
    assert isinstance(config, MLAConfig)
    config.check_one_kind("plan")
    check_kind("plan", "compiled", given[5], bool)
    check_kind("plan", "batch_invariant", given[4], bool)
    if workspace is not None:
        check_kind("plan", "workspace", workspace, Workspace)
    if ranks is not None:
        check_kind("plan", "ranks", ranks, Ranks)
    if not isinstance(cache, LayerCache):
        raise ConfigError(
            f"plan: cache must be the LayerCache of one layer, got {type(cache).__name__}. "
            "Make it with allocate_cache()."
        )


def check_ranks(batch: Batch, rows: PagedCache, ranks: Ranks, *, v4: bool) -> int:
    """Check that a batch and a cache can be sharded over ranks; return the number of ranks."""
    if not batch.causal:
        raise ConfigError(
            "plan: batch must be the whole step when ranks are given, got causal=False. The plan "
            "shards the keys itself."
        )
    if not v4:
        ranks.shard.check_block_size(rows.block_size)
    return ranks.shard.size


def check_buffers(where: str, name: str, buffers: object) -> None:
    """Check that these are buffers of plan_buffers(); filling them checks their sizes."""
    if not isinstance(buffers, dict) or not {"block_table", "slot_mapping"} <= buffers.keys():
        raise ConfigError(
            f"{where}: {name} must be the buffers of plan_buffers(), got {type(buffers).__name__}. "
            "Call plan_buffers() and pass its result."
        )


def check_cache(config: MLAConfig, cache: LayerCache, latent: PagedCache, form: str) -> None:
    """Rows are as wide as the config says, and indexer keys have the same blocks as the rows. With
    form="chosen" the caller selects the keys, and the cache may have no indexer keys."""
    get_format(latent.format, "latent")
    latent.check_width("plan", "latent", config.latent_dim)
    index = cache.index
    if config.indexer is None:
        if form == "chosen":
            raise ConfigError(
                "plan: config must have an indexer for form 'chosen' and has none. Its topk "
                "is the number of keys that a token attends to."
            )
        return
    if index is None and form == "chosen":
        return
    if index is None:
        raise ConfigError(
            f"plan: cache must have index rows for {config.model_type} and has none. If this layer "
            "shares the selection of another one, plan with that layer's cache."
        )
    get_format(index.format, "index")
    index.check_width("plan", "index", config.indexer.head_dim)
    if (index.num_blocks, index.block_size) != (latent.num_blocks, latent.block_size):
        raise ConfigError(
            f"plan: index rows must have {latent.num_blocks} blocks of {latent.block_size}, as the "
            f"latent rows have, got {index.num_blocks} of {index.block_size}."
        )


def check_window(batch: Batch, config: MLAConfig) -> None:
    """A window ends at a token's own key, which a part of the keys does not tell."""
    if config.window and not batch.causal:
        raise ConfigError(
            f"plan: batch must be the whole step for layers with a window of {config.window} "
            "tokens, got causal=False."
        )


def check_dtype(where: str, dtype: torch.dtype | None) -> None:
    """Check the dtype of queries before they are quantized; query_dtype selects fp8 queries."""
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise ConfigError(f"{where}: dtype must be one of {names}, got {dtype!r}.")


def check_query_dtype(
    where: str, config: MLAConfig, query_dtype: str | None, format: str | None, device: torch.device
) -> None:
    """fp8 queries need fp8 rows, and a GPU with fp8 matrix products."""
    if query_dtype is None:
        return
    if query_dtype not in ("fp8", "fp8_static"):
        raise ConfigError(
            f"{where}: query_dtype must be None, 'fp8' or 'fp8_static', got {query_dtype!r}."
        )
    if format not in EIGHT_BITS:
        raise ConfigError(
            f"{where}: query_dtype must be None for a cache of {format or 'the default format'}, "
            f"got {query_dtype!r}. fp8 queries need a cache of {' or '.join(EIGHT_BITS)}."
        )
    check_chip(where, device)


def check_wide_queries(where: str, query_dtype: str | None, dtype: torch.dtype) -> None:
    """fp8 queries give bf16 outputs and a float32 lse, which float64 callers would not expect."""
    if query_dtype is not None and dtype == torch.float64:
        raise ConfigError(
            f"{where}: query_dtype must be None for queries in {dtype}, got {query_dtype!r}."
        )


def check_planned_queries(
    where: str, config: MLAConfig, cache: LayerCache, query_dtype: str | None
) -> None:
    """check_query_dtype() for the rows of a layer's cache, and the scale of static queries."""
    part = next(iter(cache.parts), None)
    device = torch.device("cpu") if part is None else part.data.device
    format = None if cache.latent is None else cache.latent.format
    check_query_dtype(where, config, query_dtype, format, device)
    if query_dtype == "fp8_static" and cache.latent is not None:
        cache.latent.check_q_scale(where)


def check_planned_output(config: MLAConfig, output: str) -> None:
    """Check that this model's outputs can be quantized to a format."""
    check_width("plan", get_output_format(output), config.num_heads * config.v_head_dim)


def check_workspace(
    workspace: Workspace, config: MLAConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Check that a workspace of warmup() fits this config, dtype and device."""
    check_kind("plan", "workspace", workspace, Workspace)
    H, P, V = config.num_heads, config.qk_nope_head_dim, config.v_head_dim
    for name, tensor, shape in (
        ("rows", workspace.rows, (config.latent_dim,)),
        ("expanded", workspace.expanded, (H * (P + V),)),
        ("keys", workspace.keys, (H, config.qk_head_dim)),
    ):
        if tensor.shape[1:] != shape:
            raise ConfigError(
                f"plan: workspace must be of this config, with {name} of shape {shape}, "
                f"got {tuple(tensor.shape[1:])}. Call warmup() with the same config and cache."
            )
    if workspace.rows.device != device:
        raise ConfigError(
            f"plan: workspace must be on {device}, as the cache is, got {workspace.rows.device}. "
            "Call warmup() with this cache."
        )
    if workspace.rows.dtype != dtype:
        raise ConfigError(
            f"plan: workspace must be {dtype}, as the queries are, got {workspace.rows.dtype}. "
            "Call warmup() with that dtype."
        )


def check_eight_bit_products(where: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise on GPUs without fp8 matrix products: any replacement would be slower than 16 bits."""
    found = capability(device)
    if device.type == "cuda" and (torch.version.hip is not None or (found or (0, 0)) < (8, 9)):
        name = (
            "an AMD GPU" if torch.version.hip is not None else "SM{}{}".format(*(found or (0, 0)))
        )
        raise UnsupportedError(
            f"{where}: prefill_dtype='fp8' needs e4m3 matrix products (SM89 or newer), "
            f"got {name}. Leave prefill_dtype out."
        )
    if dtype == torch.float64:
        raise ConfigError(f"{where}: prefill_dtype must be None for queries in {dtype}, got 'fp8'.")


def check_room_for_keys(
    workspace: Workspace, calls: Mapping[str, Call], prefill_dtype: str | None
) -> None:
    """Where keys are expanded, the workspace has room for whole keys of their dtype. A kernel that
    takes keys in two parts needs none."""
    expanding = [calls[op] for op in ("mha_ragged", "mha_masked") if op in calls]
    whole = [call for call in expanding if not call.keys_apart]
    eight_bits = workspace.keys.dtype == torch.float8_e4m3fn
    if whole and eight_bits != (prefill_dtype is not None):
        raise ConfigError(
            f"plan: workspace must be for prefill_dtype {prefill_dtype!r}, got keys of "
            f"{workspace.keys.dtype}. Call warmup() with the same prefill_dtype."
        )
    if whole and len(workspace.keys) < len(workspace.expanded):
        raise ConfigError(
            f"plan: workspace must have room for whole keys, which {whole[0].problem.op} needs on "
            f"{whole[0].backend}, and has none. Call warmup() with the same backend."
        )


def check_batch(batch: Batch, latent: PagedCache, ranks: int = 1, window: int = 0) -> None:
    """Check the values of host tensors; tensors that are on the device already are trusted. In a
    cache over `ranks`, a block holds that many times its tokens. With a `window`, rows of the block
    table may be rings."""
    table, slots = batch.block_table, batch.slot_mapping
    if slots is None:
        raise ShapeError("batch: slot_mapping is missing. Only V4 plans without it.")
    check_devices(batch, ("block_table", "slot_mapping", "device_seq_lens"), latent.data.device)
    N, BS = latent.num_blocks, latent.block_size * ranks
    if window:
        check_ring_rows("block_table", batch, table, window, latent)
    elif table.is_cpu:
        check_block_table("batch", table, None, batch.read_lens, N, BS)
    check_device_lens(batch)
    if slots.is_cpu:
        if table.is_cpu and _is_plain_prompt(batch, slots, BS):
            return
        values = slots.tolist()
        check_slots("batch", values, N * BS)
        if batch.padding:
            _check_padding(batch, values)
        if table.is_cpu:
            _check_agreement(batch, values, BS)


def check_ring_rows(name: str, batch: Batch, table: Tensor, span: int, window: PagedCache) -> None:
    """Check that rings hold the step's tokens and the window before them, in existing blocks.
    `name`: of the table in the batch."""
    BS, N = window.block_size, window.num_blocks
    capacity = table.shape[1] * BS
    if _is_plain_ring(batch, table, span, BS, N):
        return
    lens = list(zip(batch.query_lens, batch.seq_lens, strict=True))
    needs = [min(S, n + span - 1) if n else 0 for n, S in lens]
    for b, needed in enumerate(needs if max(needs, default=0) > capacity else ()):
        if needed > capacity:
            n = batch.query_lens[b]
            raise ShapeError(
                f"batch: {name} must have room for the {needed} rows that request {b} "
                f"needs in this step ({n} new ones), got {table.shape[1]} blocks of {BS}. "
                "Give the step fewer tokens, or the table more columns."
            )
    bounded = batch.bounded
    if table.device.type != "cpu" or len(bounded) == len(batch.seq_lens):
        return
    if bounded:
        needs = [0 if b in bounded else needed for b, needed in enumerate(needs)]
    blocks = last_blocks(table, needs, batch.seq_lens, BS)
    if not blocks or (min(blocks) >= 0 and max(blocks) < N):
        return
    read = [
        (b, column % table.shape[1])
        for b, (needed, S) in enumerate(zip(needs, batch.seq_lens, strict=True))
        for column in range((S - needed) // BS, -(-S // BS))
        if needed
    ]
    (b, column), block = next(
        found for found in zip(read, blocks, strict=True) if not 0 <= found[1] < N
    )
    raise ShapeError(
        f"batch: {name}[{b}, {column}] must be a block of the cache (0..{N - 1}), got {block}."
    )


def _is_plain_ring(batch: Batch, table: Tensor, span: int, BS: int, N: int) -> bool:
    """Whether many requests with the same number of tokens have all blocks that their rings are
    read from. One position of each block is looked up, without a loop over requests."""
    lens = batch.seq_lens
    if len(lens) < MANY or len(set(batch.query_lens)) > 1 or batch.bounded or not table.is_cpu:
        return False
    needed = batch.query_lens[0] + span - 1
    if batch.query_lens[0] == 0 or needed > table.shape[1] * BS:
        return False
    positions = integers(lens, torch.int64)[:, None] + _back(needed, BS)
    if min(lens) < needed:
        positions.clamp_(min=0)
    return within(table.gather(1, positions // BS % table.shape[1]), N)


@lru_cache(maxsize=64)
def _back(needed: int, BS: int) -> Tensor:
    """[n] i64, counted from a request's end: a position in each block of its last `needed` rows."""
    return integers([*range(-needed, -1, BS), -1], torch.int64)


def check_devices(batch: Batch, names: Sequence[str], device: torch.device) -> None:
    """Check that tensors of a batch are on the host or on the cache's device."""
    for name in names:
        tensor = getattr(batch, name)
        if tensor is None or tensor.is_cpu or tensor.device.type == device.type:
            continue
        raise ShapeError(f"batch: {name} must be on cpu or {device}, got {tensor.device}.")


def _is_plain_prompt(batch: Batch, slots: Tensor, BS: int) -> bool:
    """Whether many rows go where the block table has them and no block is written twice. All other
    checks of slots hold then, and no loop over rows is needed."""
    if slots.shape[0] <= LONG or not batch.causal or batch.bounded or batch.padding:
        return False
    blocks = last_blocks(batch.block_table, batch.query_lens, batch.seq_lens, BS)
    if len(set(blocks)) < len(blocks):
        return False
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    spans = [((S - n) % BS, n) for n, S in lens if n]
    return torch.equal(slots, slots_of_blocks(blocks, spans, BS))


def check_device_lens(batch: Batch) -> None:
    """Check device_seq_lens against the host's lengths where they can be read without a copy."""
    lens = batch.device_seq_lens
    if lens is None or lens.device.type != "cpu":
        return
    bounded = batch.bounded
    for b, (true, given) in enumerate(zip(lens.tolist(), batch.seq_lens, strict=True)):
        if not (0 <= true <= given if b in bounded else true == given):
            expected = f"within 0..{given}" if b in bounded else f"{given}, as in seq_lens"
            raise ShapeError(f"batch: device_seq_lens[{b}] must be {expected}, got {true}.")


def _check_padding(batch: Batch, slots: list[int]) -> None:
    most = max(slots[batch.num_tokens - batch.padding :])
    if most >= 0:
        raise ShapeError(
            f"batch: slot_mapping must be -1 for the last {batch.padding} tokens (padding), "
            f"got {most}."
        )


def _check_agreement(batch: Batch, slots: list[int], BS: int) -> None:
    """A row is written to the slot where its own request will look for it, or not at all. Lengths
    that only the device has are not checked."""
    query_lens, seq_lens, bounded = batch.query_lens, batch.seq_lens, batch.bounded
    if not batch.causal or len(bounded) == len(seq_lens):
        return
    expected = last_slots(batch.block_table, query_lens, seq_lens, BS)
    if slots[: len(expected)] == expected:
        return
    t = 0
    for b, (n, S) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(S - n, S):
            if 0 <= slots[t] != expected[t] and b not in bounded:
                raise ShapeError(
                    f"batch: slot_mapping must agree with block_table, which maps position "
                    f"{position} of request {b} to slot {expected[t]}, got {slots[t]}."
                )
            t += 1
