"""Expanded attention on a GPU: openmla's backends compared with torch's cuDNN attention.

    python3 -m bench.mha --json mha.json

Causal prompts, alone and several: checked against one another, captured in CUDA graphs, replayed in
rotation; times are medians. cuDNN gets its tensors in its preferred layout, [B, H, n, E]: all
requests padded to the longest, or one call each. Ratios are to the faster of the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from bench.report import Report, script_parser
from openmla.backends import problem_on, why_not
from openmla.bench.harness import relative_error, time_graphs
from openmla.ops import mha_ragged

_SEEDED = random.Random(1)
LENGTHS = {
    "1x8192": [8192],
    "4x2048": [2048] * 4,
    "8x1024": [1024] * 8,
    "uneven": [_SEEDED.randint(1, 3000) for _ in range(8)],
}
# Heads, key columns, shared key columns, and value columns: V3 at tensor parallel 8 and 1, GLM-5,
# Mistral 4, MiniCPM3.
SHAPES = ((16, 192, 64, 128), (128, 192, 64, 128), (20, 256, 64, 256), (32, 128, 64, 128),
          (40, 96, 32, 64))  # fmt: skip
PLAIN = ("cuDNN, padded", "cuDNN, one by one")


def make(lens: Sequence[int], H: int, E: int, R: int, V: int) -> dict[str, Callable[[], Tensor]]:
    """Contenders by name; each returns the first request's output."""
    torch.manual_seed(0)
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    T, longest = sum(lens), max(lens)
    q, k, v = (torch.randn(T, H, width, **bf16) for width in (E, E, V))
    k_pe = torch.randn(T, R, **bf16)
    k[:, :, E - R :] = k_pe[:, None]
    both = torch.cat([k[:, :, : E - R], v], dim=-1)  # the layout of the expansion
    k_nope, values = both.split([E - R, V], dim=-1)
    bounds = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cuda")
    apart = [[part.transpose(0, 1)[None] for part in each.split(list(lens))] for each in (q, k, v)]
    padded = [
        pad_sequence([*each.split(list(lens))], batch_first=True).transpose(1, 2)
        for each in (q, k, v)
    ]

    def plain(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(a, b, c, is_causal=True)

    def one_by_one() -> Tensor:
        outs = [plain(*each) for each in zip(*apart, strict=True)]
        return outs[0][0].transpose(0, 1)

    def ours(backend: str, k: Tensor, v: Tensor, shared: Tensor | None) -> Callable[[], Tensor]:
        return lambda: mha_ragged(
            q, k, v, bounds, bounds, shared, scale=E**-0.5, causal=True, max_query_len=longest,
            max_key_len=longest, backend=backend,
        )[0][: lens[0]]  # fmt: skip

    contenders = {
        "cuDNN, padded": lambda: plain(*padded)[0].transpose(0, 1)[: lens[0]],
        "cuDNN, one by one": one_by_one,
        "auto, apart": ours("auto", k_nope, values, k_pe),
    }
    asked = problem_on(torch.device("cuda"), "mha_ragged", dtype=torch.bfloat16, E=E, V=V)
    for backend in ("gluon", "sdpa", "triton"):
        if why_not(asked, backend) is None:
            contenders[backend] = ours(backend, k, v, None)
    return contenders


def prompts(
    report: Report, shapes: Sequence[tuple[int, int, int, int]]
) -> Iterator[tuple[str, list[int], tuple[int, int, int, int], int]]:
    """Requested shapes: name, lengths, heads and widths, FLOPs of causal attention."""
    for H, E, R, V in shapes:
        for title, lens in LENGTHS.items():
            shape = f"h{H}-{E}/{V}-{title}"
            if report.wants(shape):
                yield shape, lens, (H, E, R, V), H * (E + V) * sum(n * (n + 1) for n in lens)


def run(arguments: Sequence[str] | None = None) -> None:
    header = f"{'shape':<22} {'contender':<18} {'us':>9} {'ratio':>6} TFLOP/s  difference"
    report = Report(script_parser("mha", __doc__), arguments, header)
    for shape, lens, widths, flops in prompts(report, SHAPES):
        contenders = make(lens, *widths)
        expected = contenders[PLAIN[0]]()
        wrong = {name: relative_error(call(), expected) for name, call in contenders.items()}
        times = time_graphs({name: contenders[name] for name in wrong if wrong[name] < 0.01}, 3)
        best = min(times[name] for name in PLAIN)
        for name in contenders:
            if name not in times:
                print(f"{shape:<22} {name:<18} WRONG, {wrong[name]:.4f} from the plain call")
                continue
            us = times[name]
            print(
                f"{shape:<22} {name:<18} {us:>9.1f} {best / us:>6.2f} "
                f"{flops / us / 1e6:>7.0f}  {wrong[name]:.5f}",
                flush=True,
            )
            row = {"shape": shape, "contender": name, "us": us, "ratio": best / us}
            report.rows.append(row)
        report.save()


if __name__ == "__main__":
    run()
