"""Session: the requests behind one past_key_values; Attachment: what attach() set up on a model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openmla.attention import Absorbed, Selection
from openmla.cache import BlockPool, CompressedPool, Geometry, LayerCache, allocate_cache
from openmla.config import MLAConfig
from openmla.errors import CacheFullError, ConfigError, ShapeError, UnsupportedError
from openmla.integrations.transformers.compressed import Compressible, check_positions
from openmla.integrations.transformers.indexer import IndexerWatch
from openmla.layers.weights import absorb, decode_weight, is_plain
from openmla.plan import Batch, Plan, make_plan

if TYPE_CHECKING:
    from openmla.integrations.transformers.paged_layer import PagedLayer

STAYING = ("pool", "caches", "positions", "last_plan", "storing", "passing", "compressible")
FIRST_REQUESTS, FIRST_TOKENS = 4, 512  # V4's windows and states begin with room for so many
ROLLBACK = 32  # tokens a V4 sequence can be cropped by
NATURAL_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(eq=False)
class Attachment:
    """Everything attach() set up on one model: the shared block pool, caches per layer, options."""

    config: MLAConfig
    modules: list[nn.Module]
    num_blocks: int
    block_size: int
    format: str | None  # None: the model's dtype
    index_format: str
    backend: str
    workspace_tokens: int | None
    may_grow: bool
    pool: BlockPool | CompressedPool = field(init=False)
    caches: dict[int, LayerCache] = field(default_factory=dict)
    detached: bool = False
    positions: Tensor | None = None  # of the pass under way, as the model was given them
    last_plan: Plan | None = None
    storing: PagedLayer | None = None  # the layer that stored latents and awaits its attention
    handles: list[Any] = field(default_factory=list)
    previous: list[tuple[Any, Any]] = field(default_factory=list)
    names: Any = field(default_factory=count)
    name: str = "openmla"  # of the attention function
    watches: dict[int, IndexerWatch] = field(default_factory=dict)  # by layer
    passing: Any = None  # the cache of a pass that was given none
    compressible: Compressible | None = None  # what a V4 layer will pool

    def __post_init__(self) -> None:
        self.pool = self._new_pool()

    def _new_pool(self) -> BlockPool | CompressedPool:
        if self.config.compressor is None:
            return BlockPool(self.num_blocks, self.block_size)
        return CompressedPool(
            Geometry.for_model(
                self.config,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_requests=FIRST_REQUESTS,
                max_tokens=FIRST_TOKENS,
                window_block_size=64,
                rollback=ROLLBACK,
                format="",
                index_format="",
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Of a model that is copied: its caches and their requests stay with the original."""
        twin = copy(self)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, deepcopy(value, memo) if name not in STAYING else None)
        twin.pool = twin._new_pool()
        twin.caches = {}
        return twin

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """Of entries, rows and states for V4; the first is the one whose size may be fixed."""
        return self.pool.pools if isinstance(self.pool, CompressedPool) else (self.pool,)

    def take(self, wanted: dict[int, int]) -> tuple[list[tuple[int, int]], ...]:
        """Blocks for new tokens, what to copy first; pools that may grow do instead of being full.

        Windows and states always may: they are bounded by the number of sequences.
        """
        for pool in self.pools:
            while not _fits(pool, wanted, raising=pool is self.pools[0] and not self.may_grow):
                pool.grow(2 * pool.num_blocks)
        taken = self.pool.take(wanted)
        return (taken,) if isinstance(taken, list) else taken

    def cache(self, layer: int, device: torch.device, dtype: torch.dtype) -> LayerCache:
        """One layer's cache, as many blocks as the pool has by now."""
        format = self.format or NATURAL_FORMATS.get(dtype)
        if format is None:
            raise UnsupportedError(
                f"attach: a {dtype} model has no cache format of its own. Give cache_format."
            )
        kept = self.caches.get(layer)
        if kept is None:
            kept = allocate_cache(
                self.config,
                num_blocks=self.pool.num_blocks,
                block_size=self.pool.block_size,
                format=format,
                index_format=self.index_format,
                layer=layer,
                max_requests=FIRST_REQUESTS,
                max_tokens=FIRST_TOKENS,
                rollback=ROLLBACK,
                device=device,
            )
        rows = kept.latent or kept.window
        assert rows is not None
        if rows.format != format or rows.data.device != device:
            raise ConfigError(
                f"attach: the cache is {rows.format} on {rows.data.device}, the "
                f"model wants {format} on {device} now. Call detach(model), then attach(model)."
            )
        kept = kept.grown(*(pool.num_blocks for pool in self.pools))
        self.caches[layer] = kept
        return kept

    def used_bytes(self) -> int:
        """Bytes of the blocks that requests hold, over all layers."""
        used = [pool.num_blocks - pool.num_free for pool in self.pools]
        total = 0
        for cache in self.caches.values():
            for part in cache.parts:
                lifetime = 1 if part is cache.window else 2 if part is cache.state else 0
                total += used[lifetime] * part.data[0].numel() * part.data.element_size()
        return total


