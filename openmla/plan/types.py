"""Plan and its parts: what a step will do, complete when made and then frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from openmla.backends import BACKENDS, Problem, launches, why_not
from openmla.cache import Geometry, LayerCache, cache_bytes
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError
from openmla.plan.workspace import LOGITS_BYTES, MASK_BYTES, Workspace

Rows = slice | Tensor  # of the step's tokens: a slice, or indices [n] i64


@dataclass(frozen=True)
class DecodePlan:
    """Requests in absorbed form, packed: arguments of one mqa_paged call."""

    rows: Rows
    block_table: Tensor  # [B, M] i32
    seq_lens: Tensor  # [B] i32
    query_start_loc: Tensor  # [B+1] i32
    split_starts: Tensor  # [B, X+1] i32
    max_query_len: int


@dataclass(frozen=True)
class ContextChunk:
    """Context rows that fit the workspace, and the neighbouring requests that attend to them."""

    rows: slice  # of the packed prefill rows
    query_start_loc: Tensor  # [B+1] i32
    max_query_len: int
    block_table: Tensor  # [B, M] i32
    starts: Tensor  # [B] i32
    key_start_loc: Tensor  # [B+1] i32
    max_key_len: int
    num_keys: int


@dataclass(frozen=True)
class PrefillPlan:
    """Requests in expanded form, packed.

    `route` is "new" (nobody has context), "one-shot" (context and new rows fit the workspace: one
    causal call over `whole`, whose rows `new_rows` are this step's) or "chunked" (the new rows
    causally, then each chunk, merged).
    """

    rows: Rows
    route: str
    query_start_loc: Tensor  # [B+1] i32
    max_query_len: int
    whole: ContextChunk | None = None
    new_rows: Tensor | None = None  # [T] i64
    chunks: tuple[ContextChunk, ...] = ()


@dataclass(frozen=True)
class ScoreChunk:
    """Tokens scored in one turn: some of the packed sparse rows, and the most keys one sees."""

    rows: slice
    num_keys: int


@dataclass(frozen=True)
class MaskGroup:
    """Queries that attend to a chunk of expanded keys in one call, by a mask of their own."""

    rows: slice  # of the packed sparse rows
    query_start_loc: Tensor  # [B+1] i32, over the chunk's requests
    key_starts: Tensor  # [n] i32, position of the chunk's first key in the row's request
    key_lens: Tensor  # [n] i32


@dataclass(frozen=True)
class MaskedChunk:
    """Keys that fit the workspace, and the groups of queries that attend to them."""

    context: ContextChunk
    groups: tuple[MaskGroup, ...]


@dataclass(frozen=True)
class SparsePlan:
    """Requests longer than the indexer's K, packed: the absorbed ones first, then the masked ones.

    Every row is scored and its K keys chosen. The first `num_absorbed` rows attend to them in
    latent space (mqa_sparse); the others in expanded form, all keys computed and a bit mask
    deciding (mha_masked).
    """

    rows: Rows
    block_table: Tensor  # [B, M] i32
    query_start_loc: Tensor  # [B+1] i32
    row_lens: Tensor  # [n] i32, keys each token may choose from
    num_rows: int
    num_absorbed: int
    max_query_len: int
    chunks: tuple[ScoreChunk, ...]
    query_bytes: int  # of one row's queries while they are quantised
    turns: tuple[slice, ...]  # of the absorbed rows
    masked: tuple[MaskedChunk, ...] = ()

    @property
    def score_bytes(self) -> int:
        """Of the largest turn: its logits, and its queries if they are quantised."""
        return _score_bytes(self.chunks, self.query_bytes)

    @property
    def mask_bytes(self) -> int:
        """Of the largest mask."""
        return max(
            (
                (group.rows.stop - group.rows.start) * num_words(chunk.context.max_key_len) * 4
                for chunk in self.masked
                for group in chunk.groups
            ),
            default=0,
        )


@dataclass(frozen=True)
class CompressedPlan:
    """A step of V4's layers of one compress ratio: every token attends to its window and, where
    the ratio is not 0, to entries: all finished ones, or with `chunks` those an indexer chooses.
    """

    ratio: int
    query_start_loc: Tensor  # [B+1] i32
    positions: Tensor  # [T] i64, of the tokens in their sequences
    window_table: Tensor  # [B, M] i32, rings
    block_table: Tensor  # [B, M] i32, of entries
    state_slots: Tensor  # [B] i32
    row_lens: Tensor  # [T] i32, entries each token may see
    num_rows: int
    max_entries: int  # the most one token sees
    chunks: tuple[ScoreChunk, ...] = ()
    query_bytes: int = 0

    @property
    def score_bytes(self) -> int:
        """Of the largest turn: its logits, and its queries if they are quantised."""
        return _score_bytes(self.chunks, self.query_bytes)


def _score_bytes(chunks: Sequence[ScoreChunk], query_bytes: int) -> int:
    turns = [(chunk.rows.stop - chunk.rows.start, chunk.num_keys) for chunk in chunks]
    return max((rows * (4 * keys + query_bytes) for rows, keys in turns), default=0)


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
    sparse: SparsePlan | None = None
    compressed: CompressedPlan | None = None
    workspace: Workspace | None = None
    long_context: Tensor | None = None  # [T] i64: 1 where longrope takes its long factors
    geometry: Geometry | None = None  # of V4's caches
    num_blocks: int = 0  # of the others', and the tokens in each
    block_size: int = 0
    run_length: int = 0  # where mqa_sparse cuts rows; 0 where it may as it likes

    def check_cache(self, cache: LayerCache) -> None:
        """Raise unless the plan's slots and tables mean the same in this cache, and its rows are as
        wide (V4's is checked by its geometry)."""
        if cache.latent is not None:
            cache.latent.check_width("step", "latent", self.config.latent_dim)
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
    def mapped(self) -> bool:
        """Whether chosen positions are made slots before they are attended to."""
        return "map_slots" in self.backends

    def explain(self) -> str:
        """What runs where, and why not something better: one line per op."""
        lines = []
        if self.decode is not None:
            B, X = self.decode.split_starts.shape
            lines.append(
                f"absorbed  {B} requests, up to {self.decode.max_query_len} queries each, "
                f"keys in up to {X - 1} runs{self._reason()}"
            )
        if self.prefill is not None:
            chunks = f", {len(self.prefill.chunks)} context chunks" if self.prefill.chunks else ""
            lines.append(
                f"expanded  {self.prefill.query_start_loc.shape[0] - 1} requests, "
                f"up to {self.prefill.max_query_len} queries each, {self.prefill.route}{chunks}"
                f"{self._reason()}"
            )
        if self.sparse is not None:
            lines += self._explain_sparse(self.sparse)
        if self.compressed is not None:
            lines += self._explain_compressed(self.compressed)
        for problem in self.problems:
            chosen = self.backends[problem.op]
            better = BACKENDS[problem.op][: BACKENDS[problem.op].index(chosen)]
            lost = "; ".join(f"not {name}: {why_not(problem, name)}" for name in better)
            lines.append(f"{problem.op:<12} {chosen}" + (f" ({lost})" if lost else ""))
        return "\n".join([*lines, *self._explain_launches()])

    def _explain_launches(self) -> list[str]:
        """How many kernels a layer launches for its attention, as far as they are ours."""
        counts = {
            problem.op: launches(problem.op, self.backends[problem.op]) for problem in self.problems
        }
        known = {op: n * self._calls(op) for op, n in counts.items() if n is not None}
        if not known:
            return []
        others = [op for op, count in counts.items() if count is None]
        beside = f"; beside them what torch launches for {', '.join(others)}" if others else ""
        listed = ", ".join(f"{op} {count}" for op, count in known.items())
        return [f"launches  up to {sum(known.values())} a layer and step: {listed}{beside}"]

    def _calls(self, op: str) -> int:
        """How often a layer calls an op in this step."""
        chunks = len(self.prefill.chunks) if self.prefill is not None else 0
        whole = self.prefill is not None and self.prefill.whole is not None
        groups, contexts, scored, turns = 0, 0, 0, 1
        if self.sparse is not None:
            groups = sum(len(chunk.groups) for chunk in self.sparse.masked)
            contexts, turns = len(self.sparse.masked), len(self.sparse.turns)
            scored = len(self.sparse.chunks)
        if self.compressed is not None:
            scored = len(self.compressed.chunks)
        indexed = self.config.indexer is not None
        return {
            "rope": 2 + indexed + (self.compressed is not None),
            "compress_kv": 1 + indexed,
            "cache_gather": chunks + whole + contexts,
            "mha_ragged": 1 + chunks,
            "merge_states": chunks + groups,
            "index_logits": scored,
            "index_topk": scored,
            "mqa_sparse": turns,
            "pack_mask": groups,
            "mha_masked": groups,
        }.get(op, 1)

    def sparse_bytes(self) -> dict[str, int]:
        """What the sparse rows of one layer hold beside inputs and outputs, at most, by name."""
        sparse, config = self.sparse, self.config
        if sparse is None or config.indexer is None:
            return {}
        rows = max((chunk.context.num_keys for chunk in sparse.masked), default=0)
        dtype = next(problem.dtype for problem in self.problems if problem.op == "cache_write")
        heads = config.num_heads * (2 * config.qk_head_dim + config.v_head_dim)
        listed = sparse.num_rows + (sparse.num_absorbed if self.mapped else 0)
        turn = max((turn.stop - turn.start for turn in sparse.turns), default=0)
        return {
            "scores": sparse.score_bytes,
            "selection": 4 * config.indexer.topk * listed,
            "latent queries": turn * latent_row(config) * dtype.itemsize,
            "mask": sparse.mask_bytes,
            "expanded keys": rows * (config.latent_dim + heads) * dtype.itemsize,
        }

    def _explain_sparse(self, sparse: SparsePlan) -> list[str]:
        assert self.config.indexer is not None
        K, expanded = self.config.indexer.topk, sparse.num_rows - sparse.num_absorbed
        keys = max((chunk.num_keys for chunk in sparse.chunks), default=0)
        lines = [
            f"sparse    {sparse.num_rows} tokens choose {K} of up to {keys} keys each",
            f"scores    in {len(sparse.chunks)} turns of {_mib(sparse.score_bytes)} at most "
            f"(bound {_mib(LOGITS_BYTES)})",
        ]
        if sparse.num_absorbed:
            lines.append(
                f"chosen    {sparse.num_absorbed} tokens, absorbed, over their own rows, in "
                f"{len(sparse.turns)} turns"
            )
        if expanded:
            rows = max(chunk.context.num_keys for chunk in sparse.masked)
            lines.append(
                f"masked    {expanded} tokens, expanded: cheaper than {K} rows gathered for each; "
                f"{len(sparse.masked)} chunks of up to {rows} keys, {_mib(sparse.mask_bytes)} of "
                f"mask at most (bound {_mib(MASK_BYTES)})"
            )
        parts = {name: size for name, size in self.sparse_bytes().items() if size}
        listed = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items())
        total = _mib(sum(parts.values()))
        lines.append(f"workspace {total} at most, beside what a backend holds: {listed}")
        return lines

    def _explain_compressed(self, step: CompressedPlan) -> list[str]:
        config = self.config
        assert config.compressor is not None
        requests = step.query_start_loc.shape[0] - 1
        lines = [
            f"window    {step.num_rows} tokens of {requests} requests, each its last "
            f"{config.compressor.window} rows"
        ]
        if step.ratio and step.chunks:
            assert config.indexer is not None
            lines += [
                f"entries   one per {step.ratio} tokens, {config.indexer.topk} of up to "
                f"{step.max_entries} chosen by each token",
                f"scores    in {len(step.chunks)} turns of {_mib(step.score_bytes)} at most "
                f"(bound {_mib(LOGITS_BYTES)}), selection "
                f"{_mib(4 * config.indexer.topk * step.num_rows)}",
            ]
        elif step.ratio:
            few = ""
            if step.ratio == INDEXED_RATIO and config.indexer is not None:
                few = f" (no more than {config.indexer.topk})"
            lines.append(
                f"entries   one per {step.ratio} tokens, all of up to {step.max_entries}{few}: "
                "no list is made"
            )
        return lines + self._explain_caches()

    def _explain_caches(self) -> list[str]:
        """What all layers of a V4 model keep, by kind."""
        if self.geometry is None:
            return []
        geometry = self.geometry
        kinds = cache_bytes(self.config, geometry)
        tokens = geometry.num_blocks * geometry.block_size
        lines = [
            f"cache     {tokens} tokens in blocks of {geometry.block_size}, {geometry.format} and "
            f"{geometry.index_format}; windows and states of {geometry.num_states} requests",
            "  ratio layers  B/token        entries      padding       window        state"
            "          total",
        ]
        for kind in kinds:
            lines.append(
                f"  {kind.ratio:>5} {kind.num_layers:>6} {kind.token_bytes:>8g} "
                f"{kind.entries:>14} {kind.padding:>12} {kind.window:>12} {kind.state:>12} "
                f"{kind.total:>14}"
            )
        each = sum(kind.num_layers * kind.token_bytes for kind in kinds)
        sums = [sum(getattr(kind, name) for kind in kinds) for name in _PARTS]
        lines.append(
            f"  total {sum(kind.num_layers for kind in kinds):>6} {each:>8g} "
            f"{sums[0]:>14} {sums[1]:>12} {sums[2]:>12} {sums[3]:>12} {sums[4]:>14}"
        )
        lines.append(
            f"  entries {sums[0] / 2**30:.2f} GiB and padding {_mib(sums[1])} grow with context; "
            f"window and state, {_mib(sums[2] + sums[3])}, do not; {sums[4] / 2**30:.2f} GiB in all"
        )
        return lines

    def _reason(self) -> str:
        """Why requests of a sparse model are dense."""
        indexer = self.config.indexer
        return f", of no more than {indexer.topk} keys: dense" if indexer is not None else ""


_PARTS = ("entries", "padding", "window", "state", "total")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
