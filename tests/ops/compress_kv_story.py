"""compress_kv as sequences in steps: a case, and its tensors under way."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.cache.format import get_format, state_rows, state_width
from openmla.ops import compress_kv
from openmla.testing import GARBAGE_BLOCK, Inputs, poison, start_loc, strided
from tests.ops.contract import page_bytes, run_or_skip

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

    def play(
        self, backend: str, steps: Sequence[Step] | None = None, *, batch_invariant: bool = False
    ) -> Story:
        """Run steps, all of them unless told, and see that nothing else changes."""
        for feeds in self.case.steps if steps is None else steps:
            starts = list(self.done)
            inputs = self.step(feeds)
            inputs.scalars["batch_invariant"] = batch_invariant
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
