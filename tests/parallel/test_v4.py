"""V4's steps over ranks: the outputs of one process, each rank with the entries of its blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openmla import (
    Batch,
    ConfigError,
    LayerCache,
    ShapeError,
    allocate_cache,
    attend_partial,
    ops,
)
from openmla.cli.sizes import Split, Step, room
from openmla.parallel import (
    Ranks,
    attend_over_ranks,
    plan_over_ranks,
    rank_buffers,
    rank_cache,
)
from tests.layers.v4 import RATIOS, Server, make_layer, real_config, sequence, tiny_config
from tests.parallel.counted import counted_bytes
from tests.parallel.processes import Processes
from tests.parallel.v4 import BS, STEPS, Both, Sharded, inputs_of, own_config


def served(rank: int, ratio: int, topk: int) -> None:
    """The layer itself."""
    layer = make_layer(tiny_config(topk=topk), ratio)
    sequences = {name: sequence(500, seed) for seed, name in enumerate("abc")}
    size = dist.get_world_size()
    alone, shared = Server(layer, sequences, block_size=BS * size), Sharded(layer, sequences)
    for wanted in STEPS:
        alone.step(wanted)
        plan = shared.step(wanted)
        most = max(shared.pool.seq_len(name) for name, _ in wanted) // 4
        assert plan.chooses == (ratio == 4 and most > topk)
        in_place = plan.groups[0].across is not None
        assert (in_place or plan.bring is not None) == (ratio == 4)
    for name in sequences:
        found = shared.outputs[name]
        torch.testing.assert_close(found, alone.outputs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("topk", [8, 512])
@pytest.mark.parametrize("ratio", RATIOS)
def test_layers(two_ranks: Processes, ratio: int, topk: int) -> None:
    two_ranks.run(served, ratio, topk)


def every_step(rank: int, format: str) -> None:
    config, index_format = tiny_config(), "index_fp32"
    if format == "fp8_dsv4":
        config, index_format = real_config(), "index_fp8"
    formats: dict[str, Any] = {"format": format, "index_format": index_format}
    ways = (
        ("all", "auto", "gather"),
        ("own", "auto", "place"),
        ("own", "auto", "gather"),
        ("own", "gather", "place"),
        ("all", "auto", "place"),
    )
    for heads, schedule, context in ways[:2] if format == "fp8_dsv4" else ways:  # rows of 512
        ranks = {"heads": heads, "schedule": schedule}
        both = Both(make_layer(config, 4), ranks=ranks, context=context, **formats)
        for wanted in STEPS[:4] if format == "fp8_dsv4" else STEPS:
            plan = both.check(wanted, padding=2)
            assert (plan.bring is not None) == (context == "gather")
            assert ("entries gathered from all ranks" in plan.explain()) == (context == "gather")


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8", "fp8_dsv4"])
def test_steps(two_ranks: Processes, format: str) -> None:
    two_ranks.run(every_step, format)


def own_entries(rank: int) -> None:
    """A rank holds the entries of its own blocks, to the bit those of one process; no others."""
    both = Both(make_layer(tiny_config(), 4))
    both.check([("a", 300), ("b", 200)])
    both.check([("c", 140)])
    size, lens = dist.get_world_size(), {"a": 300, "b": 200, "c": 140}
    for name in ("compressed", "index"):
        whole, mine = (getattr(server.cache, name).data for server in (both.alone, both.shared))
        written = torch.zeros(mine.shape[:2], dtype=torch.bool)
        for request, length in lens.items():
            tables = [server.pool.tables([request]) for server in (both.alone, both.shared)]
            one, here = (table.block_table[0] for table in tables)
            for entry in range(length // 4):
                block, offset = divmod(entry, BS // 4)
                if block % size != rank:
                    continue
                found = mine[here[block // size], offset]
                wide = size * BS // 4
                assert torch.equal(found, whole[one[entry // wide], entry % wide])
                written[here[block // size], offset] = True
        assert mine[~written].isnan().all(), "others' entries are not written"
        assert 0 < int(written.sum()) < sum(length // 4 for length in lens.values())


def test_each_rank_holds_its_own_entries(two_ranks: Processes) -> None:
    two_ranks.run(own_entries)


def drafts(rank: int) -> None:
    """Rejected tokens go back on every rank; an entry that one of them finished is made again."""
    layer = make_layer(tiny_config(), 4)
    both = Both(layer)
    both.check([("a", 253), ("b", 127)])
    for lost in (1, 3, 5, 8):
        both.check([("a", lost), ("b", lost)])
        for server in (both.alone, both.shared):
            for name in ("a", "b"):
                server.pool.truncate(name, server.pool.seq_len(name) - lost)
                changed = server.sequences[name]
                changed[server.pool.seq_len(name) :] += 1  # other tokens come in their place
        both.check([("b", 2), ("a", 1)])


def test_rejected_drafts(two_ranks: Processes) -> None:
    two_ranks.run(drafts)


def cheaper(rank: int) -> None:
    """A prompt's entries are gathered; for one token, they stay where they are."""
    for heads in ("all", "own"):
        both = Both(make_layer(tiny_config(), 4), ranks={"heads": heads}, context="auto")
        assert both.check([("a", 300)]).bring is not None
        plan = both.check([("a", 1)])
        assert plan.bring is None and plan.group("chosen") is not None


