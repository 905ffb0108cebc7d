"""Plan and its parts: what a step will do, complete when made and then frozen.

A plan says what to write, which tokens select their keys, and how each group of tokens attends.
Every token of a request is in exactly one group. A group is absorbed (queries in latent space, over
cached rows) or expanded (keys and values made from latents, a chunk of keys at a time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.choice import backend_for
from openmla.cache import Geometry, LayerCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.plan.explanation import Explanation
from openmla.plan.options import PlanOptions, thawed
from openmla.plan.workspace import Workspace
from openmla.ranks import Ranks, Shard

Rows = slice | Tensor  # of the step's tokens: a slice, or indices [n] i64
Tensors = tuple[Tensor, ...]  # not slices of one: kernels specialize on alignment

Some = TypeVar("Some", bound="Part | Plan")


def fixed_run(num_heads: int) -> int:
    """Keys per run where a row's bits must not depend on its neighbors. A single request needs
    short runs to fill the GPU; many need few partial results, whose size grows with the heads."""
    return 512 if num_heads <= 32 else 1024


class Part:
    """A piece of a plan. Its repr shows tensors by shape and dtype, because their values may be on
    a device."""

    def __repr__(self) -> str:
        names = self.__dataclass_fields__  # type: ignore[attr-defined]
        given = [(name, getattr(self, name)) for name in names]
        parts = [f"{name}={_shown(value)}" for name, value in given if not _is_nothing(value)]
        return f"{type(self).__name__}({', '.join(parts)})"


def remade(part: Some, changes: Mapping[str, Any]) -> Some:
    """The part with some values replaced, without checks. Unlike dataclasses.replace() it calls no
    constructor, because every step rebuilds its parts."""
    made = object.__new__(type(part))
    vars(made).update(vars(part))
    vars(made).update(changes)
    return made


def _is_nothing(value: object) -> bool:
    return value is None or value == () if not isinstance(value, Tensor) else False


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, slice):
        return f"{value.start}:{value.stop}"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 2:
        return f"{len(value)} of them"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)


@dataclass(frozen=True, repr=False)
class Keys(Part):
    """Cached rows that absorbed queries read: one segment of them.

    `kind` is "paged" (the first `lens` rows of a block table), "window" (the last `span` rows, in
    a ring), "prefix" (an entry for every `span` tokens) or "listed" (those of a Selection).
    """

    part: str  # of the layer's cache: "latent", "window" or "compressed"
    kind: str
    block_table: Tensor  # [B, M] i32
    lens: Tensor | None = None  # [B] i32, of "paged"
    span: int = 0


@dataclass(frozen=True, repr=False)
class Absorbed(Part):
    """Attention in latent space: mqa_paged where `reads` is paged, else mqa_sparse over one or two
    segments. `cuts` are the group's rows in calls of bounded size; none: all in one call."""

    reads: tuple[Keys, ...]
    max_query_len: int
    start_locs: Tensors  # [B+1] i32, where each request's rows begin, in each call
    cuts: tuple[slice, ...] = ()
    positions: Tensor | None = None  # [n] i64 of the tokens in their sequences, for mqa_sparse
    causal: bool = True


@dataclass(frozen=True, repr=False)
class Ask(Part):
    """Queries that attend to a chunk of expanded keys in one call, masked by their selection if
    `key_starts` are given."""

    rows: slice  # of the group's rows
    query_start_loc: Tensor  # [B+1] i32, over the chunk's requests
    max_query_len: int
    key_starts: Tensor | None = None  # [n] i32, position of the chunk's first key in the request
    key_lens: Tensor | None = None  # [n] i32


@dataclass(frozen=True, repr=False)
class Brought(Part):
    """What each rank contributes to a chunk of keys, and how the rows of all ranks are ordered."""

    starts: Tensor  # [requests] i32, among this rank's keys
    key_start_loc: Tensor  # [requests + 1] i32, over the rows that each rank contributes
    num_rows: int
    order: Tensor  # [num_keys] i64: each key's index among the gathered rows


@dataclass(frozen=True, repr=False)
class KeyChunk(Part):
    """Cached rows of neighboring requests that fit the workspace, and the queries that attend."""

    block_table: Tensor  # [B, M] i32
    starts: Tensor  # [B] i32
    key_start_loc: Tensor  # [B+1] i32
    max_key_len: int
    num_keys: int
    asks: tuple[Ask, ...]
    brought: Brought | None = None  # over ranks: rows are gathered
    # where outputs are quantized: the rows of its only ask that no later chunk adds to, and others
    ended: slice | None = None
    continued: slice | None = None


