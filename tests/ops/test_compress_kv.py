"""compress_kv: entries and state against plain Python, however a sequence is cut, and no byte more.

Sequences arrive in steps. The oracle never sees steps: it pools the raw tokens of a whole sequence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openmla.backends import BACKENDS
from openmla.cache.format import (
    INDEX_FORMATS,
    LATENT_FORMATS,
    get_format,
    state_rows,
    state_width,
)
from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.ops import compress_kv
from openmla.ops.compress_kv import cost
from openmla.testing import (
    GARBAGE_BLOCK,
    Inputs,
    out_budget,
    poison,
    poisoned_memory,
    start_loc,
    strided,
)
from tests.ops.contract import broken, page_bytes, put, run_or_skip

NOBODY = -1  # a request that is skipped


class Feed(NamedTuple):
    """What a request brings to a step: tokens that stay, then drafts that will be rejected."""

    request: int
    kept: int
    lost: int = 0


Step = tuple[Feed, ...]


@dataclass(frozen=True)
class PoolCase:
    """Sequences in steps; what nobody may read is NaN, table columns nobody needs are garbage."""

    name: str
    steps: tuple[Step, ...]
    format: str = "fp32"
    dtype: torch.dtype = torch.bfloat16
    D: int = 16
    R: int = 4
    ratio: int = 4
    overlap: bool = True
    spare: int = 0  # state rows more than the least
    BS: int = 3
    hadamard: bool = False
    scores: str = "plain"
    eps: float = 1e-6
    kv_scale: float = 0.25
    parameters: torch.dtype = torch.float32
    wrong: float = math.nan  # what rejected drafts are made of
    surplus: int = 2
    angles: torch.dtype = torch.float32  # of the table
    wide: bool = False  # the same values as float64

    def __str__(self) -> str:
        return self.name

    @property
    def feeds(self) -> list[Feed]:
        return [feed for step in self.steps for feed in step if feed.request != NOBODY]

    @property
    def lens(self) -> list[int]:
        """Tokens each sequence ends up with."""
        requests = 1 + max((feed.request for feed in self.feeds), default=-1)
        lens = [0] * requests
        for feed in self.feeds:
            lens[feed.request] += feed.kept
        return lens

    @property
    def V(self) -> int:
        return state_rows(self.ratio, overlap=self.overlap) + self.spare

    @property
    def CD(self) -> int:
        return 2 * self.D if self.overlap else self.D

    def finished(self, start: int, n: int) -> range:
        """Entries that n tokens from a position finish."""
        return range(start // self.ratio, (start + n) // self.ratio)


def drawn_scores(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if kind == "plain":
        return noise
    if kind == "far apart":
        return 160 * torch.rand(shape, generator=generator) - 80
    ramp = torch.linspace(-80, 80, shape[0])[:, None]
    return noise + (ramp if kind == "rising" else -ramp)


class Story:
    """A case under way: its tensors, and how far each sequence has come."""

    def __init__(self, case: PoolCase, device: str | torch.device = "cpu") -> None:
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(0)
        rng = random.Random(0)
        lens, D = case.lens, case.D
        self.dtype = torch.float64 if case.wide else case.dtype
        self.kv, self.score = [], []
        for S in lens:
            self.kv.append((2 * torch.randn(S, case.CD, generator=generator)).to(case.dtype))
            self.score.append(drawn_scores(case.scores, (S, case.CD), generator).to(case.dtype))
        self.bias = torch.randn(case.ratio, case.CD, generator=generator).to(case.parameters)
        self.norm_weight = torch.randn(D, generator=generator).to(case.parameters)
        self.reach = [0] * len(lens)  # one past the furthest position, drafts included
        self.done = [0] * len(lens)
        skipped = [feed.kept for step in case.steps for feed in step if feed.request == NOBODY]
        longest = max([*lens, *skipped], default=0) + case.spare + 1
        half = torch.arange(0, case.R, 2) / max(case.R, 1)
        angles = torch.outer(torch.arange(float(longest)), 10000.0**-half)
        self.table = (1.2 * torch.cat([angles.cos(), angles.sin()], dim=1)).to(case.angles)
        self.table[torch.arange(longest) % case.ratio != 0] = torch.nan
        layout = get_format(case.format)
        needs = [-(-(S + case.spare) // case.ratio // case.BS) + 1 for S in lens]
        N = sum(needs) + 2
        order = rng.sample(range(N), N)
        self.blocks = [[order.pop() for _ in range(need)] for need in needs]
        W = layout.width(D)
        aligned = case.format == "fp8_dsv4"  # its pages lie at multiples of a row's values
        padding = D + 64 if aligned else 12 // layout.dtype.itemsize
        flat = poison((N, layout.page_width(D, case.BS) + padding), layout.dtype, device)
        self.cache = flat[:, : case.BS * W].unflatten(1, (case.BS, W))
        self.slots = rng.sample(range(len(lens) + 2), len(lens))
        SW = state_width(D, overlap=case.overlap)
        state_dtype = torch.promote_types(self.dtype, torch.float32)
        self.state = strided(poison((len(lens) + 2, case.V, SW), state_dtype, device))
        self.kv_scale = torch.tensor(case.kv_scale, dtype=torch.float32, device=device)

    def step(self, feeds: Step) -> Inputs:
        """The op's arguments for the next step, after which the kept tokens are done."""
        case = self.case
        kv, score, slots = [], [], []
        positions: list[int] = []
        M = max((len(blocks) for blocks in self.blocks), default=0) + 1
        table = torch.full((len(feeds), M + 1), GARBAGE_BLOCK, dtype=torch.int32)[:, :M]
        table[:, 1::2] = -GARBAGE_BLOCK
        for row, (b, kept, lost) in enumerate(feeds):
            start = self.done[b] if b != NOBODY else 0
            n = kept + lost
            positions += range(start, start + n)
            drafts = torch.full((lost, case.CD), case.wrong)
            if b == NOBODY:
                drafts = torch.full((n, case.CD), torch.nan)
                slots.append(-1 if row else -(2**31))
            else:
                kv.append(self.kv[b][start : start + kept])
                score.append(self.score[b][start : start + kept])
                slots.append(self.slots[b] if n else GARBAGE_BLOCK)  # none of the state's
                assert self.reach[b] - start <= case.spare, "the contract goes no further back"
                for i in case.finished(start, n):
                    column = i // case.BS
                    table[row, column] = self.blocks[b][column]
                self.done[b] += kept
                self.reach[b] = max(self.reach[b], start + n)
            kv.append(drafts.to(case.dtype))
            score.append(drafts.to(case.dtype))
        beyond = poison((case.surplus, case.CD), case.dtype)
        positions += [-5, 2**40][: case.surplus]

        def put_there(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            return strided(tensor.to(self.device, dtype))

        tensors = {
            "cache": self.cache,
            "kv_scale": self.kv_scale,
            "state": self.state,
            "kv": put_there(torch.cat([*kv, beyond]), self.dtype),
            "score": put_there(torch.cat([*score, beyond]), self.dtype),
            "bias": put_there(self.bias),
            "norm_weight": self.norm_weight.to(self.device),
            "table": put_there(self.table),
            "positions": torch.tensor(positions, dtype=torch.int64, device=self.device),
            "query_start_loc": start_loc([kept + lost for _, kept, lost in feeds], self.device),
            "block_table": table.to(self.device),
            "state_slots": torch.tensor(slots, dtype=torch.int32, device=self.device),
        }
        scalars = {
            "format": case.format,
            "ratio": case.ratio,
            "overlap": case.overlap,
            "eps": case.eps,
            "hadamard": case.hadamard,
        }
        return Inputs(tensors, scalars, ("state", "kv", "score"))

    def slot(self, b: int, i: int) -> int:
        return self.blocks[b][i // self.case.BS] * self.case.BS + i % self.case.BS

    def play(self, backend: str, steps: Sequence[Step] | None = None) -> Story:
        """Run steps, all of them unless told, and see that nothing else changes."""
        for feeds in self.case.steps if steps is None else steps:
            starts = list(self.done)
            inputs = self.step(feeds)
            before = page_bytes(self.cache), page_bytes(self.state)
            run_or_skip(compress_kv, inputs, backend)
            after = page_bytes(self.cache), page_bytes(self.state)
            for old, new, kept in zip(before, after, self._untouched(feeds, starts), strict=True):
                assert torch.equal(old[kept], new[kept])
        return self

    def _untouched(self, feeds: Step, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Bytes of cache and state that a step must leave alone, padding included."""
        case = self.case
        pages = torch.ones_like(page_bytes(self.cache), dtype=torch.bool)
        NS, V, SW = self.state.shape
        rows = torch.ones_like(page_bytes(self.state), dtype=torch.bool).view(NS, V + 1, -1)
        for b, kept, lost in feeds:
            n = kept + lost
            if b == NOBODY or n == 0:
                continue
            for i in case.finished(starts[b], n):
                block, offset = divmod(self.slot(b, i), case.BS)
                for place in entry_bytes(case, offset):
                    pages[block, place] = False
            for p in range(starts[b] + max(n - V, 0), starts[b] + n):
                rows[self.slots[b], p % V, : SW * self.state.dtype.itemsize] = False
        return pages, rows.view(NS, -1)

    def entries(self) -> Tensor:
        """[n, D] f64 what the cache holds for all sequences, one after another."""
        found = [
            self.slot(b, i) for b, S in enumerate(self.done) for i in range(S // self.case.ratio)
        ]
        slots = torch.tensor(found, dtype=torch.int64)
        layout = get_format(self.case.format)
        return layout.read(self.cache.cpu(), slots, self.kv_scale.cpu(), torch.float64, self.case.D)

    def kept_positions(self) -> Iterator[tuple[int, int]]:
        """Request and position of every token whose state row must be there still."""
        for b, S in enumerate(self.done):
            for p in range(max(self.reach[b] - self.case.V, 0), S):
                yield b, p

    def kept_state(self) -> Tensor:
        """[n, SW] rows of those tokens."""
        rows = [self.state[self.slots[b], p % self.case.V].cpu() for b, p in self.kept_positions()]
        return torch.stack(rows) if rows else self.state.new_zeros(0, self.state.shape[2]).cpu()


def entry_bytes(case: PoolCase, offset: int) -> list[slice]:
    """Where in a page's bytes an entry is: values and scales apart in some formats."""
    layout, D = get_format(case.format), case.D
    width = layout.row_bytes(D)
    if case.format in ("index_fp8", "index_fp8_exact"):
        values = D
    elif case.format == "fp8_dsv4":
        values = D + 64
    else:
        return [slice(offset * width, (offset + 1) * width)]
    first, scales = case.BS * values, width - values
    return [
        slice(offset * values, (offset + 1) * values),
        slice(first + offset * scales, first + (offset + 1) * scales),
    ]


class Exact(NamedTuple):
    """What the formulas give, in Python floats."""

    entries: Tensor  # [n, D]
    state: Tensor  # [m, SW]


def exact_results(story: Story) -> Exact:
    """Entries pooled from raw tokens, all of them at hand; state rows likewise."""
    case = story.case
    tokens = [
        (kv.tolist(), score.tolist()) for kv, score in zip(story.kv, story.score, strict=True)
    ]
    biases = story.bias.tolist()
    entries = [
        exact_entry(story, *tokens[b], biases, i)
        for b, S in enumerate(story.done)
        for i in range(S // case.ratio)
    ]
    state = []
    for b, p in story.kept_positions():
        kv, score = tokens[b]
        first = p if case.overlap else p // case.ratio * case.ratio
        window = range(first, p + 1)
        z = [[s + a for s, a in zip(score[j], biases[j % case.ratio], strict=True)] for j in window]
        if case.overlap:
            state.append(kv[p] + z[0])
            continue
        largest = [max(column) for column in zip(*z, strict=True)]
        weights = [
            [math.exp(value - top) for value, top in zip(row, largest, strict=True)] for row in z
        ]
        channels = range(case.D)
        total = [math.fsum(row[d] for row in weights) for d in channels]
        weighted = [
            math.fsum(row[d] * kv[j][d] for j, row in zip(window, weights, strict=True))
            for d in channels
        ]
        state.append(largest + total + weighted)
    return Exact(
        torch.tensor(entries, dtype=torch.float64).reshape(-1, case.D),
        torch.tensor(state, dtype=torch.float64).reshape(-1, story.state.shape[2]),
    )


def exact_entry(
    story: Story, kv: list[list[float]], score: list[list[float]], biases: list[list[float]], i: int
) -> list[float]:
    case = story.case
    r, D, R = case.ratio, case.D, case.R
    pool = [(p, D if case.overlap else 0) for p in range(r * i, r * i + r)]
    if case.overlap and i > 0:
        pool += [(p, 0) for p in range(r * i - r, r * i)]
    v = []
    for d in range(D):
        z = [score[p][at + d] + biases[p % r][at + d] for p, at in pool]
        weights = [math.exp(value - max(z)) for value in z]
        summed = math.fsum(w * kv[p][at + d] for w, (p, at) in zip(weights, pool, strict=True))
        v.append(summed / math.fsum(weights))
    length = math.sqrt(math.fsum(value * value for value in v) / D + case.eps)
    v = [value / length * w for value, w in zip(v, story.norm_weight.tolist(), strict=True)]
    angles = story.table[r * i].tolist()
    for pair in range(R // 2):
        first = D - R + 2 * pair
        turned = complex(v[first], v[first + 1]) * complex(angles[pair], angles[R // 2 + pair])
        v[first], v[first + 1] = turned.real, turned.imag
    if case.hadamard:
        v = [
            math.fsum(-v[i] if (i & j).bit_count() % 2 else v[i] for i in range(D)) / math.sqrt(D)
            for j in range(D)
        ]
    return v


def cut(total: int, *edges: int) -> tuple[Step, ...]:
    """One sequence, cut before each of the positions."""
    bounds = [0, *edges, total]
    return tuple((Feed(0, b - a),) for a, b in pairwise(bounds))


def token_by_token(total: int) -> tuple[Step, ...]:
    return cut(total, *range(1, total))


# Order changes from step to step; some requests bring nothing, some belong to nobody.
MIXED: tuple[Step, ...] = (
    (Feed(2, 6), Feed(NOBODY, 5), Feed(0, 9), Feed(1, 0)),
    (Feed(1, 3), Feed(2, 0), Feed(0, 1)),
    (Feed(NOBODY, 1), Feed(0, 2), Feed(1, 1), Feed(NOBODY, 0), Feed(2, 17)),
    (Feed(1, 0),),
    (Feed(2, 1), Feed(1, 8), Feed(0, 4), Feed(3, 4)),
)
# Drafts: all of them lost, some, none, and twice over; the last entries finish late.
SPECULATIVE: tuple[Step, ...] = (
    (Feed(0, 5, 3), Feed(1, 1, 3)),
    (Feed(1, 0, 3), Feed(0, 1, 2)),
    (Feed(0, 0, 2), Feed(1, 4, 0)),
    (Feed(0, 3, 1), Feed(1, 1, 3)),
    (Feed(0, 1, 3), Feed(1, 2, 1)),
    (Feed(0, 4, 0), Feed(1, 4, 0)),
)
# More requests than a kernel may look at in one go; some of these bring nothing.
MANY: tuple[Step, ...] = (tuple(Feed(b, 5 * (b % 7 == 0)) for b in range(140)),)
FOLDED_8: dict[str, Any] = {"overlap": False, "ratio": 8}
FOLDED_3: dict[str, Any] = {"overlap": False, "ratio": 3}
V4_MAIN: dict[str, Any] = {"D": 512, "R": 64}
V4_128: dict[str, Any] = {"overlap": False, "ratio": 128, "D": 40, "R": 4, "BS": 2}

BASE = PoolCase("base", MIXED, format="bf16")
CASES = [
    BASE,
    *(
        PoolCase(f"{form}-{format}-{str(dtype)[6:]}", MIXED, format, dtype, **more)
        for form, more in (("overlap", {}), ("folded", FOLDED_3))
        for format in ("fp32", "bf16", "fp16", "fp8", "index_fp32", "index_bf16", "index_fp8")
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    ),
    *(
        PoolCase(f"{form}-{name}", steps, dtype=torch.float32, spare=spare, **more)
        for form, more in (
            ("overlap-4", {}),
            ("overlap-3", {"ratio": 3}),
            ("overlap-1", {"ratio": 1}),
            ("folded-8", FOLDED_8),
            ("folded-3", FOLDED_3),
            ("folded-1", {"overlap": False, "ratio": 1}),
        )
        for name, steps, spare in (
            ("whole", cut(26), 0),
            ("tokens", token_by_token(26), 0),
            ("tokens-spare", token_by_token(26), 3),
            ("edges", cut(26, 8, 15, 17, 24, 25), 0),
            ("edges-after", cut(26, 1, 9, 16, 23), 1),
            ("mixed", MIXED, 0),
            ("mixed-spare", MIXED, 30),
            ("speculative", SPECULATIVE, 3),
            ("speculative-spare", SPECULATIVE, 8),
        )
    ),
    *(
        PoolCase(f"folded-128-{name}", steps, dtype=torch.float32, spare=spare, **V4_128)
        for name, steps, spare in (
            ("whole", cut(300), 0),
            ("tokens", token_by_token(260), 0),
            ("at-edges", cut(300, 128, 256), 0),
            ("before-edges", cut(300, 127, 255, 256), 5),
            ("after-edges", cut(300, 1, 129, 257), 5),
            ("longer-than-state", cut(300, 100), 199),
        )
    ),
    *(
        PoolCase(f"{form}-scores-{scores}-{name}", steps, scores=scores, **more)
        for scores in ("far apart", "rising", "falling")
        for form, more, total in (("overlap-4", {}, 17), ("folded-128", V4_128, 256))
        for name, steps in (("whole", cut(total)), ("tokens", token_by_token(total)))
    ),
    PoolCase("rope-everything", MIXED, R=16),
    PoolCase("no-rope", MIXED, R=0),
    PoolCase("large-eps", MIXED, eps=0.5),
    PoolCase("block-1", MIXED, BS=1),
    PoolCase("hadamard", MIXED, hadamard=True),
    PoolCase("hadamard-folded", MIXED, hadamard=True, **FOLDED_8),
    PoolCase("width-2", MIXED, D=2, R=2, hadamard=True),
    PoolCase("width-odd", MIXED, D=7, R=2),
    PoolCase("low-precision-parameters", MIXED, parameters=torch.bfloat16),
    PoolCase("float64-table", MIXED, angles=torch.float64),
    PoolCase("no-surplus", MIXED, surplus=0),
    PoolCase("many-requests", MANY, D=4, R=2),
    PoolCase("many-requests-folded", MANY, D=4, R=2, **FOLDED_3),
    PoolCase("width-odd-packed", cut(14, 9), "fp8_ds_mla", D=133, R=4),
    *(
        PoolCase(f"{name}-{format}", cut(14, 9), format, D=128, R=64, hadamard=name == "turned")
        for name in ("v4-index", "turned")
        for format in INDEX_FORMATS
    ),
    *(
        PoolCase(f"width-192-{format}", cut(14, 9), format, D=192, R=64)
        for format in LATENT_FORMATS
    ),
    PoolCase("v4-main-4", cut(14, 9), "fp8_dsv4", torch.float32, **V4_MAIN),
    PoolCase("v4-main-128", cut(129, 100), "fp8_dsv4", torch.float32, **{**V4_128, **V4_MAIN}),
]
EXACT_CASES = [
    case for case in CASES if case.format in ("fp32", "index_fp32") and case.dtype != torch.float64
]


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: PoolCase, backend: str, device: str) -> None:
    """Entries and state within the budget; what state holds unrounded is exact."""
    story, peer = Story(case, device).play(backend), Story(case, device)
    peer.play("reference")
    exact = exact_results(story)
    assert out_budget(story.entries().float(), exact.entries, peer.entries()) <= 1
    rows = story.kept_state()
    plain = case.D if not case.overlap else rows.shape[1]
    assert torch.equal(rows[:, :plain], exact.state[:, :plain].to(rows.dtype))
    for part in (slice(plain, plain + case.D), slice(plain + case.D, None)):
        used = out_budget(rows[:, part], exact.state[:, part], peer.kept_state()[:, part])
        assert used <= 1


def assert_exact(story: Story) -> None:
    """Float64 all the way: entries have only their float32 in the cache to lose."""
    exact = exact_results(story)
    half_ulp = torch.finfo(torch.float32).eps / 2
    torch.testing.assert_close(story.entries(), exact.entries, rtol=half_ulp, atol=1e-13)
    torch.testing.assert_close(story.kept_state(), exact.state, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("case", EXACT_CASES, ids=str)
def test_reference_is_exact_in_float64(case: PoolCase) -> None:
    assert_exact(Story(replace(case, wide=True)).play("reference"))


@given(
    ratio=st.integers(1, 6),
    overlap=st.booleans(),
    spare=st.integers(0, 4),
    feeds=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=8),
)
def test_reference_takes_any_cuts_and_drafts(
    ratio: int, overlap: bool, spare: int, feeds: list[tuple[int, int]]
) -> None:
    steps = tuple((Feed(0, kept, min(lost, spare)),) for kept, lost in feeds)
    case = PoolCase("any", steps, D=2, R=2, ratio=ratio, overlap=overlap, spare=spare, wide=True)
    assert_exact(Story(case).play("reference"))


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("pieces", ["tokens", "cut"])
@pytest.mark.parametrize(
    ("more", "total"), [({}, 64), ({**V4_128, "D": 6}, 256)], ids=["overlap-4", "folded-128"]
)
@pytest.mark.parametrize("scores", ["plain", "far apart", "rising", "falling"])
def test_cuts_cost_no_precision(
    scores: str, more: dict[str, Any], total: int, pieces: str, backend: str, device: str
) -> None:
    """In pieces, an entry is as good as the reference makes it in one call."""
    edges = range(1, total) if pieces == "tokens" else (total // 2 - 1, total // 2 + 1)
    steps = cut(total, *edges)
    case = PoolCase("pieces", steps, dtype=torch.float32, scores=scores, **more)
    story = Story(case, device).play(backend)
    whole = Story(replace(case, steps=cut(total)), device).play("reference")
    assert out_budget(story.entries().float(), exact_results(story).entries, whole.entries()) <= 1


FORMS = [
    pytest.param({"ratio": 4, "overlap": True, "spare": 5}, id="overlap-4"),
    pytest.param({"ratio": 3, "overlap": True, "spare": 3}, id="overlap-3"),
    pytest.param({"ratio": 8, "overlap": False, "spare": 5}, id="folded-8"),
    pytest.param({"ratio": 3, "overlap": False, "spare": 4}, id="folded-3"),
]


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("more", FORMS)
@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 15])
@pytest.mark.parametrize("wrong", [math.nan, 30.0], ids=["nan", "numbers"])
def test_rejected_drafts_leave_no_trace(
    wrong: float, start: int, more: dict[str, Any], backend: str, device: str
) -> None:
    """Back by as much as the contract allows, twice: the bits are those of a clean run."""
    first, last = (Feed(0, start),), (Feed(0, 20),)
    clean = Story(PoolCase("clean", (first, last), "bf16", **more), device).play(backend)
    for back in range(1, more["spare"] + 1):
        rejected = (Feed(0, 0, back),)
        case = PoolCase("drafts", (first, rejected, rejected, last), "bf16", wrong=wrong, **more)
        story = Story(case, device).play(backend, case.steps[:1])
        before = page_bytes(story.cache)
        story.play(backend, case.steps[1:2])
        if not math.isnan(wrong):  # NaN is what unwritten entries are
            finishes = start % case.ratio + back >= case.ratio
            assert torch.equal(page_bytes(story.cache), before) != finishes
        story.play(backend, case.steps[2:])
        assert torch.equal(story.entries(), clean.entries())
        assert story.entries().isfinite().all()
        assert torch.equal(story.kept_state(), clean.kept_state())


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
def test_first_entry_is_its_own_tokens_alone(backend: str, device: str) -> None:
    """With overlap a window's first channels are for the entry after it, not for its own."""
    case = PoolCase("first", cut(8, 4), dtype=torch.float32)
    clean, story = Story(case, device).play(backend), Story(case, device)
    for tokens in (*story.kv, *story.score):
        tokens[:4, : case.D] = torch.nan
    story.play(backend)
    assert torch.equal(story.entries()[0], clean.entries()[0])
    assert story.entries()[0].isfinite().all() and story.entries()[1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("spare", [0, 4])
def test_a_folded_window_starts_from_nothing(spare: int, backend: str, device: str) -> None:
    """At a window's edge no state is needed, as after a prefix that was cached elsewhere."""
    case = PoolCase("edge", cut(24, 8, 16, 21), spare=spare, **FOLDED_8)
    clean, story = Story(case, device).play(backend), Story(case, device)
    for number, feeds in enumerate(case.steps):
        if number < 3:
            story.state.fill_(torch.nan)
        story.play(backend, [feeds])
    assert torch.equal(story.entries(), clean.entries())


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("spare", [0, 4])
def test_an_overlapping_window_needs_one_before_it(spare: int, backend: str, device: str) -> None:
    """Of that, only the first channels."""
    case = PoolCase("edge", cut(20, 12, 14), spare=spare)
    clean, story = Story(case, device).play(backend), Story(case, device)
    story.play(backend, case.steps[:1])
    D, slot = case.D, story.slots[0]
    needed = {p % case.V for p in range(8, 12)}
    for row in range(case.V):
        unread = (slice(D, 2 * D), slice(3 * D, None)) if row in needed else (slice(None),)
        for channels in unread:
            story.state[slot, row, channels] = torch.nan
    story.play(backend, case.steps[1:])
    assert torch.equal(story.entries(), clean.entries())


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
def test_rope_is_the_first_token_of_the_window(backend: str, device: str) -> None:
    """Rows of the table other than ratio * i are NaN in every case; here one angle is turned."""
    case = PoolCase("turned", cut(12), dtype=torch.float32, R=2)
    plain, story = Story(case, device), Story(case, device)
    plain.table[:] = torch.tensor([1.0, 0.0])
    story.table[:] = torch.nan
    for p, angle in ((0, (1.0, 0.0)), (4, (0.0, 1.0)), (8, (-1.0, 0.0))):
        story.table[p] = torch.tensor(angle)
    upright, turned = plain.play(backend).entries(), story.play(backend).entries()
    assert torch.equal(turned[:, :-2], upright[:, :-2])
    x, y = upright[:, -2:].unbind(1)
    assert torch.equal(turned[:, -2], torch.stack([x[0], -y[1], -x[2]]))
    assert torch.equal(turned[:, -1], torch.stack([y[0], x[1], -y[2]]))


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize(
    ("format", "D"),
    [*((name, 128) for name in (*LATENT_FORMATS, *INDEX_FORMATS)), ("fp8_dsv4", 512)],
)
def test_bytes_are_the_encoded_float32_entry(
    format: str, D: int, hadamard: bool, backend: str, device: str
) -> None:
    """What is stored is encode() of what fp32 would hold, in bf16 where the format is packed."""
    case = PoolCase("encoded", cut(13, 6), format, D=D, R=64, hadamard=hadamard)
    story = Story(case, device).play(backend)
    wide = Story(replace(case, format="fp32"), device).play(backend)
    layout, entries = get_format(format), wide.entries().float()
    encoded = layout.encode(entries.bfloat16() if layout.packed else entries, wide.kv_scale.cpu())
    pages = page_bytes(story.cache)
    for i, row in enumerate(encoded):
        block, offset = divmod(story.slot(0, i), case.BS)
        stored = torch.cat([pages[block, place] for place in entry_bytes(case, offset)])
        assert torch.equal(stored, row.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("more", FORMS)
def test_one_score_far_above_the_rest_takes_all(
    more: dict[str, Any], backend: str, device: str
) -> None:
    """The entry is the token with it, normed, wherever in the window it comes."""
    r, D = more["ratio"], 16
    case = PoolCase("peak", token_by_token(2 * r), dtype=torch.float32, R=0, eps=0.0, **more)
    for peak in range(r):
        story = Story(case, device)
        own = slice(D if case.overlap else 0, None)
        story.score[0][:] = -120.0
        story.score[0][r + peak, own] = 120.0
        story.play(backend)
        v = story.kv[0][r + peak, own].double()
        wanted = v / v.square().mean().sqrt() * story.norm_weight.double()
        eps = torch.finfo(torch.float32).eps
        torch.testing.assert_close(story.entries()[1], wanted, rtol=4 * eps, atol=0)


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("more", FORMS)
@pytest.mark.parametrize(
    "step",
    [(), (Feed(0, 0),), (Feed(0, 0), Feed(1, 0)), (Feed(NOBODY, 9),), (Feed(0, 1),)],
    ids=["no requests", "no tokens", "none twice", "nobody's", "no entry"],
)
@pytest.mark.parametrize("surplus", [0, 2])
def test_nothing_to_write(
    surplus: int, step: Step, more: dict[str, Any], backend: str, device: str
) -> None:
    case = PoolCase("nothing", (step,), "bf16", surplus=surplus, **more)
    story = Story(case, device)
    before = page_bytes(story.cache)
    story.play(backend)
    assert torch.equal(page_bytes(story.cache), before)


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "folded"])
def test_requests_are_apart(overlap: bool, backend: str, device: str) -> None:
    """In one call or in one each, last first: the same bits."""
    lens = (9, 12, 5, 16)
    together = tuple(Feed(b, n) for b, n in enumerate(lens))
    case = PoolCase("apart", (together,), "fp32", overlap=overlap)
    alone = replace(case, steps=tuple((feed,) for feed in reversed(together)))
    story, other = Story(case, device).play(backend), Story(alone, device).play(backend)
    assert torch.equal(story.entries(), other.entries())
    assert torch.equal(story.kept_state(), other.kept_state())


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
def test_blocks_beyond_int32(backend: str, device: str) -> None:
    """Pages past byte 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, D = 57_400, 64, 512
    layout = get_format("fp8_dsv4")
    stride = layout.page_width(D, BS)
    with poisoned_memory(False):
        flat = torch.empty((N, stride), dtype=torch.uint8, device=device)
    assert (N - 1) * stride > 2**31 and N > 57_344
    far = flat[:, : BS * layout.width(D)].unflatten(1, (BS, -1))
    story = Story(PoolCase("near", cut(12), "fp8_dsv4", D=D, R=64, BS=BS), device)
    inputs = story.step(story.case.steps[0])
    other = inputs.clone()
    run_or_skip(compress_kv, inputs, backend)
    flat[-1] = 0xFF
    broken(other, cache=lambda _: far, block_table=put((0, 0), N - 1)).run(
        compress_kv, backend=backend
    )
    near = story.cache[story.blocks[0][0]]
    assert torch.equal(far[-1], near) and not bool((near[0] == 0xFF).all())


@pytest.mark.parametrize("backend", BACKENDS["compress_kv"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "folded"])
def test_state_beyond_int32(overlap: bool, backend: str, device: str) -> None:
    """A slot past element 2^31 of the state, reserved likewise, and the first one."""
    case = PoolCase("far", cut(12, 6), overlap=overlap)
    story, other = Story(case, device), Story(case, device)
    V, SW = story.state.shape[1:]
    NS = 2**31 // (V * SW) + 2
    try:
        with poisoned_memory(False):
            state = torch.empty((NS, V, SW), dtype=torch.float32, device=device)
    except RuntimeError:
        pytest.skip("8.6 GB of address space are not to be had")
    state[[0, -1]] = torch.nan
    for each, slot in ((story, 0), (other, NS - 1)):
        each.slots, each.state = [slot], state
        for feeds in case.steps:
            run_or_skip(compress_kv, each.step(feeds), backend)
    assert torch.equal(story.entries(), other.entries())
    assert torch.equal(story.kept_state(), other.kept_state())


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "folded"])
def test_opcheck_and_fullgraph(overlap: bool, device: str) -> None:
    story = Story(replace(BASE, overlap=overlap), device).play("reference", MIXED[:2])
    inputs = story.step(MIXED[2])
    tensors = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
    for name in ("cache", "state", "kv", "score", "table"):
        tensors[name].nan_to_num_()  # opcheck compares values, and NaN differs from itself
    scalars = {**inputs.scalars, "backend": "reference"}
    torch.library.opcheck(torch.ops.openmla.compress_kv.default, tuple(tensors.values()), scalars)
    compiled = torch.compile(compress_kv, fullgraph=True, backend="aot_eager")
    other = inputs.clone()
    inputs.run(compiled, backend="reference")
    other.run(compress_kv, backend="reference")
    for name in ("cache", "state"):
        assert torch.equal(inputs[name].view(torch.uint8), other[name].view(torch.uint8))


def base_inputs() -> tuple[Story, Inputs]:
    """A step of three requests that finish entries 1; 0, 1 and 2; none."""
    steps: tuple[Step, ...] = ((Feed(0, 6),), (Feed(0, 3), Feed(1, 13), Feed(2, 2)))
    story = Story(PoolCase("bad", steps, "bf16"), "cpu").play("reference", steps[:1])
    return story, story.step(steps[1])


BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"cache": lambda t: t[0]}, "cache must be [N, BS, W], got (3, 16)"),
    ({"cache": lambda t: t[:, :, 1:]}, "cache must be [N, BS, W] with W=16, got (9, 3, 15)"),
    ({"cache": lambda t: t.float()}, "cache must be torch.bfloat16 for format bf16, got"),
    ({"cache": lambda t: t.mT.contiguous().mT}, "cache must be contiguous along its last dim"),
    ({"kv_scale": lambda t: t[None]}, "kv_scale must be [], got (1,)"),
    ({"kv_scale": lambda t: t.double()}, "kv_scale must be float32, got torch.float64"),
    ({"state": lambda t: t[0]}, "state must be [NS, V, SW], got (7, 64)"),
    ({"state": lambda t: t[:, :, 1:]}, "state must be [NS, V, SW] with SW=64, got (5, 7, 63)"),
    ({"state": lambda t: t[:, 1:]}, "state must have V>=7 rows each, got 6"),
    ({"state": lambda t: t.int()}, "state must be fp16, bf16, fp32 or fp64, got torch.int32"),
    ({"state": lambda t: t.bfloat16()}, "state must be torch.float32 with kv torch.bfloat16, got"),
    ({"state": lambda t: t.double()}, "state must be torch.float32 with kv torch.bfloat16, got"),
    ({"state": lambda t: t.mT.contiguous().mT}, "state must be contiguous along its last dim"),
    ({"kv": lambda t: t[0]}, "kv must be [T, CD], got (32,)"),
    ({"kv": lambda t: t[:, 1:]}, "kv must be [T, CD] with CD=32, got (20, 31)"),
    ({"kv": lambda t: t[:, :16]}, "kv must be [T, CD] with CD=32, got (20, 16)"),
    ({"kv": lambda t: t.int()}, "kv must be fp16, bf16, fp32 or fp64, got torch.int32"),
    ({"kv": lambda t: t.T.contiguous().T}, "kv must be contiguous along its last dimension"),
    ({"kv": lambda t: t.float()}, "score must be torch.float32 with kv torch.float32, got torch."),
    ({"kv": lambda t: t.double()}, "score must be torch.float64 with kv torch.float64, got torch."),
    ({"kv": lambda t: t.to("meta")}, "kv must be on cpu, got meta"),
    ({"score": lambda t: t[1:]}, "score must be [T, CD] with T=20, got (19, 32)"),
    ({"score": lambda t: t[:, 1:]}, "score must be [T, CD] with CD=32, got (20, 31)"),
    ({"score": lambda t: t.half()}, "score must be torch.bfloat16 with kv torch.bfloat16, got"),
    ({"score": lambda t: t.T.contiguous().T}, "score must be contiguous along its last dim"),
    ({"bias": lambda t: t[1:]}, "bias must be [ratio, CD] with ratio=4, got (3, 32)"),
    ({"bias": lambda t: t[:, 1:]}, "bias must be [ratio, CD] with CD=32, got (4, 31)"),
    ({"bias": lambda t: t.long()}, "bias must be fp16, bf16, fp32 or fp64, got torch.int64"),
    ({"norm_weight": lambda t: t[1:]}, "cache must be [N, BS, W] with W=15, got (9, 3, 16)"),
    ({"norm_weight": lambda t: t[0]}, "cache must be [N, BS, W] with W=0, got (9, 3, 16)"),
    ({"norm_weight": lambda t: t[None]}, "norm_weight must be [D], got (1, 16)"),
    ({"norm_weight": lambda t: t.long()}, "norm_weight must be fp16, bf16, fp32 or fp64, got"),
    ({"table": lambda t: t[0]}, "table must be [Q, R], got (4,)"),
    ({"table": lambda t: t.int()}, "table must be fp16, bf16, fp32 or fp64, got torch.int32"),
    ({"table": lambda t: t.bfloat16()}, "table must be float32 or float64, got torch.bfloat16"),
    ({"table": lambda t: t[:, 1:]}, "table must have an even R of at most D=16, got 3"),
    ({"table": lambda t: t.repeat(1, 5)}, "table must have an even R of at most D=16, got 20"),
    ({"positions": lambda t: t.int()}, "positions must be int64, got torch.int32"),
    ({"positions": lambda t: t[1:]}, "positions must be [T] with T=20, got (19,)"),
    ({"positions": put((3,), -1)}, "positions must be within the table's 0..13, got -1..12"),
    ({"table": lambda t: t[:12]}, "positions must be within the table's 0..11, got 0..12"),
    (
        {"positions": put((4,), 2)},
        "positions of a request must be consecutive, got 2 at row 4, expected 1",
    ),
    (
        {"positions": put((2,), 7)},
        "positions of a request must be consecutive, got 7 at row 2, expected 8",
    ),
    ({"query_start_loc": lambda t: t.long()}, "query_start_loc must be int32, got torch.int64"),
    ({"query_start_loc": lambda t: t[1:]}, "query_start_loc must be [B+1] with B+1=4, got (3,)"),
    ({"query_start_loc": put((0,), 1)}, "query_start_loc must start with 0, got [1, 3, 16, 18]"),
    ({"query_start_loc": put((2,), 2)}, "query_start_loc must not fall, got [0, 3, 2, 18]"),
    ({"query_start_loc": put((2,), -1)}, "query_start_loc must not fall, got [0, 3, -1, 18]"),
    ({"query_start_loc": lambda t: -t}, "query_start_loc must not fall, got [0, -3, -16, -18]"),
    (
        {"query_start_loc": lambda t: torch.tensor([0, 3, 2**31 - 1, -(2**31)]).int()},
        "query_start_loc must not fall, got [0, 3, 2147483647, -2147483648]",
    ),
    ({"query_start_loc": put((3,), 21)}, "query_start_loc must end within the 20 rows of kv, got"),
    ({"block_table": lambda t: t.long()}, "block_table must be int32, got torch.int64"),
    ({"block_table": lambda t: t[:2]}, "state_slots must be [B] with B=2, got (3,)"),
    (
        {"block_table": lambda t: t[:, :0]},
        "block_table must have a column for every 3 keys, got M=0 columns for 2 keys of request 0",
    ),
    ({"block_table": put((0, 0), -1)}, "block_table[0, 0] must be a block of the cache (0..8), g"),
    ({"block_table": put((1, 0), 9)}, "block_table[1, 0] must be a block of the cache (0..8), g"),
    ({"state_slots": lambda t: t.long()}, "state_slots must be int32, got torch.int64"),
    ({"state_slots": lambda t: t[1:]}, "query_start_loc must be [B+1] with B+1=3, got (4,)"),
    ({"state_slots": put((2,), 5)}, "state_slots must be below 5, got 5"),
    ({"state_slots": lambda t: t * 0 + 3}, "state_slots must name each slot once, got 3 twice"),
    ({"state_slots": lambda t: t.to("meta")}, "state_slots must be on cpu, got meta"),
    ({"ratio": 2}, "bias must be [ratio, CD] with ratio=2, got (4, 32)"),
    ({"ratio": 0}, "bias must be [ratio, CD] with ratio=0, got (4, 32)"),
    ({"ratio": 0, "bias": lambda t: t[:0]}, "ratio must be positive, got 0"),
    ({"overlap": False}, "state must be [NS, V, SW] with SW=48, got (5, 7, 64)"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_INPUT)
def test_bad_input_changes_nothing(changes: dict[str, Any], message: str) -> None:
    story, inputs = base_inputs()
    before = page_bytes(story.cache), page_bytes(story.state)
    with pytest.raises(ShapeError) as error:
        broken(inputs, **changes).run(compress_kv, backend="reference")
    assert f"compress_kv: {message}" in str(error.value)
    assert torch.equal(page_bytes(story.cache), before[0])
    assert torch.equal(page_bytes(story.state), before[1])


def test_the_base_of_bad_input_is_good() -> None:
    story, inputs = base_inputs()
    inputs.run(compress_kv, backend="reference")
    assert story.entries().isfinite().all() and len(story.entries()) == 2 + 3


def test_widths_that_cannot_be() -> None:
    story = Story(PoolCase("", cut(4), D=24, hadamard=True))
    with pytest.raises(ShapeError, match="compress_kv: hadamard needs D to be a power of two, got"):
        story.step(story.case.steps[0]).run(compress_kv, backend="reference")
    for format in ("fp8_dsv4", "index_fp8"):
        story = Story(PoolCase("", cut(4), format, D=128))
        inputs = broken(story.step(story.case.steps[0]), cache=strided)
        with pytest.raises(ShapeError, match="compress_kv: pages must be contiguous inside for fo"):
            inputs.run(compress_kv, backend="reference")


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("int4", "format 'int4' is not known. Known: fp32, bf16"),
        ("fp8_dsv4", "format fp8_dsv4 needs rows of a multiple of 64 values, 128 or more, got 16"),
        ("fp8_ds_mla", "format fp8_ds_mla needs a latent of 128 values or more, got 16"),
    ],
)
def test_formats_that_cannot_be(format: str, message: str) -> None:
    story, inputs = base_inputs()
    before = page_bytes(story.cache)
    with pytest.raises(ConfigError) as error:
        broken(inputs, format=format).run(compress_kv, backend="reference")
    assert message in str(error.value)
    assert torch.equal(page_bytes(story.cache), before)


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="compress_kv: backend 'cuda' is not known"):
        base_inputs()[1].run(compress_kv, backend="cuda")


@pytest.mark.parametrize("name", ["kv", "score", "bias", "norm_weight"])
def test_grad_is_refused(name: str) -> None:
    with torch.inference_mode(False):
        story = Story(PoolCase("grad", cut(6), "bf16"))
        inputs = story.step(story.case.steps[0])
        before = page_bytes(story.cache), page_bytes(story.state)
        inputs = broken(inputs, **{name: lambda t: t.clone().requires_grad_()})
        with pytest.raises(UnsupportedError, match=r"compress_kv: .* torch\.inference_mode\(\)"):
            inputs.run(compress_kv, backend="reference")
        assert torch.equal(page_bytes(story.cache), before[0])
        assert torch.equal(page_bytes(story.state), before[1])


def test_sizes_of_state() -> None:
    """V4's three compressors."""
    assert state_width(512, overlap=True) == 2048 and state_rows(4, overlap=True) == 7
    assert state_width(512, overlap=False) == 1536 and state_rows(128, overlap=False) == 1
    assert state_width(128, overlap=True) == 512


def test_cost() -> None:
    needed = cost(11, 3, D=512, ratio=4, overlap=True, format="fp8_dsv4", itemsize=4)
    assert needed.bytes == 11 * 2 * 1024 * 4 + 2 * 584 + 3 * 2 * 2048 * 4
    assert needed.flops == 11 * 5 * 1024
    needed = cost(256, 1, D=512, ratio=128, overlap=False, format="bf16", itemsize=2)
    assert needed.bytes == 256 * 2 * 512 * 2 + 2 * 1024 + 2 * 1536 * 4
    assert needed.flops == 256 * 5 * 512
