"""What one rank plans of everyone's batch: tokens, new rows, context, each a Batch of its own."""

from __future__ import annotations

import torch

from openmla.parallel.layout import Shard
from openmla.plan import Batch
from openmla.plan.rows import pick, repeated, some
from openmla.plan.upload import upload


def token_batch(batch: Batch, requests: list[int], shard: Shard) -> Batch:
    """Each token of some requests as a request of its own, over the keys it sees on this rank."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    seen = [
        length
        for n, S in zip(query_lens, seq_lens, strict=True)
        for length in range(S - n + 1, S + 1)
    ]
    table = pick(batch.block_table, requests)
    if len(seen) > len(requests):
        (mine,) = upload((repeated(range(len(requests)), query_lens, torch.int64),), table.device)
        table = table[mine]
    return Batch([1] * len(seen), shard.local_lens(seen), table, causal=False)


def new_batch(batch: Batch, requests: list[int], BS: int) -> Batch:
    """New rows among themselves: no key is read from the cache, and the table names none."""
    query_lens = some(batch.query_lens, requests)
    table = torch.zeros((len(requests), -(-max(query_lens) // BS)), dtype=torch.int32)
    slots = torch.full((sum(query_lens),), -1, dtype=torch.int64)
    return Batch(query_lens, query_lens, table, slots)


def context_batch(batch: Batch, requests: list[int], shard: Shard) -> Batch:
    """What requests had before this step, as far as it is here; every new token sees all of it."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    lens = [shard.local_len(S - n) for n, S in zip(query_lens, seq_lens, strict=True)]
    return Batch(query_lens, lens, pick(batch.block_table, requests), causal=False)
