"""Prefill attention in fp8 on a GPU, compared with bf16: speed, and errors against float64.

    python3 -m bench.fp8_prefill --json fp8_prefill.json

Causal prompts. "fp8" is attention over queries and keys that are e4m3 already; "fp8, quantised"
starts from bf16 in the layout of the expansion: queries, and keys with the shared columns joined,
two launches of quantize_heads. Values are bf16. Contenders are checked, captured in CUDA graphs and
replayed in rotation; times are medians, ratios are to bf16 in the same run. Errors are relative
(RMS for out, maximum for lse) on the last rows of two heads, for normal inputs and for inputs with
outliers: eight columns of queries, eight others of keys and one token of values in a hundred are 30
times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.mha import prompts
from bench.report import Report, script_parser
from openmla.backends import problem_on, why_not
from openmla.bench.harness import relative_error, time_graphs
from openmla.ops import mha_ragged, quantize_heads
from openmla.ops.quantize_heads import allocate_heads

E4M3 = torch.float8_e4m3fn
# V3, V2-Lite, Mistral 4, GLM-5.
SHAPES = ((128, 192, 64, 128), (16, 192, 64, 128), (32, 128, 64, 128), (64, 256, 64, 256))
CHECKED, HEADS = 256, 2  # last rows and first heads to compute in float64
MOST = {"bf16": 0.01, "fp8": 0.12}  # relative error above which a contender is wrong
BASE = "bf16"
TUNED = ((240, 24), (232, 40), (216, 72))  # registers of the attention and of the load warpgroups


class Heads:
    """Inputs of one shape in bf16, and their quantized forms."""

    def __init__(self, lens: Sequence[int], H: int, E: int, R: int, V: int, outliers: bool) -> None:
        torch.manual_seed(0)
        bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        T, self.lens, self.R = sum(lens), lens, R
        self.q, self.k_pe = torch.randn(T, H, E, **bf16), torch.randn(T, R, **bf16)
        both = torch.randn(T, H, E - R + V, **bf16)  # the layout of the expansion
        self.k, self.v = both.split([E - R, V], dim=-1)
        if outliers:
            self.q[:, :, :8] *= 30
            self.k[:, :, 16:24] *= 30
            self.v[::100] *= 30
        self.bounds = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cuda")
        self.scalars: dict[str, Any] = {
            "scale": E**-0.5, "causal": True, "max_query_len": max(lens), "max_key_len": max(lens),
        }  # fmt: skip
        whole = torch.cat([self.k, self.k_pe[:, None].expand(-1, H, -1)], 2)
        largest = torch.stack([part.abs().amax((0, 2)) for part in whole.split(list(lens))])
        self.k_scale = (largest.float() / 448).log2().ceil().exp2()  # [B, H]
        self.requests = torch.arange(len(lens), device="cuda").repeat_interleave(
            torch.tensor(lens, device="cuda")
        )
        self.v_scale = torch.ones_like(self.k_scale)

    def bf16(self) -> tuple[Tensor, Tensor]:
        return mha_ragged(
            self.q, self.k, self.v, self.bounds, self.bounds, self.k_pe, **self.scalars
        )

    def quantised(self) -> tuple[Tensor, ...]:
        (T, H, E), device = self.q.shape, self.q.device
        q, k = (allocate_heads(T, H, E, device, keys_contiguous=False) for _ in range(2))
        q_scale = torch.empty((T, H), device=device)
        quantize_heads(q, q_scale, self.q)
        quantize_heads(k, None, self.k, self.k_pe, self.k_scale, self.requests)
        return q, k, self.v, q_scale

    def fp8(self, made: tuple[Tensor, ...], backend: str) -> tuple[Tensor, Tensor]:
        q, k, v, q_scale = made
        return mha_ragged(
            q, k, v, self.bounds, self.bounds, None, q_scale, self.k_scale, self.v_scale,
            **self.scalars, out_dtype=torch.bfloat16, backend=backend,
        )  # fmt: skip

    def both(self, backend: str) -> tuple[Tensor, Tensor]:
        return self.fp8(self.quantised(), backend)

    def tuned(self, made: tuple[Tensor, ...], registers: tuple[int, int]) -> Tensor:
        launching = import_module("openmla.backends.gluon.mha_ragged")
        names = ("ATTEND_REGISTERS", "LOAD_REGISTERS")
        with patch.dict(launching.TUNED[1], dict(zip(names, registers, strict=True))):
            launching.SPEC.forget()
            out, _ = self.fp8(made, "gluon")
            launching.SPEC.forget()
        return out

    def exact(self, made: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Tensor]:
        """The last rows of the last request and the first heads, in float64, from the inputs or
        from their quantized forms."""
        n, h = self.lens[-1], slice(0, HEADS)
        rows = min(CHECKED, n)
        if made is None:
            k = torch.cat([self.k, self.k_pe[:, None].expand(-1, self.k.shape[1], -1)], 2)
            q, k, v = (each[-n:, h].double() for each in (self.q, k, self.v))
        else:
            q, k, v, q_scale = made
            q, k, v = (each[-n:, h].double() for each in (q, k, v))
            q = q * q_scale[-n:, h, None]
            k, v = k * self.k_scale[-1, h, None], v * self.v_scale[-1, h, None]
        logits = self.scalars["scale"] * torch.einsum("qhe,khe->qhk", q[-rows:], k)
        key = torch.arange(n, device="cuda")
        logits.masked_fill_(key > (key[-rows:])[:, None, None], -torch.inf)
        lse = logits.logsumexp(-1)
        return torch.einsum("qhk,khv->qhv", (logits - lse[..., None]).exp(), v), lse


def errors(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> tuple[float, float]:
    rows = exact[0].shape[0]
    out, lse = (each[-rows:, :HEADS].double() for each in got)
    return relative_error(out, exact[0]), float((lse - exact[1]).abs().max())


def show_errors(lens: Sequence[int], H: int, E: int, R: int, V: int) -> list[dict[str, Any]]:
    """Errors of all paths, for both kinds of inputs; "own": against float64 over the same e4m3."""
    rows = []
    for outliers in (False, True):
        heads = Heads(lens, H, E, R, V, outliers)
        exact = heads.exact()
        found = {"bf16": errors(heads.bf16(), exact)}
        for backend in able(E, V):
            made = heads.quantised()
            got = heads.fp8(made, backend)
            found[f"fp8 {backend}"] = errors(got, exact)
            found[f"fp8 {backend}, own"] = errors(got, heads.exact(made))
        for name, (out, lse) in found.items():
            kind = "outliers" if outliers else "normal"
            print(f"  {kind:<9} {name:<20} out {out:.5f}  lse {lse:.2e}", flush=True)
            rows.append({"inputs": kind, "path": name, "out": out, "lse": lse})
    return rows


def able(E: int, V: int) -> list[str]:
    asked = problem_on(torch.device("cuda"), "mha_ragged", dtype=E4M3, E=E, V=V)
    return [name for name in ("gluon", "triton") if why_not(asked, name) is None]


def contenders_of(
    heads: Heads, backends: Sequence[str], tune: bool
) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {BASE: heads.bf16}
    for backend in backends:
        made = heads.quantised()
        found[f"fp8 {backend}"] = partial(heads.fp8, made, backend)
        found[f"fp8 {backend}, quantised"] = partial(heads.both, backend)
    found["quantise alone"] = heads.quantised
    if tune:
        made = heads.quantised()
        found |= {f"fp8 {each}": partial(heads.tuned, made, each) for each in TUNED}
    return found


def run(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser("fp8_prefill", __doc__)
    parser.add_argument("--tune", action="store_true", help="also time other shares of registers")
    report = Report(parser, arguments)
    for shape, lens, widths, flops in prompts(report, SHAPES):
        print(shape)
        found = show_errors(lens, *widths)
        wrong = [
            row for row in found
            if row["inputs"] == "normal" and row["out"] > MOST[row["path"].split()[0]]
        ]  # fmt: skip
        report.rows += [{"shape": shape, **row} for row in found]
        if wrong:
            print(f"  WRONG, not timed: {wrong}")
            continue
        _, E, _, V = widths
        heads = Heads(lens, *widths, outliers=False)
        times = time_graphs(contenders_of(heads, able(E, V), report.options.tune), 3)
        for name, us in times.items():
            print(
                f"  {name:<22} {us:>9.1f} us {times[BASE] / us:>5.2f} of bf16's speed "
                f"{flops / us / 1e6:>6.0f} TFLOP/s",
                flush=True,
            )
            report.rows.append({"shape": shape, "contender": name, "us": us})
        report.save()


if __name__ == "__main__":
    run()
