"""MLAAttentionV4 is its equations, and transformers' module, however a sequence is cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from openmla import MLAAttentionV4, Plan, warmup
from openmla.backends import Problem, forget_choices, runner
from openmla.plan.types import ScoreChunk, Select
from tests.layers.v4 import (
    CLOSE,
    HIDDEN,
    LENGTH,
    RATIOS,
    TOPK,
    Server,
    attend_densely,
    known,
    make_layer,
    make_peer,
    normed,
    real_config,
    relative_error,
    sequence,
    serve,
    tiny_config,
)
from tests.plan.groups import absorbed_of


def entries_seen(ratio: int, p: int) -> int:
    return (p + 1) // ratio if ratio else 0


@pytest.mark.parametrize("window", [32, 128])
@pytest.mark.parametrize("ratio", RATIOS)
def test_equations_equal_transformers(ratio: int, window: int) -> None:
    pytest.importorskip("transformers")
    layer, hidden, dense = known(window, ratio)
    assert relative_error(make_peer(layer).full(hidden), dense.out) < CLOSE
    loaded = MLAAttentionV4(layer.config, layer=RATIOS.index(ratio))
    loaded.load_state_dict(make_peer(layer).theirs.state_dict())
    assert relative_error(serve(loaded, hidden, [LENGTH]).outputs["r"], dense.out) < CLOSE


@pytest.mark.parametrize("ratio", RATIOS)
def test_real_rows_equal_transformers(ratio: int) -> None:
    """512 columns, 64 rotated, YaRN 16 x 65536, indexer keys of 128."""
    pytest.importorskip("transformers")
    layer, hidden = make_layer(real_config(), ratio), sequence(LENGTH)
    dense = attend_densely(layer, hidden)
    assert relative_error(make_peer(layer).full(hidden), dense.out) < CLOSE
    for lens in ([LENGTH], [127, 1, 1, 126, 1, 44]):
        assert relative_error(serve(layer, hidden, lens).outputs["r"], dense.out) < CLOSE


@pytest.mark.parametrize("ratio", RATIOS)
def test_scaled_cos_and_sin_equal_transformers(ratio: int) -> None:
    pytest.importorskip("transformers")
    config = tiny_config()
    assert config.compressor is not None
    rope = replace(config.compressor.rope, attention_factor=1.5)
    layer = make_layer(replace(config, compressor=replace(config.compressor, rope=rope)), ratio)
    hidden = sequence(LENGTH)
    expected = make_peer(layer).full(hidden)
    assert relative_error(serve(layer, hidden, [LENGTH]).outputs["r"], expected) < CLOSE


def _random_cuts() -> list[int]:
    rng, lens = random.Random(5), [0]
    while sum(lens) < LENGTH:
        lens.append(min(rng.randint(1, 23), LENGTH - sum(lens)))
    return lens[1:]


WAYS = {
    "whole": [LENGTH],
    "token-by-token": [1] * LENGTH,
    "entry-1": [3, *[4] * 30, LENGTH - 123],
    "entry": [4] * (LENGTH // 4),
    "entry+1": [5, *[4] * 30, LENGTH - 125],
    "31-32-33": [31, 1, 1, 1, 30, LENGTH - 64],
    "127-128-129": [127, 1, 1, LENGTH - 129],
    "128": [128, 128, LENGTH - 256],
    "255-257": [255, 2, LENGTH - 257],
    "one-then-all": [1, LENGTH - 1],
    "random": _random_cuts(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [32, 128])
@pytest.mark.parametrize("ratio", RATIOS)
def test_any_steps_give_the_equations(ratio: int, window: int, way: str) -> None:
    layer, hidden, dense = known(window, ratio)
    server = serve(layer, hidden, WAYS[way])
    assert relative_error(server.outputs["r"], dense.out) < CLOSE


@pytest.mark.parametrize("p", [0, 2, 3, 7, 126, 127, 128])
@pytest.mark.parametrize("ratio", RATIOS)
def test_first_tokens(ratio: int, p: int) -> None:
    """A first row, a first entry, a first overlapped one, a first row that leaves the window."""
    layer, hidden, dense = known(128, ratio)
    server = serve(layer, hidden, [n for n in (p, 1) if n])
    assert relative_error(server.outputs["r"][-1], dense.out[p]) < CLOSE
    assert len(dense.chosen[p]) == min(entries_seen(ratio, p), TOPK if ratio == 4 else p)
    for name in ("compressed", "index"):
        part = getattr(server.cache, name)
        if part is not None:
            written = int((~part.data.isnan()).all(-1).sum())
            assert written == entries_seen(ratio, p)


def test_a_row_leaves_the_window() -> None:
    """Without entries a token depends on its last 128 and on nothing else."""
    layer, hidden, _ = known(128, 0)
    other = hidden[:130].clone()
    other[0] = sequence(1, seed=9)
    one, two = (serve(layer, each, [130]).outputs["r"] for each in (hidden[:130], other))
    moved = (one - two).norm(dim=1) > 1e-4
    assert bool(moved[:128].all()) and not bool(moved[128:].any())


def test_an_entry_is_seen_by_the_token_that_finishes_it() -> None:
    """Tokens 0..3 leave the window of 1, and come back to token 3 as entry 0."""
    config = tiny_config(window=1)
    layer, hidden = make_layer(config, 4), sequence(8)
    other = hidden.clone()
    other[0] = sequence(1, seed=9)
    one, two = (serve(layer, each, [8]).outputs["r"] for each in (hidden, other))
    moved = ((one - two).norm(dim=1) > 1e-4).tolist()
    assert moved == [True, False, False, True, True, True, True, True]


def forced(plan: Plan, num_keys: int) -> Plan:
    """The same step, with entries scored and chosen even where all of them will be."""
    step, everyone = plan.shared, slice(0, plan.num_tokens)
    assert step is not None and plan.select is None
    seen = (step.positions.int() + 1) // plan.ratio
    select = Select(
        rows=everyone,
        block_table=step.block_table,
        row_starts=torch.zeros_like(seen),
        first_keys=torch.arange(TOPK, dtype=torch.int32),
        row_lens=seen,
        topk_lens=seen.clamp(max=TOPK),
        start_locs=(step.query_start_loc,),
        num_rows=plan.num_tokens,
        chunks=(ScoreChunk(everyone, num_keys),),
        query_bytes=0,
    )
    (group,), part = plan.groups, absorbed_of(plan)
    window, entries = part.reads
    part = replace(part, reads=(window, replace(entries, kind="listed", span=0)))
    group = replace(group, form="chosen", part=part, selected=everyone)
    return replace(plan, groups=(group,), select=select)


@pytest.mark.parametrize("num_entries", [TOPK - 1, TOPK, TOPK + 1])
def test_few_entries_need_no_choice(num_entries: int) -> None:
    """Around TOPK: the short way and the indexer's give the same set and the same numbers."""
    layer, hidden, dense = known(32, 4)
    for length in (4 * num_entries, 4 * num_entries + 3):
        server = Server(layer, {"r": hidden})
        wanted = [("r", length)]
        space = warmup(layer.config, server.cache, max_requests=1, max_tokens=64)
        plan = server.plan(server.batch(wanted), workspace=space)
        assert plan.pool is not None and plan.pool.max_entries == num_entries
        assert (plan.select is not None) == (num_entries > TOPK)
        if plan.select is None:
            out = layer(*server.tokens(wanted), server.cache, plan)
            assert relative_error(out, dense.out[:length]) < CLOSE
            plan = forced(plan, 32)
        space.selection.fill_(77)
        out = layer(*server.tokens(wanted), server.cache, plan)
        assert relative_error(out, dense.out[:length]) < CLOSE
        for p, row in enumerate(space.selection[:length].tolist()):
            listed = [entry for entry in row if entry >= 0]
            assert len(listed) == min((p + 1) // 4, TOPK) and set(listed) == dense.chosen[p]
        assert bool((space.selection[length:] == 77).all())


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, 2.0, 60.0, torch.inf])
@pytest.mark.parametrize("ratio", RATIOS)
def test_sinks(ratio: int, sink: float) -> None:
    """One head has the sink; with -inf it is as if there were none, with +inf it says nothing."""
    layer, hidden = make_layer(tiny_config(), ratio), sequence(150)
    layer.sinks[1] = sink
    out = serve(layer, hidden, [100, 1, 49]).outputs["r"]
    assert relative_error(out, attend_densely(layer, hidden).out) < CLOSE
    if sink == torch.inf:
        layer.sinks.fill_(sink)
        assert not serve(layer, hidden, [100, 1, 49]).outputs["r"].any()


