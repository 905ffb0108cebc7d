"""The drop-in for deep_gemm: what its logits mean, by plain loops; signatures; refusals."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from openmla.errors import OpenMLAError
from openmla.integrations import deep_gemm
from openmla.integrations.deep_gemm import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_num_sms,
    get_paged_mqa_logits_metadata,
)

FP8, I32 = torch.float8_e4m3fn, torch.int32


def on(device: str, function: Any, **kwargs: Any) -> Tensor:
    """A call there, its logits here."""
    kwargs = tree_map_only(Tensor, lambda each: each.to(device), kwargs)
    logits: Tensor = function(**kwargs)
    return logits.cpu()


def score(q: Tensor, key: Tensor, weights: Tensor) -> tuple[float, float]:
    """Of one token [h, d] for one key [d], in float64; and that of absolute values."""
    total = largest = 0.0
    for head, weight in zip(q.double(), weights.double(), strict=True):
        total += float(weight) * max(float(head @ key.double()), 0.0)
        largest += abs(float(weight)) * float(head.abs() @ key.double().abs())
    return total, largest


def close(device: str, actual: Tensor, exact: tuple[Tensor, Tensor]) -> None:
    """Within what index_logits may lose of its sums (tests/ops/index_cases.py), which on a GPU the
    matrix units cut after some 13 bits of their largest term, and half a unit of bf16."""
    logits, magnitudes = exact
    assert actual.shape == logits.shape
    assert torch.equal(actual == -math.inf, logits == -math.inf)
    seen = logits != -math.inf
    room = (2**-12 if device == "cuda" else 2**-20) * magnitudes[seen]
    if actual.dtype == torch.bfloat16:
        room = room + 2**-8 * logits[seen].abs()
    assert ((actual.double() - logits)[seen].abs() <= room).all()


def packed(T: int, S: int, H: int, D: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(T, H, D).to(FP8),
        "kv": (torch.randn(S, D).to(FP8), torch.rand(S) + 0.1),
        "weights": torch.randn(T, H),
        "cu_seq_len_k_start": torch.tensor([0, 3, 5, 9, 20][:T], dtype=I32),
        "cu_seq_len_k_end": torch.tensor([S, 4, 5, 2, 23][:T], dtype=I32),
    }


def unseen(T: int, S: int) -> tuple[Tensor, Tensor]:
    return torch.full((T, S), -math.inf).double(), torch.zeros(T, S, dtype=torch.float64)


def ragged(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    keys = call["kv"][0].double() * call["kv"][1].double()[:, None]
    logits, magnitudes = unseen(len(call["q"]), len(keys))
    for t in range(len(logits)):
        for j in range(int(call["cu_seq_len_k_start"][t]), int(call["cu_seq_len_k_end"][t])):
            logits[t, j], magnitudes[t, j] = score(call["q"][t], keys[j], call["weights"][t])
    return logits, magnitudes


@pytest.mark.parametrize(("H", "D"), [(32, 64), (7, 32), (64, 128)])
def test_packed_keys(H: int, D: int, device: str) -> None:
    call = packed(5, 24, H, D)
    exact = ragged(call)
    for clean in (True, False):
        close(device, on(device, fp8_mqa_logits, **call, clean_logits=clean), exact)
    as_pair = {**call, "q": (call["q"], None)}
    close(device, on(device, fp8_fp4_mqa_logits, **as_pair), exact)
    half = on(
        device, fp8_fp4_mqa_logits, **as_pair, clean_logits=False, logits_dtype=torch.bfloat16
    )
    assert half.dtype == torch.bfloat16
    close(device, half, exact)
    narrow = {**as_pair, "weights": call["weights"].bfloat16()}
    close(
        device,
        on(device, fp8_fp4_mqa_logits, **narrow),
        ragged({**call, "weights": narrow["weights"]}),
    )


@pytest.mark.parametrize("chunk", [2**26, 50])
def test_rows_from_their_starts(chunk: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "LARGEST_CHUNK", chunk)
    call = packed(5, 24, 8, 64)
    whole = ragged(call)
    moved = on(device, fp8_mqa_logits, **call, clean_logits=False, max_seqlen_k=24)
    assert moved.shape == (5, 24)
    for t in range(5):
        first, last = int(call["cu_seq_len_k_start"][t]), int(call["cu_seq_len_k_end"][t])
        n = max(last - first, 0)
        at = slice(first, first + n)
        close(device, moved[t, :n], (whole[0][t, at], whole[1][t, at]))
        assert (moved[t, n:] == -math.inf).all()


def cached(B: int, n: int, H: int, D: int, BS: int) -> tuple[dict[str, Any], Tensor]:
    """A call, and its keys [num_blocks, BS, D] as numbers. Pages have padding behind them."""
    torch.manual_seed(1)
    M = 3
    keys, scales = torch.randn(B * M, BS, D).to(FP8), torch.rand(B * M, BS) + 0.1
    whole = torch.zeros(B * M, BS * (D + 4) + 16, dtype=torch.uint8)
    whole[:, : BS * D] = keys.view(torch.uint8).flatten(1)
    whole[:, BS * D : BS * (D + 4)] = scales.view(torch.uint8).flatten(1)
    pages = whole[:, : BS * (D + 4)].view(B * M, BS, 1, D + 4)
    lens = torch.randint(0, M * BS + 1, (B, n), dtype=I32)
    call = {
        "q": torch.randn(B, n, H, D).to(FP8),
        "kv_cache": pages,
        "weights": torch.randn(B * n, H),
        "context_lens": lens,
        "block_table": torch.randperm(B * M).int().view(B, M),
        "schedule_meta": get_paged_mqa_logits_metadata(lens, BS, get_num_sms()),
        "max_context_len": M * BS + 2,
    }
    return call, keys.double() * scales.double()[..., None]


@pytest.mark.parametrize(("n", "BS", "H"), [(1, 64, 32), (2, 16, 8), (3, 5, 17)])
@pytest.mark.parametrize("two_d", [True, False])
def test_paged_keys(n: int, BS: int, H: int, two_d: bool, device: str) -> None:
    call, keys = cached(3, n, H, 64, BS)
    if not two_d:
        call["context_lens"] = torch.tensor([0, 1, 3 * BS], dtype=I32)
    logits, magnitudes = exact = unseen(3 * n, 3 * BS + 2)
    for b in range(3):
        rows = keys[call["block_table"][b].long()].flatten(0, 1)
        for i in range(n):
            lens = call["context_lens"][b]
            seen = int(lens[i]) if two_d else int(lens) - n + i + 1
            for j in range(max(seen, 0)):
                at = b * n + i
                found = score(call["q"][b, i], rows[j], call["weights"][at])
                logits[at, j], magnitudes[at, j] = found
    for clean in (False, True):
        close(device, on(device, fp8_paged_mqa_logits, **call, clean_logits=clean), exact)
    pair = {**call, "q": (call["q"], None)}
    close(device, on(device, fp8_fp4_paged_mqa_logits, **pair), exact)
    half = on(device, fp8_fp4_paged_mqa_logits, **pair, logits_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    close(device, half, exact)
    if n == 1:  # tokens of one sequence say so; each has its own table and length all the same
        indices = torch.zeros(3, dtype=I32)
        close(device, on(device, fp8_paged_mqa_logits, **call, indices=indices), exact)


def test_a_schedule_has_their_shape() -> None:
    found = get_paged_mqa_logits_metadata(torch.ones(4, 1, dtype=I32), 64, 132)
    assert found.shape == (133, 2) and found.dtype == I32


EMPTY = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "fp8_mqa_logits": {
        "q": EMPTY,
        "kv": EMPTY,
        "weights": EMPTY,
        "cu_seq_len_k_start": EMPTY,
        "cu_seq_len_k_end": EMPTY,
        "clean_logits": True,
        "max_seqlen_k": 0,
    },
    "fp8_fp4_mqa_logits": {
        "q": EMPTY,
        "kv": EMPTY,
        "weights": EMPTY,
        "cu_seq_len_k_start": EMPTY,
        "cu_seq_len_k_end": EMPTY,
        "clean_logits": True,
        "max_seqlen_k": 0,
        "logits_dtype": torch.float32,
    },
    "fp8_paged_mqa_logits": {
        "q": EMPTY,
        "kv_cache": EMPTY,
        "weights": EMPTY,
        "context_lens": EMPTY,
        "block_table": EMPTY,
        "schedule_meta": EMPTY,
        "max_context_len": EMPTY,
        "clean_logits": False,
        "indices": None,
    },
    "fp8_fp4_paged_mqa_logits": {
        "q": EMPTY,
        "kv_cache": EMPTY,
        "weights": EMPTY,
        "context_lens": EMPTY,
        "block_table": EMPTY,
        "schedule_meta": EMPTY,
        "max_context_len": EMPTY,
        "clean_logits": False,
        "logits_dtype": torch.float32,
        "indices": None,
    },
    "get_paged_mqa_logits_metadata": {
        "context_lens": EMPTY,
        "block_kv": EMPTY,
        "num_sms": EMPTY,
        "indices": None,
    },
    "get_num_sms": {},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_originals(name: str) -> None:
    parameters = inspect.signature(getattr(deep_gemm, name)).parameters
    found = [(each, parameter.default) for each, parameter in parameters.items()]
    assert found == list(SIGNATURES[name].items())


def test_bad_packed_input_raises_as_theirs_does() -> None:
    good = packed(4, 24, 8, 64)
    for message, changes in (
        ("weights must be", {"weights": good["weights"][:2]}),
        ("cu_seq_len_k_end must be", {"cu_seq_len_k_end": good["cu_seq_len_k_end"].long()}),
        ("cu_seq_len_k_end must be within the S=24 keys",
         {"cu_seq_len_k_end": torch.tensor([99] * 4, dtype=I32)}),
        ("kv must be a pair", {"kv": good["kv"][0]}),
        ("fp4 is not supported", {"kv": (good["kv"][0], good["kv"][1].int())}),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="fp8_fp4_mqa_logits: ") as caught:
            fp8_mqa_logits(**{**good, **changes})
        assert message in str(caught.value) and isinstance(caught.value, OpenMLAError)
    with pytest.raises(RuntimeError, match="fp4 is not supported"):
        fp8_fp4_mqa_logits(**{**good, "q": (good["q"], torch.zeros(4, 8, dtype=I32))})
    with pytest.raises(RuntimeError, match="logits_dtype must be"):
        fp8_fp4_mqa_logits(**{**good, "q": (good["q"], None)}, logits_dtype=torch.float16)


def test_bad_paged_input_raises_as_theirs_does() -> None:
    good, _ = cached(3, 2, 8, 64, 16)
    for message, changes in (
        ("q and kv_cache must be", {"q": good["q"][:, 0]}),
        ("q and kv_cache must be", {"kv_cache": good["kv_cache"][:, :, 0]}),
        ("kv_cache must be", {"kv_cache": good["kv_cache"][..., :60]}),
        ("[b] or [b, next_n] with b=3", {"context_lens": torch.zeros(4, dtype=I32)}),
        ("[b] or [b, next_n] with b=3", {"block_table": good["block_table"][:2]}),
        ("context_lens must be within", {"context_lens": torch.full((3,), 999, dtype=I32)}),
        ("context_lens must be int32", {"context_lens": good["context_lens"].long()}),
    ):
        with pytest.raises(RuntimeError, match="fp8_fp4_paged_mqa_logits: ") as caught:
            fp8_paged_mqa_logits(**{**good, **changes})
        assert message in str(caught.value) and isinstance(caught.value, OpenMLAError)
