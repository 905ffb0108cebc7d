"""attend_step into quantised buffers: every form and route, padding, sinks, replayed steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    attend_step,
    make_plan,
    make_selection,
    plan_buffers,
)
from openmla.ops import quantize_out
from openmla.outputs import QuantizedOutput, make_output
from openmla.plan import Plan
from tests.attention.known import DENSE, SPARSE, H, Requests, V
from tests.plan.groups import ends_of, expanded_of, masked_chunks, num_chosen

MIXED = ([3, 1, 60, 1], [60, 17, 140, 90])  # the third is expanded where that is cheaper
FORMATS = ["fp8", "nvfp4"]


def buffers(format: str, T: int, device: str) -> QuantizedOutput:
    out = make_output(format, T, H * V, global_scale=0.02 if format == "fp8" else 90, device=device)
    out.values.view(torch.uint8).fill_(0xA5)
    return out


def same(out: QuantizedOutput, expected: Tensor) -> None:
    """The bytes that quantize_out makes of the 16-bit step; on a GPU, where sums are in another
    order, nearly all of them."""
    device = out.values.device.type
    wanted = buffers(out.format, len(expected), device)
    quantize_out(
        wanted.values, wanted.scales, expected, wanted.global_scale, format=out.format,
        backend="reference",
    )  # fmt: skip
    parts = [(out.values, wanted.values)]
    if out.scales is not None and wanted.scales is not None:
        parts.append((out.scales, wanted.scales))
    for one, other in parts:
        differ = one.view(torch.uint8) != other.view(torch.uint8)
        assert float(differ.double().mean()) <= (0 if device == "cpu" else 0.02)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
def test_forms(form: str, format: str, device: str) -> None:
    requests = Requests(*MIXED, device=device)
    cache, batch = requests.part()
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, form=form, output=format)
    usual = (requests.projected, requests.absorbed, cache, plan)
    out = buffers(format, 65, device)
    assert attend_step(*usual, out=out) is out
    same(out, attend_step(*usual))
    if plan.group("absorbed") is not None and device == "cpu":
        assert ends_of(plan)["absorbed"] == "project_quantize"


@pytest.mark.parametrize("tokens", [4, 8, 32, 100])
def test_chunked_contexts(tokens: int, device: str) -> None:
    """Contexts in pieces: requests that go on in the next chunk, others that end, one without."""
    lens = [5, 3, 4, 6, 2], [30, 9, 4, 50, 11]
    requests = Requests(*lens, device=device)
    cache, batch = requests.part()
    plan = make_plan(
        batch, DENSE, cache, dtype=requests.dtype, form="expanded", workspace_tokens=tokens,
        output="fp8",
    )  # fmt: skip
    prefill = expanded_of(plan)
    assert prefill.route == "chunked"
    assert ends_of(plan) == {"expanded": "merge_quantize"}
    assert [(rows.start, rows.stop) for rows in prefill.alone] == [(8, 12)]
    ended = [rows for chunk in prefill.chunks if (rows := chunk.ended) is not None]
    found = sorted(t for rows in (*ended, *prefill.alone) for t in range(rows.start, rows.stop))
    assert found == list(range(20))  # each row is ended once
    assert any(chunk.continued is not None for chunk in prefill.chunks) == (tokens < 100)
    out = buffers("fp8", 20, device)
    usual = (requests.projected, requests.absorbed, cache, plan)
    attend_step(*usual, out=out)
    same(out, attend_step(*usual))
    assert "expanded by merge_quantize" in plan.explain()


@pytest.mark.parametrize("tokens", [4, 8, 32, 100])
def test_nan_of_a_context_row_outlives_its_chunk(tokens: int, device: str) -> None:
    """Its request's tokens are NaN however the context is cut, other requests' are not."""
    requests = Requests([5, 3, 4, 6, 2], [30, 9, 4, 50, 11], device=device)
    cache, batch = requests.part()
    assert cache.latent is not None
    cache.latent.data[batch.block_table[3, 2], 1] = torch.nan  # position 9 of request 3
    for output in (None, "fp8"):
        plan = make_plan(
            batch, DENSE, cache, dtype=requests.dtype, form="expanded", workspace_tokens=tokens,
            output=output,
        )  # fmt: skip
        out = attend_step(
            requests.projected, requests.absorbed, cache, plan,
            out=None if output is None else buffers("fp8", 20, device),
        )  # fmt: skip
        bad = (out.values.float() if isinstance(out, QuantizedOutput) else out).isnan().flatten(1)
        assert bad[12:18].all() and not bad[:12].any() and not bad[18:].any()


@pytest.mark.parametrize("format", FORMATS)
def test_sparse_outputs_are_quantized(format: str, device: str) -> None:
    requests = Requests([3, 80, 1], [80, 80, 17], SPARSE, device)
    chosen = requests.choices()
    cache, batch = requests.part()
    plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype, output=format)
    assert plan.select is not None and num_chosen(plan)
    assert masked_chunks(plan) or device != "cpu"
    selection = make_selection(requests.listed(chosen), cache, plan)
    out = buffers(format, 84, device)
    usual = (requests.projected, requests.absorbed, cache, plan)
    attend_step(*usual, selection=selection, out=out)
    same(out, attend_step(*usual, selection=selection))


@pytest.mark.parametrize("format", FORMATS)
def test_sink_is_applied_before_outputs_are_quantized(format: str, device: str) -> None:
    requests = Requests(*MIXED, device=device)
    cache, batch = requests.part()
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, output=format)
    sink = torch.randn(H, generator=torch.Generator().manual_seed(1)).to(device)
    out = buffers(format, 65, device)
    usual = (requests.projected, requests.absorbed, cache, plan)
    attend_step(*usual, sink=sink, out=out)
    same(out, attend_step(*usual, sink=sink))


def padded(requests: Requests, more: int) -> Any:
    parts = [
        torch.cat([t, t.new_full((more, *t.shape[1:]), torch.nan)]) for t in requests.projected
    ]
    return type(requests.projected)(*parts)


@pytest.mark.parametrize("format", FORMATS)
def test_a_replayed_step(format: str, device: str) -> None:
    """What fills up a captured step is quantised zeros."""
    requests = Requests([1, 1], [30, 17], device=device)
    cache, batch = requests.part()
    kept = plan_buffers(DENSE, cache, max_requests=4, max_tokens=4, max_blocks=8)
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, into=kept, output=format)
    usual = (padded(requests, 2), requests.absorbed, cache, plan)
    out = buffers(format, 4, device)
    attend_step(*usual, out=out)
    expected = attend_step(*usual)
    same(out, expected)
    assert not out.values[2:].view(torch.uint8).any()


@pytest.mark.parametrize("format", FORMATS)
def test_padding(format: str, device: str) -> None:
    requests = Requests(*MIXED, device=device)
    cache, batch = requests.part()
    assert batch.slot_mapping is not None
    slots = torch.cat([batch.slot_mapping, batch.slot_mapping.new_full((3,), -1)])
    batch = replace(batch, slot_mapping=slots, padding=3)
    plan = make_plan(
        replace(batch, slot_mapping=slots, padding=3),
        DENSE,
        cache,
        dtype=requests.dtype,
        output=format,
    )
    assert plan.padding == 3
    out = buffers(format, 68, device)
    usual = (padded(requests, 3), requests.absorbed, cache, plan)
    attend_step(*usual, out=out)
    same(out, attend_step(*usual))
    assert not out.values[65:].view(torch.uint8).any()


def step_of(format: str = "fp8", output: str | None = "fp8") -> tuple[Requests, Any, Plan]:
    requests = Requests(*MIXED)
    cache, batch = requests.part()
    return requests, cache, make_plan(batch, DENSE, cache, dtype=requests.dtype, output=output)


def test_explain_names_the_ops() -> None:
    _, _, plan = step_of()
    text = plan.explain()
    assert "output    fp8: absorbed by project_quantize" in text
    assert "quantize_out" in text and "project_quantize" in text
    _, _, plan = step_of(output=None)
    assert "output" not in plan.explain() and "quantize" not in plan.explain()
