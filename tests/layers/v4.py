"""V4's attention from its equations, one query after another, and a loop that serves the layer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openmla import (
    PRESETS,
    Batch,
    CompressedPool,
    LayerCache,
    MLAAttentionV4,
    MLAConfig,
    Plan,
    RopeConfig,
    allocate_cache,
    make_plan,
)
from openmla.testing import poison

RATIOS = (0, 4, 128)
HIDDEN = 64
LENGTH = 300  # of most sequences: two entries of 128 tokens, and some
TOPK = 8  # entries a tiny layer chooses
CLOSE = 1e-5  # relative, to what float64 gives


def tiny_config(*, window: int = 32, topk: int = TOPK) -> MLAConfig:
    """Small enough for many steps; positions are stretched from 64 on, so that tests cross it."""
    config = PRESETS["tiny-v4"]
    assert config.indexer is not None and config.compressor is not None
    rope = replace(config.compressor.rope, original_positions=64)
    return replace(
        config,
        q_lora_rank=32,
        max_positions=1024,
        indexer=replace(config.indexer, topk=topk),
        compressor=replace(config.compressor, window=window, rope=rope),
    )


def real_config() -> MLAConfig:
    """V4's rows, rope and indexer keys as they are; few heads, a narrow model, a short table."""
    config = PRESETS["deepseek-v4-flash"]
    assert config.indexer is not None and config.compressor is not None
    return replace(
        config,
        hidden_size=HIDDEN,
        num_layers=3,
        num_heads=4,
        q_lora_rank=32,
        max_positions=1024,
        indexer=replace(config.indexer, num_heads=16, topk=8),
        compressor=replace(config.compressor, ratios=RATIOS, output_groups=2, output_lora_rank=16),
    )


def layer_number(config: MLAConfig, ratio: int) -> int:
    assert config.compressor is not None
    return config.compressor.ratios.index(ratio)


def make_layer(
    config: MLAConfig, ratio: int, *, seed: int = 0, number: int | None = None, **options: Any
) -> MLAAttentionV4:
    """Random weights of unit gain; norms, biases and sinks that make themselves felt."""
    torch.manual_seed(seed)
    number = layer_number(config, ratio) if number is None else number
    layer = MLAAttentionV4(config, layer=number, **options)
    for name, parameter in layer.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith(("sinks", "position_bias")):
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return layer


def sequence(length: int, seed: int = 1) -> Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class Peer(NamedTuple):
    """transformers' module with a layer's weights."""

    theirs: nn.Module
    rotary: nn.Module
    window: int

    def full(self, hidden: Tensor) -> Tensor:
        """Their output for a whole sequence [S, hidden] at positions 0.."""
        positions = torch.arange(hidden.shape[0])[None]
        back = positions.T - positions
        seen = (back >= 0) & (back < self.window)
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        ropes = {
            kind: self.rotary(hidden[None], position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        out: Tensor = self.theirs(hidden[None], ropes, positions, mask)[0][0]
        return out


def make_peer(layer: MLAAttentionV4) -> Peer:
    from transformers import CONFIG_MAPPING
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    config = layer.config
    indexer, compressor = config.indexer, config.compressor
    assert indexer is not None and compressor is not None
    theirs = CONFIG_MAPPING["deepseek_v4"](
        vocab_size=257,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank,
        head_dim=config.latent_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        index_n_heads=indexer.num_heads,
        index_head_dim=indexer.head_dim,
        index_topk=indexer.topk,
        o_groups=compressor.output_groups,
        o_lora_rank=compressor.output_lora_rank,
        sliding_window=compressor.window,
        compress_ratios=list(compressor.ratios),
        max_position_embeddings=config.max_positions,
        rope_scaling={
            "type": "yarn",
            "factor": compressor.rope.factor,
            "original_max_position_embeddings": compressor.rope.original_positions,
            "beta_fast": compressor.rope.beta_fast,
            "beta_slow": compressor.rope.beta_slow,
            "attention_factor": compressor.rope.cos_sin_scale,
        },
    )
    theirs._attn_implementation = "eager"
    assert MLAConfig.from_hf(theirs) == config
    module = modeling.DeepseekV4Attention(theirs, layer_number(config, layer.ratio))
    module.eval().requires_grad_(False).load_state_dict(layer.state_dict())
    return Peer(module, modeling.DeepseekV4RotaryEmbedding(theirs), compressor.window)


def unrounded(rows: Tensor) -> Tensor:
    return rows


def as_bf16(rows: Tensor) -> Tensor:
    return rows.to(torch.bfloat16).to(rows.dtype)


def as_fp8(groups: Tensor) -> Tensor:
    """[..., n] to e4m3 and back: the n share a power of two that brings the largest to 448."""
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2((amax / 448).log2().ceil())
    codes = (groups / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return codes.to(groups.dtype) * scale


def as_fp8_dsv4(rows: Tensor) -> Tensor:
    """To bf16; then all but the last 64 columns to fp8, a scale per 64 of them."""
    rows = as_bf16(rows)
    nope, rope = rows.split([rows.shape[-1] - 64, 64], -1)
    return torch.cat([as_fp8(nope.unflatten(-1, (-1, 64))).flatten(-2), rope], -1)


def hadamard_turned(rows: Tensor) -> Tensor:
    """Rows [..., n] times the orthonormal Hadamard matrix, built by doubling."""
    matrix = torch.ones(1, 1, dtype=rows.dtype)
    while matrix.shape[0] < rows.shape[-1]:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=rows.dtype), matrix)
    return rows @ matrix / math.sqrt(rows.shape[-1])


STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": unrounded,
    "bf16": as_bf16,
    "fp16": lambda rows: rows.to(torch.float16).to(rows.dtype),
    "fp8": lambda rows: rows.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(rows.dtype),
    "fp8_dsv4": as_fp8_dsv4,
}


