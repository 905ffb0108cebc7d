"""Options of one process over two ranks: the same results, within what one process loses itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openmla import (
    AbsorbedWeights,
    Batch,
    IndexInputs,
    LayerCache,
    Projected,
    QuantizedOutput,
    attend_step,
    decode_output,
    make_output,
    make_plan,
    plan_buffers,
    select_step,
    warmup,
)
from openmla.layers.warm import run_steps
from openmla.layers.warm_v4 import run_compressed_steps
from openmla.parallel import Ranks, rank_buffers
from openmla.plan import Expanded, Plan
from openmla.plan.workspace import reserve
from openmla.testing.budgets import out_budget
from tests.layers.v4 import RATIOS, make_layer, tiny_config
from tests.parallel.counted import counted_bytes
from tests.parallel.processes import Processes
from tests.parallel.sparse import Sparse
from tests.parallel.stories import Story
from tests.parallel.v4 import Both

MIXED = ([1, 20, 3, 0, 12, 1], [30, 45, 17, 9, 12, 1])
HEADS = ("all", "own")


def own_heads(story: Story, heads: str) -> slice:
    H = story.config.num_heads // story.size
    return slice(None) if heads == "all" else slice(story.rank * H, (story.rank + 1) * H)


def attend(story: Story, plan: Plan, own: slice, **options: Any) -> Any:
    selection = None
    if isinstance(story, Sparse):
        selection = select_step(story.index(story.dtype), story.mine, plan)
    given = story.projected(story.dtype, own), story.absorbed(story.dtype, own), story.mine, plan
    return attend_step(*given, selection=selection, **options)


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


# ---- requests without tokens, in captured steps


def without_tokens(rank: int) -> None:
    """The tables of tokens are those of their requests, whoever brings none."""
    for heads, lens in product(
        HEADS, (([2, 0, 1], [39, 40, 40]), ([1, 1, 0], [9, 30, 8]), ([0, 0], [5, 6]))
    ):
        story = Story(*lens, padding=4 - sum(lens[0]))
        own = own_heads(story, heads)
        plan = story.planned(heads)[0]
        assert plan.ranks is not None
        buffers = rank_buffers(plan.config, story.mine, plan.ranks, max_tokens=4, max_blocks=8)
        out = attend(story, story.planned(heads, into=buffers)[0], own)
        peer = Story(*lens, padding=4 - sum(lens[0])).alone(story.dtype, form="absorbed")
        torch.testing.assert_close(out, peer[:, own], rtol=1e-4, atol=1e-5)


def test_captured_steps_with_requests_that_bring_no_tokens(two_ranks: Processes) -> None:
    two_ranks.run(without_tokens)


# ---- quantized outputs


def quantized(rank: int) -> None:
    """As far from the exact result as the quantized outputs of one process, but for chance."""
    formats = {"fp8": 0.01, "nvfp4": 0.01}
    for heads, context, (format, scale) in product(HEADS, ("place", "gather"), formats.items()):
        story = Story(*MIXED, padding=2)
        own = own_heads(story, heads)
        given: dict[str, Any] = {"device": "cpu", "global_scale": scale}
        story.alone(story.dtype, form="auto")  # which writes
        exact = story.alone(torch.float64, form="auto")[:, own].flatten(1)
        T, columns = exact.shape
        config, buffers = story.planned(heads)[0].config, make_output(format, T, columns, **given)
        one = make_plan(story.batch, config, story.one, dtype=story.dtype, output=format)
        inputs = story.projected(story.dtype, own), story.absorbed(story.dtype, own)
        alone = decode_output(attend_step(*inputs, story.one, one, out=buffers)).double()
        plan = story.planned(heads, context=context, output=format)[0]
        found = attend(story, plan, own, out=make_output(format, T, columns, **given))
        assert isinstance(found, QuantizedOutput)
        decoded = decode_output(found).double()
        assert not decoded[-2:].any(), "padding is 0"
        assert error(decoded, exact) < 1.2 * error(alone, exact), (heads, context, format)
        assert all(group.end for group in plan.groups)


def test_quantized_outputs(two_ranks: Processes) -> None:
    two_ranks.run(quantized)


# ---- eight bits


def eight_bits(rank: int, option: str, form: str) -> None:
    """Queries, or expanded queries and keys, in e4m3: as far from the exact result as the same
    option in one process, but for chance."""
    for heads, context in product(HEADS, ("place", "gather")):
        story = Story([7, 20, 3, 12], [30, 45, 17, 12], format="fp8")
        own = own_heads(story, heads)
        plain = story.alone(story.dtype, form=form)[:, own]
        alone = story.alone(story.dtype, form=form, **{option: "fp8"})[:, own]
        exact = story.alone(torch.float64, form=form)[:, own]
        out, plan = story.over_ranks(heads=heads, form=form, context=context, **{option: "fp8"})
        used = "quantize_queries" if option == "query_dtype" else "quantize_heads"
        assert used in plan.backends
        assert not torch.equal(alone, plain), "the option does something"
        errors = error(out, exact), error(alone, exact)
        assert errors[0] < 1.3 * errors[1], (heads, context, errors)


def test_fp8_queries(two_ranks: Processes) -> None:
    two_ranks.run(eight_bits, "query_dtype", "absorbed")


def test_fp8_prefill(two_ranks: Processes) -> None:
    two_ranks.run(eight_bits, "prefill_dtype", "expanded")


# ---- masked prefill


def masked(rank: int, format: str, run: int) -> None:
    """Prompts that select their keys, expanded: keys are gathered from all ranks and masked."""
    mixed = ([20, 9, 1, 3, 12, 0], [30, 40, 37, 4, 12, 9])
    for heads, space in product(HEADS, (None, 16)):
        story = Sparse(*mixed, format=format, run=run, padding=1)
        own = own_heads(story, heads)
        options: dict[str, Any] = {"form": "expanded", "workspace_tokens": space}
        outs = {}
        for dtype in (story.dtype, torch.float64):
            one = make_plan(story.batch, story.config, story.one, dtype=dtype, **options)
            selection = select_step(story.index(dtype), story.one, one)
            given = story.projected(dtype), story.absorbed(dtype), story.one, one
            write = dtype == story.dtype
            outs[dtype] = attend_step(*given, selection=selection, write=write)[:, own]
        plan = story.planned(heads, **options)[0]
        group = plan.group("masked")
        assert group is not None and isinstance(group.part, Expanded)
        assert all(chunk.brought is not None for chunk in group.part.chunks)
        assert plan.group("chosen") is None or list(plan.group("chosen").requests) == [2]  # type: ignore[union-attr]
        with counted_bytes() as counted:
            out = attend(story, plan, own)
        assert counted.num_bytes == plan.selection_bytes() + plan.sent_bytes(story.dtype)
        used = out_budget(out, outs[torch.float64], outs[story.dtype])
        assert used <= 1 and not out[-1].any(), (heads, space, used)
        assert "keys gathered from all ranks" in str(plan.explain())
        placed = story.planned(heads, context="place", **options)[0]
        assert placed.group("masked") is None
        out_budget_of_place = out_budget(
            attend(story, placed, own), outs[torch.float64], outs[story.dtype]
        )
        assert format.startswith("fp8") or out_budget_of_place <= 1


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8", "fp8_ds_mla"])
def test_masked_prefill(two_ranks: Processes, format: str, run: int) -> None:
    two_ranks.run(masked, format, run)


# ---- batch invariance


def invariant(rank: int, kind: str, format: str) -> None:
    """A request's outputs have the same bits alone and among others, on every rank."""
    make = Sparse if kind == "sparse" else Story
    for heads, form in product(HEADS, ("auto", "absorbed", "expanded")):
        story = make([3, 20, 1, 12], [30, 45, 17, 12], format=format, padding=1)
        own = own_heads(story, heads)
        options: dict[str, Any] = {"form": form, "batch_invariant": True, "workspace_tokens": 8}
        together = attend(story, story.planned(heads, **options)[0], own)
        first = 0
        for b, n in enumerate(story.query_lens):
            rows = slice(first, first + n)
            alone = attend_some(story, heads, own, b, rows, options)
            assert torch.equal(alone, together[rows]), (heads, form, b)
            first += n
        close = attend(story, story.planned(heads, form=form)[0], own)
        rtol, atol = (1e-4, 1e-5) if format == "fp32" else (0.1, 0.05)
        torch.testing.assert_close(together, close, rtol=rtol, atol=atol)


