"""Plan and its parts: what a step will do, complete when made and then frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from openmla.backends import Problem
from openmla.cache import Geometry, LayerCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.plan.explanation import Explanation
from openmla.plan.workspace import Workspace

Rows = slice | Tensor  # of the step's tokens: a slice, or indices [n] i64
Tensors = tuple[Tensor, ...]  # not slices of one: kernels specialise on alignment

Part = TypeVar("Part")


def fixed_run(num_heads: int) -> int:
    """Keys per run where a row's bits must not depend on its neighbours. One request wants short
    runs, to be on all multiprocessors; many want few partial results, which grow with the heads."""
    return 512 if num_heads <= 32 else 1024


class _Part:
    """Shows tensors by shape and dtype: what they hold may be on a device, and is long."""

    def __repr__(self) -> str:
        names = self.__dataclass_fields__  # type: ignore[attr-defined]
        parts = (f"{name}={_shown(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({', '.join(parts)})"


def remade(part: Part, changes: Mapping[str, Any]) -> Part:
    """The part with other values, which are known to be sound: unlike dataclasses.replace() it asks
    nobody, and every step makes its parts twice."""
    made = object.__new__(type(part))
    vars(made).update(vars(part))
    vars(made).update(changes)
    return made


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, slice):
        return f"{value.start}:{value.stop}"
    if isinstance(value, tuple) and value and not isinstance(value[0], int):
        return f"{len(value)} of them"
    return repr(value)


@dataclass(frozen=True, repr=False)
class DecodePlan(_Part):
    """Requests in absorbed form, packed: arguments of one mqa_paged call."""

    rows: Rows
    block_table: Tensor  # [B, M] i32
    seq_lens: Tensor  # [B] i32
    query_start_loc: Tensor  # [B+1] i32
    max_query_len: int


@dataclass(frozen=True, repr=False)
class KeyChunk(_Part):
    """Cached rows that fit the workspace, of neighbouring requests: arguments of cache_gather."""

    block_table: Tensor  # [B, M] i32
    starts: Tensor  # [B] i32
    key_start_loc: Tensor  # [B+1] i32
    max_key_len: int
    num_keys: int
    max_query_len: int


@dataclass(frozen=True, repr=False)
class ContextChunk(KeyChunk):
    """Context, and the queries that attend to it."""

    rows: slice  # of the packed prefill rows
    query_start_loc: Tensor  # [B+1] i32
    ended: slice | None = None  # of those, the rows that no later chunk adds to
    continued: slice | None = None  # and the others; of either there may be none


@dataclass(frozen=True, repr=False)
class PrefillPlan(_Part):
    """Requests in expanded form, packed.

    `route` is "new" (nobody has context), "one-shot" (context and new rows fit the workspace: one
    causal call over `one_shot`, whose rows `new_rows` are this step's), "chunked" (the new rows
    causally, then each chunk, merged) or "context" (the chunks, merged: no key is new).
    """

    rows: Rows
    route: str
    query_start_loc: Tensor  # [B+1] i32
    max_query_len: int
    one_shot: ContextChunk | None = None
    new_rows: Tensor | None = None  # [T] i64
    chunks: tuple[ContextChunk, ...] = ()
    alone: tuple[slice, ...] = ()  # rows of requests without context, where others have chunks


@dataclass(frozen=True)
class ScoreChunk:
    """Tokens scored at once: some of the packed sparse rows, and the most keys one sees."""

    rows: slice
    num_keys: int


@dataclass(frozen=True, repr=False)
class MaskGroup(_Part):
    """Queries that attend to a chunk of expanded keys in one call, by a mask of their own."""

    rows: slice  # of the packed sparse rows
    query_start_loc: Tensor  # [B+1] i32, over the chunk's requests
    key_starts: Tensor  # [n] i32, position of the chunk's first key in the row's request
    key_lens: Tensor  # [n] i32


@dataclass(frozen=True, repr=False)
class MaskedChunk(KeyChunk):
    """All keys, this step's too, and the groups of queries that attend to them."""

    groups: tuple[MaskGroup, ...]


