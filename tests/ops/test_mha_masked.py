"""mha_masked: every backend against float64, the three sparse paths against one another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops import Segment, merge_states, mha_masked, mha_ragged, mqa_sparse, pack_mask
from openmla.ops.mha_masked import cost
from openmla.testing import Inputs, MaskedCase, RaggedCase, assert_within_budget, start_loc
from tests.ops.contract import backends, check_attention, run_or_skip
from tests.ops.declared import check_declaration

BASE = MaskedCase("prefill", (5, 17, 40), (5, 17, 40))
CASES = [
    BASE,
    MaskedCase("one-request", (33,), (33,)),
    MaskedCase("empty-requests", (3, 0, 0, 2), (3, 0, 4, 2)),
    MaskedCase("nothing", (), ()),
    MaskedCase("no-keys", (3, 2), (0, 5), causal=False),
    MaskedCase("no-keys-at-all", (3,), (0,)),
    MaskedCase("no-queries", (0,), (5,)),
    MaskedCase("one-key", (1, 1), (1, 1), H=1),
    MaskedCase("no-bits", (4, 3), (40, 3), K=0),
    MaskedCase("one-bit", (9, 4), (70, 4), K=1),
    MaskedCase("every-bit", (9, 40), (70, 40), K=70),
    MaskedCase("17-heads", (9, 4), (9, 4), H=17),
    MaskedCase("word-edges", (2, 2, 2, 2), (31, 32, 33, 64), K=25),
    MaskedCase("129-keys", (5, 3), (129, 128), K=100),
    MaskedCase("context-chunk", (5, 17), (70, 3), causal=False),
    MaskedCase("one-shot", (5, 17), (70, 30)),
    MaskedCase("many-queries", (300,), (700,), K=64, H=2),
    MaskedCase("empty-tiles", (3, 40), (900, 515), K=2, H=1),
    MaskedCase("several-tiles", (130, 1, 0, 257), (130, 200, 4, 250), K=40, H=1),
    MaskedCase("more-padding-than-rows", (5,), (5,), padding=150, H=2),
    MaskedCase("fewer-keys-than-queries", (9, 4), (3, 4)),
    MaskedCase("padding", (5, 7), (5, 7), padding=6),
    MaskedCase("padding-only", (), (), padding=3),
    MaskedCase("v32-widths", (40, 65), (40, 65), E=192, V=128),
    MaskedCase("glm5-widths", (40,), (40,), E=256, V=256),
    MaskedCase("values-wider-than-keys", (20,), (30,), E=24, V=40),
    MaskedCase("odd-widths", (20, 3), (20, 9), E=21, V=13),
    MaskedCase("plain-strides", (20, 3), (20, 9), contiguous=True),
    MaskedCase("fp32", (20, 3), (20, 9), dtype=torch.float32),
    MaskedCase("fp16", (20, 3), (20, 9), dtype=torch.float16),
]
LOOPED = [case for case in CASES if sum(case.key_lens) < 260]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_masked"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: MaskedCase, backend: str, device: str) -> None:
    check_attention(mha_masked, case.make(device), backend)


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_reference_equals_loops(case: MaskedCase) -> None:
    """One query, one head, one bit at a time, with Python floats."""
    inputs = replace(case, H=min(case.H, 2)).make().double()
    out, lse = inputs.run(mha_masked, backend="reference")
    assert out.dtype == lse.dtype == torch.float64
    queries, keys = inputs["query_start_loc"].tolist(), inputs["key_start_loc"].tolist()
    words = inputs["mask"].tolist()
    for b, (n, S) in enumerate(zip(case.query_lens, case.key_lens, strict=True)):
        for t in range(queries[b], queries[b] + n):
            seen = [keys[b] + j for j in range(S) if words[t][j // 32] >> j % 32 & 1]
            for h in range(out.shape[1]):
                q, k = inputs["q"][t, h], inputs["k"][:, h]
                if not seen:
                    assert (out[t, h] == 0).all() and lse[t, h] == -torch.inf
                    continue
                logits = [inputs.scalars["scale"] * float(torch.dot(q, k[j])) for j in seen]
                largest = max(logits)
                total = sum(math.exp(logit - largest) for logit in logits)
                expected = largest + math.log(total)
                assert math.isclose(lse[t, h], expected, rel_tol=1e-12, abs_tol=1e-12)
                row = sum(
                    math.exp(logit - expected) * inputs["v"][j, h]
                    for logit, j in zip(logits, seen, strict=True)
                )
                torch.testing.assert_close(out[t, h], row, rtol=1e-11, atol=1e-12)
    assert (out[queries[-1] :] == 0).all() and (lse[queries[-1] :] == -torch.inf).all()


def test_cases_have_what_they_promise() -> None:
    """Rows without bits, negative words, and set bits past a request's keys."""
    mask = BASE.mask()
    assert any(not row.any() for bits in BASE.bits() for row in bits)
    assert (mask[:5, 1] != 0).any() and (mask < 0).any()


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long queries are taken a few at a time; the result does not change."""
    inputs = MaskedCase("chunks", (7, 9), (40, 5)).make()
    expected = inputs.run(mha_masked, backend="reference")
    monkeypatch.setattr("openmla.backends.reference.mha_masked.LOGITS", 3 * 4 * 40)
    for actual, whole in zip(inputs.run(mha_masked, backend="reference"), expected, strict=True):
        torch.testing.assert_close(actual, whole)


@pytest.mark.parametrize("backend", backends("mha_masked"))
def test_bits_past_the_keys_may_hold_anything(backend: str, device: str) -> None:
    case = MaskedCase("tails", (3, 4), (37, 5), causal=False)
    inputs = case.make(device)
    expected = run_or_skip(mha_masked, inputs, backend)
    for fill in (0, -1):
        mask = torch.full_like(inputs["mask"], fill)
        mask[:3, 0] = inputs["mask"][:3, 0]
        mask[:3, 1] = inputs["mask"][:3, 1] & 31 | fill & ~31
        mask[3:, 0] = inputs["mask"][3:, 0] & 31 | fill & ~31
        tails = replace(inputs, tensors=inputs.tensors | {"mask": mask})
        for actual, whole in zip(tails.run(mha_masked, backend=backend), expected, strict=True):
            assert torch.equal(actual, whole)


@pytest.mark.parametrize("backend", backends("mha_masked"))
@pytest.mark.parametrize("causal", [True, False])
def test_every_bit_is_ragged(causal: bool, backend: str, device: str) -> None:
    """Causal bits make causal attention; all bits make attention to everything."""
    ragged = RaggedCase("ragged", (9, 17, 3), (70, 17, 33), causal=causal, padding=2).make(device)
    queries, keys = (ragged[name].diff() for name in ("query_start_loc", "key_start_loc"))
    seen = torch.full((31,), -1, dtype=torch.int32, device=device)
    start = 0
    for n, S in zip(queries.tolist(), keys.tolist(), strict=True):
        every = torch.full((n,), S, device=device)
        seen[start : start + n] = torch.arange(S - n + 1, S + 1, device=device) if causal else every
        start += n
    positions = torch.arange(70, dtype=torch.int32, device=device)
    positions = positions.where(positions < seen[:, None], -1)
    zeros = torch.zeros_like(seen)
    mask = pack_mask(positions, zeros, zeros + 70, num_words=3)
    scalars = {name: value for name, value in ragged.scalars.items() if name != "causal"}
    inputs = Inputs({**ragged.tensors, "mask": mask}, scalars, ragged.widen)
    actual = run_or_skip(mha_masked, inputs, backend)
    exact = ragged.double().run(mha_ragged, backend="reference")
    assert_within_budget(actual, exact, ragged.run(mha_ragged, backend="reference"))


class Latents(NamedTuple):
    """One selection over cached latents, in both forms, all float64."""

    q: Tensor  # [T, H, P+R]
    q_latent: Tensor  # [T, H, C+R]
    rows: Tensor  # [S, C+R], requests one after another
    w_uk: Tensor  # [H, P, C]
    w_uv: Tensor  # [H, C, V]
    topk_positions: Tensor  # [T, K] i32
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


P, R, C, V, H = 12, 8, 32, 10, 3
SCALE = 1.7 * (P + R) ** -0.5


def latents(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], K: int) -> Latents:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        # float32 values, so that a cache holds them exactly
        return torch.randn(shape, generator=generator).double()

    rows, q = normal(sum(seq_lens), C + R), normal(sum(query_lens), H, P + R)
    w_uk, w_uv = normal(H, P, C) / 4, normal(H, C, V) / 4
    absorbed = torch.einsum("thp,hpc->thc", q[..., :P], w_uk)
    topk = torch.full((len(q), K), -1, dtype=torch.int32)
    t = 0
    for n, S in zip(query_lens, seq_lens, strict=True):
        for i in range(n):
            chosen = torch.randperm(S - n + i + 1, generator=generator)[:K]
            topk[t, torch.randperm(K, generator=generator)[: len(chosen)]] = chosen.int()
            t += 1
    topk[2] = -1  # a query with nothing
    q_latent = torch.cat([absorbed, q[..., P:]], -1)
    return Latents(q, q_latent, rows, w_uk, w_uv, topk, query_lens, seq_lens)


def through_scatter(given: Latents) -> tuple[Tensor, Tensor]:
    """Dense attention with -inf everywhere but at the selection, by torch alone."""
    k, v = expand(given, given.rows)
    outs, lses = [], []
    queries, keys = start_loc(given.query_lens).tolist(), start_loc(given.seq_lens).tolist()
    for b, (n, S) in enumerate(lens(given)):
        asked, cached = slice(queries[b], queries[b] + n), slice(keys[b], keys[b] + S)
        chosen = given.topk_positions[asked].long()
        hidden = torch.full((n, S + 1), -torch.inf, dtype=torch.float64)
        hidden.scatter_(1, chosen.where(chosen >= 0, S), 0)  # one spare place, for -1
        logits = SCALE * torch.einsum("the,she->ths", given.q[asked], k[cached])
        logits += hidden[:, None, :S]
        lses.append(logits.logsumexp(-1))
        weights = logits.softmax(-1).nan_to_num()
        outs.append(torch.einsum("ths,shv->thv", weights, v[cached]))
    return torch.cat(outs), torch.cat(lses)


def expand(given: Latents, rows: Tensor) -> tuple[Tensor, Tensor]:
    k_nope = torch.einsum("sc,hpc->shp", rows[:, :C], given.w_uk)
    k_pe = rows[:, None, C:].expand(-1, H, -1)
    return torch.cat([k_nope, k_pe], -1), torch.einsum("sc,hcv->shv", rows[:, :C], given.w_uv)


def through_latents(given: Latents) -> tuple[Tensor, Tensor]:
    """mqa_sparse over a cache with blocks in reverse, then W_UV."""
    BS = 4
    needs = [-(-S // BS) for S in given.seq_lens]
    N = sum(needs) + 1
    cache = torch.full((N, BS, C + R), torch.nan)
    table = torch.full((len(needs), max(needs)), -1, dtype=torch.int32)
    block, first = N - 1, 0
    for b, S in enumerate(given.seq_lens):
        for column in range(needs[b]):
            part = given.rows[first + column * BS : first + min((column + 1) * BS, S)]
            cache[block, : len(part)] = part.float()
            table[b, column] = block
            block -= 1
        first += S
    T, K = given.topk_positions.shape
    positions = [S - n + i for n, S in lens(given) for i in range(n)]
    segment = Segment(
        cache,
        torch.tensor(1.0),
        "fp32",
        "positions",
        table,
        given.topk_positions,
        torch.full((T,), K, dtype=torch.int32),
    )
    out_latent, lse = mqa_sparse(
        given.q_latent,
        start_loc(given.query_lens),
        torch.tensor(positions),
        segment,
        C=C,
        scale=SCALE,
        backend="reference",
    )
    return torch.einsum("thc,hcv->thv", out_latent, given.w_uv), lse


def lens(given: Latents) -> list[tuple[int, int]]:
    return list(zip(given.query_lens, given.seq_lens, strict=True))


def through_mask(given: Latents, size: int, backend: str) -> tuple[Tensor, Tensor]:
    """pack_mask and mha_masked over chunks of `size` keys of every request, merged."""
    k, v = expand(given, given.rows)
    starts = start_loc(given.seq_lens).tolist()
    merged: tuple[Tensor, Tensor] | None = None
    for begin in range(0, max(given.seq_lens), size):
        counts = [min(max(S - begin, 0), size) for S in given.seq_lens]
        chosen = [slice(starts[b] + begin, starts[b] + begin + n) for b, n in enumerate(counts)]
        per_token = torch.repeat_interleave(
            torch.tensor(counts, dtype=torch.int32), torch.tensor(given.query_lens)
        )
        mask = pack_mask(
            given.topk_positions,
            torch.full_like(per_token, begin),
            per_token,
            num_words=-(-max(counts) // 32),
        )
        tensors = {
            "q": given.q,
            "k": torch.cat([k[part] for part in chosen]),
            "v": torch.cat([v[part] for part in chosen]),
            "query_start_loc": start_loc(given.query_lens),
            "key_start_loc": start_loc(counts),
            "mask": mask,
        }
        scalars = {
            "scale": SCALE,
            "max_query_len": max(given.query_lens),
            "max_key_len": max(counts),
        }
        partial = run_or_skip(mha_masked, Inputs(tensors, scalars, ()), backend)
        if merged is None:
            merged = partial
        else:
            merge_states(*merged, *partial)
    assert merged is not None
    return merged


@pytest.mark.parametrize("backend", backends("mha_masked"))
@pytest.mark.parametrize("size", [1000, 40, 32, 7])
@pytest.mark.parametrize("K", [5, 24, 100])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [((40,), (40,)), ((9, 17, 1), (70, 17, 33))], ids=["new", "context"]
)
def test_mask_equals_latents_equals_scatter(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], K: int, size: int, backend: str
) -> None:
    given = latents(query_lens, seq_lens, K)
    expected = through_scatter(given)
    assert (expected[1][2] == -torch.inf).all() and expected[1].isfinite().sum() > H
    for actual in (through_mask(given, size, backend), through_latents(given)):
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_declaration(device: str) -> None:
    check_declaration(mha_masked, BASE.make(device), "q k v")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k", lambda t: t.float(), "k must be torch.bfloat16 like q, got torch.float32"),
        ("v", lambda t: t.half(), "v must be torch.bfloat16 like q, got torch.float16"),
        ("key_start_loc", lambda t: t + 1, "key_start_loc must start with 0"),
        ("key_start_loc", lambda t: t * 2, "key_start_loc must end within the 62 rows of k"),
        ("key_start_loc", lambda t: t * (3 - t).sign(), "key_start_loc must not fall"),
        ("query_start_loc", lambda t: t * 2, "query_start_loc must end within the 62 rows of q"),
        ("mask", lambda t: t[:, :1], "mask must have a bit for each of max_key_len=40 keys, got 1"),
        ("max_key_len", lambda n: n - 1, "max_key_len must be at least 40, got 39"),
        ("max_query_len", lambda n: n - 1, "max_query_len must be at least 40, got 39"),
    ],
)
def test_bad_input(name: str, change: Callable[[Any], Any], message: str) -> None:
    inputs = BASE.make()
    target: dict[str, Any] = inputs.tensors if name in inputs.tensors else inputs.scalars
    target[name] = change(target[name])
    with pytest.raises(ShapeError) as error:
        inputs.run(mha_masked, backend="auto")
    assert f"mha_masked: {message}" in str(error.value)


@pytest.mark.parametrize("backend", backends("mha_masked"))
def test_bounds_may_be_loose(backend: str, device: str) -> None:
    """max_query_len and max_key_len are bounds, as a captured graph needs them."""
    inputs = BASE.make(device)
    expected = run_or_skip(mha_masked, inputs, backend)
    inputs.scalars.update(max_query_len=1000, max_key_len=32 * inputs["mask"].shape[1])
    for actual, whole in zip(inputs.run(mha_masked, backend=backend), expected, strict=True):
        torch.testing.assert_close(actual, whole)


def test_cost() -> None:
    square = cost(64, 128, H=2, E=6, V=3, itemsize=2)
    assert square.flops == 2 * 64 * 128 * 2 * 9
    assert square.bytes == (64 + 128) * 2 * 9 * 2 + 64 * 128 // 8 + 4 * 64 * 2


@pytest.mark.parametrize("backend", backends("mha_masked"))
def test_equal_keys_of_large_logits_keep_the_value(backend: str, device: str) -> None:
    """Weights sum up to 1 where lse rounds by more than a weight: logits are 1e6 here."""
    inputs = MaskedCase("equal", (3,), (40,), H=2, dtype=torch.float32).make(device)
    inputs["q"].fill_(1e6 / inputs["q"].shape[2] / inputs.scalars["scale"])
    inputs["k"].fill_(1.0)
    inputs["v"].fill_(1.0)
    out, lse = run_or_skip(mha_masked, inputs, backend)
    seen = lse > -torch.inf
    assert seen.any()
    torch.testing.assert_close(out[seen], torch.ones_like(out[seen]), rtol=0, atol=1e-4)