@dataclass(frozen=True, repr=False)
class Expanded(Part):
    """Attention over expanded keys and values.

    `route` is "new" (this step's rows alone, causally), "one-shot" (context and new rows fit the
    workspace: one causal call, in whose keys `new_rows` are this step's), "chunked" (the new rows,
    then each chunk of context, merged), "context" (the chunks, merged: no key is new) or "masked"
    (chunks of all keys, as stored, under masks).
    """

    route: str
    new: Ask | None = None  # of "new" and "chunked"
    chunks: tuple[KeyChunk, ...] = ()
    new_rows: Tensor | None = None  # [n] i64, of "one-shot"
    alone: tuple[slice, ...] = ()  # rows without context, where chunks quantize the others

    @property
    def asks(self) -> Iterator[Ask]:
        if self.new is not None:
            yield self.new
        for chunk in self.chunks:
            yield from chunk.asks


@dataclass(frozen=True, repr=False)
class Group(Part):
    """Some of the step's tokens, and how they attend.

    `form` is "absorbed", "expanded", or, where each token attends to keys that were selected for
    it, "chosen" (absorbed) or "masked" (expanded).
    """

    form: str
    rows: Rows
    part: Absorbed | Expanded | None  # over keys that this process has; None: over `across` alone
    selected: slice | None = None  # its rows of the Selection
    end: str = ""  # the op that quantizes its outputs; "": they are not
    requests: Sequence[int] = ()  # only for explain()
    across: Across | None = None


@dataclass(frozen=True, repr=False)
class Across(Part):
    """Keys that are sharded over ranks. Each rank attends to its own by `groups`, whose rows count
    from the first of `rows`. The results of all ranks are merged, and then merged into the group's
    own result."""

    rows: Rows  # of the step
    groups: tuple[Group, ...]
    inside: Rows | None = None  # where these rows are among the group's; None: all of them
    schedule: str = "exchange"  # of merge_over_ranks


@dataclass(frozen=True)
class ScoreChunk:
    """Tokens scored at once: some of those that select, and the most keys one sees."""

    rows: slice
    num_keys: int


@dataclass(frozen=True, repr=False)
class Select(Part):
    """Tokens that select their keys, those of the "chosen" group first, then the masked ones. Every
    one is scored and its K keys selected; without `chunks` the caller selects."""

    rows: Rows  # of the step
    block_table: Tensor  # [B, M] i32
    row_starts: Tensor  # zeros, i32: where scores begin, for the longest of `chunks`
    first_keys: Tensor  # [K] i32, 0, 1, ...: the selection of rows that see no more; or empty
    row_lens: Tensor  # [n] i32, keys each token may select from
    topk_lens: Tensor  # [n'] i32, keys that each of the "chosen" group selects
    start_locs: Tensors  # [B+1] i32, the requests' rows in each of `chunks`
    num_rows: int
    chunks: tuple[ScoreChunk, ...]
    query_bytes: int  # of one row's queries while they are quantized
    # over ranks: the keys that each offers for a token, and which keys are here
    offered: int = 0
    shard: Shard | None = None
    block_size: int = 0  # keys of a block here

    @property
    def score_bytes(self) -> int:
        """Of the largest chunk: its logits, and its queries if they are quantized."""
        sizes = [(chunk.rows.stop - chunk.rows.start, chunk.num_keys) for chunk in self.chunks]
        return max((rows * (4 * keys + self.query_bytes) for rows, keys in sizes), default=0)


@dataclass(frozen=True, repr=False)
class Pool(Part):
    """V4: tokens pooled into entries, one for every `ratio` of them: arguments of compress_kv."""

    ratio: int
    positions: Tensor  # [T] i64, of the tokens in their sequences
    query_start_loc: Tensor  # [B+1] i32
    block_table: Tensor  # [B, M] i32
    state_slots: Tensor  # [B] i32
    max_entries: int  # the most that one token sees


@dataclass(frozen=True, repr=False)
class Bring(Part):
    """V4 over ranks: blocks of entries that every rank gathers from all others, instead of
    attending to its own. The plan's tables name the gathered ones."""

    blocks: Tensor  # [n] i64: what this rank brings of them
    num_bytes: int  # of all of them together, in the workspace of the ranks


class Shared(NamedTuple):
    """What plans of V4's layers of all ratios have in common in a step."""

    key: object  # of the batch
    query_start_loc: Tensor  # [B+1] i32
    positions: Tensor  # [T] i64
    window_table: Tensor  # [B, M] i32, rings
    block_table: Tensor  # [B, M] i32
    state_slots: Tensor  # [B] i32
    slots: Tensor  # [T] i64

    def __repr__(self) -> str:
        parts = (f"{name}={_shown(getattr(self, name))}" for name in self._fields[1:])
        return f"Shared({', '.join(parts)})"


