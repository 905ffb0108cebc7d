"""compress_kv in Python floats, which sees no steps: it pools the raw tokens of whole sequences."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.ops.compress_kv_story import Story


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


def assert_exact(story: Story) -> None:
    """Float64 all the way: entries have only their float32 in the cache to lose."""
    exact = exact_results(story)
    half_ulp = torch.finfo(torch.float32).eps / 2
    torch.testing.assert_close(story.entries(), exact.entries, rtol=half_ulp, atol=1e-13)
    torch.testing.assert_close(story.kept_state(), exact.state, rtol=1e-13, atol=1e-12)
