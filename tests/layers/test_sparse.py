"""MLAAttention with an indexer against transformers: every way to cut a sequence around K."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openmla import (
    PRESETS,
    Batch,
    ConfigError,
    LayerCache,
    MLAAttention,
    PagedCache,
    ShapeError,
    UnsupportedError,
    make_plan,
    plan_buffers,
)
from openmla.attention import IndexInputs, select_step
from openmla.backends import Problem, forget_choices
from openmla.cache import allocate_cache
from openmla.layers.indexer import hadamard_transform
from tests.layers.families import SPARSE, Peer, make_peer
from tests.layers.serving import Server, relative_error, sequence
from tests.plan.groups import forms_of, masked_chunks, num_chosen

pytest.importorskip("transformers")
K = 24
LENGTH = 90


def serve(peer: Peer, hidden: Tensor, lens: list[int], **options: Any) -> Server:
    server = Server(peer.ours, {"r": hidden}, block_size=4, **options)
    for n in lens:
        server.step([("r", n)])
    return server


WAYS = {
    "full": [LENGTH],
    "token-by-token": [1] * LENGTH,
    "up-to-K": [K, LENGTH - K],
    "K-1": [K - 1, 1, 1, 1, LENGTH - K - 2],
    "K+1": [K + 1, 3, LENGTH - K - 4],
    "multi-token": [3, 1, 5, 2] * 8 + [2],
    "one-then-all": [1, LENGTH - 1],
}


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", SPARSE)
def test_equals_transformers(family: str, way: str, form: str) -> None:
    """Whatever the steps and the route, the outputs are the module's over the whole sequence."""
    peer, hidden = make_peer(family), sequence(LENGTH)
    expected = peer.full(hidden)
    for workspace_tokens in (12, 4096):
        server = serve(peer, hidden, WAYS[way], form=form, workspace_tokens=workspace_tokens)
        assert relative_error(server.output("r"), expected) < 1e-5


@pytest.mark.parametrize("family", SPARSE)
def test_mixed_batches(family: str, device: str) -> None:
    """Short and long requests, prefill and decode in one step, in any order."""
    peer = make_peer(family)
    hidden = {name: sequence(80, seed) for seed, name in enumerate("abcd")}
    rng = random.Random(3)
    seen = set()
    for form in ("auto", "absorbed", "expanded"):
        server = Server(peer.ours, hidden, workspace_tokens=16, form=form, device=device)
        while any(server.pool.seq_len(name) < 80 for name in "abcd"):
            wanted = []
            for name in rng.sample("abcd", 4):
                rest = 80 - server.pool.seq_len(name)
                wanted.append((name, min(rng.choice([0, 1, 1, 2, 7, 30]), rest)))
            plan = server.step(wanted)
            forms = forms_of(plan)
            seen.add(("absorbed" in forms, "expanded" in forms, plan.select is None))
        for name in "abcd":
            assert relative_error(server.output(name), peer.full(hidden[name])) < 1e-5
    assert len(seen) >= 4  # the mixtures did come by


