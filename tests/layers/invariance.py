"""A request told twice, alone and among others, and its bits compared: output, lse, chosen keys."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from openmla import (
    PRESETS,
    Batch,
    MLAAttention,
    MLAAttentionV4,
    MLAConfig,
    Plan,
    make_plan,
    plan_buffers,
)
from openmla.attention import attend_partial, select_step
from openmla.layers.linear import apply_linear
from tests.layers import serving, v4

KINDS = ("dense", "sparse", "v4")
PHASES = ("decode", "drafts", "prefill")
FORMS = ("auto", "absorbed", "expanded")
Layer = MLAAttention | MLAAttentionV4
Wanted = Sequence[tuple[Any, int]]


@dataclass(frozen=True)
class Setting:
    """What a story runs on."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: str = "auto"
    formats: tuple[str, ...] = ("fp32",)  # of caches, by the dtype
    index_format: str = "index_fp32"
    block_size: int = 4
    longest: int = 60  # context of a request
    heads: tuple[int, ...] = (4,)
    real: bool = False  # rows as wide as the models', which is what Gluon's kernels read
    prompt: int = 24  # tokens of a step, at most
    crowd: int = 4  # others in a step, at most
    spare: int = 70  # more context for V4, whose longest windows have 128 tokens


def bits(tensor: Tensor) -> Tensor:
    """As integers: NaN and both zeros have theirs, too."""
    return tensor.cpu().contiguous().view(torch.uint8)


