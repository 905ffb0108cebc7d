"""What engines ask of a step: lengths only the device knows beside exact ones, and padded rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import plan_buffers
from tests.layers.engine import (
    KINDS,
    Setting,
    assert_true,
    bytes_of,
    cut_to,
    describe,
    make_setting,
    plan_of,
    tokens_of,
)

pytest.importorskip("transformers")


def run(setting: Setting, batch: Any, rows: int, **options: Any) -> None:
    """One forward over the step's tokens and `rows` in all, the others NaN; checks all outputs."""
    plan = plan_of(setting, batch, **options)
    tokens, positions = tokens_of(setting, batch)
    hidden = tokens.new_full((rows, tokens.shape[1]), float("nan"))
    hidden[: len(tokens)] = tokens
    places = positions.new_zeros(rows)
    places[: len(tokens)] = positions
    assert_true(
        setting, setting.server.layer(hidden, places, setting.server.cache, plan), positions
    )


def buffers_for(setting: Setting, max_requests: int, each: int) -> dict[str, torch.Tensor]:
    server = setting.server
    sizes: Any = {"max_requests": max_requests, "max_tokens": each * max_requests, "max_blocks": 30}
    return plan_buffers(server.layer.config, server.cache, **sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_lengths_beside_those_of_the_device(kind: str | int, device: str) -> None:
    """Drafted rows of unknown length beside a chunk of a prompt: each gets what it should."""
    setting = make_setting(kind, device)
    setting.server.step([("a", 50), ("b", 9), ("c", 5)])
    for wanted in (
        [("a", 2), ("c", 40), ("b", 1)],
        [("b", 3), ("a", 1), ("c", 20)],
        [("c", 10), ("d", 30), ("b", 3)],
    ):
        batch = describe(setting, wanted, slack=3, drafted="ab")
        run(setting, batch, batch.num_tokens)
        cut_to(setting, batch, wanted)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows(kind: str | int, captured: bool, device: str) -> None:
    """Requests of no tokens and tokens of no request: nothing read, nothing written, outputs 0."""
    setting = make_setting(kind, device)
    setting.server.step([("a", 50), ("b", 9), ("c", 33)])
    buffers = buffers_for(setting, 6, 2) if captured else None
    columns = 0 if buffers is None else buffers.get("window_table", torch.empty(0, 0)).shape[1]
    for wanted, padding in (
        ([("a", 2), ("c", 0), ("b", 1), ("h", 0)], 3),  # h has never had a token
        ([("h", 0), ("g", 0)], 2),  # nobody has
        ([("h", 0), ("b", 2), ("c", 1), ("a", 0)], 0),
        ([], 4),
        ([("g", 2), ("a", 1)], 1),
    ):
        batch = describe(setting, wanted, padding=padding, window_columns=columns)
        for b, (_, n) in enumerate(wanted):
            batch.block_table[b] = batch.block_table[b] if n else -1
        before = bytes_of(setting)
        run(setting, batch, batch.num_tokens if buffers is None else 12, into=buffers)
        if not any(n for _, n in wanted):
            pairs = zip(before, bytes_of(setting), strict=True)
            assert all(torch.equal(kept, now) for kept, now in pairs)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_slots_that_are_on_the_device(
    kind: str | int, captured: bool, device: str
) -> None:
    """As engines keep them, padded already: taken as they are."""
    setting = make_setting(kind, device)
    setting.server.step([("a", 50), ("b", 9), ("c", 33)])
    buffers = buffers_for(setting, 6, 2) if captured else None
    columns = 0 if buffers is None else buffers.get("window_table", torch.empty(0, 0)).shape[1]
    for wanted in ([("a", 2), ("b", 1), ("h", 0)], [("b", 2), ("g", 0), ("c", 1), ("a", 1)]):
        batch = describe(setting, wanted, slack=2, drafted="a", padding=3, window_columns=columns)
        tables = {
            name: tensor.to(device)
            for name in ("block_table", "slot_mapping", "window_table", "state_slots")
            if (tensor := getattr(batch, name)) is not None
        }
        batch = replace(batch, **tables)
        run(setting, batch, batch.num_tokens if buffers is None else 12, into=buffers)
        cut_to(setting, batch, wanted)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_padding_behind_prompts(kind: str, form: str, device: str) -> None:
    """Whatever the form, with and without context, dense and chosen; slots of others stay."""
    setting = make_setting(kind, device)
    for wanted in ([("a", 30), ("b", 0), ("c", 9)], [("c", 40), ("a", 7)], [("b", 3)]):
        batch = describe(setting, wanted, padding=5)
        before = bytes_of(setting)
        run(setting, batch, batch.num_tokens, form=form)
        assert batch.slot_mapping is not None
        for kept, now in zip(before, bytes_of(setting), strict=True):
            others = torch.ones(kept.shape[0] * kept.shape[1], dtype=torch.bool, device=device)
            others[batch.slot_mapping[: -batch.padding].to(device)] = False
            assert torch.equal(kept.flatten(0, 1)[others], now.flatten(0, 1)[others])


@pytest.mark.parametrize("kind", KINDS)
def test_exact_lengths_in_a_captured_step(kind: str | int, device: str) -> None:
    """All rows decode there; exact ones are checked, and padding comes on top."""
    setting = make_setting(kind, device)
    setting.server.step([("a", 50), ("b", 9), ("c", 33)])
    buffers = buffers_for(setting, 5, 4)
    columns = buffers["window_table"].shape[1] if "window_table" in buffers else 0
    for wanted in ([("a", 2), ("c", 1), ("b", 1)], [("b", 4), ("d", 0), ("c", 3)]):
        batch = describe(setting, wanted, slack=3, drafted="ab", padding=2, window_columns=columns)
        run(setting, batch, 20, into=buffers)
        cut_to(setting, batch, wanted)
