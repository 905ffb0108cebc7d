"""One recorded step, replayed with other lengths, tables and rows: plans hold nothing but buffers.

On a GPU it is a CUDA graph over the Triton kernels; on a CPU the first plan itself is used again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from openmla import make_plan, plan_buffers
from tests.layers import v4
from tests.layers.families import make_peer
from tests.layers.serving import Server, record, relative_error, sequence

pytest.importorskip("transformers")
STEPS = [
    [("a", 2), ("b", 1)],
    [("a", 1), ("b", 2), ("c", 1)],
    [("c", 1)],
    [("b", 1), ("a", 1), ("d", 2), ("c", 2)],
    [("d", 1), ("a", 2)],
]


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_one_recording_serves_many_steps(family: str, device: str) -> None:
    peer = make_peer(family)
    hidden = {name: sequence(70, seed) for seed, name in enumerate("abcd")}
    wanted = {name: peer.full(rows) for name, rows in hidden.items()}
    server = Server(peer.ours, hidden, block_size=4, device=device)
    server.step([("a", 50), ("b", 9), ("c", 33), ("d", 1)])
    config, cache = peer.ours.config, server.cache
    buffers = plan_buffers(config, cache, max_requests=4, max_tokens=8, max_blocks=20)
    rows, positions = torch.zeros(8, 64, device=device), torch.zeros(8, device=device).long()
    backend = "auto" if device == "cpu" else "triton"
    replay, out = None, torch.empty(0)
    for step in STEPS:
        starts = {name: server.pool.seq_len(name) for name, _ in step}
        batch = server.batch(step)
        plan = make_plan(batch, config, cache, dtype=torch.float32, backend=backend, into=buffers)
        T = batch.num_tokens
        fresh = [hidden[name][starts[name] : starts[name] + n] for name, n in step]
        rows.fill_(7.0)[:T].copy_(torch.cat(fresh))
        at = [torch.arange(starts[name], starts[name] + n) for name, n in step]
        positions.zero_()[:T].copy_(torch.cat(at))
        if replay is None:
            replay, out = record(partial(peer.ours, rows, positions, cache, plan), device)
        before = [part.data.view(torch.uint8).clone() for part in cache.parts]
        replay()
        truth = [wanted[name][starts[name] : starts[name] + n] for name, n in step]
        assert relative_error(out[:T].cpu(), torch.cat(truth)) < 1e-5
        assert not out[T:].any()
        assert batch.slot_mapping is not None
        others = ~torch.isin(torch.arange(800), batch.slot_mapping).to(device)
        for part, kept in zip(cache.parts, before, strict=True):
            now = part.data.view(torch.uint8)
            assert torch.equal(now.flatten(0, 1)[others], kept.flatten(0, 1)[others])


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_rows_are_finished_op_by_op_all_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU without a kernel for latent_write: the same layer, the same cache."""
    results = []
    for whole in (True, False):
        monkeypatch.setattr("openmla.attention.write.in_one_launch", lambda *_, whole=whole: whole)
        if family == "deepseek_v4":
            server: Any = v4.Server(v4.make_layer(v4.tiny_config(), 4), {"a": v4.sequence(40)})
        else:
            server = Server(make_peer(family).ours, {"a": sequence(70)}, block_size=4)
        for n in (33, 1, 4):
            server.step([("a", n)])
        out = server.outputs["a"]
        out = out if family == "deepseek_v4" else torch.cat(out)
        parts = [part.data for part in server.cache.parts]
        results.append([out, *(data.view(torch.uint8) for data in parts)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
