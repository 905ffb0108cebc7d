"""Attachment: what attach() set up on a model, for all passes. Pass: the state of one forward pass.

Several threads may run passes over one model, each with a cache of its own. A lock guards what they
share (the block pool and the caches). What one module of a pass hands to the next is in a Pass, one
per thread.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from openmla.attention import IndexInputs, Selection
from openmla.backends.choice import BackendChoice
from openmla.cache import (
    BlockPool,
    CompressedPool,
    Geometry,
    LayerCache,
    LayerScales,
    PoolGroup,
    allocate_cache,
    ring_blocks,
    shown_bytes,
)
from openmla.config import MLAConfig, RopeConfig
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers.clamped import Clamped, counted
from openmla.integrations.transformers.compressed import Compressible
from openmla.integrations.transformers.growth import spare_blocks
from openmla.integrations.transformers.memory import ABSORBED, MemoryReport, workspace_bytes
from openmla.layers.eight_bits import largest_error
from openmla.layers.measure import Measured
from openmla.layers.rope import rope_table
from openmla.layers.weights import Known
from openmla.parallel import Ranks, rank_cache
from openmla.plan import Explanation, Plan
from openmla.plan.explanation import Line
from openmla.plan.explanation import counted as counted_lines

if TYPE_CHECKING:
    from openmla.integrations.transformers.captured import CapturedDecode
    from openmla.integrations.transformers.indexer import IndexerWatch
    from openmla.integrations.transformers.paged_layer import PagedLayer
    from openmla.integrations.transformers.session import Session

FIRST_REQUESTS, FIRST_TOKENS = 4, 512  # initial capacity of windows and V4's states
ROLLBACK = 32  # tokens that a sequence can be cropped by if layers keep a window of it
NATURAL_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Attended(NamedTuple):
    """One layer's step, for a watcher: its inputs, its caches after the step, and its output."""

    layer: int
    queries: Tensor  # [T, H, E], rotated
    rows: Tensor  # [T, D], of this step, rotated
    cache: LayerCache
    plan: Plan
    index_inputs: IndexInputs | None  # the indexer's, if the layer has one that ran
    selection: Selection | None  # V3.2's, if the plan has tokens that select keys
    out: Tensor  # [T, H, V]; for V4 still rotated


Watcher = Callable[[Attended], None]


def same_scaling(scaling: Any, config: MLAConfig) -> bool:
    """Whether an attention module's softmax scale is the one in the config of its layer."""
    return math.isclose(float(scaling), config.scale, rel_tol=1e-6)


def check_scaling(scaling: Any, config: MLAConfig) -> None:
    """Raise if an attention module has another softmax scale than the config of its layer."""
    if not same_scaling(scaling, config):
        raise ConfigError(
            f"attach: the softmax scale of an attention module must be {config.scale}, as in the "
            f"config, got {scaling}."
        )


@dataclass(eq=False)
class Pass:
    """What one forward pass hands from module to module; a thread has one pass at a time."""

    positions: Tensor | None = None  # as passed to the model
    awaited: PagedLayer | None = None  # the layer whose attention module will store latents next
    storing: PagedLayer | None = None  # the layer that stored latents and awaits its attention
    session: Session | None = None  # the session of the current pass
    generating: bool = False  # called by generate(), which continues from the last column
    own_cache: Any = None  # for a pass that was called without one
    compressible: Compressible | None = None  # what a V4 layer will pool
    index_rotation: tuple[Tensor, Tensor] | None = None  # cos and sin [B, S, R]
    index_query: Tensor | None = None  # [B, S, HI * DI], before rope
    index_weights: Tensor | None = None  # [B, S, HI]


