"""Expanded attention on a GPU: openmla's backends compared with torch's cuDNN attention.

    python3 -m bench.mha --json mha.json

Causal prompts, alone and several: checked against one another, captured in CUDA graphs, replayed in
rotation; times are medians. cuDNN gets its tensors in its preferred layout, [B, H, n, E]: all
requests padded to the longest, or one call each. Ratios are to the faster of the two.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from bench.latent import timed
from openmla.backends import problem_on, why_not
from openmla.bench.harness import describe_machine
from openmla.errors import UnsupportedError
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


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.mha")
    parser.add_argument("--json", help="write the rows here too")
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise UnsupportedError("bench: mha needs a GPU.")
    machine = describe_machine("cuda")
    print(machine)
    print(f"{'shape':<22} {'contender':<18} {'us':>9} {'ratio':>6} TFLOP/s  difference")
    rows = []
    for H, E, R, V in SHAPES:
        for title, lens in LENGTHS.items():
            shape = f"h{H}-{E}/{V}-{title}"
            if options.only not in shape:
                continue
            contenders = make(lens, H, E, R, V)
            expected = contenders[PLAIN[0]]().double()
            wrong = {
                name: float((call().double() - expected).norm() / expected.norm())
                for name, call in contenders.items()
            }
            times = timed({name: contenders[name] for name in wrong if wrong[name] < 0.01}, 3)
            best = min(times[name] for name in PLAIN)
            flops = H * (E + V) * sum(n * (n + 1) for n in lens)
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
                rows.append({"shape": shape, "contender": name, "us": us, "ratio": best / us})
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    run()
