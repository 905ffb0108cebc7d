"""Plans for captured graphs: over buffers of fixed size, which every step refills.

A step's tensors are computed from host integers, as for any other step. The plan's parts hold the
buffers at their full capacity, and the values are then copied into the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from openmla.cache import LayerCache, PagedCache, as_integer
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError, check_kind
from openmla.plan.across import token_batch
from openmla.plan.batch import Batch
from openmla.plan.checks import check_buffers
from openmla.plan.compressed_checks import check_caches
from openmla.plan.groups import (
    absorbed_group,
    absorbed_roles,
    even_chunks,
    first_keys,
    no_starts,
    query_bytes,
    query_chunks,
    row_lens,
    select_parts,
    select_roles,
    window_group,
    window_roles,
)
from openmla.plan.problems import latent_of
from openmla.plan.rows import rope_offsets
from openmla.plan.types import Across, Group, Parts, ScoreChunk, remade
from openmla.plan.upload import upload
from openmla.ranks import Ranks
from openmla.ranks.ranks import with_all_heads

Buffers = dict[str, Tensor]

EMPTY = {"slot_mapping": -1, "state_slots": -1}  # padding values; 0 for names that are not listed
SHARED = (  # by V4's layers of all ratios
    "block_table", "query_start_loc", "slot_mapping", "window_table", "state_slots", "positions",
)  # fmt: skip
WIDE = ("slot_mapping", "positions", "rope_offsets")  # int64
CONSTANT = ("row_starts", "first_keys")  # constant over all steps
OF_REQUESTS = ("block_table", "seq_lens", "window_table", "state_slots")
WRITES = "writes."  # of V4 over ranks: what every rank writes, not its own entries
OF_ALL = ("first_keys", "ratio")  # of a graph of any size; the rest is of tokens


@torch.inference_mode(False)  # inference tensors do not count writes
def plan_buffers(
    config: MLAConfig,
    cache: LayerCache,
    *,
    max_requests: int,
    max_tokens: int,
    max_blocks: int,
    beside: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Allocate the tensors of the largest step of a CUDA graph, for make_plan(into=...).

    Smaller steps are padded with empty requests and tokens, which see no key and write no row.
    slice_buffers() makes smaller buffers of the same memory. DeepSeek V4 needs buffers for each
    compress ratio, from a cache of that ratio.

    Args:
        config: the model's dimensions.
        cache: the cache of any of the layers.
        max_requests: requests in a step.
        max_tokens: tokens in a step. A request can have max_tokens // max_requests of them.
        max_blocks: columns of the block table.
        beside: DeepSeek V4: the buffers for another compress ratio, of the same sizes, to share
            tensors with. See make_plan(beside=...).

    Returns:
        Tensors by name, on the cache's device.

    Raises:
        ConfigError: a size is not positive, or `beside` has other sizes.

    ```python
    import openmla

    config = openmla.PRESETS["tiny-v3"]
    cache = openmla.allocate_cache(config, num_blocks=8, block_size=16, format="bf16")
    buffers = openmla.plan_buffers(config, cache, max_requests=4, max_tokens=4, max_blocks=8)
    pool = openmla.BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 20})
    table, slots = pool.block_table(["a"]), pool.slot_mapping([("a", 19, 20)])
    plan = openmla.make_plan(openmla.Batch([1], [20], table, slots), config, cache, into=buffers)
    assert plan.num_tokens == 4  # the step, and 3 tokens of padding
    ```
    """
    config.check_one_kind("plan_buffers")
    sizes = {"max_requests": max_requests, "max_blocks": max_blocks, "max_tokens": max_tokens}
    for name, size in sizes.items():
        if as_integer(size) is None or size < 1:
            raise ConfigError(f"plan_buffers: {name} must be a positive integer, got {size!r}.")
    if max_tokens < max_requests:
        raise ConfigError(
            f"plan_buffers: max_tokens must be at least max_requests={max_requests}, "
            f"got {max_tokens}."
        )
    shapes: dict[str, tuple[int, ...]] = {
        "block_table": (max_requests, max_blocks),
        "slot_mapping": (max_tokens,),
    }
    if config.compressor is not None:
        rows = check_caches(config, cache)
        columns = _ring_columns(config, cache, rows, max_tokens // max_requests)
        chunks = _even_score_chunks(config, cache, max_tokens, max_blocks)
        shapes |= {
            "query_start_loc": (max_requests + 1,),
            "window_table": (max_requests, columns),
            "state_slots": (max_requests,),
            "positions": (max_tokens,),
            "row_lens": (max_tokens if chunks else 0,),
            "topk_lens": (max_tokens if chunks else 0,),
            **_each("score_start_locs", len(chunks), (max_requests + 1,)),
        }
    else:
        rows = latent_of(cache)
        if config.indexer is not None:
            shapes |= dict.fromkeys(("row_lens", "topk_lens"), (max_tokens,))
            chunks = _even_score_chunks(config, cache, max_tokens, max_blocks)
            shapes |= _each("score_start_locs", len(chunks), (max_requests + 1,))
        if config.indexer is not None or config.window:
            shapes["positions"] = (max_tokens,)
            most = len(query_chunks(max_tokens, config, itemsize=8))  # enough for any dtype
            shapes |= _each("query_chunk_start_locs", most, (max_requests + 1,))
        else:
            shapes["query_start_loc"] = (max_requests + 1,)
            shapes["seq_lens"] = (max_requests,)
        if config.rope.kind == "longrope":
            shapes["rope_offsets"] = (max_tokens,)
    buffers = {
        name: torch.full(
            shape,
            EMPTY.get(name, 0),
            dtype=torch.int64 if name in WIDE else torch.int32,
            device=rows.data.device,
        )
        for name, shape in shapes.items()
    }
    if config.indexer is not None:
        for name, make in (("row_starts", no_starts), ("first_keys", first_keys)):
            buffers[name] = make(chunks, config.indexer.topk).to(rows.data.device)
    if config.compressor is not None:
        buffers["ratio"] = torch.tensor(cache.ratio)  # on the host: whose buffers these are
    if beside is not None:
        buffers |= _common(beside, buffers)
    return buffers


def rank_buffers(
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    *,
    max_tokens: int,
    max_blocks: int,
    max_requests: int | None = None,
) -> dict[str, Tensor]:
    """Allocate the tensors of a captured step over ranks, for make_plan(into=..., ranks=...).

    Sharded entries of DeepSeek V4 have additional buffers for what every rank writes.

    Args:
        config: the model's dimensions.
        cache: this rank's cache of any of the layers.
        ranks: the ranks that share the cache.
        max_tokens: tokens in a step. Each counts as a request, except for DeepSeek V4.
        max_blocks: columns of the block table. A column covers block_size * W positions.
        max_requests: DeepSeek V4 only: requests in a step. Defaults to max_tokens.
    """
    check_kind("plan_buffers", "ranks", ranks, Ranks)
    check_kind("plan_buffers", "config", config, MLAConfig)
    check_kind("plan_buffers", "cache", cache, LayerCache)
    sizes: dict[str, Any] = {"max_tokens": max_tokens, "max_blocks": max_blocks}
    sizes["max_requests"] = max_tokens
    if config.compressor is None:
        return plan_buffers(with_all_heads(config, ranks), cache, **sizes)
    if max_requests is not None:
        sizes["max_requests"] = max_requests
    buffers = plan_buffers(config, cache, **sizes)
    if cache.ratio != INDEXED_RATIO:
        return buffers
    sizes["max_blocks"] *= ranks.shard.size
    window = LayerCache(window=cache.window, geometry=cache.geometry)
    others = plan_buffers(config, window, **sizes)
    return buffers | {f"{WRITES}{name}": tensor for name, tensor in others.items()}


def slice_buffers(
    buffers: dict[str, Tensor], *, max_requests: int, max_tokens: int
) -> dict[str, Tensor]:
    """Take views of plan_buffers() tensors, for a graph of fewer requests and tokens.

    One set of buffers can serve graphs of all sizes, one step at a time: a step fills the buffers
    of its graph, and then that graph is replayed. No memory is allocated.

    Args:
        buffers: the result of plan_buffers().
        max_requests: requests in a step of the smaller graph.
        max_tokens: tokens in a step of the smaller graph.

    Returns:
        Tensors by name, which share the memory of `buffers`.

    Raises:
        ConfigError: a size is not positive or larger than that of `buffers`, or max_tokens is less
            than max_requests.

    ```python
    import openmla

    config = openmla.PRESETS["tiny-v3"]
    cache = openmla.allocate_cache(config, num_blocks=8, block_size=16, format="bf16")
    whole = openmla.plan_buffers(config, cache, max_requests=4, max_tokens=4, max_blocks=8)
    single = openmla.slice_buffers(whole, max_requests=1, max_tokens=1)
    print(single["block_table"].shape)  # 1 of 4 rows
    assert single["block_table"].data_ptr() == whole["block_table"].data_ptr()
    ```
    """
    check_buffers("slice_buffers", "buffers", buffers)
    sizes = (max_requests, buffers["block_table"]), (max_tokens, buffers["slot_mapping"])
    for name, (value, rows) in zip(("max_requests", "max_tokens"), sizes, strict=True):
        if as_integer(value) is None or not 1 <= value <= rows.shape[0]:
            raise ConfigError(
                f"slice_buffers: {name} must be in 1..{rows.shape[0]}, the size of these buffers, "
                f"got {value!r}."
            )
    if max_tokens < max_requests:
        raise ConfigError(
            f"slice_buffers: max_tokens must be at least max_requests={max_requests}, "
            f"got {max_tokens}."
        )

    def kept(name: str) -> slice:
        name = name.removeprefix(WRITES)
        if "start_loc" in name:
            return slice(max_requests + 1)
        return slice(max_requests if name in OF_REQUESTS else max_tokens)

    return {
        name: tensor if name.removeprefix(WRITES) in OF_ALL else tensor[kept(name)]
        for name, tensor in buffers.items()
    }


def _common(beside: Buffers, buffers: Buffers) -> Buffers:
    for name in SHARED:
        given, due = (
            tuple(each[name].shape) if name in each else None for each in (beside, buffers)
        )
        if given is None or given != due:
            raise ConfigError(
                f"plan_buffers: beside must be DeepSeek V4 buffers of the same sizes, with {name} "
                f"{due}, got {given}."
            )
    return {name: beside[name] for name in SHARED}


def _each(name: str, count: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of a tuple of tensors, each of which is a buffer of its own."""
    return {f"{name}.{i}": shape for i in range(count)}


def _ring_columns(config: MLAConfig, cache: LayerCache, window: PagedCache, tokens: int) -> int:
    """How many columns a step with that many tokens per request needs."""
    assert config.compressor is not None
    back = cache.geometry.rollback if cache.geometry is not None else 0
    most = config.compressor.window - 1 + tokens + back
    return -(-most // window.block_size) + 1


def captured_score_chunks(
    config: MLAConfig, cache: LayerCache, buffers: Buffers
) -> tuple[ScoreChunk, ...]:
    """How the rows of a captured step are scored: each may see as many keys as fit."""
    max_tokens, max_blocks = buffers["slot_mapping"].shape[0], buffers["block_table"].shape[1]
    return _even_score_chunks(config, cache, max_tokens, max_blocks)


def _even_score_chunks(
    config: MLAConfig, cache: LayerCache, max_tokens: int, max_blocks: int
) -> tuple[ScoreChunk, ...]:
    index = cache.index
    if index is None:
        return ()
    return even_chunks(max_tokens, max_blocks * index.block_size, query_bytes(config, index))


def captured_parts(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    dtype: torch.dtype,
    buffers: Buffers,
    ranks: Ranks | None = None,
) -> tuple[Parts, Buffers]:
    """A fully absorbed step over buffers, and the values to copy into them; nothing is copied yet.
    Over ranks every token is a request of its own, over this rank's keys."""
    assert batch.slot_mapping is not None  # make_plan() checked it
    latent, slots, wide = latent_of(cache), batch.slot_mapping, config
    offsets = rope_offsets(batch, config) if "rope_offsets" in buffers else None
    max_requests, max_tokens = buffers["block_table"].shape[0], buffers["slot_mapping"].shape[0]
    if ranks is not None:
        check_fit_tokens(batch, buffers)
        batch = token_batch(batch, range(len(batch.query_lens)), ranks.shard)
        slots = ranks.shard.local_slots(slots, latent.block_size)
        wide = with_all_heads(config, ranks)
    check_fit(batch, buffers)
    requests, everyone = range(len(batch.query_lens)), slice(0, max_tokens)
    select = None
    if config.window:
        _check_columns(batch, buffers, latent.block_size)
        cuts = query_chunks(max_tokens, config, dtype.itemsize)
        values = window_roles(batch, requests, cuts)
        check_roles(values, buffers)
        group: Group | None = window_group(buffers, everyone, config.window, cuts, requests)
    elif config.indexer is None:
        values = absorbed_roles(batch, requests)
        check_roles(values, buffers)
        longest = max_tokens // max_requests
        group = absorbed_group(buffers, everyone, longest, requests, causal=batch.causal)
    else:  # every row selects, short ones all they have: one graph for all lengths
        chunks = captured_score_chunks(config, cache, buffers)
        cuts = query_chunks(max_tokens, wide, dtype.itemsize)
        lens, K = row_lens(batch.query_lens, batch.seq_lens, batch.causal), config.indexer.topk
        values = select_roles(batch, K, requests, len(lens), lens, chunks, cuts)
        check_roles(values, buffers)
        held = 0 if cache.index is None else query_bytes(config, cache.index)
        select, group = select_parts(
            buffers, everyone, everyone, max_tokens, max_tokens, chunks, cuts, held, requests
        )
        if ranks is not None:
            offered = min(K, buffers["block_table"].shape[1] * latent.block_size)
            here = {"offered": offered, "shard": ranks.shard, "block_size": latent.block_size}
            select = remade(select, here)
    assert group is not None
    if ranks is not None:
        across = Across(everyone, (group,))
        group = remade(group, {"part": None, "across": across})
    values["slot_mapping"] = slots
    if "rope_offsets" in buffers:
        values["rope_offsets"] = torch.zeros(0, dtype=torch.int64) if offsets is None else offsets
    shared = buffers["slot_mapping"], buffers.get("rope_offsets")
    return Parts((group,), select, None, *shared), values


def check_roles(names: Iterable[str], buffers: Buffers) -> None:
    """Check that every tensor of a step has a buffer."""
    for name in names:
        if name not in buffers:
            raise ConfigError(
                f"plan: into must be plan_buffers() of this config and cache, got buffers without "
                f"{name}."
            )


def check_ring(batch: Batch, cache: LayerCache, buffers: Buffers) -> None:
    """V4: check that buffers belong to this kind of layer, and that rings have the same size."""
    check_roles(("ratio",), buffers)
    if int(buffers["ratio"]) != cache.ratio:
        raise ConfigError(
            f"plan: into must be made for compress ratio {cache.ratio}, got "
            f"{int(buffers['ratio'])}. Call plan_buffers() with a cache of each ratio."
        )
    assert batch.window_table is not None
    rings, columns = buffers["window_table"].shape[1], batch.window_table.shape[1]
    if columns != rings:
        raise ConfigError(
            f"plan: window_table must have {rings} columns like the buffers, got {columns}. Call "
            f"pool.tables(requests, window_columns={rings})."
        )
    check_fit(batch, buffers)


def _check_columns(batch: Batch, buffers: Buffers, BS: int) -> None:
    """Check that block tables whose rows are rings have as many columns as their buffer: the block
    of a position depends on it."""
    rings, columns = buffers["block_table"].shape[1], batch.block_table.shape[1]
    if columns != rings and max(batch.read_lens, default=0) > columns * BS:
        raise ConfigError(
            f"plan: block_table must have {rings} columns like the buffers, got {columns}. Call "
            f"pool.block_table(requests, num_columns={rings})."
        )


def check_fit_tokens(batch: Batch, buffers: Buffers) -> None:
    most = buffers["slot_mapping"].shape[0]
    if batch.num_tokens > most:
        raise _too_large("tokens", batch.num_tokens, most)


def check_fit(batch: Batch, buffers: Buffers) -> None:
    max_requests, max_blocks = buffers["block_table"].shape
    max_tokens = buffers["slot_mapping"].shape[0]
    B, M = batch.block_table.shape
    longest = max(batch.query_lens, default=0)
    for name, value, most in (
        ("requests", B, max_requests),
        ("tokens", batch.num_tokens, max_tokens),
        ("block table columns", M, max_blocks),
        ("query tokens of one request", longest, max_tokens // max_requests),
    ):
        if value > most:
            raise _too_large(name, value, most)


def _too_large(name: str, value: int, most: int) -> ConfigError:
    return ConfigError(
        f"plan: the number of {name} must be at most {most} with these buffers, got {value}. Call "
        "plan_buffers() with larger sizes."
    )


def fill(buffers: Buffers, values: Buffers) -> None:
    """Copy a step's tensors into its buffers and fill the rest with padding.

    Host tensors are padded on the host, sent in one copy, and moved into place by one or two ops.
    """
    device = buffers["block_table"].device
    values = {
        name: value
        for name, value in values.items()
        if name not in CONSTANT and not _same(value, buffers[name])
    }
    here = [name for name, value in values.items() if value.device.type == "cpu" != device.type]
    if here:
        _send(buffers, {name: values.pop(name) for name in here})
    for name, value in values.items():
        _put(name, buffers[name], value)


def _send(buffers: Buffers, values: Buffers) -> None:
    padded = tuple([_padded(name, value, buffers[name]) for name, value in values.items()])
    sent = upload(padded, buffers["block_table"].device)
    pairs = [(buffers[name], value) for name, value in zip(values, sent, strict=True)]
    for dtype in (torch.int32, torch.int64):  # one op handles one dtype
        mine = [pair for pair in pairs if pair[0].dtype == dtype]
        if mine:
            torch._foreach_copy_([each for each, _ in mine], [value for _, value in mine])


def _same(value: Tensor, buffer: Tensor) -> bool:
    """Whether another kind of layer already filled this buffer, in shared memory."""
    return value.data_ptr() == buffer.data_ptr() and value.shape == buffer.shape


def _padded(name: str, value: Tensor, buffer: Tensor) -> Tensor:
    """A host tensor padded to the size of its buffer."""
    if value.shape == buffer.shape:
        return value
    place = torch.empty_like(buffer, device="cpu")
    _put(name, place, value)
    return place


def _put(name: str, place: Tensor, value: Tensor) -> None:
    if value.shape == place.shape:
        place.copy_(value, non_blocking=True)
        return
    n = value.shape[0]
    if "start_loc" in name:  # padding requests are empty, at the end
        place[n:] = value[-1:]
    else:
        place.fill_(EMPTY.get(name.removeprefix(WRITES), 0))
    place[tuple(map(slice, value.shape))].copy_(value, non_blocking=True)