def test_both_routes_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request gathers its rows, another is masked; both are packed apart and put back."""
    peer = make_peer("deepseek_v32")
    hidden = {name: sequence(200, seed) for seed, name in enumerate("abc")}
    server = Server(peer.ours, hidden, num_blocks=400)
    server.step([("a", 60), ("b", 10), ("c", 40)])
    monkeypatch.setattr(
        "openmla.plan.routes.choose_sparse_absorbed", lambda config, n, S, **_: n < 5
    )
    plan = server.step([("c", 50), ("b", 3), ("a", 2)])
    assert plan.select is not None and num_chosen(plan) == 2
    assert masked_chunks(plan) and plan.group("absorbed") is not None
    assert "chosen" in plan.explain() and "masked" in plan.explain()
    for name in "abc":
        expected = peer.full(hidden[name])[: server.pool.seq_len(name)]
        assert relative_error(server.output(name), expected) < 1e-5


def test_enough_keys_for_all_is_dense() -> None:
    """With K no smaller than the context, sparse is dense to the last rounding."""
    config = PRESETS["tiny-v3.2"]
    assert config.indexer is not None
    torch.manual_seed(0)
    sparse = MLAAttention(replace(config, indexer=replace(config.indexer, topk=LENGTH)))
    dense = MLAAttention(replace(config, indexer=None))
    state = {n: t for n, t in sparse.state_dict().items() if not n.startswith("indexer.")}
    dense.load_state_dict(state)
    hidden = sequence(LENGTH)
    for form in ("absorbed", "expanded"):
        outs = []
        for layer in (sparse, dense):
            server = Server(layer, {"r": hidden}, form=form)
            for n in (50, 1, 39):
                server.step([("r", n)])
            outs.append(server.output("r"))
        assert relative_error(*outs) < 1e-6


@pytest.mark.parametrize("family", SPARSE)
def test_a_selection_of_everything_is_dense(family: str) -> None:
    """Through the sparse ops themselves: K one below the longest row, so only one key is missed."""
    peer, hidden = make_peer(family), sequence(LENGTH)
    indexer = peer.ours.config.indexer
    assert indexer is not None
    peer.ours.config = replace(peer.ours.config, indexer=replace(indexer, topk=LENGTH - 1))
    assert peer.ours.indexer is not None
    peer.ours.indexer.config = peer.ours.config
    peer.theirs.indexer.index_topk = LENGTH - 1  # type: ignore[union-attr]
    for form in ("absorbed", "expanded"):
        server = serve(peer, hidden, [LENGTH], form=form)
        assert server.plans[0].select is not None
        assert relative_error(server.output("r"), peer.full(hidden)) < 1e-5


def test_the_masked_route_equals_the_gathered_one() -> None:
    """Also where the cache rounds: both read the same bytes."""
    peer, hidden = make_peer("deepseek_v32"), sequence(LENGTH)
    for format in ("bf16", "fp8"):
        outs = [
            serve(peer, hidden, [40, 50], form=form, format=format).output("r")[K:]
            for form in ("absorbed", "expanded")
        ]
        assert relative_error(*outs) < 1e-5


def test_a_backend_that_takes_slots_only_is_given_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashMLA's; others look positions up themselves, and nothing maps them."""
    peer, hidden = make_peer("deepseek_v32"), sequence(LENGTH)
    plain = serve(peer, hidden, [40, 50], form="absorbed")
    assert "map_slots" not in plain.plans[1].explain()

    def refuse_positions(problem: Problem, _: str) -> str | None:
        return "takes slots" if problem.kinds == ("positions",) else None

    with monkeypatch.context() as patched:
        patched.setattr("openmla.plan.problems.why_not", refuse_positions)
        forget_choices()
        mapped = serve(peer, hidden, [40, 50], form="absorbed")
    forget_choices()
    assert "map_slots" in mapped.plans[1].explain()
    assert torch.equal(plain.output("r"), mapped.output("r"))


@pytest.mark.parametrize("format", ["index_bf16", "index_fp8", "index_fp8_exact"])
def test_rounded_index_keys_choose_nearly_the_same(format: str) -> None:
    peer, hidden = make_peer("deepseek_v32"), sequence(LENGTH)
    exact = serve(peer, hidden, [LENGTH])
    rounded = serve(peer, hidden, [LENGTH], index_format=format)
    assert relative_error(rounded.output("r"), exact.output("r")) < 0.3
    alike = (rounded.output("r") - exact.output("r")).norm(dim=1) < 1e-4
    # rows past K, the others have no choice; one key changed changes a row, and a choice that
    # ignored the scores would leave none alike
    assert alike[K:].float().mean() > 0.3


@pytest.mark.parametrize("index_format", ["index_fp32", "index_fp8"])
def test_hadamard_changes_no_product(index_format: str) -> None:
    peer, hidden = make_peer("deepseek_v32"), sequence(LENGTH)
    plain = serve(peer, hidden, [50, 1, 39], index_format=index_format).output("r")
    assert peer.ours.indexer is not None
    peer.ours.indexer.hadamard = True
    turned = serve(peer, hidden, [50, 1, 39], index_format=index_format).output("r")
    if index_format == "index_fp32":
        assert relative_error(turned, plain) < 1e-5
    else:  # other roundings: most rows choose the same keys
        assert ((turned - plain).norm(dim=1) < 1e-4)[K:].float().mean() > 0.3