class Session:
    """The requests behind one past_key_values object: one per batch row, for all layers."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.requests: list[int] = []
        self.columns: list[list[tuple[bool, int]]] = []  # per row: runs of (is a token, how many)
        self.decoded: dict[int, Tensor] = {}  # quantised kv_b_proj by layer, as it was here first
        self.steps = 0
        self.leader: int | None = None  # the layer whose cache calls move requests
        self.copies: tuple[list[tuple[int, int]], ...] = ([],)
        self.spans: list[tuple[int, int, int]] = []  # request, old length, new length
        self.batch: Batch | None = None
        self.picked: Tensor | None = None  # tokens that are not padding, None: all
        self.plans: dict[tuple[torch.device, int], Plan] = {}  # by compress ratio too
        self.dtype: torch.dtype | None = None  # of the last pass's queries
        self.selection: Selection | None = None  # of the last layer that chose
        self.unfinished = False  # a pass has begun, and its last layer has not attended
        weakref.finalize(self, _free_requests, attachment.pool, self.requests)

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """A copy shares every block until one of the two writes."""
        twin = Session(self.attachment)
        memo[id(self)] = twin
        twin.steps, twin.leader, twin.dtype = self.steps, self.leader, self.dtype
        twin.requests += self._shared(range(len(self.requests)))
        twin.columns = [list(runs) for runs in self.columns]
        return twin

    def _shared(self, rows: Sequence[int]) -> list[int]:
        for row in rows:
            if not 0 <= row < len(self.requests):
                raise ShapeError(
                    f"attach: the cache has rows 0..{len(self.requests) - 1}, got {row}."
                )
        fresh = [next(self.attachment.names) for _ in rows]
        for row, name in zip(rows, fresh, strict=True):
            self.attachment.pool.share(self.requests[row], name)
        return fresh

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of what row rows[i] was; no byte moves."""
        fresh = self._shared(rows)
        _free_requests(self.attachment.pool, self.requests)
        self.requests[:] = fresh
        self.columns = [list(self.columns[row]) for row in rows]

    def truncate(self, num_columns: int) -> None:
        """Drop the last columns of every row; some of them may be padding."""
        pool = self.attachment.pool
        columns = [list(runs) for runs in self.columns]
        lens = []
        for request, runs in zip(self.requests, columns, strict=True):
            surplus, tokens = num_columns, 0
            while surplus > 0 and runs:
                is_token, length = runs.pop()
                dropped = min(length, surplus)
                surplus -= dropped
                tokens += dropped if is_token else 0
                if dropped < length:
                    runs.append((is_token, length - dropped))
            lens.append(pool.seq_len(request) - tokens)
            pool.check_truncate(request, lens[-1])
        for request, length in zip(self.requests, lens, strict=True):
            pool.truncate(request, length)
        self.columns = columns

    def clear(self) -> None:
        _free_requests(self.attachment.pool, self.requests)
        self.requests.clear()
        self.columns.clear()
        self.unfinished = False

    def absorbed(self, module: nn.Module, layer: int, dtype: torch.dtype) -> Absorbed:
        """The module's kv_b_proj: views of its weight, or a quantised one decoded.

        Decoded once per session, so that adapters and weights may change between generations.
        """
        linear = module.kv_b_proj
        assert isinstance(linear, nn.Module)
        if is_plain(linear):
            weight = linear.weight
        else:
            C = self.attachment.config.kv_lora_rank
            if layer not in self.decoded:
                self.decoded[layer] = decode_weight(linear, C, dtype)
            weight = self.decoded[layer]
        assert isinstance(weight, Tensor)
        return absorb(weight, self.attachment.config)

    def begin(self, B: int, S: int, mask: Tensor | None) -> None:
        """A new forward pass: find padding, take blocks, describe the batch."""
        if self.unfinished:
            raise ConfigError(
                "attach: the last pass over this cache failed half-way, so layers disagree on what "
                "it holds. Make a new one."
            )
        pool = self.attachment.pool
        fresh = not self.requests
        requests = [next(self.attachment.names) for _ in range(B)] if fresh else self.requests
        if len(requests) != B:
            raise ShapeError(
                f"attach: the cache holds {len(requests)} sequences, got a batch of {B}."
            )
        starts = [pool.seq_len(request) for request in requests]
        spans = new_spans(B, S, mask, starts)
        if isinstance(pool, CompressedPool):
            check_positions(self.attachment.positions, spans, starts)
        new_lens = [stop - start for start, stop in spans]
        self.copies = self.attachment.take(dict(zip(requests, new_lens, strict=True)))
        if fresh:
            self.requests += requests
            self.columns = [[] for _ in requests]
        for runs, (start, stop) in zip(self.columns, spans, strict=True):
            new_runs = ((False, start), (True, stop - start), (False, S - stop))
            runs += [run for run in new_runs if run[1] > 0]
        ends = [start + n for start, n in zip(starts, new_lens, strict=True)]
        self.spans = list(zip(requests, starts, ends, strict=True))
        self.describe()
        self.picked = None
        if sum(new_lens) < B * S:
            rows = [torch.arange(b * S + i, b * S + j) for b, (i, j) in enumerate(spans)]
            self.picked = torch.cat(rows)
        self.plans = {}
        self.steps += 1
        self.unfinished = True

    def describe(self, window_columns: int = 0) -> None:
        """The step that brings requests from their old lengths to their new ones, as a Batch."""
        pool, requests = self.attachment.pool, [request for request, _, _ in self.spans]
        query_lens = [end - start for _, start, end in self.spans]
        ends = [end for _, _, end in self.spans]
        if isinstance(pool, CompressedPool):
            tables = pool.tables(requests, window_columns=window_columns)
            self.batch = Batch(query_lens, ends, **tables._asdict())
        else:
            slots = pool.slot_mapping(self.spans)
            self.batch = Batch(query_lens, ends, pool.block_table(requests), slots)

    def plan(
        self,
        cache: LayerCache,
        device: torch.device,
        dtype: torch.dtype,
        into: dict[str, Tensor] | None = None,
    ) -> Plan:
        """This pass's plan: made for the first layer of a kind on a device, for all of them."""
        key = (device, cache.ratio)
        self.dtype = dtype
        if key not in self.plans:
            assert self.batch is not None
            config = self.attachment.config
            if config.indexer is not None and config.compressor is None and cache.index is None:
                raise UnsupportedError(
                    f"attach: the first layer on {device} must have an indexer of its own."
                )
            self.plans[key] = make_plan(
                self.batch,
                self.attachment.config,
                cache,
                dtype=dtype,
                backend=self.attachment.backend,
                workspace_tokens=None if into else self.attachment.workspace_tokens,
                into=into,
            )
            self.attachment.last_plan = self.plans[key]
        return self.plans[key]