@dataclass(eq=False, repr=False)
class Attachment:
    """What attach() set up on a model: config, options, block pool and caches.

    Get it with openmla.attachment_of(model). explain() shows what the last pass ran, and memory()
    what the caches, workspaces and captured graphs take.
    """

    config: MLAConfig
    modules: list[nn.Module]
    num_blocks: int
    block_size: int
    format: str | None  # None: the model's dtype
    index_format: str
    backend: BackendChoice
    workspace_tokens: int | None
    may_grow: bool
    absorbed_format: str | None = None  # "fp8": fp8 weights of kv_b_proj
    batch_invariant: bool = False  # same as in make_plan()
    query_dtype: str | None = None  # same as in make_plan()
    prefill_dtype: str | None = None  # same as in make_plan()
    ranks: Ranks | None = None  # the cache is sharded over them; None: it is not sharded
    detached: bool = False
    handles: list[Any] = field(default_factory=list)
    previous: tuple[Any, Any] = (None, None)  # text config, its attention before attach()
    request_ids: Any = field(default_factory=count)
    name: str = "openmla"  # the name of the attention function
    watches: dict[int, IndexerWatch] = field(default_factory=dict)  # by layer
    captured: CapturedDecode | None = None  # captures decode steps, if capture is on
    scales: dict[int, LayerScales] = field(default_factory=dict)  # by layer; the default is 1
    first_scales: bool = False  # kv_scale="first": the first pass measures them

    def __post_init__(self) -> None:
        self._start()

    def __repr__(self) -> str:
        format = self.format or "the model's precision"
        layers = f"{len(self.modules)} layers of {self.config.model_type}"
        return f"Attachment({layers}, {format}, {self.pool!r})"

    def _start(self) -> None:
        """Set up everything that passes change."""
        self.pool = self._new_pool()
        self.busy: set[Any] = set()  # requests of running passes
        for pool in self.pools:
            pool.busy = self.busy
        self.caches: dict[int, LayerCache] = {}
        self.last_plan: Any = None
        self.last_plans: dict[int, Plan] = {}  # of the last pass, by kind of layer
        self.workspace_bytes = 0  # the most that any pass planned for
        # decoded kv_b_proj weights, alive while a cache or a graph needs them
        self._decoded: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.known: dict[int, Known] = {}  # views of plain weights, by layer, for all sessions
        self.eight_bits: dict[int, Tensor] = {}  # the current fp8 copy of kv_b_proj, by layer
        # the same, plus copies that caches still hold of weights that have changed since
        self._in_eight_bits: weakref.WeakValueDictionary[tuple[int, int], Tensor] = (
            weakref.WeakValueDictionary()
        )  # by layer and id
        self.expands_bytes = 0  # a kv_b_proj decoded again for each expanded prefill
        self.lock = threading.RLock()  # guards caches; held while a layer attends
        self._pool_lock = threading.Lock()
        self._dropped: deque[Sequence[int]] = deque()  # requests of sessions that are gone
        self._passes = threading.local()
        self._streams: dict[torch.device, Any] = {}  # stream of the caches' last use
        self._tables: dict[torch.device, Tensor] = {}
        self.cut_off = Clamped()
        self.measured: dict[int, Measured] = {}  # by layer, while calibrate() runs
        self.watcher: Watcher | None = None  # called with every layer's step while bisect runs

    def __getstate__(self) -> dict[str, Any]:
        """State for copying or saving the model; caches and requests stay with the original."""
        fields = self.__dataclass_fields__
        return {name: value for name, value in vars(self).items() if name in fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        twin = Attachment.__new__(Attachment)
        memo[id(self)] = twin
        twin.__setstate__({name: deepcopy(v, memo) for name, v in self.__getstate__().items()})
        return twin

    def _new_pool(self) -> BlockPool | PoolGroup:
        if self.config.compressor is None:
            pool = BlockPool(self.num_blocks, self.block_size * self.num_ranks)
            window = max(kind.window for kind in self.config.every_kind)
            if not window:
                return pool
            # one more row: a query that only looks has the position of the last token
            given = {"window": window + 1, "rollback": ROLLBACK}
            first = ring_blocks(window, ROLLBACK, FIRST_REQUESTS, FIRST_TOKENS, self.block_size)
            return PoolGroup({"all": pool, "window": BlockPool(first, self.block_size, **given)})
        return CompressedPool(
            Geometry.for_model(
                self.config,
                num_blocks=self.num_blocks,
                block_size=self.block_size * self.num_ranks,
                max_requests=FIRST_REQUESTS,
                max_tokens=FIRST_TOKENS,
                window_block_size=64,
                rollback=ROLLBACK,
                format="",
                index_format="",
            )
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks. A block of the pool is one block on each rank."""
        return 1 if self.ranks is None else self.ranks.shard.size

    @property
    def current(self) -> Pass:
        """This thread's current or next pass."""
        found: Pass | None = getattr(self._passes, "current", None)
        if found is None:
            found = self._passes.current = Pass()
        return found

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The pools: of all rows, and those of windows; for V4 of entries, rows and states. Only
        the first can have a fixed size."""
        return self.pool.pools if isinstance(self.pool, PoolGroup) else (self.pool,)

    @property
    def ring_columns(self) -> int:
        """Blocks of a window that a step of one token per row may see, at most."""
        rows = self.pools[1]
        assert rows.window is not None
        return -(-(rows.window + rows.rollback) // rows.block_size) + 1

    def lifetime(self, layer: int) -> int:
        """Which of the pools a layer's rows are in; V4's layers are in several."""
        return int(self.config.layer(layer).window > 0)

    @property
    def partial_keys(self) -> bool:
        """Whether some layers attend to a part of the keys: every pass then needs a cache."""
        kinds = self.config.every_kind
        return any(kind.indexer is not None or kind.window > 0 for kind in kinds)

    @property
    def num_rows(self) -> int:
        """How many layers have rows of their own."""
        numbers = [int(module.layer_idx) for module in self.modules]  # type: ignore[arg-type]
        return sum(self.config.kv_source(number) == number for number in numbers)

    @property
    def awaits_scales(self) -> bool:
        """Whether the first pass still has to measure the scales of some layers."""
        return self.first_scales and len(self.scales) < self.num_rows

    def is_followed(self) -> bool:
        """Whether modules and config still ask for causal attention with the same softmax scale."""
        causal = getattr(self.previous[0], "is_causal", True)
        return causal and all(
            getattr(module, "is_causal", True)
            and same_scaling(module.scaling, self.config.layer(module.layer_idx))  # type: ignore[arg-type]
            for module in self.modules
        )

    @contextmanager
    def bookkeeping(self) -> Iterator[BlockPool | PoolGroup]:
        """Lock the pool for this thread. Do not nest; nothing inside it waits for a lock."""
        try:
            with self._pool_lock:
                yield self.pool
        finally:
            self._free_dropped()

    def tell(self, *step: Any) -> None:
        """Pass a layer's step (Attended's fields) to the watcher, if there is one."""
        if self.watcher is not None:
            self.watcher(Attended(*step))

    def drop(self, requests: Sequence[int]) -> None:
        """Free a session's requests. The garbage collector may call this at any point of any
        thread: if the pool is in use, the thread that uses it frees them afterwards."""
        self._dropped.append(requests)
        self._free_dropped()

    def _free_dropped(self) -> None:
        while self._dropped and self._pool_lock.acquire(blocking=False):
            try:
                for request in self._dropped.popleft() if self._dropped else ():
                    self.busy.discard(request)
                    self.pool.free(request)
            finally:
                self._pool_lock.release()

    @contextmanager
    def using_caches(self, device: torch.device) -> Iterator[None]:
        """Use the caches from this thread only, after what other streams have launched on them."""
        with self.lock:
            if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                stream, last = torch.cuda.current_stream(device), self._streams.get(device)
                if last is not None and last != stream:
                    stream.wait_stream(last)
                self._streams[device] = stream
            yield

    def take(self, wanted: dict[int, int]) -> tuple[list[tuple[int, int]], ...]:
        """Allocate blocks for new tokens; returns what to copy first. Full pools grow if they may.

        Windows and states may always grow: the number of sequences bounds them. Called with the
        pool locked.
        """
        for lifetime, pool in enumerate(self.pools):
            missing = pool.missing(wanted)
            if missing and lifetime == 0 and not self.may_grow:
                break  # take() below raises the error
            if missing:
                rows = sum(map(bool, wanted.values())) if lifetime == 0 else 0
                each = self._block_bytes()[lifetime]
                spare = spare_blocks(pool.num_blocks, rows=rows, block_bytes=each)
                pool.grow(pool.num_blocks + missing + spare)
        if isinstance(self.pool, PoolGroup):
            return tuple(self.pool.take(wanted))
        return (self.pool.take(wanted),)

    def cache(self, layer: int, device: torch.device, dtype: torch.dtype) -> LayerCache:
        """One layer's cache, with as many blocks as the pool has now."""
        format = self.format or NATURAL_FORMATS.get(dtype)
        if format is None:
            raise UnsupportedError(
                f"attach: there is no default cache format for a {dtype} model. Pass cache_format."
            )
        with self.lock:
            kept = self.caches.get(layer)
            if kept is None:
                kept = self._new_cache(layer, format, device)
            source = self.config.kv_source(layer)
            if source != layer:
                kept = self.caches[layer] = self._grown(layer, kept)
                return kept.reading(self.cache(source, device, dtype))
            rows = kept.latent or kept.window
            assert rows is not None
            if rows.format != format or rows.data.device != device:
                if not self._holds_nothing():
                    raise ConfigError(
                        f"attach: the model now needs {format} on {device}, and its caches are "
                        f"{rows.format} on {rows.data.device}. Delete every past_key_values made "
                        "before."
                    )
                if self.captured is not None:
                    self.captured._drop()  # graphs read the caches that are replaced
                kept = self._new_cache(layer, format, device)
            kept = self.caches[layer] = self._grown(layer, kept)
            return kept

    def with_index(self, cache: LayerCache, device: torch.device, dtype: torch.dtype) -> LayerCache:
        """Return a layer's cache with the indexer keys of a layer that selects keys, to plan with,
        if layers of several kinds share a selection. A plan depends on sizes only."""
        for module in self.modules if self.config.kinds else ():
            if module.indexer is not None and next(module.parameters()).device == device:
                selecting = self.cache(int(module.layer_idx), device, dtype)  # type: ignore[arg-type]
                return replace(cache, index=selecting.index)
        return cache

    def _holds_nothing(self) -> bool:
        """Whether no row that was cached before the current pass will be read."""
        session = self.current.session
        mine = session.requests if session is not None and session.fresh else ()
        return set(self.pools[0].requests) <= set(mine)

    def _new_cache(self, layer: int, format: str, device: torch.device) -> LayerCache:
        allocate = allocate_cache if self.ranks is None else partial(rank_cache, ranks=self.ranks)
        with torch.inference_mode(False):  # passes write to it with and without inference mode
            return allocate(
                self.config,
                num_blocks=self.pools[self.lifetime(layer)].num_blocks,
                block_size=self.pool.block_size // self.num_ranks,
                format=format,
                kv_scale=self.scales.get(layer, 1.0),
                index_format=self.index_format,
                layer=layer,
                max_requests=FIRST_REQUESTS,
                max_tokens=FIRST_TOKENS,
                rollback=ROLLBACK,
                device=device,
            )

    def copy(
        self,
        copies: tuple[list[tuple[int, int]], ...],
        sources: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> None:
        """Carry out the copies of take() in every layer, then move rows from slot to slot."""
        for layer, kept in self.caches.items():
            cache = self.caches[layer] = self._grown(layer, kept)
            if not cache.parts:
                continue
            v4 = self.config.compressor is not None
            with self.using_caches(cache.parts[0].data.device):
                cache.copy_blocks(*(copies if v4 else (copies[self.lifetime(layer)],)))
                if sources is not None and targets is not None:
                    config = self.config.layer(layer)
                    if cache.latent is not None:
                        cache.latent.move_rows(sources, targets, config.latent_dim)
                    if cache.index is not None:
                        assert config.indexer is not None
                        cache.index.move_rows(sources, targets, config.indexer.head_dim)

    def _grown(self, layer: int, cache: LayerCache) -> LayerCache:
        latent, sizes = cache.latent, [pool.num_blocks for pool in self.pools]
        if latent is not None:
            sizes = [sizes[self.lifetime(layer)]]
            if latent.num_blocks >= sizes[0]:
                return cache  # the common case; indexer keys have as many blocks
        with torch.inference_mode(False):
            return cache.grown(*sizes)

    def reach(self, length: int) -> None:
        """Support sequences of this length; transformers does not stop at the config's limit."""
        if length > self.config.max_positions:
            compressor = self.config.compressor
            assert compressor is not None
            external = compressor.rope.kind == "external" and any(compressor.ratios)
            if external and self._entry_rotary().rope_type["compress"] == "dynamic":
                raise UnsupportedError(
                    f"attach: deepseek_v4 with a dynamic RoPE supports at most "
                    f"{self.config.max_positions} tokens, got {length}."
                )
            longer = max(2 * self.config.max_positions, length)
            self.config, self._tables = replace(self.config, max_positions=longer), {}

    def table(self, device: torch.device) -> Tensor:
        """Angles for V4's entries; the modules rotate everything else."""
        compressor = self.config.compressor
        assert compressor is not None
        found = self._tables.get(device)
        if found is None:
            found = self._new_table(compressor.rope).to(device)
            if type(found) is Tensor:  # do not keep a tracer's fake tensor for eager passes
                self._tables[device] = found
        return found

    def _entry_rotary(self) -> Any:
        """The transformers module that rotates V4's entries."""
        modules: list[Any] = list(self.modules)
        return next(m.compressor.rotary_emb for m in modules if m.compressor is not None)

    def _new_table(self, rope: RopeConfig) -> Tensor:
        if rope.kind != "external":
            return rope_table(rope, self.config.qk_rope_head_dim, self.config.max_positions)
        # the same rotation that the model's compressors apply to their entries
        rotary = self._entry_rotary()
        angles = torch.outer(
            torch.arange(self.config.max_positions, dtype=torch.float32),
            rotary.compress_inv_freq.float().cpu(),
        )
        return torch.cat([angles.cos(), angles.sin()], dim=1) * rotary.compress_attention_scaling

    def explain(self) -> Explanation:
        """Explain what the last forward pass ran in each layer, and why. Print the result."""
        if self.last_plan is None:
            return Explanation([Line("", "no pass has run yet")])
        lines: list[Line] = []
        for kind, plan in self.last_plans.items():
            lines += self._kind_lines(kind) if self.config.kinds else []
            lines += plan.explain(finished=True).lines
        if self.absorbed_format is not None:
            told = (line for line in str(self.memory()).splitlines() if line.startswith(ABSORBED))
            lines += [Line("absorbed", line.removeprefix(ABSORBED)) for line in told]
        if self.first_scales and self.scales:
            rows = [scales.row for scales in self.scales.values()]
            spread = f"kv_scale {min(rows):.4g} to {max(rows):.4g} over {len(self.scales)} layers"
            lines.append(Line("scales", f"found in the first pass: {spread}"))
        return Explanation([*lines, *(Line("", t) for t in self.cut_off.lines(self._caches()))])

    def _kind_lines(self, kind: int) -> list[Line]:
        """How many layers are of a kind, and what they keep per token."""
        layers = [n for n, each in enumerate(self.config.layer_kinds) if each == kind]
        caches = [cache for n, cache in self._caches().items() if n in layers]
        parts = [part.data for cache in caches for part in cache.parts]
        each = sum(data[0, 0].numel() * data.element_size() for data in parts)
        what = (
            f"{counted_lines(len(layers), 'layer')} of kind {kind}: {', '.join(map(str, layers))}"
        )
        kept = f"{shown_bytes(each)} per token of the whole context"
        pool = self.pools[self.lifetime(layers[0])]
        if pool.window is not None:
            before = pool.window - 1 + pool.rollback
            kept = f"{shown_bytes(each)} per token of a step and of the {before:,} tokens before it"
        return [Line("layers", what), Line("keeps", kept)]

    def clamped(self) -> dict[int, int]:
        """How many values were too large for their scales and saturated in fp8 so far, by layer.
        Waits for the device."""
        return counted(self._caches())

    def after_pass(self) -> None:
        """Warn once if values saturated, without making the pass wait."""
        self.cut_off.after_pass(self._caches())

    def _caches(self) -> dict[int, LayerCache]:
        """A copy of the current caches: other threads may add some."""
        with self.lock:
            return dict(self.caches)

    def planned(self, kind: int, plan: Plan, *, first: bool) -> None:
        """Keep the plan that a pass will run for a kind of layer, and count its workspace.
        `first`: the pass has planned no other."""
        self.last_plan = plan
        if first or not self.config.kinds:
            self.last_plans = {}
        self.last_plans[kind] = plan
        self.workspace_bytes = max(self.workspace_bytes, workspace_bytes(plan))

    def decoded(self, weight: Tensor) -> None:
        """Count a cache's decoded copy of a kv_b_proj for as long as it is alive."""
        self._decoded[id(weight)] = weight

    def share_eight_bits(self, layer: int, kept: Tensor) -> Tensor:
        """Return the fp8 copy of a kv_b_proj that all caches share: the existing one if it is
        equal, else this one from now on."""
        with self.lock:
            found = self.eight_bits.get(layer)
            if found is not None and found.device == kept.device and torch.equal(found, kept):
                return found
            self.eight_bits[layer] = self._in_eight_bits[layer, id(kept)] = kept
            return kept

    def memory(self) -> MemoryReport:
        """Report the memory that attach() takes besides the model's weights. Print the result."""
        with self.lock:
            captured = self.captured
            graphs = captured.memory if captured is not None else None
            weights = {weight.data_ptr(): weight for weight in self._decoded.values()}
            return MemoryReport(
                block_bytes=sum(cache.num_bytes for cache in self.caches.values()),
                used_bytes=self.used_bytes(),
                num_blocks=self.pool.num_blocks,
                free_blocks=self.pool.num_free,
                decoded_bytes=sum(weight.nbytes for weight in weights.values()),
                graph_bytes=0 if graphs is None else graphs.num_bytes,
                num_graphs=len(captured.recorded) if captured and graphs is not None else 0,
                workspace_bytes=self.workspace_bytes and self.workspace_bytes + self.expands_bytes,
                gathered_bytes=0 if self.ranks is None else self.ranks.workspace.num_bytes,
                **self._eight_bits_told(),
            )

    def _eight_bits_told(self) -> dict[str, Any]:
        kept = [(self.config.layer(n), each) for (n, _), each in self._in_eight_bits.items()]
        if not kept:
            return {}
        error = max(largest_error(each, config) for config, each in kept)
        return {"absorbed_bytes": sum(each.nbytes for _, each in kept), "absorbed_error": error}

    def used_bytes(self) -> int:
        """Bytes of the blocks that requests hold, over all layers."""
        used = [pool.num_blocks - pool.num_free for pool in self.pools]
        return sum(n * each for n, each in zip(used, self._block_bytes(), strict=False))

    def _block_bytes(self) -> tuple[int, int, int]:
        """Bytes of one block over all layers, in the order of `pools`."""
        totals = [0, 0, 0]
        for layer, cache in self._caches().items():
            for part in cache.parts:
                lifetime = 1 if part is cache.window else 2 if part is cache.state else 0
                lifetime = self.lifetime(layer) if part is cache.latent else lifetime
                totals[lifetime] += part.data[0].numel() * part.data.element_size()
        return totals[0], totals[1], totals[2]
