"""Requests of random rows and queries, parts of them in caches, and float64's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from openmla import (
    PRESETS,
    AbsorbedWeights,
    Batch,
    BlockPool,
    LayerCache,
    MLAConfig,
    PagedCache,
    Projected,
    absorb,
    allocate_cache,
)

DENSE, SPARSE = PRESETS["tiny-v3"], PRESETS["tiny-v3.2"]  # the latter chooses 32 keys
H, P, R, V, C = 4, 16, 8, 24, 32


def bits(tensor: Tensor) -> Tensor:
    """A copy of the bytes, by which NaN equals NaN."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


class Requests:
    """B requests with their last query_lens tokens new; float64 of values that float32 can hold,
    and on a GPU, whose kernels do not take that, float32."""

    def __init__(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        config: MLAConfig = DENSE,
        device: str = "cpu",
    ) -> None:
        self.query_lens, self.seq_lens, self.config = list(query_lens), list(seq_lens), config
        self.device, self.dtype = device, torch.float64 if device == "cpu" else torch.float32
        random = torch.Generator().manual_seed(0)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(device, self.dtype)

        self.rows = [make(S, C + R) for S in seq_lens]
        self.q = make(sum(query_lens), H, P + R)
        self.weight = make(H * (P + V), C) * C**-0.5

    @property
    def absorbed(self) -> AbsorbedWeights:
        return absorb(self.weight, self.config)

    @property
    def projected(self) -> Projected:
        spans = zip(self.rows, self.query_lens, strict=True)
        new = torch.cat([rows[len(rows) - n :] for rows, n in spans])
        return Projected(self.q[..., :P], self.q[..., P:], new[:, :C], new[:, C:])

    @property
    def q_latent(self) -> Tensor:
        into = torch.einsum("thp,hpc->thc", self.q[..., :P], self.absorbed.w_uk)
        return torch.cat([into, self.q[..., P:]], -1)

    def out_of_latent(self, out_latent: Tensor) -> Tensor:
        return torch.einsum("thc,hcv->thv", out_latent, self.absorbed.w_uv)

    def part(
        self,
        firsts: Sequence[int] | None = None,
        stops: Sequence[int] | None = None,
        *,
        BS: int = 4,
        written: bool = False,
        latent_only: bool = False,
    ) -> tuple[LayerCache, Batch]:
        """Keys firsts .. stops-1 of each request in a cache of their own, whose other rows are NaN,
        and the batch of this step over it. By default all keys. The new ones are in the last part
        and not in the cache, unless `written`."""
        causal = stops is None
        firsts = [0] * len(self.seq_lens) if firsts is None else firsts
        stops = self.seq_lens if stops is None else stops
        lens = [stop - first for first, stop in zip(firsts, stops, strict=True)]
        blocks = sum(-(-S // BS) for S in lens) + 3
        pool = BlockPool(blocks, BS)
        everyone = range(len(lens))
        for b in reversed(everyone):  # blocks out of order
            pool.take({b: lens[b]})
        cache = allocate_cache(
            self.config,
            num_blocks=blocks,
            block_size=BS,
            format="fp32",
            index_format="index_fp32",
            device=self.device,
        )
        assert cache.latent is not None
        cache.latent.data.fill_(torch.nan)
        for b, rows in enumerate(self.rows):
            held = lens[b] - (self.query_lens[b] if causal and not written else 0)
            slots = pool.slot_mapping([(b, 0, held)]).to(self.device)
            mine = rows[firsts[b] : firsts[b] + held]
            cache.latent.data.flatten(0, 1)[slots] = mine.float()
        if latent_only:
            cache = LayerCache(latent=cache.latent)
        table = pool.block_table(everyone)
        if not causal:
            return cache, Batch(self.query_lens, lens, table, causal=False)
        spans = [(b, lens[b] - self.query_lens[b], lens[b]) for b in everyone]
        return cache, Batch(self.query_lens, lens, table, pool.slot_mapping(spans))

    def truth(self, chosen: Sequence[Sequence[int]] | None = None) -> tuple[Tensor, Tensor]:
        """Out [T, H, V] and lse [T, H], one query at a time: over all keys it sees, or `chosen`."""
        outs, lses, per_head, t = [], [], self.weight.double().view(H, P + V, C), 0
        for b, (stored, n) in enumerate(zip(self.rows, self.query_lens, strict=True)):
            rows = stored.double()
            kv = torch.einsum("sc,hdc->shd", rows[:, :C], per_head)
            k = torch.cat([kv[..., :P], rows[:, None, C:].expand(-1, H, -1)], dim=-1)
            for i in range(n):
                seen = range(self.seq_lens[b] - n + i + 1) if chosen is None else chosen[t]
                keys = torch.tensor(list(seen), dtype=torch.int64, device=self.device)
                logits = self.config.scale * torch.einsum("he,she->hs", self.q[t].double(), k[keys])
                outs.append(torch.einsum("hs,shv->hv", logits.softmax(-1), kv[keys, :, P:]))
                lses.append(logits.logsumexp(-1))
                t += 1
        return torch.stack(outs), torch.stack(lses)

    def close(self, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        """Equal to what the dtype leaves."""
        most = 1e-12 if self.dtype == torch.float64 else 1e-4
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=most, atol=most, check_dtype=False, equal_nan=False
            )

    def choices(self, K: int = 32, seed: int = 1) -> list[list[int]]:
        """Up to K of the keys each token sees, in no order."""
        random, chosen = torch.Generator().manual_seed(seed), []
        for n, S in zip(self.query_lens, self.seq_lens, strict=True):
            for i in range(n):
                order = torch.randperm(S - n + i + 1, generator=random)
                chosen.append(order[:K].tolist())
        return chosen

    def listed(
        self, chosen: Sequence[Sequence[int]], number: Callable[[int, int], int] | None = None
    ) -> Tensor:
        """Choices as [T, 32] i32; `number` gives key k of request b its number in a part, or -1."""
        table = torch.full((len(chosen), 32), -1, dtype=torch.int32)
        owners = [b for b, n in enumerate(self.query_lens) for _ in range(n)]
        for t, keys in enumerate(chosen):
            given = keys if number is None else [number(owners[t], k) for k in keys]
            table[t, : len(given)] = torch.tensor(given, dtype=torch.int32)
        return table.to(self.device)


def latent_bits(cache: LayerCache) -> Tensor:
    assert isinstance(cache.latent, PagedCache)
    return bits(cache.latent.data)