@dataclass(frozen=True, repr=False)
class SparsePlan(_Part):
    """Requests longer than the indexer's K, packed: the absorbed ones first, then the masked ones.

    Every row is scored and its K keys chosen. The first `num_absorbed` rows attend to them in
    latent space (mqa_sparse); the others in expanded form, all keys computed and a bit mask
    deciding (mha_masked).
    """

    rows: Rows
    block_table: Tensor  # [B, M] i32
    row_starts: Tensor  # zeros, i32: where scores begin, for the longest of `chunks`
    first_keys: Tensor  # [K] i32, 0, 1, ...: the choice of rows that see no more; or empty
    row_lens: Tensor  # [n] i32, keys each token may choose from
    topk_lens: Tensor  # [num_absorbed] i32, keys it does choose
    positions: Tensor  # [num_absorbed] i64, of the tokens in their sequences
    score_start_locs: Tensors  # [B+1] i32, the requests' rows in each of `chunks`
    query_chunk_start_locs: Tensors  # [B+1] i32, and in each of `query_chunks`
    num_rows: int
    num_absorbed: int
    chunks: tuple[ScoreChunk, ...]
    query_bytes: int  # of one row's queries while they are quantised
    query_chunks: tuple[slice, ...]  # of the absorbed rows, which attend to what they chose
    masked: tuple[MaskedChunk, ...] = ()

    @property
    def score_bytes(self) -> int:
        """Of the largest chunk: its logits, and its queries if they are quantised."""
        return _score_bytes(self.chunks, self.query_bytes)

    @property
    def mask_bytes(self) -> int:
        """Of the largest mask."""
        return max(
            (
                (group.rows.stop - group.rows.start) * num_words(chunk.max_key_len) * 4
                for chunk in self.masked
                for group in chunk.groups
            ),
            default=0,
        )


@dataclass(frozen=True, repr=False)
class Parts(_Part):
    """The tensors of a plan that is not V4's, before they are on the device."""

    decode: DecodePlan | None
    prefill: PrefillPlan | None
    sparse: SparsePlan | None
    slot_mapping: Tensor  # [T] i64
    rope_offsets: Tensor | None  # [T] i64


@dataclass(frozen=True, repr=False)
class CompressedPlan(_Part):
    """A step of V4's layers of one compress ratio: every token attends to its window and, where
    the ratio is not 0, to entries: all finished ones, or with `chunks` those an indexer chooses.
    """

    ratio: int
    query_start_loc: Tensor  # [B+1] i32
    positions: Tensor  # [T] i64, of the tokens in their sequences
    window_table: Tensor  # [B, M] i32, rings
    block_table: Tensor  # [B, M] i32, of entries
    state_slots: Tensor  # [B] i32
    # of `chunks`, empty where there are none
    row_starts: Tensor  # zeros, i32: where scores begin, for the longest of them
    first_keys: Tensor  # [K] i32, 0, 1, ...: the choice of tokens that see no more; or empty
    row_lens: Tensor  # [T] i32, entries each token may see
    topk_lens: Tensor  # [T] i32, entries it chooses
    score_start_locs: Tensors  # [B+1] i32, the requests' rows in each of `chunks`
    num_rows: int
    max_entries: int  # the most one token sees
    chunks: tuple[ScoreChunk, ...] = ()
    query_bytes: int = 0

    @property
    def score_bytes(self) -> int:
        """Of the largest chunk: its logits, and its queries if they are quantised."""
        return _score_bytes(self.chunks, self.query_bytes)


def _score_bytes(chunks: Sequence[ScoreChunk], query_bytes: int) -> int:
    sizes = [(chunk.rows.stop - chunk.rows.start, chunk.num_keys) for chunk in chunks]
    return max((rows * (4 * keys + query_bytes) for rows, keys in sizes), default=0)


def latent_row(config: MLAConfig) -> int:
    """Elements an absorbed token holds: its query, twice while it is put together, its output."""
    return config.num_heads * (2 * config.kv_lora_rank + config.latent_dim)