def test_entries_by_cost(two_ranks: Processes) -> None:
    two_ranks.run(cheaper)


def prefixes(rank: int) -> None:
    both = Both(make_layer(tiny_config(), 4))
    both.check([("a", 300)])
    for server in (both.alone, both.shared):
        server.sequences["b"][:300] = server.sequences["a"][:300]
        server.pool.share("a", "b")
    both.check([("b", 3), ("a", 1)])
    both.check([("a", 40), ("b", 1)])


def test_shared_prefixes(two_ranks: Processes) -> None:
    two_ranks.run(prefixes)


def counted(rank: int) -> None:
    """What a layer sends is what the plan says: nothing where every rank has all."""
    H, D = 4, 32
    for heads in ("all", "own"):
        both = Both(
            make_layer(tiny_config(), 4), context="gather", ranks={"heads": heads, "check": False}
        )
        for wanted in ([("a", 300), ("b", 3)], [("a", 1), ("b", 1)]):
            with counted_bytes() as sent:
                plan = both.step(wanted)[2]
            assert sent.num_bytes == plan.sent_bytes(torch.float32) and sent.calls == 2
            blocks = 2 if len(wanted) == 2 and wanted[0][1] == 300 else 3  # a's two, then b's
            assert sent.num_bytes == blocks * BS // 4 * (32 + 16) * 4
    for heads, schedule in product(("all", "own"), ("gather", "exchange")):
        for ratio, topk in ((0, 8), (4, 8), (4, 512), (128, 8)):
            layer = make_layer(tiny_config(topk=topk), ratio)
            both = Both(layer, ranks={"heads": heads, "schedule": schedule, "check": False})
            for wanted in ([("a", 300)], [("a", 1), ("b", 1)]):
                with counted_bytes() as sent:
                    plan = both.step(wanted)[2]
                due = plan.sent_bytes(torch.float32) + plan.selection_bytes()
                assert sent.num_bytes == due
                assert (sent.calls > 0) == (ratio == 4)
                if ratio == 4 and topk == 8 and heads == "own" and schedule == "exchange":
                    # the formula of the docs, two ranks, float32: queries, outputs, candidates
                    each = H // 2 * 4 * D + H // 2 * (4 * D + 4) + 8 * topk
                    assert due == sum(n for _, n in wanted) * each


def test_sent_bytes(two_ranks: Processes) -> None:
    two_ranks.run(counted)


def replayed(rank: int) -> None:
    """One set of buffers for all steps, larger than any; what fills up gets 0."""
    for ratio, heads in product(RATIOS, ("all", "own")):
        both = Both(make_layer(tiny_config(), ratio), ranks={"heads": heads})
        config, sizes = both.layer.config, {"max_tokens": 6, "max_requests": 3, "max_blocks": 3}
        own = own_config(config, both.shared.ranks)
        buffers = rank_buffers(own, both.shared.cache, both.shared.ranks, **sizes)
        addresses = [tensor.data_ptr() for tensor in buffers.values()]
        both.check([("a", 255), ("b", 9)])
        for wanted in ([("a", 1), ("b", 1)], [("b", 2), ("c", 1), ("a", 2)], [("a", 2)], []):
            T = sum(n for _, n in wanted)
            out, expected, plan = both.step(wanted, padding=6 - T, into=buffers)
            assert plan.num_tokens == 6 and plan.chooses == (ratio == 4)
            assert addresses == [tensor.data_ptr() for tensor in buffers.values()]
            assert not out[T:].any()
            torch.testing.assert_close(out[:T], expected[:T], rtol=1e-4, atol=1e-5)
        with pytest.raises(ConfigError, match="query tokens of one request must be at most 2"):
            both.step([("a", 3)], padding=3, into=buffers)


