"""MLAAttentionV4 with caches that round: what is rounded, when, and what becomes of the choice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openmla import warmup
from tests.layers.v4 import (
    CLOSE,
    LENGTH,
    RATIOS,
    STORED,
    TOPK,
    Server,
    as_bf16,
    as_fp8,
    attend_densely,
    hadamard_turned,
    known,
    make_layer,
    real_config,
    relative_error,
    sequence,
    serve,
    tiny_config,
)


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8", "fp8_dsv4"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_rounded_caches(ratio: int, format: str) -> None:
    """As the equations with the same rows rounded, but for a few that fall the other way."""
    layer, hidden = make_layer(real_config(), ratio), sequence(200)
    exact = attend_densely(layer, hidden).out
    rounded = attend_densely(layer, hidden, stored=STORED[format]).out
    out = serve(layer, hidden, [127, 1, 1, 71], format=format).outputs["r"]
    lost = relative_error(rounded, exact)
    assert lost > 1e-4
    assert relative_error(out, rounded) < 0.1 * lost


@pytest.mark.parametrize("ratio", RATIOS)
def test_scaled_caches(ratio: int) -> None:
    """Rows and entries are stored over the scale, read times it; states know none."""
    layer, hidden, exact = known(32, ratio)
    scale = 0.03

    def stored(rows: Tensor) -> Tensor:
        return STORED["fp8"](rows / scale) * scale

    rounded = attend_densely(layer, hidden, stored=stored).out
    out = serve(layer, hidden, [127, 1, 172], format="fp8", kv_scale=scale).outputs["r"]
    assert relative_error(out, rounded) < 0.1 * relative_error(rounded, exact.out)


@pytest.mark.parametrize("ratio", RATIOS)
def test_low_precision_layers_stay_close(ratio: int) -> None:
    layer, hidden = make_layer(tiny_config(topk=64), ratio), sequence(200)
    expected = attend_densely(layer, hidden).out
    server = Server(
        layer.to(torch.bfloat16),
        {"r": hidden.to(torch.bfloat16)},
        format="bf16",
        dtype=torch.bfloat16,
    )
    for n in (127, *[1] * 10, 63):
        server.step([("r", n)])
    assert relative_error(server.outputs["r"], expected) < 4 * torch.finfo(torch.bfloat16).eps


def rounded(rows: Tensor) -> Tensor:
    return as_fp8(as_bf16(rows))


@pytest.mark.parametrize("hadamard", [True, False])
def test_rounded_index_keys(hadamard: bool) -> None:
    """Queries and keys in fp8 choose what the equations choose after the same rounding."""
    layer, hidden = make_layer(real_config(), 4, hadamard=hadamard), sequence(LENGTH)
    server = Server(layer, {"r": hidden}, index_format="index_fp8")
    space = warmup(layer.config, server.cache, max_requests=1, max_tokens=LENGTH)
    server.step([("r", LENGTH)], workspace=space)

    def turned_around(rounding: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda rows: hadamard_turned(rounding(hadamard_turned(rows)))

    # float32 queries are not rounded to bf16 on their way, keys are
    key, query = (turned_around(f) if hadamard else f for f in (rounded, as_fp8))
    chosen = {
        "exact": attend_densely(layer, hidden).chosen,
        "rounded": attend_densely(layer, hidden, indexed=key, asked=query).chosen,
    }
    rows = [{entry for entry in row if entry >= 0} for row in space.selection.tolist()]
    alike = {
        name: sum(a == b for a, b in zip(rows[4 * TOPK + 4 :], each[4 * TOPK + 4 :], strict=True))
        for name, each in chosen.items()
    }
    total = len(rows) - 4 * TOPK - 4
    assert alike["rounded"] > 0.95 * total > alike["exact"] > 0.3 * total


def same_share(actual: Tensor, expected: Tensor) -> float:
    return float((actual == expected).double().mean())


@pytest.mark.parametrize("ratio", RATIOS)
def test_rows_are_rotated_then_rounded_then_quantised(ratio: int) -> None:
    """norm, rope, bf16, fp8: another order would change about every second rotated column."""
    layer, hidden = make_layer(real_config(), ratio), sequence(150)
    server = serve(layer, hidden, [150], format="fp8_dsv4")
    exact = attend_densely(layer, hidden)
    window = range(150 - 128, 150)
    wanted = STORED["fp8_dsv4"](exact.raw[window.start :])
    assert same_share(server.rows("window", "r", window), wanted) > 0.999
    if ratio:
        entries = range(150 // ratio)
        wanted = STORED["fp8_dsv4"](exact.entries)
        assert same_share(server.rows("compressed", "r", entries), wanted) > 0.999


@pytest.mark.parametrize("hadamard", [True, False])
def test_index_keys_are_quantised_last(hadamard: bool) -> None:
    """All 128 columns of a key share a scale, found after rope, the Hadamard rotation and bf16;
    without the last about 3 % of them would differ."""
    layer, hidden = make_layer(real_config(), 4, hadamard=hadamard), sequence(150)
    server = serve(layer, hidden, [150], index_format="index_fp8")
    keys = attend_densely(layer, hidden).keys
    keys = hadamard_turned(keys) if hadamard else keys
    assert same_share(server.rows("index", "r", range(37)), rounded(keys)) > 0.999


@pytest.mark.parametrize("hadamard_first", [True, False])
def test_hadamard_changes_no_choice(hadamard_first: bool) -> None:
    hidden, chosen, outs = sequence(LENGTH), [], []
    for hadamard in (hadamard_first, not hadamard_first):
        layer = make_layer(tiny_config(), 4, hadamard=hadamard)
        server = Server(layer, {"r": hidden})
        space = warmup(layer.config, server.cache, max_requests=1, max_tokens=LENGTH)
        server.step([("r", LENGTH)], workspace=space)
        chosen.append([set(row) for row in space.selection.tolist()])
        outs.append(server.outputs["r"])
    assert chosen[0] == chosen[1]
    assert relative_error(outs[0], outs[1]) < CLOSE
    assert chosen[0][-1] == attend_densely(layer, hidden).chosen[-1]
