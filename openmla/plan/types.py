"""Plan and its parts: what a step will do, complete when made and then frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from openmla.backends import BACKENDS, Problem, why_not
from openmla.config import MLAConfig
from openmla.plan.workspace import Workspace

LOGITS_BYTES = 256 << 20  # of indexer scores held at once
LATENT_BYTES = 256 << 20  # of absorbed queries and outputs held at once
MASK_BYTES = 128 << 20  # of a bit mask held at once: 32768 queries and as many keys

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
        return max(
            (
                (chunk.rows.stop - chunk.rows.start) * (4 * chunk.num_keys + self.query_bytes)
                for chunk in self.chunks
            ),
            default=0,
        )

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
    workspace: Workspace | None = None
    long_context: Tensor | None = None  # [T] i64: 1 where longrope takes its long factors

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
        for problem in self.problems:
            chosen = self.backends[problem.op]
            better = BACKENDS[problem.op][: BACKENDS[problem.op].index(chosen)]
            lost = "; ".join(f"not {name}: {why_not(problem, name)}" for name in better)
            lines.append(f"{problem.op:<12} {chosen}" + (f" ({lost})" if lost else ""))
        return "\n".join(lines)

    def sparse_bytes(self) -> dict[str, int]:
        """What the sparse rows of one layer hold beside inputs and outputs, at most, by name."""
        sparse, config = self.sparse, self.config
        if sparse is None or config.indexer is None:
            return {}
        rows = max((chunk.context.num_keys for chunk in sparse.masked), default=0)
        dtype = next(problem.dtype for problem in self.problems if problem.op == "cache_write")
        heads = config.num_heads * (2 * config.qk_head_dim + config.v_head_dim)
        turn = max((turn.stop - turn.start for turn in sparse.turns), default=0)
        return {
            "scores": sparse.score_bytes,
            "selection": 4 * config.indexer.topk * (sparse.num_rows + sparse.num_absorbed),
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

    def _reason(self) -> str:
        """Why requests of a sparse model are dense."""
        indexer = self.config.indexer
        return f", of no more than {indexer.topk} keys: dense" if indexer is not None else ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