def test_hadamard_transform_is_orthonormal() -> None:
    matrix = hadamard_transform(torch.eye(16, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T) and matrix.abs().unique().numel() == 1


def test_layers_share_a_selection() -> None:
    """A layer without an indexer attends to the keys the layer before chose."""
    config = PRESETS["tiny-glm-5.2"]
    torch.manual_seed(0)
    full, shared = (MLAAttention(config, layer=layer) for layer in (1, 2))
    assert full.indexer is not None and shared.indexer is None
    assert not any(name.startswith("indexer.") for name in shared.state_dict())
    shared.q_a_proj, shared.q_a_layernorm = full.q_a_proj, full.q_a_layernorm
    hidden = sequence(60)
    server = Server(full, {"r": hidden}, block_size=4)
    own = allocate_cache(config, num_blocks=200, block_size=4, format="fp32", layer=2)
    assert own.index is None
    plan = server.step([("r", 60)])
    positions = torch.arange(60)
    _, selection = full.attend(hidden, positions, server.cache, plan)
    assert selection is not None
    shared_out, passed = shared.attend(hidden, positions, own, plan, selection)
    assert passed is selection
    # the same layer with an indexer that chooses the same keys, by the same low-rank query
    twin = MLAAttention(config, layer=1)
    twin.load_state_dict({**full.state_dict(), **shared.state_dict()})
    twin_out, _ = twin.attend(hidden, positions, server.cache, plan)
    assert relative_error(shared_out, twin_out) < 1e-6
    with pytest.raises(ConfigError, match="MLAAttention: selection is missing: this layer has"):
        shared(hidden, positions, own, plan)
    later = make_plan(
        Batch([60], [60], server.pool.block_table(["r"]), torch.arange(60)),
        config,
        server.cache,
        dtype=torch.float32,
    )
    with pytest.raises(
        ConfigError, match=r"selection must be made with this plan .60 selecting tokens"
    ):
        shared.attend(hidden, positions, own, later, selection)


def test_rolled_back_tokens_leave_no_trace() -> None:
    """Speculative tokens are dropped and others take their place, in both caches."""
    peer, hidden = make_peer("deepseek_v32"), sequence(LENGTH)
    wrong = hidden.clone()
    wrong[40:47] = sequence(7, seed=9)
    server = Server(peer.ours, {"r": wrong}, block_size=4)
    server.step([("r", 40)])
    server.step([("r", 7)])
    server.pool.truncate("r", 42)
    server.outputs["r"] = [torch.cat(server.outputs["r"])[:40]]
    server.pool.truncate("r", 40)
    server.sequences["r"] = hidden
    for n in (5, 1, 44):
        server.step([("r", n)])
    assert relative_error(server.output("r"), peer.full(hidden)) < 1e-5


def test_captured_steps_pad_with_nothing() -> None:
    """Buffers larger than the step: real rows as ever, padded ones see and write nothing."""
    peer = make_peer("deepseek_v32")
    hidden = {name: sequence(60, seed) for seed, name in enumerate("ab")}
    server = Server(peer.ours, hidden, block_size=4)
    server.step([("a", 50), ("b", 9)])
    assert server.cache.latent is not None and server.cache.index is not None
    buffers = plan_buffers(
        peer.ours.config, server.cache, max_requests=4, max_tokens=8, max_blocks=20
    )
    batch = server.batch([("a", 2), ("b", 1)])
    assert batch.slot_mapping is not None
    untouched = [
        part.data.flatten(0, 1)[~torch.isin(torch.arange(800), batch.slot_mapping)].clone()
        for part in (server.cache.latent, server.cache.index)
    ]
    plan = make_plan(batch, peer.ours.config, server.cache, dtype=torch.float32, into=buffers)
    rows = torch.cat([hidden["a"][50:52], hidden["b"][9:10], torch.full((5, 64), 7.0)])
    positions = torch.tensor([50, 51, 9, 0, 0, 0, 0, 0])
    out = peer.ours(rows, positions, server.cache, plan)
    wanted = torch.cat([peer.full(hidden["a"][:52])[50:], peer.full(hidden["b"][:10])[9:]])
    assert relative_error(out[:3], wanted) < 1e-5
    assert not out[3:].any()
    for part, before in zip((server.cache.latent, server.cache.index), untouched, strict=True):
        after = part.data.flatten(0, 1)[~torch.isin(torch.arange(800), batch.slot_mapping)]
        assert torch.equal(after.view(torch.int32), before.view(torch.int32))


def test_index_keys_wait_for_everything_else() -> None:
    """Whatever is wrong with a step, in the layer or below it, no index key is written."""
    peer, hidden = make_peer("deepseek_v32"), sequence(30)
    layer, positions = peer.ours, torch.arange(30)
    server = Server(layer, {"r": hidden}, block_size=4)
    config, cache = layer.config, server.cache
    plan = make_plan(server.batch([("r", 30)]), config, cache, dtype=torch.float32)
    assert plan.select is not None and layer.indexer is not None
    before = [part.data.view(torch.uint8).clone() for part in cache.parts]

    def refused(message: str, call: Callable[[], Any]) -> None:
        with pytest.raises((ShapeError, UnsupportedError, RuntimeError), match=message):
            call()
        after = [part.data.view(torch.uint8) for part in cache.parts]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def run() -> Tensor:
        return layer(hidden, positions, cache, plan)

    for owner, name, wrong, message in (
        (layer, "kv_b_proj", nn.Linear(32, 161, bias=False), "weights: kv_b_proj must be"),
        (layer, "kv_b_proj", nn.Linear(32, 160), "kv_b_proj has a bias"),
        (layer, "kv_a_proj_with_mqa", nn.Linear(64, 41), r"step: k_pe must be \[T, R\] = \(30"),
        (layer.indexer, "wq_b", nn.Linear(15, 256), "mat1 and mat2 shapes cannot be multiplied"),
        (layer.indexer, "weights_proj", nn.Linear(63, 16), "mat1 and mat2 shapes"),
    ):
        right = getattr(owner, name)
        setattr(owner, name, wrong.requires_grad_(False))
        refused(message, run)
        setattr(owner, name, right)
    refused(
        "hidden must be torch.float32 like", lambda: layer(hidden.half(), positions, cache, plan)
    )
    queries, weights, keys = torch.zeros(30, 16, 16), torch.zeros(30, 16), torch.zeros(30, 16)
    for inputs, message in (
        (IndexInputs(queries, weights.half(), keys), r"select: w_idx must be torch\.float32 like"),
        (IndexInputs(queries.to("meta"), weights, keys), "select: q_idx must be on cpu, got meta"),
        (IndexInputs(queries[:29], weights, keys), "select: q_idx must be"),
    ):
        refused(message, partial(select_step, inputs, cache, plan))
    assert run().isfinite().all()


def test_missing_parts_are_told_and_nothing_is_written() -> None:
    peer, hidden = make_peer("deepseek_v32"), sequence(30)
    server = Server(peer.ours, {"r": hidden}, block_size=4)
    batch = server.batch([("r", 30)])
    config, cache = peer.ours.config, server.cache
    assert cache.latent is not None and cache.index is not None
    with pytest.raises(ConfigError, match="plan: cache must have index rows for deepseek_v32"):
        make_plan(batch, config, LayerCache(latent=cache.latent), dtype=torch.float32)
    one = torch.tensor(1.0)
    swapped = LayerCache(
        latent=cache.latent, index=PagedCache(torch.zeros(200, 4, 16), "fp32", one)
    )
    with pytest.raises(ConfigError, match="format 'fp32' is not known for index rows"):
        make_plan(batch, config, swapped, dtype=torch.float32)
    other = PagedCache(torch.zeros(100, 8, 16), "index_fp32", one)
    with pytest.raises(ConfigError, match=r"plan: index rows .* 200 blocks of 4"):
        make_plan(batch, config, LayerCache(latent=cache.latent, index=other))
    plan = make_plan(batch, config, cache, dtype=torch.float32)
    wide = allocate_cache(
        config, num_blocks=200, block_size=8, format="fp32", index_format="index_fp32"
    )
    with pytest.raises(
        ConfigError, match="must have 200 blocks of 4 tokens like the cache of the plan, got 200"
    ):
        peer.ours(hidden, torch.arange(30), wide, plan)
    assert not any(part.data.any() for part in wide.parts)
    plan = make_plan(batch, config, cache, dtype=torch.float32)
    state = {n: t for n, t in peer.ours.state_dict().items() if "wq_b" not in n}
    with pytest.raises(RuntimeError, match=r"Missing key.*indexer\.wq_b\.weight"):
        MLAAttention(config).load_state_dict(state)
