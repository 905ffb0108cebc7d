"""Kernels of other packages in `openmla bench`, by stand-ins for them: found, judged, told."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.bench import peers
from openmla.cli.__main__ import main as openmla
from openmla.integrations import deep_gemm


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A package of this name, and a machine that it runs on."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for member, value in members.items():
        setattr(module, member, value)
    absent = peers.Peer.absent
    monkeypatch.setattr(peers.Peer, "absent", lambda self, device: absent(self, "cuda"))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Of one request, [n, H, D] over [S, H or 1, D]."""
    scores = scale * torch.einsum("nhd,shd->hns", q.double(), k.double().expand(-1, q.shape[1], -1))
    if causal:
        n, S = scores.shape[1:]
        scores.masked_fill_(torch.ones(n, S).triu(S - n + 1).bool(), -torch.inf)
    values = v.double().expand(-1, q.shape[1], -1)
    return torch.einsum("hns,shv->nhv", scores.softmax(-1), values).to(q.dtype)


class Paged:
    """FlashInfer's wrapper: pages of each request in a row."""

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.numel() >= 2**20

    def plan(self, *given: Any) -> None:
        self.given = given

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> Tensor:
        starts, pages_of, pages, lens, H, C, R, BS, causal, scale, *dtypes = self.given
        assert (q_nope.shape[1], ckv.shape[2], kpe.shape[2], ckv.shape[1]) == (H, C, R, BS)
        assert dtypes == [q_nope.dtype, ckv.dtype]
        out = []
        for b, S in enumerate(lens.tolist()):
            mine = pages[pages_of[b] : pages_of[b + 1]].long()
            rows = torch.cat([ckv[mine], kpe[mine]], -1).flatten(0, 1)[:S, None]
            q = torch.cat([q_nope, q_pe], -1)[starts[b] : starts[b + 1]]
            out.append(attend(q, rows, rows[..., :C], scale, causal))
        return torch.cat(out)


class Ragged:
    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, starts: Tensor, keys: Tensor, *heads: int, **more: Any) -> None:
        self.starts, self.keys, self.heads, self.more = starts, keys, heads, more

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.heads == (q.shape[1], k.shape[1], q.shape[2])
        assert self.more["head_dim_vo"] == v.shape[2] and self.more["q_data_type"] == q.dtype
        out = []
        for b in range(len(self.starts) - 1):
            keys = slice(self.keys[b], self.keys[b + 1])
            rows = q[self.starts[b] : self.starts[b + 1]]
            given = (self.more["sm_scale"], self.more["causal"])
            out.append(attend(rows, k[keys], v[keys], *given))
        return torch.cat(out)


def decode_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, lens: Tensor,
    parts: Tensor, splits: int, scale: float, page: int,
) -> None:  # fmt: skip
    assert parts.shape == (*q.shape[:2], splits, v.shape[-1] + 1) and k.shape[1] == page
    for b, S in enumerate(lens.tolist()):
        pages = table[b, : -(-S // page)].long()
        keys, values = k[pages].flatten(0, 1)[:S], v[pages].flatten(0, 1)[:S]
        out[b] = attend(q[b : b + 1], keys, values, scale, False)[0]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert openmla(["bench", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("op", "package", "members", "name"),
    [
        ("mqa_paged", "flashinfer.mla", {"BatchMLAPagedAttentionWrapper": Paged}, "flashinfer"),
        (
            "mqa_paged",
            "vllm.v1.attention.ops.triton_decode_attention",
            {"decode_attention_fwd": decode_attention_fwd},
            "vllm (Triton)",
        ),
        (
            "mha_ragged",
            "flashinfer.prefill",
            {"BatchPrefillWithRaggedKVCacheWrapper": Ragged},
            "flashinfer",
        ),
        ("index_logits", "deep_gemm", vars(deep_gemm), "deep_gemm"),
        ("index_logits_ragged", "deep_gemm", vars(deep_gemm), "deep_gemm"),
    ],
)
def test_who_is_installed_takes_part(
    op: str,
    package: str,
    members: dict[str, Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    public = {key: value for key, value in members.items() if not key.startswith("__")}
    stand_in(monkeypatch, package, **public)
    found = bench(capsys, op)
    rows = [row for row in found["rows"] if row["contender"] == name]
    assert rows, found["left_out"]
    assert all(0 <= row["error"] <= 1 and row["ratio"] > 0 for row in rows)


def test_a_peer_that_is_wrong_or_fails_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Paged):
        def run(self, *given: Tensor) -> Tensor:
            return super().run(*given) * 1.1

    calls = []

    def late(*given: Any) -> None:
        """Fails when it is timed."""
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("CUDA error:\n  an illegal memory access")
        decode_attention_fwd(*given)

    stand_in(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=Wrong)
    stand_in(
        monkeypatch, "vllm.v1.attention.ops.triton_decode_attention", decode_attention_fwd=late
    )
    found = bench(capsys, "mqa_paged")
    assert {row["contender"] for row in found["rows"]} >= {"reference"}
    told = {each["contender"]: each["why"] for each in found["left_out"]}
    assert told["flashinfer"].startswith("WRONG: ")
    assert told["vllm (Triton)"] == "failed: RuntimeError: CUDA error: an illegal memory access"
    stand_in(monkeypatch, "flashinfer.mla")  # a release without the class
    assert openmla(["bench", "mqa_paged"]) == 0
    assert "flashinfer   failed: AttributeError" in capsys.readouterr().out


def test_who_is_missing_or_ours_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)  # as install() does
    assert openmla(["bench", "index_logits"]) == 0
    out = capsys.readouterr().out
    assert "not included: deep_gemm, package deep_gemm is openmla's own drop-in" in out
    monkeypatch.delitem(sys.modules, "deep_gemm")
    monkeypatch.setattr("openmla.bench.peers.find_spec", lambda name: None)
    assert openmla(["bench", "mqa_paged"]) == 0
    assert (
        "not included: flashinfer, package flashinfer is not installed" in capsys.readouterr().out
    )


def test_shapes_that_do_not_suit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "deep_gemm")
    found = bench(capsys, "index_logits", "tiny-verify2-b2-s200-bf16")
    told = {each["contender"]: each["why"] for each in found["left_out"]}
    assert told["deep_gemm"] == "takes fp8 keys, these are index_bf16"
