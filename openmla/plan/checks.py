"""What make_plan() refuses: caches, workspaces and batches that do not belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openmla.cache import LayerCache, PagedCache
from openmla.cache.blocks import LONG, slots_of_blocks
from openmla.cache.format import get_format
from openmla.config import MLAConfig
from openmla.errors import ConfigError, ShapeError, UnsupportedError, check_kind
from openmla.hardware import capability
from openmla.ops._queries import EIGHT_BITS, check_chip
from openmla.ops._values import check_block_table, check_slots
from openmla.outputs import check_width, get_output_format
from openmla.plan.batch import Batch
from openmla.plan.places import last_blocks, last_slots
from openmla.plan.types import Call
from openmla.plan.workspace import Workspace
from openmla.ranks import Ranks

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_kinds(
    batch: object, config: object, cache: object, given: Sequence[object], workspace: object,
    ranks: object,
) -> None:  # fmt: skip
    """What make_plan() is called with is of the kinds it takes; `given` are its PlanOptions."""
    check_kind("plan", "batch", batch, Batch)
    check_kind("plan", "config", config, MLAConfig)
    check_kind("plan", "compiled", given[5], bool)
    check_kind("plan", "batch_invariant", given[4], bool)
    if workspace is not None:
        check_kind("plan", "workspace", workspace, Workspace)
    if ranks is not None:
        check_kind("plan", "ranks", ranks, Ranks)
    if not isinstance(cache, LayerCache):
        raise ConfigError(
            f"plan: cache must be the LayerCache of one layer, got {type(cache).__name__}."
        )


def check_ranks(batch: Batch, rows: PagedCache, ranks: Ranks, *, v4: bool) -> int:
    """What goes over ranks; returns how many there are."""
    if not batch.causal:
        raise ConfigError(
            "plan: batch must be of the whole step over ranks, got causal=False. Ranks hold parts."
        )
    if not v4:
        ranks.shard.check_block_size(rows.block_size)
    return ranks.shard.size


def check_buffers(where: str, name: str, buffers: object) -> None:
    """They are plan_buffers()'s; whose they are is seen when a step's tensors are put there."""
    if not isinstance(buffers, dict) or not {"block_table", "slot_mapping"} <= buffers.keys():
        raise ConfigError(
            f"{where}: {name} must be plan_buffers()'s, got {type(buffers).__name__}."
        )


def check_cache(config: MLAConfig, cache: LayerCache, latent: PagedCache, form: str) -> None:
    """Rows are as wide as the config says, and indexer keys in blocks like theirs; where the caller
    chooses, there need be none."""
    get_format(latent.format, "latent")
    latent.check_width("plan", "latent", config.latent_dim)
    index = cache.index
    if config.indexer is None:
        if form == "chosen":
            raise ConfigError(
                "plan: config must have an indexer for form 'chosen', got none. Its topk says how "
                "many keys a token attends to."
            )
        return
    if index is None and form == "chosen":
        return
    if index is None:
        raise ConfigError(
            f"plan: cache must have index rows for {config.model_type}, got none. A layer that "
            "shares its selection has none: plan with the cache of one that does not."
        )
    get_format(index.format, "index")
    index.check_width("plan", "index", config.indexer.head_dim)
    if (index.num_blocks, index.block_size) != (latent.num_blocks, latent.block_size):
        raise ConfigError(
            f"plan: index rows must be in {latent.num_blocks} blocks of {latent.block_size} like "
            f"the latent ones, got {index.num_blocks} of {index.block_size}."
        )


def check_dtype(where: str, dtype: torch.dtype | None) -> None:
    """Queries are floating-point; fp8 ones are asked for by query_dtype."""
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise ConfigError(f"{where}: dtype must be one of {names}, got {dtype!r}.")


def check_query_dtype(
    where: str, config: MLAConfig, query_dtype: str | None, format: str | None, device: torch.device
) -> None:
    """fp8 queries are for rows of fp8, on chips that multiply them."""
    if query_dtype is None:
        return
    if query_dtype not in ("fp8", "fp8_static"):
        raise ConfigError(
            f"{where}: query_dtype must be None, 'fp8' or 'fp8_static', got {query_dtype!r}."
        )
    if format not in EIGHT_BITS:
        raise ConfigError(
            f"{where}: query_dtype must be None over a cache of {format or 'the default format'}, "
            f"got {query_dtype!r}. fp8 queries read {', '.join(EIGHT_BITS)}."
        )
    check_chip(where, device)


def check_wide_queries(where: str, query_dtype: str | None, dtype: torch.dtype) -> None:
    """Outputs of fp8 queries are bf16, their lse is float32: float64 would be so in name only."""
    if query_dtype is not None and dtype == torch.float64:
        raise ConfigError(f"{where}: query_dtype must be None for queries in {dtype}.")


def check_planned_queries(
    where: str, config: MLAConfig, cache: LayerCache, query_dtype: str | None
) -> None:
    """The same of a cache."""
    part = next(iter(cache.parts), None)
    device = torch.device("cpu") if part is None else part.data.device
    format = None if cache.latent is None else cache.latent.format
    check_query_dtype(where, config, query_dtype, format, device)
    if query_dtype == "fp8_static" and cache.latent is not None:
        cache.latent.check_q_scale(where)


def check_planned_output(config: MLAConfig, output: str) -> None:
    """A format that this model's outputs can be quantised to."""
    check_width("plan", get_output_format(output), config.num_heads * config.v_head_dim)