def num_words(num_keys: int) -> int:
    """32-bit words that hold a bit per key."""
    return -(-num_keys // 32)


@dataclass(frozen=True)
class Plan:
    """One step, complete when made. Integers change only when a launch shape does."""

    config: MLAConfig
    num_tokens: int
    slot_mapping: Tensor  # [T] i64
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    backends: Mapping[str, str]
    problems: tuple[Problem, ...]
    keys_apart: bool = False  # mha_ragged takes the keys' shared columns by themselves
    sparse: SparsePlan | None = None
    compressed: CompressedPlan | None = None
    workspace: Workspace | None = None
    rope_offsets: Tensor | None = None  # [T] i64: rows to longrope's long factors in its table
    geometry: Geometry | None = None  # of V4's caches
    batch_key: object = None  # of V4: its plans of one batch share tensors
    num_blocks: int = 0  # of the others', and the tokens in each
    block_size: int = 0
    padding: int = 0  # tokens of no request, the last ones; what fills up buffers is not counted
    # rows per run of latent attention where bits must not depend on the batch; 0: as is fastest
    run_length: int = 0
    prefill_dtype: str | None = None  # "fp8": expanded queries and keys are e4m3
    output: str | None = None  # the format that outputs are quantised to
    query_dtype: str | None = None  # "fp8" or "fp8_static": what absorbed queries are quantised to
    # how each form's tokens get there: the op that ends them
    ends: Mapping[str, str] = field(default_factory=dict)
    causal: bool = True  # False: of a part of the keys, none of them new; nothing is written
    # the request and its routes (absorbed, expanded, chosen or masked), read by explain() only
    query_lens: Sequence[int] = ()
    seq_lens: Sequence[int] = ()
    bounded: frozenset[int] = frozenset()  # requests of upper bounds, the device has the lengths
    form: str = "auto"
    requested: Mapping[str, str] = field(default_factory=dict)  # per op: a backend, or "auto"
    routes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def check_cache(self, cache: LayerCache) -> None:
        """Raise unless the plan's slots and tables mean the same in this cache, and its rows are as
        wide (V4's is checked by its geometry)."""
        if cache.latent is not None:
            cache.latent.check_width("step", "latent", self.config.latent_dim)
            if self.query_dtype == "fp8_static":
                cache.latent.check_q_scale("step")
        if cache.index is not None and self.config.indexer is not None:
            cache.index.check_width("step", "index", self.config.indexer.head_dim)
        for part in (cache.latent, cache.index):
            if part is not None and (
                part.block_size != self.block_size or part.num_blocks < self.num_blocks
            ):
                raise ConfigError(
                    f"step: cache must have {self.num_blocks} blocks of {self.block_size} tokens "
                    f"as planned, got {part.num_blocks} of {part.block_size}."
                )

    @property
    def keeps_codes(self) -> bool:
        """Whether rows of an fp8 cache are gathered as they are stored."""
        return self.prefill_dtype is not None and self.problem("cache_write").format == "fp8"

    @property
    def chooses(self) -> bool:
        """Whether some of its tokens attend to keys that are chosen for them."""
        if self.compressed is not None:
            return len(self.compressed.chunks) > 0
        return self.sparse is not None

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits are its own, whatever else is in the step."""
        return self.run_length > 0

    @property
    def fixed_by(self) -> str | None:
        """What project_heads is called with if a row's bits are its own; None: torch multiplies."""
        return self.called_with("project_heads") if self.batch_invariant else None

    @property
    def mapped(self) -> bool:
        """Whether chosen positions are made slots before they are attended to."""
        return "map_slots" in self.backends

    def called_with(self, op: str) -> str:
        """The backend that mqa_paged and mqa_sparse are called with. Their kernels differ by the
        tokens of a call and by where a layer's rows lie, so each call chooses unless a backend was
        named; `backends` has the choice for the largest call over the planned cache."""
        return self.requested[op]

    def problem(self, op: str) -> Problem:
        """What the backends were asked about an op of this plan."""
        return next(problem for problem in self.problems if problem.op == op)

    def __repr__(self) -> str:
        counts = [f"{len(b)} requests {form}" for form, b in self.routes.items() if len(b)]
        if self.compressed is not None:
            counts = [f"{len(self.compressed.state_slots)} requests, ratio {self.compressed.ratio}"]
        ops = ("mqa_paged", "mha_ragged", "mqa_sparse", "mha_masked")
        attending = ", ".join(f"{op} by {self.backends[op]}" for op in ops if op in self.backends)
        return (
            f"Plan({self.config.model_type}, {self.num_tokens} tokens: "
            f"{', '.join(counts) or 'no requests'}; {attending})"
        )

    def explain(self, *, finished: bool = False) -> Explanation:
        """What runs where, why so and why not something better, in how many bytes.

        Text for print(); a table where a terminal or a notebook shows the value itself.
        `finished`: of rows that come normalised and rotated, as an attached model's do.
        """
        from openmla.plan.explain import explain  # which is about this class

        return explain(self, finished)

    def sparse_bytes(self) -> dict[str, int]:
        """What the sparse rows of one layer hold beside inputs and outputs, at most, by name."""
        sparse, config = self.sparse, self.config
        if sparse is None or config.indexer is None:
            return {}
        rows = max((chunk.num_keys for chunk in sparse.masked), default=0)
        dtype, masked = self.problem("cache_write").dtype, sparse.num_rows - sparse.num_absorbed
        listed = sparse.num_rows + (sparse.num_absorbed if self.mapped else 0)
        most = max((chunk.stop - chunk.start for chunk in sparse.query_chunks), default=0)
        return {
            "scores": sparse.score_bytes,
            "selection": 4 * config.indexer.topk * listed,
            "latent queries": most * latent_row(config) * dtype.itemsize,
            "mask": sparse.mask_bytes,
            "expanded keys": self.expanded_bytes(rows, rows, masked),
        }

    def expanded_bytes(self, gathered: int, keys: int, queries: int) -> int:
        """Of rows gathered, keys and values expanded from them or from new ones, whole keys; in fp8
        also of queries, with a scale each, and of codes in 16 bits."""
        config, size = self.config, self.problem("cache_write").dtype.itemsize
        H, D, E = config.num_heads, config.latent_dim, config.qk_head_dim
        held = gathered * D * size
        if self.keeps_codes:
            held = gathered * (D + config.kv_lora_rank * size)
        held += keys * H * (config.qk_nope_head_dim + config.v_head_dim) * size
        if self.prefill_dtype is None:
            return held + keys * H * E * size
        return held + keys * H * E + queries * (H * E + 4 * (-(-H // 4) * 4))