@pytest.mark.parametrize("ratio", RATIOS)
def test_mixed_batches(ratio: int, device: str) -> None:
    """Prefill, extension, decode and idle requests in one step, in any order."""
    layer = make_layer(tiny_config(), ratio)
    names, length = "abcde", 160
    hidden = {name: sequence(length, seed) for seed, name in enumerate(names)}
    expected = {name: attend_densely(layer, hidden[name]).out for name in names}
    rng = random.Random(3)
    server = Server(layer, hidden, device=device)
    seen = set()
    while any(server.pool.seq_len(name) < length for name in names):
        wanted = []
        for name in rng.sample(names, 5):
            rest = length - server.pool.seq_len(name)
            wanted.append((name, min(rng.choice([0, 0, 1, 1, 2, 7, 40]), rest)))
        if not any(n for _, n in wanted):
            continue
        seen |= {(min(n, 3), server.pool.seq_len(name) > 0) for name, n in wanted}
        server.step(wanted)
    assert len(seen) == 8  # nothing, one, two and many tokens; first ones and later ones
    for name in names:
        assert relative_error(server.outputs[name], expected[name]) < CLOSE


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_step_without_tokens(ratio: int) -> None:
    layer, hidden, dense = known(32, ratio)
    server = serve(layer, hidden, [50, 0, 50])
    assert relative_error(server.outputs["r"], dense.out[:100]) < CLOSE