class Dense(NamedTuple):
    """What the equations give for a whole sequence, in float64."""

    out: Tensor  # [S, hidden]
    raw: Tensor  # [S, D], rotated, as stored
    entries: Tensor  # [E, D], the same
    keys: Tensor  # [E, DI], rotated, as they meet queries
    chosen: list[set[int]]  # entries each token attends to


def frequencies(rope: RopeConfig, R: int) -> Tensor:
    pairs = torch.arange(R // 2, dtype=torch.float64)
    plain = rope.theta ** (-2 * pairs / R)
    if rope.kind == "default":
        return plain
    assert rope.kind == "yarn"

    def turning(turns: float) -> float:
        stretch = rope.original_positions / (2 * math.pi * turns)
        return R * math.log(stretch) / (2 * math.log(rope.theta))

    low = max(math.floor(turning(rope.beta_fast)), 0)
    high: float = min(math.ceil(turning(rope.beta_slow)), R - 1)
    if low == high:
        high += 0.001
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp


def turned(rows: Tensor, positions: Tensor, rope: RopeConfig, R: int, sign: int = 1) -> Tensor:
    """Rows [n, ..., D] with their last R columns rotated in pairs, backwards for sign -1."""
    angles = positions.double()[:, None] * frequencies(rope, R)
    angles = angles.view(-1, *[1] * (rows.dim() - 2), R // 2)
    cos, sin = angles.cos(), sign * angles.sin()
    head, tail = rows[..., :-R], rows[..., -R:]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([head, pairs.flatten(-2)], dim=-1)


def normed(rows: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    rows = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    return rows if weight is None else rows * weight


def pooled(
    hidden: Tensor,
    weights: Mapping[str, Tensor],
    name: str,
    *,
    ratio: int,
    rope: RopeConfig,
    R: int,
    eps: float,
) -> Tensor:
    """[E, D]: entries of all windows that are complete, normalised and rotated."""
    u, s = (hidden @ weights[f"{name}.{part}_proj.weight"].T for part in ("kv", "gate"))
    bias, weight = weights[f"{name}.position_bias"], weights[f"{name}.kv_norm.weight"]
    D = weight.shape[0]
    rows = []
    for p in range(ratio - 1, hidden.shape[0], ratio):
        older = [(j, 0) for j in range(p - 2 * ratio + 1, p - ratio + 1) if j >= 0]
        newer = [(j, D if ratio == 4 else 0) for j in range(p - ratio + 1, p + 1)]
        places = (older if ratio == 4 else []) + newer
        z = torch.stack([(s[j] + bias[j % ratio])[start : start + D] for j, start in places])
        kv = torch.stack([u[j][start : start + D] for j, start in places])
        shares = (z - z.amax(0)).exp()
        rows.append((shares / shares.sum(0) * kv).sum(0))
    if not rows:
        return hidden.new_zeros(0, D)
    firsts = torch.arange(len(rows)) * ratio
    return turned(normed(torch.stack(rows), eps, weight), firsts, rope, R)


def attend_densely(
    layer: MLAAttentionV4,
    hidden: Tensor,
    *,
    stored: Callable[[Tensor], Tensor] = unrounded,
    indexed: Callable[[Tensor], Tensor] = unrounded,
    asked: Callable[[Tensor], Tensor] = unrounded,
) -> Dense:
    """The layer's weights, none of its code. `stored` is what a cache makes of rows, `indexed`
    and `asked` what becomes of the indexer's keys and queries before they meet."""
    config, ratio = layer.config, layer.ratio
    indexer, compressor = config.indexer, config.compressor
    assert indexer is not None and compressor is not None
    rope = compressor.rope if ratio else config.rope
    H, D, R = config.num_heads, config.latent_dim, config.qk_rope_head_dim
    eps, window, K = config.latent_eps, compressor.window, indexer.topk
    weights = {name: tensor.double().cpu() for name, tensor in layer.state_dict().items()}
    hidden = hidden.double()
    S, positions = hidden.shape[0], torch.arange(hidden.shape[0])
    q_resid = normed(hidden @ weights["q_a_proj.weight"].T, eps, weights["q_a_norm.weight"])
    q = normed((q_resid @ weights["q_b_proj.weight"].T).view(S, H, D), eps)
    q = turned(q, positions, rope, R)
    raw = normed(hidden @ weights["kv_proj.weight"].T, eps, weights["kv_norm.weight"])
    raw = stored(turned(raw, positions, rope, R))
    entries, keys = hidden.new_zeros(0, D), hidden.new_zeros(0, indexer.head_dim)
    chosen: list[set[int]] = [set() for _ in range(S)]
    sizes: dict[str, Any] = {"ratio": ratio, "rope": rope, "R": R, "eps": eps}
    if ratio:
        entries = stored(pooled(hidden, weights, "compressor", **sizes))
        chosen = [set(range((p + 1) // ratio)) for p in range(S)]
    if ratio == 4:
        name, HI, DI = "compressor.indexer", indexer.num_heads, indexer.head_dim
        keys = indexed(pooled(hidden, weights, name, **sizes))
        q_idx = (q_resid @ weights[f"{name}.q_b_proj.weight"].T).view(S, HI, DI)
        q_idx = asked(turned(q_idx, positions, rope, R))
        w_idx = hidden @ weights[f"{name}.scorer.weights_proj.weight"].T / math.sqrt(HI * DI)
        scores = (w_idx[..., None] * (q_idx @ keys.T).relu()).sum(1)  # [S, E]
        for p in range(S):
            n = (p + 1) // ratio
            chosen[p] = set(scores[p, :n].topk(min(n, K)).indices.tolist())
    out = torch.zeros_like(q)
    for p in range(S):
        rows = torch.cat([raw[max(p - window + 1, 0) : p + 1], entries[sorted(chosen[p])]])
        logits = torch.cat([D**-0.5 * (q[p] @ rows.T), weights["sinks"][:, None]], dim=1)
        logits = logits - logits[:, :-1].amax(1, keepdim=True)
        shares = logits.exp()
        out[p] = shares[:, :-1] / shares.sum(1, keepdim=True) @ rows
    out = turned(out, positions, rope, R, sign=-1)
    grouped = out.reshape(S, compressor.output_groups, -1)
    o_a = weights["o_a_proj.weight"].view(compressor.output_groups, -1, grouped.shape[-1])
    z = torch.einsum("sgd,grd->sgr", grouped, o_a).flatten(1)
    return Dense(z @ weights["o_b_proj.weight"].T, raw, entries, keys, chosen)


class Server:
    """Feeds a layer with parts of known sequences and keeps what it answers.

    Caches start as NaN, compressor states too, and blocks are handed out in no order.
    """

    def __init__(
        self,
        layer: MLAAttentionV4,
        sequences: Mapping[Any, Tensor],
        *,
        num_blocks: int = 16,
        block_size: int = 128,
        window_block_size: int = 16,
        max_requests: int = 5,
        max_tokens: int = 320,
        rollback: int = 8,
        format: str = "fp32",
        kv_scale: float = 1.0,
        index_format: str = "index_fp32",
        number: int | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.layer, self.options, self.device = layer.to(device), options, device
        self.sequences = {name: hidden.to(device) for name, hidden in sequences.items()}
        self.cache: LayerCache = allocate_cache(
            layer.config,
            num_blocks=num_blocks,
            block_size=block_size,
            format=format,
            kv_scale=kv_scale,
            index_format=index_format,
            layer=layer_number(layer.config, layer.ratio) if number is None else number,
            max_requests=max_requests,
            max_tokens=max_tokens,
            window_block_size=window_block_size,
            rollback=rollback,
            device=device,
        )
        for part in self.cache.parts:
            raw = part.data.view(torch.uint8)
            raw.copy_(poison(raw.shape, torch.uint8, device))
        assert self.cache.geometry is not None
        self.pool = CompressedPool(self.cache.geometry)
        for number, pool in enumerate(self.pool.pools):
            names = list(range(pool.num_blocks))
            pool.take(dict.fromkeys(names, 1))
            random.Random(number).shuffle(names)
            for name in names:
                pool.free(name)
        self.outputs: dict[Hashable, Tensor] = {
            name: torch.empty(0, HIDDEN, dtype=hidden.dtype) for name, hidden in sequences.items()
        }
        self.plans: list[Plan] = []

    def take(self, wanted: Sequence[tuple[Any, int]]) -> None:
        self.cache.copy_blocks(*self.pool.take(dict(wanted)))

    def batch(self, wanted: Sequence[tuple[Any, int]], *, window_columns: int = 0) -> Batch:
        """Takes blocks for the new tokens and describes the step."""
        self.take(wanted)
        names = [name for name, _ in wanted]
        tables = self.pool.tables(names, window_columns=window_columns)
        return Batch(
            query_lens=[n for _, n in wanted],
            seq_lens=[self.pool.seq_len(name) for name in names],
            block_table=tables.block_table,
            window_table=tables.window_table,
            state_slots=tables.state_slots,
        )

    def tokens(self, wanted: Sequence[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
        """Hidden states and positions of tokens that were just taken."""
        parts, places = [], []
        for name, n in wanted:
            end = self.pool.seq_len(name)
            parts.append(self.sequences[name][end - n : end])
            places.append(torch.arange(end - n, end, device=self.device))
        return torch.cat(parts), torch.cat(places)

    def plan(self, batch: Batch, **options: Any) -> Plan:
        chosen = {"dtype": torch.float32, **self.options, **options}
        return make_plan(batch, self.layer.config, self.cache, **chosen)

    def step(self, wanted: Sequence[tuple[Any, int]], **options: Any) -> Plan:
        """One forward of the layer over the next tokens of each wanted request."""
        plan = self.plan(self.batch(wanted), **options)
        out = self.layer(*self.tokens(wanted), self.cache, plan)
        for (name, _), rows in zip(wanted, out.cpu().split([n for _, n in wanted]), strict=True):
            self.outputs[name] = torch.cat([self.outputs[name], rows])
        self.plans.append(plan)
        return plan

    def rewind(self, name: Hashable, length: int) -> None:
        self.pool.truncate(name, length)
        self.outputs[name] = self.outputs[name][:length]

    def share(self, source: Hashable, target: Hashable, length: int | None = None) -> None:
        self.pool.share(source, target, length)
        self.outputs[target] = self.outputs[source][: self.pool.seq_len(target)]

    def rows(self, part: str, name: Hashable, positions: Sequence[int]) -> Tensor:
        """Rows of a request as a cache has them, looked up by hand."""
        cache, config = getattr(self.cache, part), self.layer.config
        assert config.indexer is not None
        table = getattr(
            self.pool.tables([name]), f"{'window' if part == 'window' else 'block'}_table"
        )
        BS = cache.block_size
        blocks = [int(table[0, (p // BS) % table.shape[1]]) for p in positions]
        slots = [block * BS + p % BS for block, p in zip(blocks, positions, strict=True)]
        D = config.indexer.head_dim if part == "index" else config.latent_dim
        there = torch.tensor(slots, dtype=torch.int64)
        return cache.layout.read(cache.data, there, cache.kv_scale, torch.float64, D)

    def bytes(self) -> list[Tensor]:
        """A copy of everything the caches hold."""
        return [part.data.view(torch.uint8).clone() for part in self.cache.parts]

    def unchanged(self, before: Sequence[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(before, self.bytes(), strict=True))


@lru_cache
def known(window: int, ratio: int) -> tuple[MLAAttentionV4, Tensor, Dense]:
    """A layer, a sequence and what the equations make of it."""
    layer, hidden = make_layer(tiny_config(window=window), ratio), sequence(LENGTH)
    return layer, hidden, attend_densely(layer, hidden)


def serve(layer: MLAAttentionV4, hidden: Tensor, lens: list[int], **options: Any) -> Server:
    server = Server(layer, {"r": hidden}, **options)
    for n in lens:
        server.step([("r", n)])
    return server
