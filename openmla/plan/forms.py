"""Chooses the form of each request, absorbed or expanded: the cheaper one by the ops' cost()."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from openmla.config import MLAConfig
from openmla.ops.mha_masked import cost as masked_cost
from openmla.ops.mha_ragged import cost as mha_cost
from openmla.ops.mqa_paged import cost as mqa_cost
from openmla.ops.mqa_sparse import cost as sparse_cost
from openmla.ranks import Ranks
from openmla.ranks.merge import sent_bytes

# Flops a machine does in the time it moves one byte. H200: 760 TFLOP/s over 4.2 TB/s; a 2-core
# server CPU: 190 GFLOP/s over 28 GB/s (openmla/bench/harness.py measures both). Only the
# order matters. Devices without kernels here (mps, xpu, ...) are taken as a CPU.
BALANCE = {"cuda": 180, "cpu": 7}
# Flops a device does in the time a byte takes to another device: an H200's 760 TFLOP/s over
# NVLink's 450 GB/s; on CPUs, a core's share over a socket. Only the order matters.
LINK_BALANCE = {"cuda": 1700, "cpu": 200}


def _balance(device: str) -> int:
    return BALANCE.get(device, BALANCE["cpu"])


def link_balance(device: str) -> int:
    return LINK_BALANCE.get(device, LINK_BALANCE["cpu"])


def merged_bytes(config: MLAConfig, ranks: Ranks, n: int, dtype: torch.dtype) -> int:
    """Bytes a rank sends to merge n tokens' outputs over ranks; with heads="own", also its latent
    queries."""
    size, H, C = ranks.shard.size, config.num_heads, config.kv_lora_rank
    if ranks.heads == "all":
        return sent_bytes("exchange", "all", (n, H, config.v_head_dim), dtype, size)
    queries = (size - 1) * n * H * config.latent_dim * dtype.itemsize
    return queries + sent_bytes("exchange", "own", (n, H * size, C), dtype, size)


def gathered_bytes(config: MLAConfig, ranks: Ranks, num_keys: int, dtype: torch.dtype) -> float:
    """Bytes a rank sends to give these rows to all ranks."""
    size = ranks.shard.size
    return (size - 1) / size * num_keys * config.latent_dim * dtype.itemsize


@lru_cache(maxsize=4096)
def decode_threshold(
    config: MLAConfig, format: str, itemsize: int, device: str, bits: int, run_length: int = 0
) -> int:
    """The largest number of new tokens for which a request of about 2**bits keys is cheaper
    absorbed than expanded. With a run length, absorbed tokens write and merge a partial result per
    run.

    Requests are grouped by the bit length of their key count, so that the answer can be reused.
    """
    S = 1 << bits
    # absorbed is cheaper up to some count. One token is always absorbed, because a second form in
    # a step costs launches that cost() does not count
    low, high = 1, S
    while low < high:
        n = (low + high + 1) // 2
        absorbed = _absorbed(config, n, S, format, itemsize, device, run_length)
        if absorbed <= _expanded(config, n, S, itemsize, device):
            low = n
        else:
            high = n - 1
    return low


def choose_absorbed(
    config: MLAConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    format: str,
    itemsize: int,
    device: str,
    run_length: int = 0,
) -> list[bool]:
    """Per request: whether its new tokens take the absorbed form."""
    thresholds: dict[int, int] = {}

    def threshold(S: int) -> int:
        bits = S.bit_length() - 1
        if bits not in thresholds:
            thresholds[bits] = decode_threshold(config, format, itemsize, device, bits, run_length)
        return thresholds[bits]

    return [n <= 1 or n <= threshold(max(S, 1)) for n, S in zip(query_lens, seq_lens, strict=True)]


def choose_sparse_absorbed(
    config: MLAConfig,
    n: int,
    S: int,
    *,
    format: str,
    dtype: torch.dtype,
    device: str,
    efficiencies: tuple[float, float],
    ranks: Ranks | None = None,
) -> bool:
    """Whether n tokens over S > K keys should read their K rows each, instead of computing all
    pairs under a mask. `efficiencies`: the fraction of peak that each route reaches; GEMMs with
    weights are assumed to reach all of it.

    Over ranks, each rank reads the selected rows that it holds and results are merged; for a mask,
    every rank gathers all rows."""
    assert config.indexer is not None
    if n == 1:  # decode of many requests, at every step
        return True
    gathering, masking = efficiencies
    bits, itemsize = S.bit_length() - 1, dtype.itemsize
    if ranks is not None:
        link = link_balance(device)
        read = _gathered(config, n, S, format, itemsize, device, gathering)
        read /= ranks.shard.size if ranks.heads == "all" else 1
        masked = _masked(config, n, S, itemsize, device, masking)
        return read + link * merged_bytes(config, ranks, n, dtype) <= masked + (
            link * gathered_bytes(config, ranks, S, dtype)
        )
    if _surely_gathered(config, n, bits, format, itemsize, device, efficiencies):
        return True
    return _gathered(config, n, S, format, itemsize, device, gathering) <= _masked(
        config, n, S, itemsize, device, masking
    )


@lru_cache(maxsize=4096)
def _surely_gathered(
    config: MLAConfig,
    n: int,
    bits: int,
    format: str,
    itemsize: int,
    device: str,
    efficiencies: tuple[float, float],
) -> bool:
    """Whether gathering is cheaper for n tokens over any number of keys of this bit length: its
    highest cost (most keys) is below the lowest cost of masking. Steps with draft tokens ask this
    for every request."""
    least, most = 1 << bits, (2 << bits) - 1
    gathering, masking = efficiencies
    return _gathered(config, n, most, format, itemsize, device, gathering) <= _masked(
        config, n, least, itemsize, device, masking
    )


def _gathered(
    config: MLAConfig, n: int, S: int, format: str, itemsize: int, device: str, efficiency: float
) -> float:
    assert config.indexer is not None
    H, C, D = config.num_heads, config.kv_lora_rank, config.latent_dim
    P, V = config.qk_nope_head_dim, config.v_head_dim
    pairs = n * min(S, config.indexer.topk)
    gathered = sparse_cost(pairs, n, H=H, D=D, C=C, format=format, itemsize=itemsize)
    into_and_out_of_latent = 2 * n * H * C * (P + V)
    return max(
        gathered.flops / efficiency + into_and_out_of_latent, _balance(device) * gathered.bytes
    )


def _masked(
    config: MLAConfig, n: int, S: int, itemsize: int, device: str, efficiency: float
) -> float:
    H, C, E = config.num_heads, config.kv_lora_rank, config.qk_head_dim
    P, V = config.qk_nope_head_dim, config.v_head_dim
    masked = masked_cost(n, S, H=H, E=E, V=V, itemsize=itemsize)
    visible = (S - n / 2) / S  # tiles whose keys all follow their queries are skipped
    expansion, written = 2 * S * H * C * (P + V), S * H * (E + V) * itemsize
    return max(
        masked.flops * visible / efficiency + expansion,
        _balance(device) * (masked.bytes + written),
    )


def _absorbed(
    config: MLAConfig, n: int, S: int, format: str, itemsize: int, device: str, run_length: int
) -> float:
    H, C, D = config.num_heads, config.kv_lora_rank, config.latent_dim
    P, V = config.qk_nope_head_dim, config.v_head_dim
    attention = mqa_cost([n], [S], H=H, D=D, C=C, format=format, itemsize=itemsize, causal=True)
    into_and_out_of_latent = 2 * n * H * C * (P + V)
    step = max(attention.flops + into_and_out_of_latent, _balance(device) * attention.bytes)
    runs = S // run_length + 1 if 0 < run_length <= S else 1
    partial = 0 if runs == 1 else runs * n * H * C * 4  # bytes in float32
    return step + _balance(device) * 2 * partial  # in a separate launch, which nothing overlaps


def _expanded(config: MLAConfig, n: int, S: int, itemsize: int, device: str) -> float:
    H, C, E = config.num_heads, config.kv_lora_rank, config.qk_head_dim
    P, V = config.qk_nope_head_dim, config.v_head_dim
    attention = mha_cost([n], [S], H=H, E=E, V=V, itemsize=itemsize, causal=True)
    expansion = 2 * S * H * C * (P + V)
    written = S * H * (E + V) * itemsize
    return max(attention.flops + expansion, _balance(device) * (attention.bytes + written))