def _fits(pool: BlockPool, wanted: dict[int, int], *, raising: bool) -> bool:
    try:
        pool.check(wanted)
    except CacheFullError:
        if raising:
            raise
        return False
    return True


def _free_requests(pool: BlockPool | CompressedPool, requests: Sequence[int]) -> None:
    for request in requests:
        pool.free(request)


def new_spans(
    B: int, S: int, mask: Tensor | None, seq_lens: Sequence[int]
) -> list[tuple[int, int]]:
    """Which of the S new columns of each row are tokens; padding is on one side or both.

    A single new column on a GPU is taken as a token without looking: that would wait for it.
    """
    if mask is None or (S == 1 and mask.device.type != "cpu"):
        return [(0, S)] * B
    if mask.dim() != 2:
        raise UnsupportedError(
            f"attach: attention_mask must be [batch, columns], got {tuple(mask.shape)}. "
            "Square masks are not supported."
        )
    real = mask.to(torch.bool)
    if real.device.type == "cpu" and mask.shape[1] > S:
        cached = real[:, :-S].sum(dim=1).tolist()
        if cached != list(seq_lens):
            raise ShapeError(
                "attach: attention_mask must show the tokens that are cached, "
                f"{list(seq_lens)} per row, got {cached}."
            )
    new = real[:, -S:].int()
    lens, firsts = new.sum(dim=1).tolist(), new.argmax(dim=1).tolist()
    edges = new.diff(dim=1).abs().sum(dim=1).tolist()
    spans = []
    for b in range(B):
        if edges[b] > 2 or (edges[b] == 2 and bool(new[b, 0])):
            raise ShapeError(f"attach: attention_mask must not have holes, row {b} has one.")
        spans.append((firsts[b], firsts[b] + lens[b]))
    return spans
