"""DecodePlanner: plans for decode steps over tensors that an engine updates in place.

An engine that captures CUDA graphs keeps its block table, lengths, slots and query starts at fixed
addresses and writes new values there before each step. A plan for such a step depends only on how
many requests and tokens it has, so it is made once for each size. What a sparse step needs besides
those tensors is computed from them on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import times_forgotten
from openmla.backends.asked import Asked
from openmla.cache import LayerCache, as_integer
from openmla.config import MLAConfig
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.plan.checks import (
    check_cache,
    check_planned_output,
    check_planned_queries,
    check_wide_queries,
)
from openmla.plan.problems import cache_kind, calls_of, choose, frozen, latent_of
from openmla.plan.sparse import even_chunks, query_bytes, query_chunks
from openmla.plan.types import DecodePlan, Plan, SparsePlan, Tensors, fixed_run

MOST_PLANS = 4096  # kept at a time; an engine has as many sizes as it has graphs


class DecodePlanner:
    """Plans decode steps of up to `max_tokens` tokens without a loop over requests.

    Every request of a step brings the same number of tokens: one, or one and its draft tokens.
    Requests that pad a step come last, bring no tokens (query_start_loc repeats its last value) and
    have length 0. `dtype`, `backend`, `batch_invariant`, `query_dtype` and `output` are the same as
    in make_plan(). In a sparse model every token selects its keys, however short its context.
    """

    def __init__(
        self,
        config: MLAConfig,
        cache: LayerCache,
        *,
        max_tokens: int,
        dtype: torch.dtype | None = None,
        backend: Asked = "auto",
        batch_invariant: bool = False,
        query_dtype: str | None = None,
        output: str | None = None,
    ) -> None:
        check_kind("decode_planner", "config", config, MLAConfig)
        check_kind("decode_planner", "cache", cache, LayerCache)
        if config.compressor is not None or config.rope.kind == "longrope":
            what = "DeepSeek V4" if config.compressor is not None else "longrope"
            raise ConfigError(
                f"decode_planner: {what} models are not supported. Use make_plan(into=)."
            )
        if as_integer(max_tokens) is None or max_tokens < 1:
            raise ConfigError(
                f"decode_planner: max_tokens must be a positive integer, got {max_tokens!r}."
            )
        if output is not None:
            check_planned_output(config, output)
        check_planned_queries("decode_planner", config, cache, query_dtype)
        latent = latent_of(cache)
        check_cache(config, cache, latent, "auto")
        layout = latent.layout
        if dtype is None:
            dtype = torch.bfloat16 if layout.scaled or layout.packed else layout.dtype
        check_wide_queries("decode_planner", query_dtype, dtype)
        self.config, self.cache, self.dtype = config, cache, dtype
        self.max_tokens, self.backend = max_tokens, frozen(backend)
        self.query_dtype, self.output = query_dtype, output
        self.run_length = fixed_run(config.num_heads) if batch_invariant else 0
        self._plans: dict[object, tuple[Plan, Tensor, Tensor]] = {}  # and what update() takes
        self._behind: dict[int, Tensor] = {}  # by tokens per request: how far from the last
        self._rows = self._make_rows() if config.indexer is not None else {}

    def plan(
        self,
        *,
        block_table: Tensor,  # [B, M] i32
        seq_lens: Tensor,  # [B] i32
        query_start_loc: Tensor,  # [B+1] i32
        slot_mapping: Tensor,  # [T] i64
        num_requests: int | None = None,
        num_tokens: int | None = None,
    ) -> Plan:
        """The plan of a step over these tensors, the same object whenever they are at the same
        addresses. Call it before every step: a sparse plan is brought up to date here.

        `num_requests` and `num_tokens` are B and T where the tensors have room for more; slicing
        them yourself does the same, but costs more than the rest of this call."""
        key = (
            num_requests, num_tokens, block_table.shape, block_table.stride(), seq_lens.shape,
            query_start_loc.shape, slot_mapping.shape, block_table.data_ptr(), seq_lens.data_ptr(),
            query_start_loc.data_ptr(), slot_mapping.data_ptr(), times_forgotten(),
        )  # fmt: skip
        known = self._plans.get(key)
        if known is None:
            if num_requests is not None:
                block_table, seq_lens = block_table[:num_requests], seq_lens[:num_requests]
                query_start_loc = query_start_loc[: num_requests + 1]
            slot_mapping = slot_mapping[:num_tokens]
            self._check(block_table, seq_lens, query_start_loc, slot_mapping)
            plan = self._make(block_table, seq_lens, query_start_loc, slot_mapping)
            if len(self._plans) >= MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            known = self._plans[key] = plan, seq_lens, query_start_loc
        self.update(*known)
        return known[0]

    def update(self, plan: Plan, seq_lens: Tensor, query_start_loc: Tensor) -> None:
        """Recompute on the device what a sparse plan derives from the lengths; may be captured."""
        sparse = plan.sparse
        if sparse is None:
            return
        assert self.config.indexer is not None
        B, T = seq_lens.shape[0], plan.num_tokens
        if T != B:
            behind = self._tokens_behind(T // B)
            torch.sub(seq_lens[:, None], behind, out=sparse.row_lens.view(B, -1))
            sparse.row_lens.clamp_(min=0)
        torch.clamp(sparse.row_lens, max=self.config.indexer.topk, out=sparse.topk_lens)
        torch.sub(sparse.row_lens, 1, out=sparse.positions)
        cuts = [chunk.rows for chunk in sparse.chunks], sparse.query_chunks
        locs = sparse.score_start_locs, sparse.query_chunk_start_locs
        for rows, start_locs in zip(cuts, locs, strict=True):
            if len(rows) > 1:
                for cut, place in zip(rows, start_locs, strict=True):
                    torch.clamp(query_start_loc, cut.start, cut.stop, out=place).sub_(cut.start)

    def _tokens_behind(self, tokens: int) -> Tensor:
        """[tokens] i32: how many of a request's tokens follow each of them."""
        if tokens not in self._behind:
            device = latent_of(self.cache).data.device
            self._behind[tokens] = torch.arange(tokens - 1, -1, -1, dtype=torch.int32).to(device)
        return self._behind[tokens]

    @torch.inference_mode(False)  # inference tensors do not tell whether they were written to
    def _make_rows(self) -> dict[str, Tensor]:
        """What sparse plans of all sizes share, so that a captured graph outlives its plan: each
        plan takes the first elements."""
        assert self.config.indexer is not None
        device, n = latent_of(self.cache).data.device, self.max_tokens
        return {
            "row_lens": torch.zeros(n, dtype=torch.int32, device=device),
            "topk_lens": torch.zeros(n, dtype=torch.int32, device=device),
            "positions": torch.zeros(n, dtype=torch.int64, device=device),
            "row_starts": torch.zeros(n, dtype=torch.int32, device=device),
            "first_keys": torch.arange(self.config.indexer.topk, dtype=torch.int32).to(device),
        }

    @torch.inference_mode(False)
    def _start_locs(self, name: str, count: int, query_start_loc: Tensor) -> Tensors:
        """query_start_loc of each chunk; of a single one, the engine's own."""
        if count == 1:
            return (query_start_loc,)
        places = []
        for i in range(count):
            whole = self._rows.get(f"{name}.{i}")
            if whole is None:
                whole = query_start_loc.new_zeros(self.max_tokens + 1)
                self._rows[f"{name}.{i}"] = whole
            places.append(whole[: query_start_loc.shape[0]])
        return tuple(places)

    def _check(
        self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor
    ) -> None:
        B, T = seq_lens.numel(), slot_mapping.numel()
        device = latent_of(self.cache).data.device
        columns = block_table.shape[1] if block_table.dim() == 2 else 1
        for name, tensor, shape, dtype in (
            ("block_table", block_table, (B, columns), torch.int32),
            ("seq_lens", seq_lens, (B,), torch.int32),
            ("query_start_loc", query_start_loc, (B + 1,), torch.int32),
            ("slot_mapping", slot_mapping, (T,), torch.int64),
        ):
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
                raise ShapeError(
                    f"decode_planner: {name} must be {list(shape)} {dtype} on {device}, got "
                    f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}."
                )
        if not 0 < T <= self.max_tokens or B == 0 or T % B:
            raise ShapeError(
                f"decode_planner: a step must have B requests of equally many tokens, at most "
                f"{self.max_tokens} in all, got {T} tokens of {B} requests."
            )

    def _make(
        self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor
    ) -> Plan:
        config, latent = self.config, latent_of(self.cache)
        B, T, M = seq_lens.shape[0], slot_mapping.shape[0], block_table.shape[1]
        decode, sparse = None, None
        if config.indexer is None:
            decode = DecodePlan(slice(0, T), block_table, seq_lens, query_start_loc, T // B)
        else:
            sparse = self._sparse(block_table, seq_lens, query_start_loc, T)
        calls = calls_of(decode, None, sparse, self.output, self.query_dtype)
        kind = cache_kind([latent], self.cache.index)
        choice = choose(config, kind, self.dtype, calls, self.run_length, self.backend)
        return Plan(
            config=config,
            num_tokens=T,
            slot_mapping=slot_mapping,
            decode=decode,
            prefill=None,
            sparse=sparse,
            backends=dict(choice.backends),
            requested=dict(choice.requested),
            problems=choice.problems,
            num_blocks=latent.num_blocks,
            block_size=latent.block_size,
            run_length=self.run_length,
            output=self.output,
            query_dtype=self.query_dtype,
            ends=dict(choice.ends),
            query_lens=(T // B,) * B,
            seq_lens=(M * latent.block_size,) * B,
            bounded=frozenset(range(B)),
            form="captured",
            routes={"absorbed" if sparse is None else "chosen": range(B)},
        )

    def _sparse(
        self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, T: int
    ) -> SparsePlan:
        config, index = self.config, self.cache.index
        assert index is not None  # check_cache looked
        held = query_bytes(config, index)
        chunks = even_chunks(T, block_table.shape[1] * index.block_size, held)
        attending = query_chunks(T, config, self.dtype.itemsize)
        rows, loc = self._rows, query_start_loc
        return SparsePlan(
            rows=slice(0, T),
            block_table=block_table,
            row_starts=rows["row_starts"],
            first_keys=rows["first_keys"],
            row_lens=seq_lens if seq_lens.shape[0] == T else rows["row_lens"][:T],
            topk_lens=rows["topk_lens"][:T],
            positions=rows["positions"][:T],
            score_start_locs=self._start_locs("score", len(chunks), loc),
            query_chunk_start_locs=self._start_locs("query", len(attending), loc),
            num_rows=T,
            num_absorbed=T,
            chunks=chunks,
            query_bytes=held,
            query_chunks=attending,
        )