def attend_some(
    story: Story, heads: str, own: slice, b: int, rows: slice, options: dict[str, Any]
) -> Tensor:
    """One of a story's requests by itself."""
    whole = story.batch
    assert whole.slot_mapping is not None
    batch = Batch(
        [story.query_lens[b]],
        [story.seq_lens[b]],
        story.table[b : b + 1],
        whole.slot_mapping[rows],
    )
    planned = story.planned(heads)[0]
    given = {"dtype": story.dtype, "ranks": planned.ranks, **options}
    plan = make_plan(batch, planned.config, story.mine, **given)
    projected = Projected(*(each[rows] for each in story.projected(story.dtype, own)))
    selection = None
    if isinstance(story, Sparse):
        index = story.index(story.dtype)
        assert index.k_idx is not None
        index = IndexInputs(index.q_idx[rows], index.w_idx[rows], index.k_idx[rows])
        selection = select_step(index, story.mine, plan)
    weights = story.absorbed(story.dtype, own)
    out: Tensor = attend_step(projected, weights, story.mine, plan, selection=selection)
    return out


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_batch_invariance(two_ranks: Processes, kind: str, format: str) -> None:
    two_ranks.run(invariant, kind, format)


# ---- lengths that only the device knows


def device_lengths(rank: int, kind: str) -> None:
    """Upper bounds on the host, true lengths in a tensor: the results of the true ones."""
    make = Sparse if kind == "sparse" else Story
    for heads, captured in product(HEADS, (False, True)):
        story = make([1, 3, 2], [29, 13, 38], padding=2)
        own = own_heads(story, heads)
        peer = attend(story, story.planned(heads, form="absorbed")[0], own)
        true = torch.tensor(story.seq_lens, dtype=torch.int32)
        bounds = [S + extra for S, extra in zip(story.seq_lens, (2, 0, 1), strict=True)]
        batch = replace(story.batch, seq_lens=bounds, device_seq_lens=true)
        planned = story.planned(heads)[0]
        options: dict[str, Any] = {"dtype": story.dtype, "ranks": planned.ranks}
        if captured:
            assert planned.ranks is not None
            sizes = {"max_tokens": 8, "max_blocks": 6}
            options["into"] = rank_buffers(planned.config, story.mine, planned.ranks, **sizes)
        plan = make_plan(batch, planned.config, story.mine, **options)
        if captured:
            continue_rows = 8 - story.q.shape[0]
            story = padded(story, continue_rows)
        out = attend(story, plan, own)
        torch.testing.assert_close(out[: len(peer)], peer, rtol=1e-4, atol=1e-5)