def check_workspace(
    workspace: Workspace, config: MLAConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """A workspace of warmup() is for this config, dtype and device."""
    check_kind("plan", "workspace", workspace, Workspace)
    H, P, V = config.num_heads, config.qk_nope_head_dim, config.v_head_dim
    for name, tensor, shape in (
        ("rows", workspace.rows, (config.latent_dim,)),
        ("expanded", workspace.expanded, (H * (P + V),)),
        ("keys", workspace.keys, (H, config.qk_head_dim)),
    ):
        if tensor.shape[1:] != shape:
            raise ConfigError(
                f"plan: workspace must be of this config, with {name} of {shape} each, "
                f"got {tuple(tensor.shape[1:])}. Give warmup() the same config and cache."
            )
    if workspace.rows.device != device:
        raise ConfigError(
            f"plan: workspace must be on {device} like the cache, got {workspace.rows.device}."
        )
    if workspace.rows.dtype != dtype:
        raise ConfigError(
            f"plan: workspace must be {dtype} like the queries, got {workspace.rows.dtype}. "
            "Give warmup() that dtype."
        )


def check_eight_bit_products(where: str, device: torch.device, dtype: torch.dtype) -> None:
    """Chips that cannot multiply e4m3 are named: nothing else would be as fast as 16 bits."""
    found = capability(device)
    if device.type == "cuda" and (torch.version.hip is not None or (found or (0, 0)) < (8, 9)):
        name = "AMD's" if torch.version.hip is not None else "SM{}{}".format(*(found or (0, 0)))
        raise UnsupportedError(
            f"{where}: prefill_dtype='fp8' needs products of e4m3, which chips have from SM89 on, "
            f"this is {name}. Leave it out."
        )
    if dtype == torch.float64:
        raise ConfigError(f"{where}: prefill_dtype must be None for queries in {dtype}.")


def check_room_for_keys(
    workspace: Workspace, calls: Mapping[str, Call], prefill_dtype: str | None
) -> None:
    """Where keys are expanded, the workspace has room for whole ones, of the type they are; none is
    needed where mha_ragged takes them in two parts."""
    expanding = [calls[op] for op in ("mha_ragged", "mha_masked") if op in calls]
    whole = [call for call in expanding if not call.keys_apart]
    eight_bits = workspace.keys.dtype == torch.float8_e4m3fn
    if whole and eight_bits != (prefill_dtype is not None):
        raise ConfigError(
            f"plan: workspace must be for prefill_dtype {prefill_dtype!r}, got keys of "
            f"{workspace.keys.dtype}. Give warmup() the same prefill_dtype."
        )
    if whole and len(workspace.keys) < len(workspace.expanded):
        raise ConfigError(
            f"plan: workspace must have room for whole keys, which {whole[0].problem.op} by "
            f"{whole[0].backend} wants, got none. Give warmup() the same backend."
        )


def check_batch(batch: Batch, latent: PagedCache, ranks: int = 1) -> None:
    """Values are checked on the host; tensors that are on the device already are trusted. Of a
    cache over `ranks`, a block holds so many times its tokens."""
    table, slots = batch.block_table, batch.slot_mapping
    if slots is None:
        raise ShapeError("batch: slot_mapping must be given, only V4 does without.")
    check_devices(batch, ("block_table", "slot_mapping", "device_seq_lens"), latent.data.device)
    N, BS = latent.num_blocks, latent.block_size * ranks
    if table.is_cpu:
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


def check_devices(batch: Batch, names: Sequence[str], device: torch.device) -> None:
    """Tensors of a batch are on the host or where the cache is."""
    for name in names:
        tensor = getattr(batch, name)
        if tensor is None or tensor.is_cpu or tensor.device.type == device.type:
            continue
        raise ShapeError(f"batch: {name} must be on cpu or {device}, got {tensor.device}.")


def _is_plain_prompt(batch: Batch, slots: Tensor, BS: int) -> bool:
    """Whether many rows go where the table has them, no block written twice: what else is checked
    of slots holds then, and nothing looks at each."""
    if slots.shape[0] <= LONG or not batch.causal or batch.bounded or batch.padding:
        return False
    blocks = last_blocks(batch.block_table, batch.query_lens, batch.seq_lens, BS)
    if len(set(blocks)) < len(blocks):
        return False
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    spans = [((S - n) % BS, n) for n, S in lens if n]
    return torch.equal(slots, slots_of_blocks(blocks, spans, BS))


def check_device_lens(batch: Batch) -> None:
    """Lengths of the device that can be looked at are what the host knows of them."""
    lens = batch.device_seq_lens
    if lens is None or lens.device.type != "cpu":
        return
    bounded = batch.bounded
    for b, (true, given) in enumerate(zip(lens.tolist(), batch.seq_lens, strict=True)):
        if not (0 <= true <= given if b in bounded else true == given):
            expected = f"within 0..{given}" if b in bounded else f"{given}, which is exact"
            raise ShapeError(f"batch: device_seq_lens[{b}] must be {expected}, got {true}.")


def _check_padding(batch: Batch, slots: list[int]) -> None:
    most = max(slots[batch.num_tokens - batch.padding :])
    if most >= 0:
        raise ShapeError(
            f"batch: slot_mapping must be -1 for the last {batch.padding} tokens, which are "
            f"padding, got {most}."
        )


def _check_agreement(batch: Batch, slots: list[int], BS: int) -> None:
    """A row is written where its own request will look for it, or not at all; where that is, is
    not known of lengths that only the device has."""
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
                    f"batch: slot_mapping must agree with block_table, which has position "
                    f"{position} of request {b} in slot {expected[t]}, got {slots[t]}."
                )
            t += 1
