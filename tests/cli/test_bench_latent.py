"""bench.latent on a CPU: batches as vLLM passes them, and FA3's arguments, by a fake of FA3."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import decode_batch, fa3, latent, serving
from bench.decode_batch import ONE_LONG, C, D, vllm_batch

LENS = [100, 2, 37, 64]
CASES = {title: make.args for title, make in latent.vllm_shapes() if isinstance(make, partial)}


class FakeFA3:
    """Both functions of vLLM's interface with the parameters that MLA uses, in plain torch."""

    FA3_AVAILABLE = True
    FA3_UNAVAILABLE_REASON = None

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor  # of outputs; other than 1 is wrong
        self.scheduled: list[dict[str, Any]] = []
        self.called: list[dict[str, Any]] = []

    def get_scheduler_metadata(self, *, batch_size: int, **given: Any) -> Tensor:
        self.scheduled.append({"batch_size": batch_size, **given})
        return torch.arange(1, 2 + -(-batch_size // 4) * 16, dtype=torch.int32)

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor,
        max_seqlen_k: int, *, seqused_k: Tensor, q_v: Tensor, softmax_scale: float, causal: bool,
        block_table: Tensor, return_softmax_lse: bool, scheduler_metadata: Tensor, num_splits: int,
        fa_version: int, cp_world_size: int, cp_rank: int, cp_tot_seqused_k: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert fa_version == 3 and causal and return_softmax_lse
        assert (cp_world_size, cp_rank, cp_tot_seqused_k) == (1, 0, None)
        assert int(seqused_k.max()) <= max_seqlen_k
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
        self.called.append(dict(locals()))
        keys, queries = torch.cat([k, v], -1), torch.cat([q, q_v], -1).float()
        out, lse = torch.zeros(q_v.shape), torch.zeros(q.shape[1], len(q))
        page, starts = k.shape[1], cu_seqlens_q.tolist()
        for b, S in enumerate(seqused_k.tolist()):
            rows = keys[block_table[b, : -(-S // page)].long(), :, 0].flatten(0, 1)[:S].float()
            n = starts[b + 1] - starts[b]
            for i in range(n):
                seen, t = rows[: S - n + 1 + i], starts[b] + i
                scores = softmax_scale * (queries[t] @ seen.T)
                lse[:, t] = scores.logsumexp(-1)
                out[t] = scores.softmax(-1) @ seen[:, k.shape[-1] :]
        return self.factor * out.to(q.dtype), lse


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fa3.why_absent.cache_clear()
    yield
    fa3.why_absent.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeFA3], FakeFA3]:
    """A function that puts a fake in the place of vLLM's interface."""

    def put(fake: FakeFA3) -> FakeFA3:
        module: Any = ModuleType(fa3.INTERFACE)
        for name in (
            "FA3_AVAILABLE", "FA3_UNAVAILABLE_REASON", "get_scheduler_metadata",
            "flash_attn_varlen_func",
        ):  # fmt: skip
            setattr(module, name, getattr(fake, name))
        monkeypatch.setitem(sys.modules, fa3.INTERFACE, module)
        return fake

    return put


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_batch, "lengths", lambda keys: LENS)
    monkeypatch.setattr(decode_batch, "LAYERS", (2, 3))


@pytest.mark.parametrize("title", CASES)
def test_vllm_shapes_are_what_vllm_allocates(title: str) -> None:
    keys, H, new, page, layout = (*CASES[title], "LBNHC")[:5]
    batch = vllm_batch(keys, H, new, page, layout, "meta")  # shapes and strides alone
    B, N, L = len(batch.lens), len(batch.layers[0]), len(batch.layers)
    assert f"-h{H}-p{page}-{keys}" in title and keys.split("x")[0] == str(B)
    assert B in (1, 16, 64, 128) and all(1024 <= S <= 32768 for S in batch.lens)
    assert batch.table.shape == (B, 33792 // page) and batch.table.dtype == torch.int32
    assert batch.max_model_len == 33792
    assert batch.q.shape == (B * new, H, D) and batch.q.dtype == torch.bfloat16
    assert batch.q.is_contiguous() and batch.seq_lens.shape == (B,)
    assert batch.start_loc.shape == (B + 1,)
    between = L if layout == "BLNHC" else 1
    for layer in batch.layers:
        assert layer.shape == (N, page, D) and layer.dtype == torch.bfloat16
        assert layer.stride() == (between * page * D, D, 1)
    offsets = {layer.storage_offset() for layer in batch.layers}
    step = page * D if between > 1 else N * page * D
    assert offsets == {number * step for number in range(L)}
    assert L * sum(batch.lens) * D * 2 > 50 << 20  # more than the L2 cache of an H200


def test_vllm_shapes_cover_what_the_issue_asks_for() -> None:
    assert {H for _, H, *_ in CASES.values()} == {16, 128}
    assert {new for _, _, new, *_ in CASES.values()} == {1, 2}
    assert {page for _, _, _, page, *_ in CASES.values()} == {16, 64}
    assert {keys.split("x")[0] for keys, *_ in CASES.values()} == {"1", "16", "64", "128"}
    assert all(title.startswith("vllm-") for title in CASES)
    assert set(CASES) <= {title for title, _ in latent.shapes()}


def test_serving_shapes_have_every_value_at_least_three_times() -> None:
    dense, sparse = list(serving.dense_shapes()), list(serving.sparse_shapes())
    assert 60 <= len(dense) + len(sparse) <= 120
    bf16 = [shape for shape in dense if shape[-1] == "bf16"]
    for place, values in ((1, serving.KEYS), (2, serving.HEADS), (3, (1, 2, 3, 4)), (4, (16, 64))):
        counts = Counter(shape[place] for shape in bf16)
        assert set(counts) == set(values) and min(counts.values()) >= 3
    assert len({(H, new) for _, _, H, new, *_ in bf16}) > 25  # not the same pairs again and again
    assert Counter(shape[1] for shape in sparse) == {"sparse": 10, "v4": 10}
    for kind in ("sparse", "v4"):
        assert {B for _, which, _, B in sparse if which == kind} == set(serving.BATCHES)
    names = [title for title, _ in latent.shapes()]
    assert len(names) == len(set(names)) and {shape[0] for shape in (*dense, *sparse)} < set(names)


@pytest.mark.parametrize("keys", serving.KEYS)
def test_serving_batches(keys: str) -> None:
    batch = vllm_batch(keys, 12, 3, 64, device="meta")
    assert batch.q.shape == (3 * len(batch.lens), 12, D) and min(batch.lens) >= 3
    assert batch.table.shape[1] * 64 >= max(batch.lens)
    if keys == ONE_LONG:
        assert len(batch.lens) == 61 and sorted(batch.lens)[-2:][0] <= 600


def test_the_summary_names_medians_and_misses() -> None:
    def row(shape: str, who: str, ratio: float | None, flash: float | None) -> dict[str, Any]:
        return {"shape": shape, "contender": who, "ratio": ratio, "to_flashmla": flash}

    rows = [
        row("serving-decode-a", "openmla", 0.9, 1.2), row("serving-decode-b", "openmla", 1.1, None),
        row("serving-decode-b", "fa3", 1.0, None), row("serving-v4-a", "openmla", 1.5, 1.5),
        row("serving-fp8-a", "openmla", None, None), row("dense-decode-a", "openmla", 0.1, 0.1),
    ]  # fmt: skip
    assert list(serving.summary(rows)) == [
        "decode, openmla: 2 shapes, median 1.00, to FlashMLA 1.20, least 0.90, 1 below 0.95",
        "v4, openmla: 1 shape, median 1.50, to FlashMLA 1.50, least 1.50, 0 below 0.95",
    ]


def test_log_uniform_lengths_are_uneven_and_fixed() -> None:
    lens = decode_batch.lengths("64xlog")
    assert lens == decode_batch.lengths("64xlog") and len(lens) == 64
    assert 1024 <= min(lens) < 2048 and 16384 < max(lens) <= 32768
    assert 3000 < sorted(lens)[32] < 11000  # around the geometric mean


@pytest.mark.parametrize(("max_model_len", "width"), [(33792, 2112), (33793, 2120), (100, 8)])
def test_tables_are_as_wide_as_max_model_len(max_model_len: int, width: int) -> None:
    assert decode_batch.table_width(16, max_model_len) == width


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_tables_hold_own_blocks_then_stale_ids(layout: str) -> None:
    batch = vllm_batch("", 16, 1, 16, layout, "cpu")
    blocks = [-(-S // 16) for S in LENS]
    own = torch.cat([row[:n] for row, n in zip(batch.table, blocks, strict=True)])
    assert len(own.unique()) == sum(blocks)  # no block has two owners
    assert int(batch.table.min()) > 0 and int(batch.table.max()) < len(batch.layers[0])
    assert batch.table[:, max(blocks) :].float().std() > 0
    for layer in batch.layers[1:]:
        assert (
            torch.equal(layer, batch.layers[0]) and layer.data_ptr() != batch.layers[0].data_ptr()
        )
    latent_half, rope_half = batch.halves
    assert latent_half.is_contiguous() and rope_half.stride() == (16 * 192, 192, 1)
    assert torch.equal(batch.q, torch.cat(batch.halves, -1))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize("new", [1, 2])
def test_fa3_is_called_as_vllm_calls_it(
    install: Callable[[FakeFA3], FakeFA3], new: int, layout: str
) -> None:
    fake = install(FakeFA3())
    shape = latent.served("", 16, new, 16, layout, "cpu")
    assert list(shape.contenders) == ["openmla", "fa3", "fa3 eager", "cat+openmla"]
    assert shape.calls == 3 and len(shape.exact[0]) == len(LENS) * new
    for name, contender in shape.contenders.items():
        out_error, lse_error = latent.errors(contender(), shape.exact)
        assert out_error < 4e-3 and lse_error < 1e-3, name
    captured, eager = fake.called
    assert (captured["num_splits"], captured["max_seqlen_k"]) == (32, 33792)
    assert (eager["num_splits"], eager["max_seqlen_k"]) == (0, max(LENS))
    for call, scheduled in zip(fake.called, fake.scheduled, strict=True):
        assert call["q"].shape == (len(LENS) * new, 16, 64) and call["q_v"].shape[-1] == C
        assert call["k"].shape[1:] == (16, 1, 64) and call["v"].shape[1:] == (16, 1, C)
        assert call["k"].data_ptr() == call["v"].data_ptr() + 2 * C  # views of the cache
        assert call["softmax_scale"] == D**-0.5
        assert call["block_table"].shape == (len(LENS), 2112)
        assert call["scheduler_metadata"].tolist() == list(range(1, 18))
        assert scheduled == {
            "batch_size": len(LENS), "max_seqlen_q": new, "max_seqlen_k": max(LENS),
            "num_heads_q": 16, "num_heads_kv": 1, "headdim": 64, "headdim_v": C,
            "cache_seqlens": call["seqused_k"], "cu_seqlens_q": call["cu_seqlens_q"],
            "qkv_dtype": torch.bfloat16, "page_size": 16, "causal": True,
            "num_splits": call["num_splits"],
        }  # fmt: skip
    buffer = captured["scheduler_metadata"].untyped_storage().nbytes() // 4
    assert buffer == 1 + 4 * 512  # what captured graphs read


@pytest.mark.usefixtures("small")
def test_every_call_reads_the_next_layer(install: Callable[[FakeFA3], FakeFA3]) -> None:
    fake = install(FakeFA3())
    shape = latent.served("", 16, 1, 16, "LBNHC", "cpu")
    for _ in range(4):
        shape.contenders["fa3"]()
    read = [call["v"].data_ptr() for call in fake.called]
    assert len(set(read)) == 3 and read[0] == read[3]
    out, _ = shape.contenders["openmla"](backend="reference")  # as --sweep calls it
    assert torch.allclose(out.double(), shape.exact[0], atol=1e-2)


def test_an_absent_fa3_is_left_out_with_its_reason(
    install: Callable[[FakeFA3], FakeFA3], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, fa3.INTERFACE, raising=False)
    monkeypatch.setattr(latent, "find_spec", lambda name: None)
    told = latent.absent()
    assert told["fa3"].startswith(f"{fa3.INTERFACE} cannot be imported (ModuleNotFoundError")
    assert told["flashmla"] == "package flash_mla is not installed"
    fa3.why_absent.cache_clear()
    fake = FakeFA3()
    fake.FA3_AVAILABLE, fake.FA3_UNAVAILABLE_REASON = False, "no such file"  # type: ignore[assignment]
    install(fake)
    assert latent.absent()["fa3"] == "_vllm_fa3_C cannot be loaded (no such file)"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_wrong_fa3_has_no_time(
    factor: float,
    install: Callable[[FakeFA3], FakeFA3],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    install(FakeFA3(factor))
    made = [("vllm-small", lambda: latent.served("", 16, 1, 16, "LBNHC", "cpu"))]
    monkeypatch.setattr(latent, "shapes", lambda: iter(made))
    monkeypatch.setattr("bench.report.describe_machine", lambda device: "no GPU")
    monkeypatch.setattr(latent, "time_graphs", lambda right, calls: dict.fromkeys(right, 2.0))
    path = tmp_path / "rows.json"
    latent.run(["--only", "vllm", "--json", str(path)])
    rows = {row["contender"]: row for row in json.loads(path.read_text())["rows"]}
    wrong = factor != 1.0
    assert ("WRONG" in capsys.readouterr().out) == wrong
    assert {"openmla", "cat+openmla"} <= set(rows)
    assert ("fa3" in rows) != wrong and ("fa3 eager" in rows) != wrong
    assert rows["openmla"]["ratio"] == (None if wrong else 1.0)
