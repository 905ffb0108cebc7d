"""Absorbed products on a GPU: fp8 w_uk and w_uv compared with torch.bmm and bf16 weights.

    python3 -m bench.absorbed --json absorbed.json
    python3 -m bench.absorbed --sweep --only w_uv-h16

Weights of enough layers to exceed the L2 cache are read in turn, as in a model. Contenders are
checked against float64, captured in CUDA graphs of one call per layer, and replayed in rotation;
times are medians. Ratios are to torch.bmm; for queries, whose product goes into the first columns
of q_latent, torch.bmm is also timed together with the copy of the other columns. --sweep runs other
tiles of openmla in the same rotation: the winner is written into backends/triton/_head_weights.py
by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.report import Report, judged, script_parser
from openmla.bench.harness import relative_error, time_graphs
from openmla.ops import project_heads
from openmla.ops.project_heads import cost

P, C, R = 128, 512, 64
OUTGROWN = 128 << 20  # bytes: more than twice an H200's L2 cache
BASE = "bf16, torch.bmm"
E4M3 = torch.float8_e4m3fn
WRONG = 6e-3  # relative error limit of a bf16 product
# block_m, block_n, block_k, warps, stages
SWEPT = {
    True: [
        (16, 16, 64, 2, 3), (16, 16, 64, 2, 8), (16, 16, 128, 2, 4), (16, 16, 128, 1, 4),
        (16, 16, 256, 2, 2), (16, 16, 512, 4, 1), (16, 32, 64, 2, 8), (16, 32, 128, 4, 4),
        (16, 64, 64, 4, 3), (16, 64, 64, 4, 8), (16, 64, 128, 4, 4), (16, 64, 128, 8, 4),
        (16, 128, 64, 4, 6), (16, 128, 64, 8, 8), (16, 128, 128, 4, 4), (16, 128, 128, 8, 4),
        (16, 128, 32, 4, 8),
    ],
    False: [
        (32, 64, 64, 4, 4), (32, 64, 128, 4, 3), (32, 128, 64, 4, 4), (64, 32, 64, 4, 3),
        (64, 64, 64, 4, 3), (64, 64, 64, 4, 5), (64, 64, 128, 4, 3), (64, 128, 64, 4, 3),
        (64, 128, 64, 8, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
    ],
}  # fmt: skip


class Shape(NamedTuple):
    contenders: dict[str, Callable[[], Tensor]]  # each returns out [T, H, N] of the next layer
    exact: Tensor  # for the first layer, float64
    layers: int
    bytes: dict[bool, int]  # moved by a call, by whether weights are fp8


def make(into: bool, T: int, H: int, sweep: bool) -> Shape:
    """Project queries into latent space, or outputs out of it."""
    torch.manual_seed(0)
    layers = max(64, OUTGROWN // (H * P * C))
    K, N = (P, C) if into else (C, P)
    x = torch.randn(T, H, K, device="cuda").bfloat16()
    q_pe = torch.randn(T, H, R, device="cuda").bfloat16()
    q_latent = torch.empty(T, H, C + R, device="cuda", dtype=torch.bfloat16)
    out = q_latent[:, :, :C] if into else q_latent.new_empty(T, H, N)
    stored = [(torch.randn(H, P, C, device="cuda") * 60).to(E4M3) for _ in range(layers)]
    heads = torch.rand(H, 1, 1, device="cuda") / 1000 + 1e-3
    blocks = heads.expand(H, *(n // 128 for n in (K, N))).contiguous()

    def laid(w: Tensor) -> Tensor:
        return w if into else w.transpose(1, 2)

    eight = [laid(w) for w in stored]
    sixteen = [laid((w.float() * heads).bfloat16()) for w in stored]
    exact = torch.einsum("thk,hkn->thn", x.double(), eight[0].double() * heads.double())

    def bmm(weights: Iterator[Tensor]) -> Tensor:
        return torch.bmm(x.transpose(0, 1), next(weights)).transpose(0, 1)

    def beside(weights: Iterator[Tensor]) -> Tensor:
        return torch.cat([bmm(weights), q_pe], dim=-1)[:, :, :C]

    op = partial(project_heads, backend="triton")

    def ours(
        weights: Iterator[Tensor], scale: Tensor | None, whole: bool = False,
        run: Callable[..., None] = op,
    ) -> Tensor:  # fmt: skip
        run(out, x, next(weights), scale)
        if whole:
            q_latent[:, :, C:] = q_pe
        return out

    contenders: dict[str, Callable[[], Tensor]] = {
        BASE: partial(bmm, itertools.cycle(sixteen)),
        "fp8, a scale per head": partial(ours, itertools.cycle(eight), heads),
        "fp8, blocks of 128": partial(ours, itertools.cycle(eight), blocks),
        "bf16, project_heads": partial(ours, itertools.cycle(sixteen), None),
    }
    if into:
        contenders |= {
            "bf16, torch.bmm and cat": partial(beside, itertools.cycle(sixteen)),
            "fp8, in place": partial(ours, itertools.cycle(eight), heads, True),
        }
    for name, run in tiles("project_heads", T, K).items() if sweep else ():
        contenders[name] = partial(ours, itertools.cycle(eight), heads, run=run)
    sizes = {
        small: cost(T, H=H, K=K, N=N, itemsize=2, w_itemsize=1 if small else 2).bytes
        for small in (True, False)
    }
    return Shape(contenders, exact, layers, sizes)


def tiles(op: str, T: int, K: int, least_n: int = 16) -> dict[str, Callable[..., None]]:
    """run() of project_heads or project_quantize with other tiles, by name. The op itself would
    repeat the launches of its first tile."""
    module = import_module(f"openmla.backends.triton.{op}")
    shared = import_module("openmla.backends.triton._head_weights")

    def tried(tile: Any) -> Callable[..., None]:
        kept = lru_cache(module.SPEC.launch.__wrapped__)

        def run(*args: Any, **kwargs: Any) -> None:
            fresh = patch.object(module.SPEC, "launch", kept)
            with patch.object(module, "config_of", lambda *_, **__: tile), fresh:
                module.run(*args, **kwargs)

        return run

    swept = [shared.Config(*row) for row in SWEPT[T <= shared.FEW_TOKENS]]
    fitting = [tile for tile in swept if tile.block_n >= least_n and tile.block_k <= K]
    return {"x".join(map(str, tile)): tried(tile) for tile in fitting}


def checked(title: str, shape: Shape) -> dict[str, float]:
    """Relative errors of all contenders that can be launched. Each begins with the first layer."""
    found = judged(title, shape.contenders, lambda out: relative_error(out, shape.exact))
    for name in found:
        for _ in range(shape.layers - 1):  # cycle back to the first layer
            shape.contenders[name]()
    return found


def run(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser("absorbed", __doc__)
    parser.add_argument("--sweep", action="store_true", help="also time other tiles")
    columns = f"{'us':>8} {'ratio':>6} {'MiB':>7} {'TB/s':>6}   error"
    report = Report(parser, arguments, f"{'shape':<22} {'contender':<26} {columns}")
    for into, H, T in itertools.product((True, False), (16, 128), (1, 16, 128)):
        title = f"{'w_uk' if into else 'w_uv'}-h{H}-b{T}"
        if not report.wants(title):
            continue
        shape = make(into, T, H, report.options.sweep)
        errors = checked(title, shape)
        right = {name: shape.contenders[name] for name in errors if errors[name] < WRONG}
        times = time_graphs(right, shape.layers)
        for name, error in errors.items():
            if name not in times:
                print(f"{title:<22} {name:<26} WRONG, error {error:.4f}")
                continue
            size, us = shape.bytes["bf16" not in name], times[name]
            row = {"shape": title, "contender": name, "us": us, "ratio": times[BASE] / us,
                   "bytes": size, "error": error}  # fmt: skip
            report.rows.append(row)
            print(
                f"{title:<22} {name:<26} {us:>8.2f} {row['ratio']:>6.2f} {size / 2**20:>7.2f} "
                f"{size / us / 1e6:>6.2f} {error:>8.5f}",
                flush=True,
            )
        report.save()


if __name__ == "__main__":
    run()
