"""Steps over a sharded cache, beside the same steps of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openmla import (
    AbsorbedWeights,
    Batch,
    BlockPool,
    LayerCache,
    MLAConfig,
    Projected,
    absorb,
    allocate_cache,
    attend_step,
    make_plan,
    ops,
)
from openmla.cache import LayerScales
from openmla.parallel import RankPlan, Ranks, Shard, attend_over_ranks, plan_over_ranks
from openmla.testing.budgets import out_budget

TINY = MLAConfig.from_numbers(
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    scale=0.2,
)
WIDE = replace(TINY, kv_lora_rank=512, qk_rope_head_dim=64)  # as packed rows are
APART = LayerScales(0.2, 0.05, k_pe=0.2)  # of fp8 rows: k_pe is stored divided by 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Story:
    """Requests of random rows in one process's cache and in this rank's, blocks out of order."""

    def __init__(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        format: str = "fp32",
        BS: int = 4,
        run: int = 1,
        padding: int = 0,
        shared: int = 0,  # first tokens that all requests share
        config: MLAConfig | None = None,
        index_format: str = "index_fp32",
    ) -> None:
        self.index_format = index_format
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.config = config or (WIDE if format == "fp8_ds_mla" else TINY)
        self.query_lens, self.seq_lens, self.padding = list(query_lens), list(seq_lens), padding
        self.shard, self.format, self.BS = Shard(self.size, self.rank, run), format, BS
        self.dtype = DTYPES.get(format, torch.bfloat16)
        self.random = torch.Generator().manual_seed(len(seq_lens))
        config = self.config
        T = sum(query_lens) + padding
        first = self._make(shared, config.latent_dim)
        self.rows = [
            torch.cat([first, self._make(S - shared, config.latent_dim)]) for S in seq_lens
        ]
        H, P, R = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q = self._make(T, H, P + R)
        heads = H * (P + config.v_head_dim)
        self.weight = self._make(heads, config.kv_lora_rank) * config.kv_lora_rank**-0.5
        self._place(shared)

    def _make(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def _place(self, shared: int) -> None:
        wide = self.BS * self.size
        blocks = sum(-(-S // wide) for S in self.seq_lens) + 3
        pool = BlockPool(blocks, wide)
        requests = range(len(self.seq_lens))
        for b in reversed(requests):
            if shared and b < len(self.seq_lens) - 1:
                pool.share(len(self.seq_lens) - 1, b, shared)
            copies = pool.take({b: self.seq_lens[b] - (pool.seq_len(b) if shared else 0)})
            assert not copies, "prefixes of whole blocks"
        self.table = pool.block_table(requests)
        spans = [(b, 0, S) for b, S in enumerate(self.seq_lens)]
        self.places = [pool.slot_mapping([span]) for span in spans]
        self.one, self.mine = (
            allocate_cache(
                self.config,
                num_blocks=blocks,
                block_size=size,
                format=self.format,
                kv_scale=APART if self.format == "fp8" else 1.0,
                index_format=self.index_format,
            )
            for size in (wide, self.BS)
        )
        for cache, sharded in ((self.one, False), (self.mine, True)):
            assert cache.latent is not None
            if self.format != "fp8_ds_mla":
                cache.latent.data.view(torch.uint8).fill_(255)  # NaN in every format
            for slots, rows, n in zip(self.places, self.rows, self.query_lens, strict=True):
                held = slots[: len(slots) - n]
                self.write(cache, rows[: len(held)], self._local(held) if sharded else held)

    def _local(self, slots: Tensor) -> Tensor:
        return self.shard.local_slots(slots, self.BS)

    def write(self, cache: LayerCache, rows: Tensor, slots: Tensor) -> None:
        assert cache.latent is not None
        C = self.config.kv_lora_rank
        latent = cache.latent
        ops.cache_write(
            latent.data, rows[:, :C], rows[:, C:], slots, latent.kv_scale, latent.rope_ratio,
            format=latent.format,
        )  # fmt: skip

    @property
    def batch(self) -> Batch:
        spans = zip(self.places, self.query_lens, strict=True)
        slots = [places[len(places) - n :] for places, n in spans]
        slots.append(torch.full((self.padding,), -1))
        return Batch(
            self.query_lens, self.seq_lens, self.table, torch.cat(slots), padding=self.padding
        )

    def projected(self, dtype: torch.dtype, heads: slice = slice(None)) -> Projected:
        spans = zip(self.rows, self.query_lens, strict=True)
        new = [rows[len(rows) - n :] for rows, n in spans]
        new.append(torch.full((self.padding, self.config.latent_dim), torch.nan).to(self.dtype))
        rows, q = torch.cat(new).to(dtype), self.q[:, heads].to(dtype)
        P, C = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        return Projected(q[..., :P], q[..., P:], rows[:, :C], rows[:, C:])

    def absorbed(self, dtype: torch.dtype, heads: slice = slice(None)) -> AbsorbedWeights:
        config = self.config
        each = self.weight.unflatten(0, (config.num_heads, -1))[heads]
        own = replace(config, num_heads=each.shape[0])
        return absorb(each.flatten(0, 1).to(dtype).contiguous(), own)

    def alone(self, dtype: torch.dtype, **options: Any) -> Tensor:
        """One process, in `dtype`; its cache is written to once, in the story's own."""
        plan = make_plan(self.batch, self.config, self.one, dtype=dtype, **options)
        given = (self.projected(dtype), self.absorbed(dtype), self.one, plan)
        return attend_step(*given, write=dtype == self.dtype)

    def planned(
        self, heads: str = "all", schedule: str = "auto", check: bool = True, **options: Any
    ) -> tuple[RankPlan, slice]:
        """This rank's plan, and which of the heads are its own."""
        config, own = self.config, slice(None)
        if heads == "own":
            H = config.num_heads // self.size
            config, own = (
                replace(config, num_heads=H),
                slice(self.rank * H, (self.rank + 1) * H),
            )
        ranks = Ranks(dist.group.WORLD, self.shard.interleave, heads, schedule, check)
        plan = plan_over_ranks(self.batch, config, self.mine, ranks, dtype=self.dtype, **options)
        return plan, own

    def over_ranks(self, **options: Any) -> tuple[Tensor, RankPlan]:
        plan, own = self.planned(**options)
        out = attend_over_ranks(
            self.projected(self.dtype, own), self.absorbed(self.dtype, own), self.mine, plan
        )
        return out, plan

    def check(self, *, heads: str = "all", form: str = "auto", **options: Any) -> RankPlan:
        """Within the budget of one process's own error; padding 0."""
        peer = self.alone(self.dtype, form=form)
        exact = self.alone(torch.float64, form=form)
        out, plan = self.over_ranks(heads=heads, form=form, **options)
        H = self.config.num_heads // self.size
        own = slice(None) if heads == "all" else slice(self.rank * H, (self.rank + 1) * H)
        used = out_budget(out, exact[:, own], peer[:, own])
        assert used <= 1, f"{used:.2f} of the budget, {plan}"
        T = self.q.shape[0]
        assert not out[T - self.padding :].any()
        assert plan.explain()
        return plan

    def check_close(self, **options: Any) -> None:
        """As near as float32 is, output by output: the budget is for many outputs at once."""
        alone = self.alone(self.dtype, form=options["form"])
        out, plan = self.over_ranks(**options)
        own = slice(None)
        if options["heads"] == "own":
            H = self.config.num_heads // self.size
            own = slice(self.rank * H, (self.rank + 1) * H)
        torch.testing.assert_close(
            out, alone[:, own], rtol=1e-4, atol=1e-5, msg=lambda m: f"{m} {plan}"
        )