def config_of(kind: str, setting: Setting, heads: int) -> MLAConfig:
    if not setting.real:
        if kind == "v4":
            return v4.tiny_config()
        config = PRESETS["tiny-v3" if kind == "dense" else "tiny-v3.2"]
        indexer = config.indexer
        if indexer is not None:  # of fewer keys than a request may have
            indexer = replace(indexer, topk=min(indexer.topk, setting.longest // 2))
        return replace(config, num_heads=heads, indexer=indexer)
    if kind == "v4":
        return replace(v4.real_config(), num_heads=heads)
    config = PRESETS["deepseek-v3" if kind == "dense" else "deepseek-v3.2"]
    indexer = None if config.indexer is None else replace(config.indexer, topk=64)
    return replace(
        config, num_heads=heads, hidden_size=64, q_lora_rank=128, max_positions=8192,
        indexer=indexer,
    )  # fmt: skip


@lru_cache
def layer_of(kind: str, setting: Setting, heads: int, ratio: int) -> Layer:
    config = config_of(kind, setting, heads)
    if kind == "v4":
        return v4.make_layer(config, ratio).to(setting.device, setting.dtype)
    torch.manual_seed(0)
    layer = MLAAttention(config)
    for parameter in layer.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * noise)
    return layer.to(setting.device, setting.dtype)


class Latent(serving.Server):
    """A layer of a model that caches latent rows; keeps lse and chosen keys of every token."""

    def __init__(self, layer: MLAAttention, sequences: Mapping[Any, Tensor], **options: Any):
        super().__init__(layer, sequences, **options)
        self.found: dict[Any, list[tuple[Tensor, ...]]] = {name: [] for name in sequences}

    buffers: dict[str, Tensor] | None = None  # of a captured step

    def tell(self, wanted: Wanted, padding: int) -> Plan:
        starts = {name: self.pool.seq_len(name) for name, _ in wanted}
        plan = planned(self, self.batch(wanted), padding)
        parts = [self.sequences[name][starts[name] : starts[name] + n] for name, n in wanted]
        places = [torch.arange(starts[name], starts[name] + n) for name, n in wanted]
        hidden, positions = filled(parts, places, plan.num_tokens)
        self.keep(wanted, self.attend(hidden, positions.to(self.device), plan))
        return plan

    def attend(self, hidden: Tensor, positions: Tensor, plan: Plan) -> tuple[Tensor, ...]:
        """MLAAttention.attend(), with what it does not return."""
        layer, T = self.layer, plan.num_tokens
        projected, raw, q_resid = layer.project(hidden, positions, plan)
        indexer, selection = layer.config.indexer, None
        chosen = torch.full((T, 0 if indexer is None else indexer.topk), -1, dtype=torch.int32)
        if layer.indexer is not None:
            assert q_resid is not None and raw is not None and self.cache.index is not None
            table = raw.table
            assert table is not None
            index = layer.indexer(hidden, q_resid, positions, table, self.cache.index, plan)
            selection = select_step(index, self.cache, plan)
        if selection is not None and plan.select is not None:
            rows = plan.select.rows
            rows = rows if isinstance(rows, slice) else rows.cpu()
            chosen[rows] = selection.positions.cpu()
        out, lse = attend_partial(
            projected, layer.absorbed, self.cache, plan, selection=selection, raw=raw
        )
        whole = apply_linear(layer.o_proj, out.flatten(1), plan, "o_proj")
        return whole, out, lse, chosen

    def keep(self, wanted: Wanted, results: tuple[Tensor, ...]) -> None:
        start = 0
        for name, n in wanted:
            self.found[name].append(tuple(bits(each[start : start + n]) for each in results))
            start += n


class Compressed(v4.Server):
    """The same of a V4 layer; its lse comes from a second look at what it wrote."""

    def __init__(self, layer: MLAAttentionV4, sequences: Mapping[Any, Tensor], **options: Any):
        super().__init__(layer, sequences, **options)
        self.found: dict[Any, list[tuple[Tensor, ...]]] = {name: [] for name in sequences}

    buffers: dict[str, Tensor] | None = None  # of a captured step

    def tell(self, wanted: Wanted, padding: int) -> Plan:
        columns = 0 if self.buffers is None else self.buffers["window_table"].shape[1]
        plan = planned(self, self.batch(wanted, window_columns=columns), padding)
        hidden, places = self.tokens(wanted)
        hidden, positions = filled([hidden], [places.cpu()], plan.num_tokens)
        out = self.layer(hidden, positions.to(self.device), self.cache, plan)
        start = 0
        for name, n in wanted:
            self.found[name].append((bits(out[start : start + n]),))
            start += n
        return plan


def planned(server: Latent | Compressed, batch: Batch, padding: int) -> Plan:
    """The step's plan, with tokens of nobody behind it: few, or all that fills up buffers."""
    config, cache, options = server.layer.config, server.cache, server.options
    if server.buffers is None:
        return make_plan(padded(batch, padding), config, cache, **options)
    return make_plan(batch, config, cache, into=server.buffers, **options)


def padded(batch: Batch, padding: int) -> Batch:
    slots = batch.slot_mapping
    if slots is not None:
        slots = torch.cat([slots, slots.new_full((padding,), -1)])
    return replace(batch, padding=padding, slot_mapping=slots)


def filled(parts: list[Tensor], places: list[Tensor], T: int) -> tuple[Tensor, Tensor]:
    """With rows of NaN behind them: nobody's."""
    hidden, positions = torch.cat(parts), torch.cat(places)
    more = T - hidden.shape[0]
    nobody = hidden.new_full((more, hidden.shape[1]), torch.nan)
    return torch.cat([hidden, nobody]), torch.cat([positions, positions.new_zeros(more)])


def tokens(length: int, seed: int, setting: Setting) -> Tensor:
    """Hidden states of which some come again, exactly or nearly: scores that tie, or almost."""
    hidden = v4.sequence(length, seed)
    rng = random.Random(seed)
    for _ in range(length // 4):
        noise = rng.choice([0.0, 1e-7, 1e-3])
        hidden[rng.randrange(length)] = hidden[rng.randrange(length)] * (1 + noise)
    return hidden.to(setting.dtype)


@dataclass
class Story:
    """What the request "r" does step by step, and who else is there."""

    kind: str
    seed: int
    setting: Setting
    layer: Layer
    steps: list[int]
    options: dict[str, Any]
    crowd: list[dict[str, int]] = field(default_factory=list)  # new tokens of others, by step
    order: list[int] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)  # of all that others ever bring

    def server(self, names: Sequence[str], lengths: Mapping[str, int]) -> Latent | Compressed:
        sequences = {
            name: tokens(max(lengths[name], 1), 1000 * self.seed % 100003 + number, self.setting)
            for number, name in enumerate(names)
        }
        common = {"device": self.setting.device, **self.options}
        if isinstance(self.layer, MLAAttentionV4):
            return Compressed(
                self.layer, sequences, num_blocks=48, max_requests=8, max_tokens=400, **common
            )
        size = self.setting.block_size
        needed = sum(-(-length // size) for length in lengths.values())
        return Latent(self.layer, sequences, num_blocks=needed + 8, block_size=size, **common)

    def alone(self, steps: Sequence[int] | None = None) -> list[tuple[Tensor, ...]]:
        steps = self.steps if steps is None else steps
        server = self.server(["r"], {"r": sum(self.steps)})
        for n in steps:
            server.tell([("r", n)], 0)
        return server.found["r"]

    def among_others(self, *, captured: bool = False) -> list[tuple[Tensor, ...]]:
        lengths = {"r": sum(self.steps), **self.lengths}
        server = self.server(list(lengths), lengths)
        if captured:  # for one request more than ever come
            longest = max(*self.steps, *(n for others in self.crowd for n in others.values()), 0)
            server.buffers = plan_buffers(
                self.layer.config, server.cache, max_requests=6, max_tokens=6 * longest,
                max_blocks=max(lengths.values()) // self.setting.block_size + 4,
            )  # fmt: skip
        for n, others, place, padding in zip(
            self.steps, self.crowd, self.order, self.padding, strict=True
        ):
            wanted = list(others.items())
            wanted.insert(place % (len(wanted) + 1), ("r", n))
            server.tell(wanted, padding)
        return server.found["r"]


def draw_story(kind: str, phase: str, seed: int, setting: Setting) -> Story:
    rng = random.Random(f"{kind} {phase} {seed}")
    heads, ratio, formats = rng.choice(setting.heads), rng.choice(v4.RATIOS), setting.formats
    longest, prompt = setting.longest, setting.prompt
    if kind == "v4":  # an entry of 128 tokens, if rarely; rings and positions bound the rest
        longest, prompt = (300, 60) if setting.real else (longest + setting.spare, prompt)
        formats = ("bf16", "fp8_dsv4") if setting.real else formats
    context = rng.choice([1, rng.randint(1, longest), longest])
    later = {
        "decode": lambda: 1,
        "drafts": lambda: rng.randint(2, 4),
        "prefill": lambda: rng.randint(1, prompt),
    }[phase]
    steps = [context, *(later() for _ in range(2))]
    options: dict[str, Any] = {
        "batch_invariant": True,
        "dtype": setting.dtype,
        "backend": setting.backend,
        "format": rng.choice(formats),
        "index_format": setting.index_format,
    }
    if kind != "v4":
        options["form"] = rng.choice(FORMS)
        options["workspace_tokens"] = rng.choice([2, 5, 1000]) * setting.block_size
    story = Story(kind, seed, setting, layer_of(kind, setting, heads, ratio), steps, options)
    for _ in steps:
        names = rng.sample("abcd", rng.randint(0, setting.crowd))
        new = {name: rng.choice([0, 1, 1, 3, rng.randint(1, longest)]) for name in names}
        for name, n in new.items():
            story.lengths[name] = story.lengths.get(name, 0) + n
        story.crowd.append(new)
        story.order.append(rng.randrange(5))
        story.padding.append(rng.choice([0, 0, 1, 5]))
    return story


def assert_same(one: list[tuple[Tensor, ...]], other: list[tuple[Tensor, ...]]) -> None:
    """Bit by bit, token by token, whatever steps they came in."""
    for left, right in zip(zip(*one, strict=True), zip(*other, strict=True), strict=True):
        assert torch.equal(joined(left), joined(right))


def joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part for part in parts if part.numel()] or [parts[0].flatten()])