def padded(story: Story, more: int) -> Story:
    """The same requests, with more tokens of no request behind them."""
    q = story.q
    story.padding += more
    story.q = torch.cat([q, q.new_zeros((more, *q.shape[1:]))])
    if isinstance(story, Sparse):
        story.q_idx = torch.cat(
            [story.q_idx, story.q_idx.new_zeros((more, *story.q_idx.shape[1:]))]
        )
        story.w_idx = torch.cat([story.w_idx, story.w_idx.new_zeros((more, story.w_idx.shape[1]))])
    return story


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_lengths_on_the_device(two_ranks: Processes, kind: str) -> None:
    two_ranks.run(device_lengths, kind)


def refused(rank: int) -> None:
    story = Story([1], [9])
    ranks = Ranks(dist.group.WORLD)
    given = (story.batch, story.config, story.mine)
    one = make_plan(story.batch, story.config, story.one, dtype=story.dtype)
    assert one.sent_bytes(story.dtype) == one.selection_bytes() == 0
    buffers = plan_buffers(story.config, story.mine, max_requests=1, max_tokens=1, max_blocks=8)
    for options, sentence in (
        ({"form": "chosen"}, "form must be auto, absorbed or expanded over ranks"),
        ({"beside": one}, "beside must be None for"),
        ({"context": "here"}, "context must be auto, place or gather"),
        ({"into": buffers, "form": "expanded"}, "form must be auto or absorbed with into="),
    ):
        with pytest.raises(Exception, match=sentence):
            make_plan(*given, dtype=story.dtype, ranks=ranks, **options)


