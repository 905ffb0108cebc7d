"""Cases of whole layers, MLAAttention and MLAAttentionV4: projections, rope, indexer, gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openmla import (
    PRESETS,
    Batch,
    BlockPool,
    MLAAttention,
    MLAAttentionV4,
    MLAConfig,
    RopeTable,
    allocate_cache,
    make_plan,
    plan_buffers,
    warmup,
)
from tests.corpus.common import Random, Results, Run, cache_bytes, fill_with_nan
from tests.layers.families import FAMILIES, GATED, SPARSE, UNROTATED
from tests.layers.v4 import Server, real_config, tiny_config

BLOCK = 4
ORIGINAL = 48  # positions of longrope's short factors
STEPS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("a", 30), ("b", 1)),
    (("a", 1), ("b", 2), ("c", 17)),
    (("b", 40), ("a", 3)),
    (("c", 1), ("b", 1), ("a", 1)),
)
LONG: tuple[tuple[tuple[str, int], ...], ...] = (
    (("a", 47), ("b", 20), ("c", 60)),  # longrope: at both sides of the original length
    (("a", 1), ("b", 1), ("c", 1)),
    (("a", 1), ("b", 3), ("c", 2)),
)
LONG_DECODE: tuple[tuple[tuple[str, int], ...], ...] = (
    *LONG[:1], (("a", 1), ("b", 1), ("c", 1)), (("a", 1), ("b", 1), ("c", 1)),
)  # fmt: skip
STEPS_V4: tuple[tuple[tuple[str, int], ...], ...] = (
    (("a", 150), ("b", 2)),  # ratio 4: more entries than K; ratio 128: one entry
    (("a", 1), ("b", 1), ("c", 7)),
    (("c", 140), ("a", 3), ("b", 4)),
    (("a", 1), ("c", 1), ("b", 1)),
)
SHORT_V4: tuple[tuple[tuple[str, int], ...], ...] = (
    (("a", 20), ("b", 2)),  # no more entries than K
    (("a", 1), ("b", 1)),
    (("b", 9), ("a", 2)),
)

CASES: dict[str, Run] = {}


def config_of(name: str) -> MLAConfig:
    if name in PRESETS:
        config = replace(PRESETS[name], max_positions=512)
        if config.indexer is not None:
            config = replace(config, indexer=replace(config.indexer, topk=8))
        return config
    fields = {**FAMILIES, **GATED, **SPARSE, **UNROTATED}[name]
    if name == "minicpm3-longrope":
        scaling = {**fields["rope_scaling"], "original_max_position_embeddings": ORIGINAL}
        fields = {**fields, "rope_scaling": scaling}
    return MLAConfig.from_hf(fields)


def randomize(layer: nn.Module, random: Random) -> None:
    """Weights of unit gain; norms, biases and sinks that matter."""
    for name, parameter in layer.named_parameters():
        noise = random.normal(*parameter.shape)
        if parameter.dim() > 1 and not name.endswith("position_bias"):
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        elif name.endswith(("sinks", "position_bias")):
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))


def run_layer(
    name: str,
    family: str,
    steps: Sequence[Sequence[tuple[str, int]]] = STEPS,
    dtype: torch.dtype = torch.float32,
    format: str = "fp32",
    kv_scale: float = 1.0,
    index_format: str = "index_fp32",
    padding: int = 0,
    captured_from: int | None = None,  # steps from this one on are over buffers
    workspace: int | None = None,
    absorbed_format: str | None = None,
    hadamard: bool = False,
    numbers: Sequence[int] = (0,),  # layers that share a selection
    **options: Any,
) -> Results:
    """Steps over one or two layers, tokens of three sequences."""
    config, random, found = config_of(family), Random(name), Results()
    layers, caches = [], []
    pool = BlockPool(80, BLOCK)
    for number in numbers:
        layer = MLAAttention(
            config, layer=number, absorbed_format=absorbed_format, hadamard=hadamard
        )
        randomize(layer, random)
        layer.to(dtype).refresh_weights()
        layers.append(layer)
        caches.append(
            allocate_cache(
                config,
                num_blocks=80,
                block_size=BLOCK,
                format=format,
                kv_scale=kv_scale,
                index_format=index_format,
                layer=number,
            )
        )
        fill_with_nan(caches[-1])
    hidden = {key: random.normal(120, config.hidden_size, dtype=dtype) for key in "abc"}
    if workspace is not None:
        options["workspace"] = warmup(
            config, caches[0], max_requests=3, max_tokens=256, workspace_tokens=workspace,
            dtype=dtype,
        )  # fmt: skip
    buffers = None
    if captured_from is not None:
        buffers = plan_buffers(config, caches[0], max_requests=4, max_tokens=12, max_blocks=30)
    for count, wanted in enumerate(steps):
        batch = _batch(pool, wanted, padding)
        into = buffers if count >= (captured_from or 0) else None
        plan = make_plan(batch, config, caches[0], dtype=dtype, into=into, **options)
        x, positions = _tokens(pool, hidden, wanted, plan.num_tokens)
        selection = None
        for number, layer, cache in zip(numbers, layers, caches, strict=True):
            x, selection = layer.attend(x, positions, cache, plan, selection)
            found[f"{count}.layer{number}"] = x.clone()
        if selection is not None:
            found[f"{count}.chosen"] = selection.positions.clone()
    for number, cache in zip(numbers, caches, strict=True):
        found |= cache_bytes(cache, f"cache{number}")
    return found


def _batch(pool: BlockPool, wanted: Sequence[tuple[str, int]], padding: int) -> Batch:
    before = {name: pool.seq_len(name) for name, _ in wanted}
    pool.take(dict(wanted))
    spans = [(name, before[name], before[name] + n) for name, n in wanted]
    slots = [pool.slot_mapping(spans), torch.full((padding,), -1)]
    return Batch(
        query_lens=[n for _, n in wanted],
        seq_lens=[pool.seq_len(name) for name, _ in wanted],
        block_table=pool.block_table([name for name, _ in wanted]),
        slot_mapping=torch.cat(slots),
        padding=padding,
    )


def _tokens(
    pool: Any, hidden: dict[str, Tensor], wanted: Sequence[tuple[str, int]], T: int
) -> tuple[Tensor, Tensor]:
    """Hidden states and positions of the tokens just taken, and finite padding behind them."""
    parts, places = [], []
    for name, n in wanted:
        end = pool.seq_len(name)
        parts.append(hidden[name][end - n : end])
        places.append(torch.arange(end - n, end))
    rest = T - sum(n for _, n in wanted)
    some = next(iter(hidden.values()))
    parts.append(torch.ones(rest, some.shape[1], dtype=some.dtype))
    places.append(torch.zeros(rest, dtype=torch.int64))
    return torch.cat(parts), torch.cat(places)


def run_layer_v4(
    name: str,
    ratio: int,
    steps: Sequence[Sequence[tuple[str, int]]] = STEPS_V4,
    real: bool = False,
    format: str = "fp32",
    index_format: str = "index_fp32",
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    captured_from: int | None = None,
    workspace: bool = False,
    hadamard: bool = True,
    **options: Any,
) -> Results:
    """Steps over one layer, whose compressor state is carried from each to the next."""
    config, random, found = real_config() if real else tiny_config(), Random(name), Results()
    assert config.compressor is not None
    number = config.compressor.ratios.index(ratio)
    rope = config.compressor.rope if ratio else config.rope
    table = RopeTable(rope, config.qk_rope_head_dim, config.max_positions)
    layer = MLAAttentionV4(config, layer=number, hadamard=hadamard, rope_table=table)
    randomize(layer, random)
    layer.to(dtype)
    hidden = {key: random.normal(300, config.hidden_size, dtype=dtype) for key in "abc"}
    server = Server(layer, hidden, format=format, index_format=index_format, dtype=dtype)
    if workspace:
        options["workspace"] = warmup(
            config, server.cache, max_requests=3, max_tokens=256, dtype=dtype
        )
    buffers = None
    if captured_from is not None:
        buffers = plan_buffers(config, server.cache, max_requests=4, max_tokens=20, max_blocks=3)
    for count, wanted in enumerate(steps):
        into = buffers if count >= (captured_from or 0) else None
        columns = 0 if into is None else into["window_table"].shape[1]
        batch = replace(server.batch(wanted, window_columns=columns), padding=padding)
        plan = server.plan(batch, into=into, **options)
        x, positions = _tokens(server.pool, hidden, wanted, plan.num_tokens)
        found[f"{count}.out"] = layer(x, positions, server.cache, plan).clone()
    return found | cache_bytes(server.cache)


def _run(function: Any, arguments: dict[str, Any], name: str) -> Results:
    results: Results = function(name, **arguments)
    return results


def _add(kind: str, function: Any, **arguments: Any) -> None:
    name = f"layer-{kind}"
    assert name not in CASES, name
    CASES[name] = partial(_run, function, arguments)


BF16: dict[str, Any] = {"dtype": torch.bfloat16, "format": "bf16", "index_format": "index_bf16"}
for _family in (*FAMILIES, *GATED, *UNROTATED, *SPARSE):
    if _family in ("glm_moe_dsa", "minicpm3-longrope"):  # below, with steps of their own
        continue
    _add(f"{_family}", run_layer, family=_family)
for _family in ("deepseek_v3", "bailing_hybrid", "deepseek_v32", "tiny-longcat"):
    _add(f"{_family}-bf16", run_layer, family=_family, **BF16)
for _family in ("deepseek_v3", "bailing_hybrid", "deepseek_v32", "kimi_linear"):
    _add(f"{_family}-batch-invariant", run_layer, family=_family, batch_invariant=True)
    _add(f"{_family}-compiled", run_layer, family=_family, compiled=True)
    _add(f"{_family}-padded", run_layer, family=_family, padding=3)
    _add(f"{_family}-expanded", run_layer, family=_family, form="expanded", workspace_tokens=16)
    _add(f"{_family}-absorbed", run_layer, family=_family, form="absorbed")
    _add(f"{_family}-workspace", run_layer, family=_family, form="expanded", workspace=16)
    _add(f"{_family}-captured", run_layer, family=_family, captured_from=3, padding=2)
for _form in ("auto", "absorbed", "expanded"):
    _add(f"longrope-{_form}", run_layer, family="minicpm3-longrope", steps=LONG, form=_form)
_add("longrope-chunked", run_layer, family="minicpm3-longrope", steps=LONG, form="expanded",
     workspace_tokens=16)  # fmt: skip
_add("longrope-padded", run_layer, family="minicpm3-longrope", steps=LONG, padding=2)
_add("longrope-compiled", run_layer, family="minicpm3-longrope", steps=LONG, compiled=True)
_add("longrope-batch-invariant", run_layer, family="minicpm3-longrope", steps=LONG,
     batch_invariant=True)  # fmt: skip
_add("longrope-captured", run_layer, family="minicpm3-longrope", steps=LONG_DECODE,
     captured_from=1)  # fmt: skip
_add("fp8-cache", run_layer, family="deepseek_v3", format="fp8", kv_scale=0.03,
     dtype=torch.bfloat16)  # fmt: skip
_add("fp8-weights", run_layer, family="deepseek_v3", absorbed_format="fp8")
_add("fp8-weights-bf16", run_layer, family="deepseek_v32", absorbed_format="fp8", **BF16)
_add("sparse-hadamard", run_layer, family="deepseek_v32", hadamard=True)
_SHARED = config_of("tiny-glm-5.2").indexer
assert _SHARED is not None
_PAIR = tuple(_SHARED.shared.index(shares) for shares in (False, True))
_add("glm-shared-choice", run_layer, family="tiny-glm-5.2", numbers=_PAIR)
_add("glm-shared-choice-expanded", run_layer, family="tiny-glm-5.2", numbers=_PAIR,
     form="expanded")  # fmt: skip
_add("glm-shared-choice-captured", run_layer, family="tiny-glm-5.2", numbers=_PAIR,
     captured_from=3)  # fmt: skip
for _ratio in (0, 4, 128):
    _v4: dict[str, Any] = {"ratio": _ratio}
    _add(f"v4-{_ratio}", run_layer_v4, **_v4)
    _add(f"v4-{_ratio}-short", run_layer_v4, steps=SHORT_V4, **_v4)
    _add(f"v4-{_ratio}-bf16", run_layer_v4, **BF16, **_v4)
    _add(f"v4-{_ratio}-padded", run_layer_v4, padding=3, **_v4)
    _add(f"v4-{_ratio}-batch-invariant", run_layer_v4, batch_invariant=True, **_v4)
    _add(f"v4-{_ratio}-compiled", run_layer_v4, compiled=True, **_v4)
    _add(f"v4-{_ratio}-workspace", run_layer_v4, workspace=True, **_v4)
    _add(f"v4-{_ratio}-captured", run_layer_v4, captured_from=3, **_v4)
    _add(f"v4-{_ratio}-reference", run_layer_v4, backend="reference", steps=SHORT_V4, **_v4)
    _add(f"v4-{_ratio}-fp8_dsv4", run_layer_v4, real=True, format="fp8_dsv4",
         index_format="index_fp8", dtype=torch.bfloat16, **_v4)  # fmt: skip
_add("v4-4-no-hadamard", run_layer_v4, ratio=4, hadamard=False)