def test_fixed_buffers(two_ranks: Processes) -> None:
    two_ranks.run(replayed)


def parts(rank: int) -> None:
    """The window, and the entries of all ranks: merged, what the whole step gives."""
    for heads, topk in product(("all", "own"), (8, 512)):
        both = Both(make_layer(tiny_config(topk=topk), 4), ranks={"heads": heads}, context="place")
        both.check([("a", 255), ("b", 9)])
        plan = both.step([("a", 1), ("b", 2)])[2]
        hidden, positions = torch.randn(3, 64), torch.tensor([255, 9, 10])
        tokens = inputs_of(both.layer, hidden, positions, plan, both.own)
        cache, found = both.shared.cache, []
        for keys in ("window", "entries", "all"):
            index = None if keys == "window" else tokens.index
            inputs = replace(tokens, index=index, raw=None)
            found.append(attend_partial(inputs, None, cache, plan, keys=keys, write=False))
        (merged, lse), entries, whole = found
        ops.merge_states(merged, lse, *entries)
        assert entries[1].isfinite().any()
        torch.testing.assert_close(merged, whole[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, whole[1], rtol=1e-4, atol=1e-5)


def test_window_and_entries_apart(two_ranks: Processes) -> None:
    two_ranks.run(parts)


def filled(rank: int) -> None:
    """What a step leaves of its buffers writes nothing and belongs to no request."""
    for ratio in RATIOS:
        shared = Both(make_layer(tiny_config(), ratio)).shared
        sizes = {"max_tokens": 6, "max_requests": 3, "max_blocks": 3}
        buffers = rank_buffers(shared.layer.config, shared.cache, shared.ranks, **sizes)
        columns = buffers["window_table"].shape[1]
        for wanted in ([("a", 2), ("b", 2), ("c", 2)], [("a", 1), ("b", 2)]):
            plan = shared.plan(shared.batch(wanted, window_columns=columns), into=buffers)
        assert plan.slot_mapping[3:].tolist() == [-1] * 3
        assert plan.pool is None or plan.pool.state_slots[2:].tolist() == [-1]


def test_buffers_are_filled_up_with_nothing(two_ranks: Processes) -> None:
    two_ranks.run(filled)


def empty(rank: int) -> None:
    for topk in (8, 512):
        both = Both(make_layer(tiny_config(topk=topk), 4))
        both.check([("a", 290)])
        for wanted in ([], [("a", 0)], [("a", 0), ("b", 1)]):
            for padding in (0, 2):
                both.check(wanted, padding=padding)


def test_empty_steps(two_ranks: Processes) -> None:
    two_ranks.run(empty)


def refused(rank: int) -> None:
    layer = make_layer(tiny_config(), 4)
    server = Sharded(layer, {"a": sequence(300), "b": sequence(300)})
    config, cache, ranks = layer.config, server.cache, server.ranks
    server.plan(server.batch([("a", 299)]))
    batch = server.batch([("a", 1)])
    slots, rings = batch.state_slots, batch.window_table
    assert slots is not None and rings is not None
    group = dist.group.WORLD
    dense = allocate_cache(config, num_blocks=2, block_size=128, max_requests=1, max_tokens=4)
    bad: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"into": {}}, ConfigError, r"into must be .* plan_buffers\(\), got dict"),
        ({"form": "expanded"}, ConfigError, "form must be auto or absorbed for deepseek_v4"),
        ({"workspace_tokens": 64}, ConfigError, "workspace_tokens must be None for"),
        ({"ranks": Ranks(group, 64)}, ConfigError, "interleave must be 1 or the block size of 128"),
        ({"cache": LayerCache()}, ConfigError, "cache must have window rows for"),
        ({"cache": replace(cache, state=None)}, ConfigError, "cache must have state rows"),
        ({"batch": replace(batch, block_table=batch.block_table + 99)}, ShapeError, "must be a bl"),
        ({"batch": replace(batch, block_table=batch.block_table[:, :0])}, ShapeError, "column"),
        ({"batch": replace(batch, state_slots=slots + 99)}, ShapeError, "state_slots"),
        ({"batch": Batch([1], [1], batch.block_table, torch.tensor([0]))}, ShapeError, "window_t"),
    )
    before = [part.data.clone() for part in cache.parts]
    plain: dict[str, Any] = {"batch": batch, "config": config, "cache": cache, "ranks": ranks}
    for changed, kind, sentence in bad:
        with pytest.raises(kind, match=sentence):
            plan_over_ranks(**plain | changed)
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"state_slots": slots + rank}, "state_slots"),
        ({"window_table": torch.full_like(rings, rank)}, "window_table"),
    )
    for changed, field in others:
        with pytest.raises(ConfigError, match=f"{field} must be the same on every rank"):
            plan_over_ranks(replace(batch, **changed), config, cache, ranks)
    plan = plan_over_ranks(**plain)
    hidden, positions = server.tokens([("a", 1)])
    given = inputs_of(layer, hidden, positions, plan, slice(None))
    sink = layer.sinks.float()
    wrong: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
        (replace(given, index=None), {}, ConfigError, "index is missing"),
        (replace(given, q=given.q[:, :1]), {}, ShapeError, "q must be"),
        (given, {"sink": sink[:1]}, ShapeError, r"sink must be \[H\]"),
        (given, {"raw": given.raw}, ConfigError, "raw must be None with CompressedInputs"),
        (None, {}, ConfigError, "projected must be of type CompressedInputs"),
    )
    for inputs, options, kind, sentence in wrong:
        with pytest.raises(kind, match=sentence):
            attend_over_ranks(inputs, None, cache, plan, **{"sink": sink, **options})
    for part, old in zip(cache.parts, before, strict=True):
        assert torch.equal(part.data.view(torch.uint8), old.view(torch.uint8))
    with pytest.raises(ConfigError, match=r"plan and cache must have .* ratio 4"):
        layer(hidden, positions, dense, plan)


