"""merge_over_ranks: both schedules, against one softmax over all keys."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from openmla.errors import ConfigError, ShapeError
from openmla.parallel import merge_over_ranks
from openmla.ranks.merge import choose_schedule, sent_bytes, weigh
from tests.parallel.counted import counted_bytes
from tests.parallel.processes import Processes

H, V = 8, 5
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def everyones(size: int, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Partials [W, T, H, V] of all ranks and their lse: some saw no key, and what they hold is
    poison; the last row is seen by nobody."""
    generator = torch.Generator().manual_seed(size * 100 + T)
    outs = torch.randn(size, T, H, V, generator=generator, dtype=torch.float64).to(dtype)
    lses = torch.randn(size, T, H, generator=generator) * 9
    unseen = torch.rand(size, T, H, generator=generator) < 0.3
    unseen[:, -1:] = True
    lses[unseen] = -torch.inf
    outs[unseen] = torch.nan
    return outs, lses


def expected(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """By float64, rank by rank."""
    seen = lses.isfinite()
    weights = lses.double().masked_fill(~seen, -torch.inf)
    total = weights.logsumexp(0)
    shares = torch.where(seen, (weights - total).exp(), 0)
    values = outs.double().masked_fill(~seen[..., None], 0)
    return (shares[..., None] * values).sum(0), total


def merge_every_way(rank: int, size: int) -> None:
    for T, dtype, heads in product((0, 1, 6), DTYPES, ("all", "own")):
        outs, lses = everyones(size, T, dtype)
        out, lse = expected(outs, lses)
        own = slice(None) if heads == "all" else slice(rank * H // size, (rank + 1) * H // size)
        merged = {}
        for schedule in ("gather", "exchange", "auto"):
            mine, kept = outs[rank].clone(), lses[rank].clone()
            with counted_bytes() as counted:
                got = merge_over_ranks(mine, kept, dist.group.WORLD, heads=heads, schedule=schedule)
            assert torch.equal(mine.nan_to_num(), outs[rank].nan_to_num())  # inputs stay
            tolerance = max(4 * torch.finfo(dtype).eps, 1e-6)
            torch.testing.assert_close(got[0].double(), out[:, own], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(got[1].double(), lse[:, own], rtol=1e-6, atol=1e-6)
            assert got[0].dtype == dtype
            merged[schedule] = got
            if schedule != "auto":
                shape = (T, H, V)
                assert counted.num_bytes == sent_bytes(schedule, heads, shape, dtype, size)
        if size == 2:
            for a, b in zip(merged["gather"], merged["exchange"], strict=True):
                assert torch.equal(a, b), "the schedules must agree to the bit on two ranks"


def test_schedules_agree_with_one_softmax(two_ranks: Processes) -> None:
    two_ranks.run(merge_every_way, 2)


@pytest.mark.slow
def test_schedules_agree_on_more_ranks(many_ranks: Processes) -> None:
    if H % many_ranks.size == 0:
        many_ranks.run(merge_every_way, many_ranks.size)


def corrupt(rank: int) -> None:
    """One rank's lse, live or not before, and an out whose weight is nothing beside the other's."""
    for kind, owner in product((torch.inf, torch.nan), (0, 1)):
        outs, lses = everyones(2, 4, torch.float32)
        lses[:, 2, 5], outs[:, 2, 5] = 0.0, 1.0
        before = expected(outs, lses)
        lses[owner, 0, 1], lses[owner, 1, 6], lses[owner, 3, 7] = kind, kind, kind
        lses[owner, 2, 5], outs[owner, 2, 5] = -1e4, torch.nan
        bad = torch.zeros(4, H, dtype=torch.bool)
        bad[0, 1], bad[1, 6], bad[3, 7] = True, True, True
        for schedule, heads in product(("gather", "exchange"), ("all", "own")):
            own = slice(None) if heads == "all" else slice(rank * H // 2, (rank + 1) * H // 2)
            out, lse = merge_over_ranks(
                outs[rank], lses[rank], dist.group.WORLD, heads=heads, schedule=schedule
            )
            assert torch.equal(lse.isnan(), bad[:, own])
            assert out[bad[:, own]].isnan().all()
            if heads == "all":
                assert out[2, 5].isnan().all() and lse[2, 5] == 0
            bad_out = bad.clone()
            bad_out[2, 5] = True
            kept = ~bad_out[:, own]
            torch.testing.assert_close(
                out[kept].double(), before[0][:, own][kept], rtol=1e-5, atol=1e-5
            )


def test_nan_and_inf_of_one_rank_reach_all(two_ranks: Processes) -> None:
    two_ranks.run(corrupt)


def strided_inputs(rank: int) -> None:
    outs, lses = everyones(2, 4, torch.float32)
    out, lse = outs[rank], lses[rank]
    wide = torch.full((4, H, 2 * V), torch.nan)
    wide[..., :V] = out
    turned = lse.T.contiguous().T
    for schedule, heads in product(("gather", "exchange"), ("all", "own")):
        asked = {"heads": heads, "schedule": schedule}
        got = merge_over_ranks(wide[..., :V], turned, dist.group.WORLD, **asked)
        plain = merge_over_ranks(out, lse, dist.group.WORLD, **asked)
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


def test_strides_do_not_matter(two_ranks: Processes) -> None:
    two_ranks.run(strided_inputs)


def over_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "cp"))
    outs, lses = everyones(2, 3, torch.float32)
    got = merge_over_ranks(outs[rank], lses[rank], mesh["cp"])
    plain = merge_over_ranks(outs[rank], lses[rank], dist.group.WORLD)
    assert torch.equal(got[0], plain[0])
    with pytest.raises(ConfigError, match=r"group must be a device mesh .* got 2"):
        merge_over_ranks(outs[rank], lses[rank], mesh)


def test_device_meshes_are_groups(two_ranks: Processes) -> None:
    two_ranks.run(over_a_mesh)


def refused(rank: int) -> None:
    """Found on every rank by itself: nobody waits."""
    out, lse = torch.zeros(3, 3, 4), torch.zeros(3, 3)
    bad: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((out, lse, dist.group.WORLD, "own"), ShapeError, "H must be a multiple of the 2 ranks"),
        ((out, lse, dist.group.WORLD, "some"), ConfigError, "heads must be"),
        ((out, lse.bfloat16(), dist.group.WORLD, "all"), ShapeError, "lse float32 or float64"),
        ((out, lse[:2], dist.group.WORLD, "all"), ShapeError, r"got \(3, 3, 4\) and \(2, 3\)"),
        ((out, lse, None, "all"), ConfigError, "group must be a process group"),
    ]
    for arguments, kind, sentence in bad:
        *tensors, heads = arguments
        with pytest.raises(kind, match=sentence):
            merge_over_ranks(*tensors, heads=heads)
    with pytest.raises(ConfigError, match="schedule must be one of auto, gather, exchange"):
        merge_over_ranks(out, lse, dist.group.WORLD, schedule="ring")


def test_bad_input_is_refused(two_ranks: Processes) -> None:
    two_ranks.run(refused)


def test_a_group_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"torch.distributed is not initialized"):
        merge_over_ranks(torch.zeros(1, 1, 1), torch.zeros(1, 1), None)


def test_auto_takes_fewer_bytes() -> None:
    V3 = (4096, 128, 128)
    bf16 = torch.bfloat16
    assert choose_schedule(V3, bf16, 2, "all") == "exchange"
    assert choose_schedule(V3, bf16, 8, "all") == "gather"
    assert choose_schedule((1, 128, 128), bf16, 8, "all") == "exchange"  # little
    assert choose_schedule(V3, bf16, 8, "own") == "exchange"


@pytest.mark.parametrize("shared", [1e5, -1e7])
def test_weights_of_equal_ranks_sum_up_to_one(shared: float) -> None:
    """At 1e7 lse rounds by 1: a weight is a share of the weights' own sum."""
    weights, _ = weigh(torch.full((3, 1, 1), shared))
    torch.testing.assert_close(weights.sum(0), torch.ones(1, 1))
