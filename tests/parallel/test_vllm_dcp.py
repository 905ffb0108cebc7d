"""A sparse model in vLLM with decode context parallelism: two ranks give what one process does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openmla.parallel import Shard, merge_over_ranks
from tests.integrations import vllm_stand_ins as stand_ins
from tests.integrations.vllm_layers import BLOCK_SIZE, MAX_BLOCKS, H, P, SparseEngine, V
from tests.parallel.processes import Processes

STEPS = (
    {"a": 70, "b": 5},  # prompts, of which one selects
    {"a": 1, "b": 40},  # one decodes, the other goes on with its prompt
    {"a": 1, "b": 1},
    {"a": 1},
    {"a": 2, "b": 1, "c": 1},  # `c` has one key: a rank has none
)


def common_of_rank(
    engine: SparseEngine, wanted: dict[str, int], lens: dict[str, int], shard: Shard, tokens: int
) -> Any:
    """A step as vLLM hands it to one rank: lengths of whole requests, and this rank's slots."""
    B, slots = len(wanted), []
    table = torch.zeros(B, MAX_BLOCKS, dtype=torch.int32)
    for b, (name, n) in enumerate(wanted.items()):
        blocks, start = engine.blocks.setdefault(name, []), lens[name] - n
        while len(blocks) * BLOCK_SIZE * shard.size < lens[name]:
            blocks.append(engine.free.pop())
        table[b, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for p in range(start, start + n):
            place = shard.local_indices(p)
            slot = blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            slots.append(slot if shard.owners(p) == shard.rank else -1)
    slots += [-1] * (tokens - len(slots))
    starts = torch.tensor([0, *wanted.values()]).cumsum(0).int()
    seq_lens = torch.tensor([lens[name] for name in wanted], dtype=torch.int32)
    return stand_ins.CommonAttentionMetadata(
        starts, starts, seq_lens, seq_lens, B, tokens, max(wanted.values()), int(seq_lens.max()),
        table, torch.tensor(slots), shard.local_counts(seq_lens),
    )  # fmt: skip


def attend(
    engine: SparseEngine, metadata: Any, hidden: Tensor, low: Tensor, q_latent: Tensor, rows: Tensor
) -> Tensor:
    """What vLLM's layer does with context parallelism, the heads of all ranks at once."""
    assert metadata.num_decode_tokens == len(rows) and metadata.num_prefills == 0
    stand_ins.CONTEXT[0] = SimpleNamespace(
        attn_metadata={"0": metadata}, no_compile_layers={"0": engine.layers[0]}
    )
    kept = metadata.slot_mapping >= 0
    engine.layers[0].kv_cache.flatten(0, 1)[metadata.slot_mapping[kept]] = rows[kept]
    engine.indexer(hidden, low, None, lambda positions, q, k: (q, k))
    cache = engine.layers[0].kv_cache
    out, lse = engine.layers[0].impl.forward_mqa(q_latent, cache, metadata, None)
    seen = metadata.decode.seq_lens.repeat_interleave(metadata.query_start_loc.diff())
    assert torch.isneginf(lse[: len(seen)][seen == 0]).all()  # vLLM masks these by the same lengths
    merged, _ = merge_over_ranks(out, lse, dist.group.WORLD)
    return merged


def follow(rank: int, interleave: int, padding: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_ins.install(monkeypatch)
        whole = SparseEngine("cpu")
        own = SparseEngine("cpu", ranks=2, heads=H // 2, interleave=interleave)
        own.indexer.load_state_dict(whole.indexer.state_dict())
        shard, lens = Shard(2, rank, interleave), dict.fromkeys("abc", 0)
        for wanted in STEPS:
            n = sum(wanted.values())
            T = n + padding
            lens = {name: length + wanted.get(name, 0) for name, length in lens.items()}
            hidden, low = torch.randn(T, 48), torch.randn(T, 24)
            q, rows = whole.inputs(T)
            stand_ins.CONFIG[0] = whole.config
            expected = torch.zeros(T, H * V)
            metadata = whole.builder.build(0, whole.common(wanted, len(wanted), T))
            whole.forward(metadata, hidden, low, q, rows, expected)
            for name in wanted:
                whole.rows[name] = torch.zeros(lens[name], 1)  # how many there are is all it reads
            stand_ins.CONFIG[0] = own.config
            metadata = own.builder.build(0, common_of_rank(own, wanted, lens, shard, T))
            q_latent = torch.einsum("thp,hpc->thc", q[..., :P], whole.w_uk)
            q_latent = torch.cat([q_latent, q[..., P:]], -1)
            latent = attend(own, metadata, hidden, low, q_latent, rows)
            out = torch.einsum("thc,hcv->thv", latent, whole.w_uv).flatten(1)
            torch.testing.assert_close(out[:n], expected[:n], rtol=2e-4, atol=2e-4)
            assert not out[n:].any()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("interleave", [1, 4])
def test_two_ranks_give_what_one_does(two_ranks: Processes, interleave: int, padding: int) -> None:
    two_ranks.run(follow, interleave, padding)


def refuse_drafts(rank: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_ins.install(monkeypatch)
        with pytest.raises(ValueError, match="speculative decoding of a sparse model"):
            SparseEngine("cpu", ranks=2, heads=H // 2, drafts=1)


def test_drafts_are_refused(two_ranks: Processes) -> None:
    two_ranks.run(refuse_drafts)