def test_only_the_query_position_is_rotated_back() -> None:
    """A window of one: the key stands where the query does, and the latent comes out as it was."""
    config = tiny_config(window=1)
    layer = make_layer(config, 0)
    layer.sinks.fill_(-torch.inf)
    token = sequence(1)
    out = serve(layer, token.expand(80, HIDDEN), [50, *[1] * 5, 25]).outputs["r"]
    latent = normed(token @ layer.kv_proj.weight.T, config.latent_eps, layer.kv_norm.weight)
    heads = latent.expand(config.num_heads, -1)
    expected = layer.o_b_proj(layer.o_a_proj(heads.reshape(1, 2, -1)))
    torch.testing.assert_close(out, expected.expand(80, -1), rtol=1e-4, atol=1e-5)


def test_only_distances_count() -> None:
    """The same token over and over: once the window is full, one position is like another."""
    layer = make_layer(tiny_config(), 0)
    out = serve(layer, sequence(1).expand(120, HIDDEN), [64, *[1] * 4, 52]).outputs["r"]
    torch.testing.assert_close(out[31:], out[31:32].expand(89, -1), rtol=1e-4, atol=1e-5)
    assert relative_error(out[30], out[31]) > 1e-3


def test_window_only_layers_can_be_stretched() -> None:
    """The reference model leaves their rope alone; an engine that stretches it is matched."""
    layer, hidden, dense = known(32, 0)
    config = layer.config
    assert config.compressor is not None and config.rope.kind == "default"
    yarn = replace(config.compressor.rope, theta=config.rope.theta)
    stretched = make_layer(replace(config, rope=yarn), 0)
    out = serve(stretched, hidden, [200, 100]).outputs["r"]
    assert relative_error(out, attend_densely(stretched, hidden).out) < CLOSE
    assert relative_error(out, dense.out) > 1e-2
    others = make_layer(replace(config, rope=yarn), 4)
    assert relative_error(serve(others, hidden, [300]).outputs["r"], known(32, 4)[2].out) < CLOSE


def test_draft_layers_have_a_window_only() -> None:
    config, hidden = tiny_config(), sequence(100)
    layer = make_layer(config, 0, number=7)
    assert layer.ratio == 0 and layer.compressor is None
    assert not any(name.startswith("compressor") for name in layer.state_dict())
    server = Server(layer, {"r": hidden}, number=7)
    assert server.cache.parts == (server.cache.window,)
    for n in (60, 1, 39):
        server.step([("r", n)])
    assert relative_error(server.outputs["r"], attend_densely(layer, hidden).out) < CLOSE


def test_scores_in_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, hidden, dense = known(32, 4)
    monkeypatch.setattr("openmla.plan.groups.LOGITS_BYTES", 4 * 600)
    server = serve(layer, hidden, [150, 150])
    step = server.plans[1].select
    assert step is not None and len(step.chunks) > 10 and step.score_bytes <= 4 * 600
    assert relative_error(server.outputs["r"], dense.out) < CLOSE


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("ratio", RATIOS)
def test_compiles_without_breaks(ratio: int) -> None:
    layer, hidden, dense = known(32, ratio)
    server = serve(layer, hidden, [120])
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for n in (9, 3):
        wanted = [("r", n)]
        plan = server.plan(server.batch(wanted))
        out = compiled(*server.tokens(wanted), server.cache, plan)
        end = server.pool.seq_len("r")
        assert relative_error(out, dense.out[end - n : end]) < CLOSE


@pytest.mark.parametrize("index_format", ["index_fp32", "index_fp8"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_plans_ask_backends_what_ops_ask(
    ratio: int, index_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a plan would name a backend that its step then refuses."""
    layer, hidden, _ = known(32, ratio)
    server = Server(layer, {"r": hidden}, format="bf16", index_format=index_format)
    plan = server.plan(server.batch([("r", 100)]))
    asked: list[Problem] = []

    def recorded(problem: Problem, backend: str) -> object:
        asked.append(problem)
        return runner(problem, backend)

    ops = {"latent_write", "mqa_sparse", *(["compress_kv"] if ratio else [])}
    ops |= {"index_logits"} if ratio == 4 else set()
    forget_choices()  # or a call of an earlier test would have decided
    monkeypatch.setattr("openmla.ops._register.runner", recorded)
    layer(*server.tokens([("r", 100)]), server.cache, plan)
    assert ops <= {problem.op for problem in asked}
    for op in ops:
        assert plan.problem(op) in asked