def test_refusals(two_ranks: Processes) -> None:
    two_ranks.run(refused)


def any_steps(
    rank: int, steps: list[list[tuple[str, int]]], topk: int, heads: str, context: str
) -> None:
    options: dict[str, Any] = {"context": context, "ranks": {"heads": heads}}
    both = Both(make_layer(tiny_config(topk=topk), 4), length=900, **options)
    for wanted in steps:
        both.check(wanted)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.one_of(st.integers(0, 6), st.integers(100, 140))),
            min_size=1,
            max_size=3,
            unique_by=lambda each: each[0],
        ),
        min_size=1,
        max_size=6,
    ),
    topk=st.sampled_from([4, 30, 512]),
    heads=st.sampled_from(["all", "own"]),
    context=st.sampled_from(["auto", "place", "gather"]),
)
def test_any_v4_steps_over_two_ranks_equal_one_process(
    two_ranks: Processes, steps: Any, topk: int, heads: str, context: str
) -> None:
    two_ranks.run(any_steps, steps, topk, heads, context)


def many(rank: int) -> None:
    """More ranks than blocks, most of which then hold nothing."""
    for ratio, topk, context in product((4, 128), (8, 512), ("place", "gather", "auto")):
        both = Both(make_layer(tiny_config(topk=topk), ratio), context=context)
        for wanted in STEPS:
            both.check(wanted, padding=1)


@pytest.mark.slow
def test_more_ranks(many_ranks: Processes) -> None:
    many_ranks.run(many)


def sized(rank: int) -> None:
    """What `openmla size` counts is what a rank allocates."""
    config, N, ranks = tiny_config(), 3, Ranks(dist.group.WORLD)
    sizes = {"num_blocks": N, "block_size": BS, "max_requests": 5, "max_tokens": 5}
    caches = [
        rank_cache(config, ranks, layer=layer, format="bf16", index_format="index_fp32", **sizes)
        for layer in range(config.num_layers)
    ]
    split = Split(ranks.shard.size, "all")
    needed = room(Step(config, "bf16", "index_fp32", batch=5, ranks=split), BS)
    assert N * needed.block + needed.fixed == sum(cache.num_bytes for cache in caches)


def test_sizes(two_ranks: Processes) -> None:
    two_ranks.run(sized)
