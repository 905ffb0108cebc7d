"""Expanded attention on a GPU: our backends beside torch's own attention, called plainly.

    python3 -m bench.mha --json mha.json

One causal prompt of 8192 tokens: checked against one another, captured in CUDA graphs, replayed in
rotation; medians. The plain call gets its tensors as it likes them, [1, H, n, E].
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.latent import timed
from openmla.bench.harness import describe_machine
from openmla.errors import UnsupportedError
from openmla.ops import mha_ragged

N = 8192
SHAPES = ((16, 192, 128), (128, 192, 128), (20, 256, 256), (32, 128, 128), (32, 96, 64))


def make(H: int, E: int, V: int) -> dict[str, Callable[[], Tensor]]:
    """Contenders by name, the plain call first."""
    torch.manual_seed(0)
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(N, H, width, **bf16) for width in (E, E, V))
    a, b, c = (each.transpose(0, 1).contiguous()[None] for each in (q, k, v))
    bounds = torch.tensor([0, N], dtype=torch.int32, device="cuda")

    def plain() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(a, b, c, is_causal=True)[0].transpose(0, 1)

    def ours(backend: str) -> Callable[[], Tensor]:
        return lambda: mha_ragged(
            q, k, v, bounds, bounds, scale=E**-0.5, causal=True, max_query_len=N, max_key_len=N,
            backend=backend,
        )[0]  # fmt: skip

    return {"cuDNN, plain": plain, "sdpa": ours("sdpa"), "triton": ours("triton")}


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.mha")
    parser.add_argument("--json", help="write the rows here too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise UnsupportedError("bench: mha needs a GPU.")
    machine = describe_machine("cuda")
    print(machine)
    print(f"{'shape':<16} {'contender':<14} {'us':>9} {'ratio':>6} TFLOP/s  difference")
    rows = []
    for H, E, V in SHAPES:
        contenders = make(H, E, V)
        expected = contenders["cuDNN, plain"]().double()
        wrong = {
            name: float((call().double() - expected).norm() / expected.norm())
            for name, call in contenders.items()
        }
        right = {name: call for name, call in contenders.items() if wrong[name] < 0.01}
        times = timed(right, 3)
        flops = H * N * (N + 1) * (E + V)
        for name in contenders:
            shape = f"h{H}-{E}/{V}"
            if name not in times:
                print(f"{shape:<16} {name:<14} WRONG, {wrong[name]:.4f} from the plain call")
                continue
            us, ratio = times[name], times["cuDNN, plain"] / times[name]
            rate = flops / us / 1e6
            print(
                f"{shape:<16} {name:<14} {us:>9.1f} {ratio:>6.2f} {rate:>7.0f}  {wrong[name]:.5f}"
            )
            rows.append({"shape": shape, "contender": name, "us": us, "ratio": ratio})
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    run()
