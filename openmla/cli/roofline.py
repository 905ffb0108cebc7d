"""A lower bound on a decode step's time: its reads, FLOPs and messages over a machine's limits.

Bytes and FLOPs are those of the ops' own cost(), for one rank, over all layers; the rest of a layer
counts by its weights, each read once. The model has no overlap and no waiting: a measured step
takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from openmla.cli.sizes import Kind, Step, kinds
from openmla.ops._register import Cost
from openmla.ops.compress_kv import cost as compress_cost
from openmla.ops.index_logits import cost as logits_cost
from openmla.ops.index_topk import cost as topk_cost
from openmla.ops.index_write import cost as index_write_cost
from openmla.ops.latent_write import cost as latent_write_cost
from openmla.ops.mqa_paged import cost as paged_cost
from openmla.ops.mqa_sparse import cost as sparse_cost
from openmla.ops.rope import cost as rope_cost

ITEMSIZE = 2  # queries and outputs in bf16
LSE, SUM, CANDIDATE = 4, 4, 8  # bytes: two float32; a float32 score and an int32 position
SMALL = 256 * 1024  # message bytes below which the number of collectives decides


class Machine(NamedTuple):
    """One GPU: bytes, bytes/s, dense bf16 FLOP/s; and one direction of its link."""

    memory: float
    bandwidth: float
    flops: float
    link: float | None = None  # bytes/s that leave a GPU; None: communication takes no time
    latency: float = 0.0  # seconds, per collective


def layer_costs(step: Step, kind: Kind) -> dict[str, Cost]:
    """One layer's ops between its projections, on the rank with the most keys."""
    if step.config.compressor is not None:
        return _compressed_costs(step, kind)
    config, B, S = step.config, step.batch, step.local_context
    H, D, C, R = config.num_heads, config.latent_dim, config.kv_lora_rank, config.qk_rope_head_dim
    rows: dict[str, Any] = {"D": D, "format": step.format, "itemsize": ITEMSIZE}
    costs = {
        "latent_write": latent_write_cost(
            B, H=step.ranks.own_heads(config), E=config.qk_head_dim, R=R, norm_queries=False,
            **rows,
        )
    }  # fmt: skip
    if kind.indexed:
        costs |= _index_costs(step)
    if step.chooses:
        assert config.indexer is not None
        # the selected keys are spread over ranks like all others
        chosen = min(-(-config.indexer.topk // step.ranks.size), S)
        costs["mqa_sparse"] = sparse_cost(B * chosen, B, H=H, C=C, **rows)
    else:
        costs["mqa_paged"] = paged_cost([1] * B, [S] * B, H=H, C=C, causal=True, **rows)
    if step.ranks.size > 1:
        costs["merge"] = _merge_cost(step)
    return costs


def _index_costs(step: Step) -> dict[str, Cost]:
    """Write keys and, if requests have more than K, score and select them."""
    indexer = step.config.indexer
    assert indexer is not None
    sizes = {"DI": indexer.head_dim, "R": step.config.qk_rope_head_dim, "itemsize": ITEMSIZE}
    written = index_write_cost(step.batch, format=step.index_format, **sizes)
    return {"index_write": written} | (_scoring_costs(step) if step.chooses else {})


def _scoring_costs(step: Step) -> dict[str, Cost]:
    """Score all of a rank's keys and select the best, then select from every rank's best."""
    B, S, W, indexer = step.batch, step.local_scored, step.ranks.size, step.config.indexer
    assert indexer is not None
    HI, DI, K = indexer.num_heads, indexer.head_dim, indexer.topk
    scored = logits_cost([1] * B, [S] * B, HI=HI, DI=DI, format=step.index_format)
    chosen = [topk_cost(B, B * S, K=K)]
    if W > 1:
        chosen.append(topk_cost(B, B * W * min(K, S), K=K, itemsize=CANDIDATE))
    return {"index_logits": scored, "index_topk": _total(chosen)}


def _merge_cost(step: Step) -> Cost:
    """Exchange: every rank's part of a head is read once, the merged one written once. Gather: all
    ranks' lse are read, this rank's part is scaled into float32, the sums are read and rounded."""
    W, B, H = step.ranks.size, step.batch, step.config.num_heads
    own, V = step.ranks.own_heads(step.config), step.ranks.out_width(step.config)
    if _schedule(step) == "exchange":
        return Cost(B * own * (W + 1) * (V * ITEMSIZE + LSE), 2 * B * own * W * V)
    rounded = V * (ITEMSIZE + SUM)
    return Cost(B * (H * (rounded + W * LSE) + own * rounded), B * (H + own) * V)


def _compressed_costs(step: Step, kind: Kind) -> dict[str, Cost]:
    """V4: write a row into the window, pool tokens into entries, attend to both, rotate back."""
    config, B, S = step.config, step.batch, step.context
    own, D, R = step.ranks.own_heads(config), config.latent_dim, config.qk_rope_head_dim
    indexer = config.indexer
    assert config.compressor is not None
    rows: dict[str, Any] = {"D": D, "format": step.format, "itemsize": ITEMSIZE}
    costs = {"latent_write": latent_write_cost(B, H=own, E=D, R=R, norm_queries=True, **rows)}
    seen, entries = min(S, config.compressor.window), 0
    if kind.ratio:
        entries = S // kind.ratio
        pooled = [compress_cost(B, B, ratio=kind.ratio, overlap=kind.indexed, **rows)]
        if kind.indexed:
            assert indexer is not None
            DI, K, format = indexer.head_dim, indexer.topk, step.index_format
            keys: dict[str, Any] = {"D": DI, "format": format, "itemsize": ITEMSIZE}
            pooled.append(compress_cost(B, B, ratio=kind.ratio, overlap=True, **keys))
            if step.chooses:
                costs |= _scoring_costs(step)
            entries = min(entries, K)
        costs["compress_kv"] = _total(pooled)
    if step.ranks.size > 1 and kind.is_sharded(config):
        # this rank's entries for all heads, then the window for its own heads
        here = -(-entries // step.ranks.size)
        calls = [
            sparse_cost(B * here, B, H=config.num_heads, C=D, **rows),
            sparse_cost(B * seen, B, H=own, C=D, **rows),
        ]
        costs |= {"mqa_sparse": _total(calls), "merge": _merge_cost(step)}
    else:
        costs["mqa_sparse"] = sparse_cost(B * (seen + entries), B, H=own, C=D, **rows)
    costs["rope"] = rope_cost(B, H=own, R=R, itemsize=ITEMSIZE)
    return costs


def _total(costs: Sequence[Cost]) -> Cost:
    return Cost(*map(sum, zip(*costs, strict=True)))


def sent_bytes(step: Step, *, chooses: bool = False) -> dict[str, float]:
    """Bytes that leave one rank per token and sharded layer, by purpose; docs/size.md derives them.

    `chooses`: the layer has an indexer of its own and requests have more than K keys.
    """
    W, H, config = step.ranks.size, step.config.num_heads, step.config
    if W == 1:
        return {}
    sent: dict[str, float] = {}
    if step.ranks.heads == "own":
        sent["queries"] = (W - 1) * H // W * config.latent_dim * ITEMSIZE
    sent |= _merge_bytes(step, _schedule(step))
    if chooses:
        assert config.indexer is not None
        sent["candidates"] = (W - 1) * min(config.indexer.topk, step.local_scored) * CANDIDATE
    return sent


def _merge_bytes(step: Step, schedule: str) -> dict[str, float]:
    """Gather all lse and add up outputs in float32, or exchange both unchanged."""
    W, H, V = step.ranks.size, step.config.num_heads, step.ranks.out_width(step.config)
    own = step.ranks.heads == "own"
    if schedule == "exchange":
        return {"outputs": (W - 1) * (H // W if own else H) * (V * ITEMSIZE + LSE)}
    # reduce-scatter, or all-reduce with twice the bytes
    return {"lse": (W - 1) * H * LSE, "outputs": (1 if own else 2) * (W - 1) * H * V * SUM / W}


def _schedule(step: Step) -> str:
    """The schedule of merge_over_ranks: fewer bytes, or for small messages fewer collectives."""
    if step.ranks.schedule != "auto":
        return step.ranks.schedule
    gather, exchange = (
        step.batch * sum(_merge_bytes(step, schedule).values())
        for schedule in ("gather", "exchange")
    )
    return "exchange" if exchange <= max(gather, SMALL) else "gather"


class Predicted(NamedTuple):
    """One rank's step: bytes and FLOPs over all layers, seconds at the machine's limits."""

    costs: dict[str, Cost]  # by op
    weights: float  # bytes
    sent: dict[str, float]  # bytes, by purpose
    collectives: int
    attention_time: float
    weights_time: float
    link_time: float

    @property
    def moved(self) -> float:
        """Bytes that the rank reads from or writes to memory, weights included."""
        return sum(cost.bytes for cost in self.costs.values()) + self.weights

    @property
    def time(self) -> float:
        return self.attention_time + self.weights_time + self.link_time


def predict(step: Step, machine: Machine, weights: float = 0.0) -> Predicted:
    """Predict a step on a machine. `weights`: bytes of them that the whole model reads per step."""
    costs: dict[str, Cost] = {}
    sent: dict[str, float] = {}
    collectives, attention_time = 0, 0.0
    for kind in kinds(step.config):
        n = kind.num_layers
        for op, cost in layer_costs(step, kind).items():
            attention_time += n * roof(cost, machine)
            so_far = costs.get(op, Cost(0, 0))
            costs[op] = Cost(so_far.bytes + n * cost.bytes, so_far.flops + n * cost.flops)
        parts = {}
        if kind.is_sharded(step.config):
            parts = sent_bytes(step, chooses=kind.indexed and step.chooses)
        collectives += n * len(parts)
        for what, num_bytes in parts.items():
            sent[what] = sent.get(what, 0) + n * step.batch * num_bytes
    if step.ranks.heads == "own":
        weights = weights / step.ranks.size
    link_time = collectives * machine.latency
    if machine.link is not None:
        link_time += sum(sent.values()) / machine.link
    weights_time = weights / machine.bandwidth
    return Predicted(costs, weights, sent, collectives, attention_time, weights_time, link_time)


def roof(cost: Cost, machine: Machine) -> float:
    """Seconds: bytes over memory bandwidth or FLOPs over matrix throughput, whichever is longer."""
    return max(cost.bytes / machine.bandwidth, cost.flops / machine.flops)
