"""Bytes that fit, bytes moved and sent, the roofline: beside caches made and steps measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from openmla import PRESETS, allocate_cache
from openmla.cli.roofline import Machine, layer_costs, predict, roof, sent_bytes
from openmla.cli.sizes import (
    HEADS,
    Kind,
    Split,
    Step,
    kinds,
    room,
    token_bytes,
    tokens_that_fit,
)
from openmla.errors import ConfigError
from openmla.ops._register import Cost

RESULTS = Path(__file__).parents[2] / "bench" / "results"
H200 = Machine(memory=141e9, bandwidth=4.8e12, flops=989e12)
V3, V32 = PRESETS["deepseek-v3"], PRESETS["deepseek-v3.2"]


@pytest.mark.parametrize("name", ["tiny-v3", "tiny-v3.2", "tiny-glm-5.2", "tiny-v4"])
@pytest.mark.parametrize("format", ["bf16", "fp32", "fp8"])
def test_room_is_what_allocate_cache_takes(name: str, format: str) -> None:
    config, N, BS = PRESETS[name], 3, 128
    step = Step(config, format, batch=5)
    caches = [
        allocate_cache(
            config, num_blocks=N, block_size=BS, format=format, layer=layer, max_requests=5,
            max_tokens=5,
        )
        for layer in range(config.num_layers)
    ]  # fmt: skip
    needed, made = room(step, BS), sum(cache.num_bytes for cache in caches)
    assert made == N * needed.block + needed.fixed
    assert tokens_that_fit(step, made, BS) == N * BS
    assert tokens_that_fit(step, made - 1, BS) == (N - 1) * BS
    assert tokens_that_fit(step, 0, BS) == 0
    assert (needed.fixed > 0) == (config.compressor is not None)
    assert token_bytes(step).total <= needed.block / BS


def test_bytes_of_a_token_of_released_models() -> None:
    assert token_bytes(Step(V3, "bf16")) == (61 * 1152, 0)
    assert token_bytes(Step(V3, "fp8_ds_mla")) == (61 * 656, 0)
    assert token_bytes(Step(V32, "fp8_ds_mla")) == (61 * 656, 61 * 132)
    glm = PRESETS["glm-5.2"]  # three layers of four take the selection of the one before
    assert token_bytes(Step(glm, "bf16", "index_bf16")) == (78 * 1152, 21 * 256)
    flash = token_bytes(Step(PRESETS["deepseek-v4-flash"], "fp8_dsv4"))
    assert flash == (21 * 584 / 4 + 20 * 584 / 128, 21 * 132 / 4)


def test_a_dense_layer_by_hand() -> None:
    """Rows read once, 2 * (576 + 512) flops per key and head, the new row written."""
    B, S, H = 3, 1000, 128
    costs = layer_costs(Step(V3, "fp8_ds_mla", batch=B, context=S), Kind(61, False))
    assert list(costs) == ["latent_write", "mqa_paged"]
    queries_and_outputs = B * H * ((576 + 512) * 2 + 4)
    assert costs["mqa_paged"] == (B * S * 656 + queries_and_outputs, 2 * B * S * H * 1088)
    assert costs["latent_write"].bytes > B * 656


def test_a_sparse_layer_chooses_past_k_keys() -> None:
    few = layer_costs(Step(V32, "fp8_ds_mla", context=2048), Kind(1, True))
    assert list(few) == ["latent_write", "index_write", "mqa_paged"]
    step = Step(V32, "fp8_ds_mla", batch=2, context=2049)
    many, shared = (layer_costs(step, Kind(1, indexed)) for indexed in (True, False))
    assert list(many) == [
        *("latent_write", "index_write", "index_logits", "index_topk", "mqa_sparse")
    ]
    assert list(shared) == ["latent_write", "mqa_sparse"]
    assert many["mqa_sparse"].flops == 2 * 2 * 2048 * 128 * 1088
    assert many["index_logits"].flops == 2 * 2 * 2049 * 64 * 129


def test_kinds_of_layers() -> None:
    assert kinds(V3) == ((61, False, 0),) and kinds(V32) == ((61, True, 0),)
    assert kinds(PRESETS["glm-5.2"]) == ((21, True, 0), (57, False, 0))
    flash = kinds(PRESETS["deepseek-v4-flash"])
    assert flash == ((2, False, 0), (21, True, 4), (20, False, 128))


def test_v4_reads_its_window_and_what_it_chose() -> None:
    step = Step(PRESETS["deepseek-v4-flash"], "fp8_dsv4", context=65536)
    rows = {0: 128, 4: 128 + 512, 128: 128 + 512}
    for kind in kinds(step.config):
        costs = layer_costs(step, kind)
        assert costs["mqa_sparse"].flops == 2 * rows[kind.ratio] * 64 * (512 + 512)
        assert ("index_logits" in costs) == (kind.ratio == 4)
    short = replace(step, context=5)
    assert layer_costs(short, Kind(1, True, 4))["mqa_sparse"].flops == 2 * 6 * 64 * 1024


def test_v4_over_ranks() -> None:
    """Entries of ratio 4 are shared and cost what docs/context-parallel-v4.md says; no others."""
    alone = Step(PRESETS["deepseek-v4-flash"], "fp8_dsv4", context=10**6)
    step = replace(alone, ranks=Split(8))
    # the window and what is whole for 8 heads, 64 of the 512 chosen for all 64
    rows = {0: 8 * 128, 4: 8 * 128 + 64 * 64, 128: 8 * (128 + 10**6 // 128)}
    for kind in kinds(step.config):
        costs = layer_costs(step, kind)
        assert costs["mqa_sparse"].flops == 2 * rows[kind.ratio] * (512 + 512)
        assert ("merge" in costs) == ("index_logits" in costs) == (kind.ratio == 4)
    one, eight = (predict(each, H200) for each in (alone, step))
    assert eight.costs["index_logits"].bytes < one.costs["index_logits"].bytes / 7.9
    assert not one.sent and eight.collectives == 21 * 3
    each = sum(eight.sent.values()) / 21
    assert each == 7 * 8 * (1024 + 1028) + 7 * 512 * 8  # queries, outputs and lse, candidates
    assert round(each / 1024) == 140
    held = [tokens_that_fit(replace(alone, ranks=Split(W)), 1e11, 1024) for W in (1, 8, 16)]
    assert [round(tokens / held[0], 1) for tokens in held] == [1, 6.9, 11.8]
    few = predict(replace(step, context=512 * 4), H200)
    assert few.collectives == 21 * 2 and "candidates" not in few.sent


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("schedule", ["gather", "exchange"])
def test_sent_bytes_by_hand(heads: str, schedule: str) -> None:
    """8 ranks, 128 heads: queries of 576 values, outputs of 512, or 128 past w_uv, to 7 others."""
    step = Step(V32, "bf16", context=10**6, ranks=Split(8, heads, schedule))
    by_hand = {
        ("own", "gather"): {
            "queries": 7 * 16 * 1152,
            "lse": 7 * 128 * 4,
            "outputs": 7 * 16 * 2048,
        },
        ("own", "exchange"): {"queries": 7 * 16 * 1152, "outputs": 7 * 16 * 1028},
        ("all", "gather"): {"lse": 7 * 128 * 4, "outputs": 2 * 7 * 16 * 512},
        ("all", "exchange"): {"outputs": 7 * 128 * 260},
    }
    assert sent_bytes(step) == by_hand[heads, schedule]
    assert sent_bytes(step, chooses=True)["candidates"] == 7 * 2048 * 8
    short = replace(step, context=4096)  # 512 keys a rank: no more candidates than that
    assert sent_bytes(short, chooses=True)["candidates"] == 7 * 512 * 8
    assert sent_bytes(replace(step, ranks=Split(1, heads, schedule)), chooses=True) == {}


def test_the_schedule_that_is_taken_sends_less() -> None:
    """Own heads are exchanged: sums are float32, outputs bf16. All of them are added up from five
    ranks on, unless they are few."""
    for W, batch, heads, taken in (
        (2, 512, "own", "exchange"),
        (64, 512, "own", "exchange"),
        (4, 512, "all", "exchange"),
        (5, 512, "all", "gather"),
        (5, 1, "all", "exchange"),
        (2, 1, "all", "exchange"),
    ):
        steps = [Step(V3, batch=batch, ranks=Split(W, heads, name)) for name in ("auto", taken)]
        assert sent_bytes(steps[0]) == sent_bytes(steps[1]), (W, batch, heads)
    tiny = PRESETS["tiny-v3"]
    auto, exchange = (Step(tiny, ranks=Split(64, "all", name)) for name in ("auto", "exchange"))
    assert sent_bytes(auto) == sent_bytes(exchange)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", [1, 300])
def test_the_formula_is_that_of_the_code_that_sends(heads: str, batch: int) -> None:
    merge = import_module("openmla.ranks.merge")
    shape = (batch, 128, 512 if heads == "own" else 128)
    for W in (2, 4, 8, 16, 128):
        for schedule in ("gather", "exchange"):
            step = Step(V3, batch=batch, ranks=Split(W, heads, schedule))
            sent = sent_bytes(step)
            counted = batch * (sum(sent.values()) - sent.get("queries", 0))
            assert counted == merge.sent_bytes(schedule, heads, shape, torch.bfloat16, W)
        taken = merge.choose_schedule(shape, torch.bfloat16, W, heads)
        auto, named = (Step(V3, batch=batch, ranks=Split(W, heads, s)) for s in ("auto", taken))
        assert sent_bytes(auto) == sent_bytes(named)


def test_a_step_adds_up() -> None:
    link = H200._replace(link=50e9, latency=1e-5)
    step = Step(V32, "fp8_ds_mla", batch=4, context=10**5, ranks=Split(8))
    found = predict(step, link, weights=8e9)
    assert found.weights == 1e9 and found.weights_time == 1e9 / 4.8e12
    one = layer_costs(step, Kind(1, True))
    assert found.costs == {op: Cost(61 * cost.bytes, 61 * cost.flops) for op, cost in one.items()}
    assert found.attention_time == pytest.approx(sum(61 * roof(c, link) for c in one.values()))
    assert found.collectives == 61 * 3  # queries, candidates, both outputs and lse
    sent = 61 * 4 * sum(sent_bytes(step, chooses=True).values())
    assert sum(found.sent.values()) == sent
    assert found.link_time == pytest.approx(sent / 50e9 + 183e-5)
    assert found.time == found.attention_time + found.weights_time + found.link_time
    whole = predict(replace(step, ranks=Split(8, "all")), link, weights=8e9)
    assert whole.weights == 8e9


@pytest.mark.parametrize("config", [V3, V32], ids=["v3", "v3.2"])
def test_more_ranks_hold_more_and_attend_in_less_time(config: object) -> None:
    """Until what is chosen among, and merged, grows with the ranks."""
    steps = [
        Step(V3 if config is V3 else V32, "bf16", batch=8, context=10**6, ranks=Split(2**n))
        for n in range(5)
    ]
    times = [predict(step, H200).attention_time for step in steps]
    fits = [tokens_that_fit(step, 100e9, 64) for step in steps]
    assert times == sorted(times, reverse=True)
    assert fits == [fits[0] * 2**n for n in range(5)]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"size must divide the model's 128 heads .* got 3"):
        Step(V3, ranks=Split(3))
    assert Step(V3, ranks=Split(3, "all")).local_context == 1
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"format": "fp7"}, "'fp7' is not known"),
        ({"format": "fp8_dsv4", "config": PRESETS["tiny-glm"]}, "fp8_dsv4 needs rows"),
        ({"batch": 0}, "batch must be a positive integer, got 0"),
        ({"context": -1}, "context must be a positive integer, got -1"),
    )
    for changes, said in wrong:
        with pytest.raises(ConfigError, match=said):
            Step(**{"config": V3, **changes})
    for ranks, said in (((0,), "size"), ((2, "some"), "heads"), ((2, "all", "fast"), "schedule")):
        with pytest.raises(ConfigError, match=f"ranks: {said} must be"):
            Split(*ranks)


def measured() -> Iterator[tuple[str, float, float]]:
    """Shape, predicted and measured us of a layer, of every committed decode step we ran."""
    for row in json.loads((RESULTS / "sparse_step_h200.json").read_text())["rows"]:
        H, B, S = map(int, re.findall(r"\d+", row["shape"]))
        layer = replace(V32, num_heads=H, num_layers=1)
        step = Step(layer, "fp8_ds_mla", "index_fp8", B, 1024 * S + 1)
        yield f"sparse {row['shape']}", 1e6 * predict(step, H200).time, row["whole"]
    for file in ("latent_dense_h200.json", "latent_dense_fp8_h200.json"):
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            shape = re.fullmatch(r"dense-decode-(\w+)-h(\d+)-(\d+)x(\d+)", row["shape"])
            if shape is None or row["contender"] != "openmla":
                continue
            H, B, S = map(int, shape.groups()[1:])
            layer = replace(V3, num_heads=H, num_layers=1)
            costs = layer_costs(Step(layer, shape[1], batch=B, context=S), Kind(1, False))
            yield row["shape"], 1e6 * roof(costs["mqa_paged"], H200), row["us"]


def test_no_measured_step_beats_the_roofline() -> None:
    """And those that take long enough to be more than launches come near it; docs/size.md has the
    ratios that this prints."""
    page = (RESULTS.parents[1] / "docs" / "size.md").read_text()
    ratios: dict[str, list[float]] = {}
    for shape, predicted, us in measured():
        print(
            f"{shape:<32} predicted {predicted:>6.1f} us  measured {us:>6.1f}  {us / predicted:.2f}"
        )
        assert us > predicted, shape
        if predicted >= 50:
            kind = "sparse" if shape.startswith("sparse") else shape.split("-h")[0]
            ratios.setdefault(kind, []).append(us / predicted)
    bounds = {kind: (round(min(all_), 2), round(max(all_), 2)) for kind, all_ in ratios.items()}
    print(bounds)
    for low, high in bounds.values():
        assert f"{low:.2f} to {high:.2f}" in page
    whole, us = whole_model()
    print(f"V2-Lite with 8 experts: {whole:.1f} us, measured {us:.1f}: {us / whole:.2f}")
    assert us > whole and f" {us / whole:.2f} |" in page


def whole_model() -> tuple[float, float]:
    """Predicted and measured us of the recorded decode step of bench generate --model v2-lite."""
    rows = json.loads((RESULTS / "generate_h200.json").read_text())["rows"]
    (row,) = (row for row in rows if row["contender"] == "captured")
    assert row["shape"] == "8 tokens of the whole model, each over 32768 keys"
    step = Step(PRESETS["deepseek-v2-lite"], "bf16", batch=8, context=32769)
    weights = 2 * (3_108_007_424 - 102400 * 2048)  # bf16, all but the embedding table
    return 1e6 * predict(step, H200, weights).time, row["median_us"]