def named_backends(rank: int) -> None:
    """A backend for each of several ops is the same choice on every rank."""
    ops = ("mqa_paged", "cache_write", "merge_states", "mha_ragged", "cache_gather")
    story = Story(*MIXED)
    backend = dict.fromkeys(ops if rank else reversed(ops), "reference")
    assert story.planned(backend=backend)[0].backends["mqa_paged"] == "reference"


def test_backends_by_op(two_ranks: Processes) -> None:
    two_ranks.run(named_backends)


def test_refusals(two_ranks: Processes) -> None:
    two_ranks.run(refused)


# ---- torch.compile


def compiled(rank: int, kind: str, form: str, context: str, one_graph: bool) -> None:
    """The results of the step as it is, by one graph for several lengths where `one_graph`."""
    make = Sparse if kind == "sparse" else Story

    def step(
        given: tuple[Projected, AbsorbedWeights],
        index: IndexInputs | None,
        cache: LayerCache,
        plan: Plan,
    ) -> Tensor:
        selection = None if index is None else select_step(index, cache, plan)
        out: Tensor = attend_step(*given, cache, plan, selection=selection)
        return out

    for heads in HEADS:
        torch._dynamo.reset()
        graph = torch.compile(step, backend="aot_eager", fullgraph=True)
        steps = ([3, 4], [30, 17]), ([5, 6], [28, 24]), ([7, 3], [10, 40])  # as many blocks
        for number, lens in enumerate(steps):
            story = make(*lens)
            own = own_heads(story, heads)
            options: dict[str, Any] = {"form": form, "context": context, "compiled": True}
            plan = story.planned(heads, check=False, workspace_tokens=256, **options)[0]
            given = story.projected(story.dtype, own), story.absorbed(story.dtype, own)
            index = story.index(story.dtype) if isinstance(story, Sparse) else None
            for tensor in (*given[0], *(index or ())):
                assert tensor is not None
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            peer = step(given, index, story.mine, plan)
            with torch._dynamo.config.patch(error_on_recompile=one_graph and number > 0):
                out = graph(given, index, story.mine, plan)
            torch.testing.assert_close(out, peer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "form", "context", "one_graph"),
    [
        ("dense", "absorbed", "place", True),
        ("dense", "expanded", "place", False),
        ("dense", "expanded", "gather", True),
        ("sparse", "absorbed", "place", False),
        ("sparse", "expanded", "gather", False),
    ],
)
def test_compiled_steps(
    two_ranks: Processes, kind: str, form: str, context: str, one_graph: bool
) -> None:
    two_ranks.run(compiled, kind, form, context, one_graph)


# ---- warm-up


def warmed(rank: int, kind: str) -> None:
    """Steps that warmup(ranks=) runs on a GPU, here on a CPU: they run, and nothing is written."""
    for heads in HEADS:
        story = (Sparse if kind == "sparse" else Story)([1], [30], BS=8)
        planned = story.planned(heads)[0]
        config, cache, ranks = planned.config, story.mine, planned.ranks
        assert ranks is not None
        sizes: dict[str, Any] = {"max_requests": 2, "max_tokens": 8, "dtype": story.dtype}
        space = warmup(config, cache, workspace_tokens=16, ranks=ranks, **sizes)
        before = [part.data.clone() for part in cache.parts]
        given: dict[str, Any] = {"dtype": story.dtype, "backend": "auto", "ranks": ranks}
        run_steps(config, cache, space, 2, 8, **given)
        for part, kept in zip(cache.parts, before, strict=True):
            assert torch.equal(part.data.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_warm_up_steps(two_ranks: Processes, kind: str) -> None:
    two_ranks.run(warmed, kind)


def warmed_v4(rank: int) -> None:
    for ratio in RATIOS:
        shared = Both(make_layer(tiny_config(), ratio)).shared
        config, cache, ranks = shared.layer.config, shared.cache, shared.ranks
        before = [part.data.clone() for part in cache.parts]
        space = reserve(config, cache, max_requests=2, max_tokens=12, dtype=torch.float32)
        run_compressed_steps(config, cache, space, 2, 12, torch.float32, "auto", ranks)
        for part, kept in zip(cache.parts, before, strict=True):
            assert torch.equal(part.data.view(torch.uint8), kept.view(torch.uint8))


def test_warm_up_steps_of_v4(two_ranks: Processes) -> None:
    two_ranks.run(warmed_v4)
