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
from openmla.backends.choice import BackendChoice
from openmla.cache import LayerCache, as_integer
from openmla.config import MLAConfig
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.plan.checks import (
    check_cache,
    check_planned_output,
    check_planned_queries,
    check_wide_queries,
)
from openmla.plan.groups import (
    Roles,
    absorbed_group,
    even_chunks,
    query_bytes,
    query_chunks,
    select_parts,
)
from openmla.plan.options import PlanOptions, frozen
from openmla.plan.plan import assemble, queries_dtype
from openmla.plan.problems import cache_kind, choose, latent_of, needs_of
from openmla.plan.types import Absorbed, Group, Parts, Plan, Select, fixed_run

MOST_PLANS = 4096  # kept at a time; an engine has as many sizes as it has graphs


class DecodePlanner:
    """Plans decode steps over tensors that an engine updates in place, without host lengths.

    Every request of a step has the same number of tokens: one, or one and its draft tokens. Padding
    requests come last, have no tokens (query_start_loc repeats its last value) and length 0. In a
    sparse model every token selects keys, however short its context is.

    Args:
        config: the model's dimensions. DeepSeek V4 and longrope are not supported.
        cache: the cache of any of the layers.
        max_tokens: the most tokens in a step.
        dtype: same as in make_plan().
        backend: same as in make_plan().
        batch_invariant: same as in make_plan().
        query_dtype: same as in make_plan().
        output: same as in make_plan().

    Raises:
        ConfigError: the model is not supported, or the options contradict each other.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3"]
    cache = openmla.allocate_cache(config, num_blocks=4, block_size=16, format="bf16")
    planner = openmla.DecodePlanner(config, cache, max_tokens=2)
    tensors = {
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 30], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "slot_mapping": torch.tensor([19, 45]),
    }
    plan = planner.plan(**tensors)
    tensors["seq_lens"] += 1
    tensors["slot_mapping"] += 1
    print(planner.plan(**tensors) is plan)  # True: the tensors are at the same addresses
    ```
    """

    def __init__(
        self,
        config: MLAConfig,
        cache: LayerCache,
        *,
        max_tokens: int,
        dtype: torch.dtype | None = None,
        backend: BackendChoice = "auto",
        batch_invariant: bool = False,
        query_dtype: str | None = None,
        output: str | None = None,
    ) -> None:
        check_kind("decode_planner", "config", config, MLAConfig)
        check_kind("decode_planner", "cache", cache, LayerCache)
        if config.compressor is not None or config.rope.kind == "longrope":
            what = "DeepSeek V4" if config.compressor is not None else "longrope"
            raise ConfigError(
                f"decode_planner: {what} models are not supported. Call make_plan(into=...)."
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
        dtype = queries_dtype(latent, dtype)
        check_wide_queries("decode_planner", query_dtype, dtype)
        self.config, self.cache, self.dtype = config, cache, dtype
        self.max_tokens = max_tokens
        self.options = PlanOptions(
            dtype, frozen(backend), batch_invariant=batch_invariant, output=output,
            query_dtype=query_dtype,
        )  # fmt: skip
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
        """Plan a step over these tensors. Call it before every step: it updates a sparse plan.

        The result is the same object whenever the tensors are at the same addresses.

        Args:
            block_table: [B, M] int32.
            seq_lens: [B] int32, including the new tokens.
            query_start_loc: [B+1] int32.
            slot_mapping: [T] int64.
            num_requests: B, if the tensors have room for more. Slicing them yourself costs more
                than the rest of this call.
            num_tokens: T, if slot_mapping has room for more.
        """
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
        return known[0].prepare()

    def update(self, plan: Plan, seq_lens: Tensor, query_start_loc: Tensor) -> None:
        """Recompute on the device what a sparse plan derives from the lengths; may be captured."""
        select, part = plan.select, plan.groups[0].part
        if select is None:
            return
        assert self.config.indexer is not None
        assert isinstance(part, Absorbed) and part.positions is not None
        B, T = seq_lens.shape[0], plan.num_tokens
        if T != B:
            behind = self._tokens_behind(T // B)
            torch.sub(seq_lens[:, None], behind, out=select.row_lens.view(B, -1))
            select.row_lens.clamp_(min=0)
        torch.clamp(select.row_lens, max=self.config.indexer.topk, out=select.topk_lens)
        torch.sub(select.row_lens, 1, out=part.positions)
        cuts = [chunk.rows for chunk in select.chunks], part.cuts
        for rows, start_locs in zip(cuts, (select.start_locs, part.start_locs), strict=True):
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
    def _start_locs(self, name: str, count: int, query_start_loc: Tensor) -> Roles:
        """query_start_loc of each chunk; of a single one, the engine's own."""
        if count == 1:
            return {f"{name}.0": query_start_loc}
        places = {}
        for i in range(count):
            whole = self._rows.get(f"{name}.{i}")
            if whole is None:
                whole = query_start_loc.new_zeros(self.max_tokens + 1)
                self._rows[f"{name}.{i}"] = whole
            places[f"{name}.{i}"] = whole[: query_start_loc.shape[0]]
        return places

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
                f"decode_planner: a step must have the same number of tokens for each of its B "
                f"requests, and at most {self.max_tokens} in total, got B={B} and T={T}."
            )

    def _make(
        self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor
    ) -> Plan:
        config, latent = self.config, latent_of(self.cache)
        B, T, M = seq_lens.shape[0], slot_mapping.shape[0], block_table.shape[1]
        roles = {
            "block_table": block_table,
            "seq_lens": seq_lens,
            "query_start_loc": query_start_loc,
        }
        select = None
        if config.indexer is None:
            group = absorbed_group(roles, slice(0, T), T // B, range(B))
        else:
            select, group = self._select(roles, T)
        needs = needs_of((group,), select, config, config, self.options)
        kind = cache_kind([latent], self.cache.index)
        backend = self.options.backend
        choice = choose(config, kind, self.dtype, needs, self.run_length, backend)
        return assemble(
            Parts((group,), select, None, slot_mapping),
            choice,
            config,
            self.cache,
            self.options,
            run_length=self.run_length,
            captured=True,
            query_lens=(T // B,) * B,
            seq_lens=(M * latent.block_size,) * B,
            bounded=frozenset(range(B)),
        )

    def _select(self, roles: Roles, T: int) -> tuple[Select, Group]:
        """Every token selects its keys."""
        config, index, everyone = self.config, self.cache.index, slice(0, T)
        assert index is not None  # check_cache looked
        table, lens, loc = roles["block_table"], roles["seq_lens"], roles["query_start_loc"]
        held = query_bytes(config, index)
        chunks = even_chunks(T, table.shape[1] * index.block_size, held)
        cuts = query_chunks(T, config, self.dtype.itemsize)
        shared = {name: self._rows[name][:T] for name in ("row_lens", "topk_lens", "positions")} | {
            name: self._rows[name] for name in ("row_starts", "first_keys")
        }
        if lens.shape[0] == T:
            shared["row_lens"] = lens
        shared |= self._start_locs("score_start_locs", len(chunks), loc)
        shared |= self._start_locs("query_chunk_start_locs", len(cuts), loc)
        requests = range(lens.shape[0])
        select, group = select_parts(
            roles | shared, everyone, everyone, T, T, chunks, cuts, held, requests
        )
        assert group is not None
        return select, group