class Parts(NamedTuple):
    """The tensors of a plan, before they are on the device."""

    groups: tuple[Group, ...]
    select: Select | None
    pool: Pool | None
    slot_mapping: Tensor  # [T] i64
    rope_offsets: Tensor | None = None  # [T] i64
    shared: Shared | None = None
    bring: Bring | None = None


class Call(NamedTuple):
    """One op of a plan. `problem` describes its largest call and `backend` runs that call. `passed`
    is the backend= of every call: "auto" if each call chooses its own."""

    problem: Problem
    backend: str
    passed: str
    keys_apart: bool = False  # of mha_ragged: it takes the keys' shared columns by themselves


def latent_row(config: MLAConfig) -> int:
    """Elements an absorbed token holds: its query, twice while it is put together, its output."""
    return config.num_heads * (2 * config.kv_lora_rank + config.latent_dim)


def num_words(num_keys: int) -> int:
    """32-bit words that hold a bit per key."""
    return -(-num_keys // 32)


@dataclass(frozen=True)
class Plan:
    """One step, made by make_plan(); frozen. explain() shows what runs where, and why.

    Integers change only when a launch shape changes; everything else is a tensor.

    Attributes:
        config: the model's dimensions.
        options: the options of make_plan().
        num_tokens: T, the tokens of the step, including padding.
        slot_mapping: [T] int64 slots that are written; -1 for none.
        groups: tokens that attend in the same form; every token of a request is in one group.
        calls: by op, its problem and its backend.
        select: the tokens that select keys.
        pool: DeepSeek V4: the tokens that are pooled into entries.
        bring: DeepSeek V4 over ranks: the blocks of entries that are gathered.
        ranks: the ranks that share the cache.
        workspace: the workspace of warmup().
        rope_offsets: [T] int64 offsets to the long factors in a longrope table.
        ratio: DeepSeek V4: the compress ratio of the layers.
        geometry: DeepSeek V4: the sizes of the caches.
        shared: DeepSeek V4: what the plans of all ratios have in common.
        num_blocks: blocks of the cache.
        block_size: tokens per block.
        padding: tokens of no request, the last ones.
        run_length: rows per run of latent attention in a batch-invariant plan, else 0.
        causal: False for a plan over part of the keys, none of them new.
        captured: whether the tensors are buffers whose addresses stay the same.
        preparing: functions of registered backends to call before each step.
        query_lens: for explain().
        seq_lens: for explain().
        bounded: requests whose seq_lens are upper bounds.
    """

    config: MLAConfig
    options: PlanOptions
    num_tokens: int
    slot_mapping: Tensor  # [T] i64
    groups: tuple[Group, ...]
    calls: Mapping[str, Call]  # by op
    select: Select | None = None
    pool: Pool | None = None
    bring: Bring | None = None
    ranks: Ranks | None = None  # that share the cache
    workspace: Workspace | None = None
    rope_offsets: Tensor | None = None  # [T] i64: rows to longrope's long factors in its table
    ratio: int = 0  # V4: tokens per entry of this kind of layer
    geometry: Geometry | None = None  # of V4's caches
    shared: Shared | None = None
    num_blocks: int = 0  # of the others', and the tokens in each
    block_size: int = 0
    padding: int = 0  # tokens of no request, the last ones, that are in no group
    # rows per run of latent attention where bits must not depend on the batch; 0: as is fastest
    run_length: int = 0
    causal: bool = True  # False: of a part of the keys, none of them new; nothing is written
    captured: bool = False  # over buffers, or an engine's tensors, whose addresses stay
    preparing: tuple[Callable[[object], None], ...] = ()  # what backends do once in every step
    # what was asked for, read by explain() only
    query_lens: Sequence[int] = ()
    seq_lens: Sequence[int] = ()
    bounded: frozenset[int] = frozenset()  # requests of upper bounds, the device has the lengths

    @property
    def output(self) -> str | None:
        """The format of quantized outputs, or None."""
        return self.options.output

    @property
    def query_dtype(self) -> str | None:
        """The quantization of absorbed queries: "fp8", "fp8_static" or None."""
        return self.options.query_dtype

    @property
    def prefill_dtype(self) -> str | None:
        """The quantization of expanded queries and keys: "fp8" or None."""
        return self.options.prefill_dtype

    def prepare(self) -> Plan:
        """Call prepare_step() of the backends that have one, before the step's layers run."""
        for prepare in self.preparing:
            prepare(self)
        return self

    def group(self, form: str) -> Group | None:
        """Return the group of a form ("absorbed", "expanded", "chosen" or "masked"), or None."""
        for group in self.groups:
            if group.form == form:
                return group
        return None

    @property
    def listing(self) -> Group | None:
        """The group, of this process or over ranks, that reads selected keys in latent space."""
        group = self.group("chosen")
        return group if group is None or group.across is None else group.across.groups[0]

    def check_cache(self, where: str, cache: LayerCache) -> None:
        """Raise unless this cache has the geometry and row width of the plan's cache."""
        config = self.config
        for name, part in (
            ("latent", cache.latent),
            ("window", cache.window),
            ("compressed", cache.compressed),
        ):
            if part is not None:
                part.check_width(where, name, config.latent_dim)
        if cache.latent is not None and self.query_dtype == "fp8_static":
            cache.latent.check_q_scale(where)
        if cache.index is not None and config.indexer is not None:
            cache.index.check_width(where, "index", config.indexer.head_dim)
        if config.compressor is not None:
            if cache.ratio != self.ratio:
                raise ConfigError(
                    f"{where}: cache must have the plan's compress ratio {self.ratio}, got "
                    f"{cache.ratio}. Make one plan for each ratio."
                )
            here, planned = cache.geometry, self.geometry
            if here is not None and planned is not None and not here.serves(planned):
                wanted = planned.grown(here.num_blocks, here.window_blocks, here.num_states)
                name = next(
                    name for name, value in vars(wanted).items() if getattr(here, name) != value
                )
                raise ConfigError(
                    f"{where}: cache must have {name}={getattr(wanted, name)!r} like the cache of "
                    f"the plan, got {getattr(here, name)!r}."
                )
            return
        for part in (cache.latent, cache.index):
            if part is not None and (
                part.block_size != self.block_size or part.num_blocks < self.num_blocks
            ):
                raise ConfigError(
                    f"{where}: cache must have {self.num_blocks} blocks of {self.block_size} "
                    f"tokens like the cache of the plan, got {part.num_blocks} of "
                    f"{part.block_size}."
                )

    @property
    def keeps_codes(self) -> bool:
        """Whether rows of an fp8 cache are gathered as they are stored."""
        return self.prefill_dtype is not None and self.problem("cache_write").format == "fp8"

    @property
    def chooses(self) -> bool:
        """Whether some tokens attend to selected keys."""
        return self.select is not None

    @property
    def batch_invariant(self) -> bool:
        """Whether results of a row are bitwise independent of the batch."""
        return self.run_length > 0

    @property
    def fixed_by(self) -> str | None:
        """The backend of project_heads in a batch-invariant plan; None: torch multiplies."""
        return self.backend("project_heads") if self.batch_invariant else None

    @property
    def mapped(self) -> bool:
        """Whether selected positions are turned into slots before they are attended to."""
        return "map_slots" in self.calls

    def backend(self, op: str) -> str:
        """Return the backend= to call an op with: the plan's, or else the requested one."""
        call = self.calls.get(op)
        return backend_for(op, thawed(self.options.backend)) if call is None else call.passed

    @property
    def backends(self) -> dict[str, str]:
        """The backend of each op. For ops that choose at every call, that of the largest call."""
        return {op: call.backend for op, call in self.calls.items()}

    def problem(self, op: str) -> Problem:
        """Return the Problem of an op of this plan, as backends see it."""
        return self.calls[op].problem

    def __repr__(self) -> str:
        counts = [f"{len(each.requests)} requests {each.form}" for each in self.groups]
        if self.config.compressor is not None:
            counts = [f"{len(self.query_lens)} requests, ratio {self.ratio}"]
        ops = ("mqa_paged", "mha_ragged", "mqa_sparse", "mha_masked")
        calls = self.calls
        attending = ", ".join(f"{op} by {calls[op].backend}" for op in ops if op in calls)
        return (
            f"Plan({self.config.model_type}, {self.num_tokens} tokens: "
            f"{', '.join(counts) or 'no requests'}; {attending})"
        )

    def sent_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that this rank sends in one layer's attention, for queries of dtype."""
        from openmla.plan.across import bytes_sent

        return bytes_sent(self, dtype)

    def selection_bytes(self, scores: torch.dtype = torch.float32) -> int:
        """Return the bytes of candidate keys and scores that this rank sends in a selection."""
        if self.ranks is None or self.select is None:
            return 0
        each = self.select.offered * (scores.itemsize + 4)
        return (self.ranks.shard.size - 1) * self.select.num_rows * each

    def explain(self, *, finished: bool = False) -> Explanation:
        """Explain what runs where, why, why not a faster backend, and in how many bytes.

        Args:
            finished: whether rows come normalized and rotated, as those of an attached model do.

        Returns:
            Text to print. A terminal or a notebook shows the value as a table.
        """
        from openmla.plan.explain import explain  # which is about this class

        return explain(self, finished)
