"""A decode step of one DeepSeek-V3.2 layer's attention, op by op and as one captured graph.

    python3 -m bench.sparse_step --json sparse_step.json
    python -m bench.sparse_step --measured sparse_step.json --plot sparse_step.png

Write both caches, score every key, select 2048, attend: what a layer does for B requests between
its projections. The whole chain is captured as one CUDA graph, and each op as a graph of its own;
all are replayed in rotation, and times are medians. Shares are of the ops' sum, which is larger
than the time of the whole graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bench.latent import timed
from openmla.bench.harness import describe_machine
from openmla.cache.format import get_format
from openmla.errors import UnsupportedError
from openmla.ops import (
    Segment,
    index_logits,
    index_topk,
    index_write,
    latent_write,
    mqa_sparse,
)

BS, C, R, D, HI, DI, K = 64, 512, 64, 576, 64, 128, 2048
CALLS = 10  # per graph
SHAPES = [(H, B, S) for H in (16, 128) for B in (1, 16, 64) for S in (32768, 131072)]


class Step:
    """B requests of S cached tokens each, about to decode one more."""

    def __init__(self, H: int, B: int, S: int, device: str, backend: str) -> None:
        self.B, self.S, self.backend = B, S, backend
        torch.manual_seed(0)
        blocks = S // BS + 1
        self.latent = self._cache(B * blocks, "fp8_ds_mla", D, device)
        self.index = self._cache(B * blocks, "index_fp8", DI, device)
        self.table = torch.randperm(B * blocks, device=device).int().view(B, blocks)
        self.start_loc = torch.arange(B + 1, device=device, dtype=torch.int32)
        self.positions = torch.full((B,), S, device=device)
        self.lens = torch.full((B,), S + 1, dtype=torch.int32, device=device)
        self.slots = (self.table[:, S // BS] * BS + S % BS).long()
        self.one = torch.ones((), device=device)
        half = torch.arange(0, R, 2, device=device) / R
        angles = torch.outer(torch.arange(float(S + 1), device=device), 10000.0**-half)
        self.rotation = torch.cat([angles.cos(), angles.sin()], dim=1)
        bf16: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.q_heads = torch.randn(B, H, 192, **bf16) / 3
        self.kv = torch.randn(B, D, **bf16)
        self.norm = torch.ones(C, **bf16)
        self.q_latent = torch.randn(B, H, D, **bf16) / 3
        self.k_raw = torch.randn(B, DI, **bf16)
        self.k_norm, self.k_bias = torch.ones(DI, device=device), torch.zeros(DI, device=device)
        self.q_idx = torch.randn(B, HI, DI, device=device).to(torch.float8_e4m3fn)
        self.w_idx = torch.rand(B, HI, device=device) / 100
        self.logits = self.score()
        self.chosen, self.counts = self.choose()

    def _cache(self, num_blocks: int, format: str, width: int, device: str) -> Tensor:
        """Random rows, made a part at a time."""
        layout, one = get_format(format), torch.ones((), device=device)
        data = torch.empty(num_blocks, BS, layout.width(width), dtype=layout.dtype, device=device)
        for start in range(0, num_blocks * BS, 65536):
            slots = torch.arange(start, min(start + 65536, num_blocks * BS), device=device)
            layout.write(data, slots, torch.randn(len(slots), width, device=device), one)
        return data

    def write(self) -> None:
        latent_write(
            self.latent, self.q_heads, self.kv, self.norm, self.positions, self.slots, self.one,
            self.rotation, format="fp8_ds_mla", pairing="pairs", eps=1e-6, backend=self.backend,
        )  # fmt: skip

    def write_index(self) -> None:
        index_write(
            self.index, self.k_raw, self.k_norm, self.k_bias, self.positions, self.rotation,
            self.slots, format="index_fp8", eps=1e-6, pairing="halves", rope_start=0,
            backend=self.backend,
        )  # fmt: skip

    def score(self) -> Tensor:
        self.logits = index_logits(
            self.q_idx, self.w_idx, self.index, self.table, self.start_loc, self.lens,
            format="index_fp8", num_keys=self.S + 1, backend=self.backend,
        )  # fmt: skip
        return self.logits

    def choose(self) -> tuple[Tensor, Tensor]:
        self.chosen, self.counts = index_topk(
            self.logits, torch.zeros_like(self.lens), self.lens, K=K, backend=self.backend
        )
        return self.chosen, self.counts

    def attend(self) -> tuple[Tensor, Tensor]:
        segment = Segment(
            self.latent, self.one, "fp8_ds_mla", "positions", self.table, self.chosen, self.counts
        )
        return mqa_sparse(
            self.q_latent, self.start_loc, self.positions, segment, C=C, scale=192**-0.5,
            backend=self.backend,
        )  # fmt: skip

    def parts(self) -> dict[str, Callable[[], Any]]:
        return {
            "latent_write": self.write,
            "index_write": self.write_index,
            "index_logits": self.score,
            "index_topk": self.choose,
            "mqa_sparse": self.attend,
        }

    def whole(self) -> tuple[Tensor, Tensor]:
        for part in list(self.parts().values())[:-1]:
            part()
        return self.attend()


def problems(step: Step) -> list[str]:
    """Check a step's results against the reference: no better key may be left out, and the output
    must be within 1 %."""
    out, lse = step.whole()
    logits, chosen = step.logits, step.chosen.long()
    worst = logits.gather(1, chosen).min(1).values
    better = (logits > worst[:, None]).sum(1)
    found = [] if bool((better < K).all()) else ["a better key was left out"]
    step.backend, ours = "reference", step.backend
    wanted, wanted_lse = step.attend()
    step.backend = ours
    error = float((out.double() - wanted.double()).norm() / wanted.double().norm())
    if error > 0.01 or float((lse - wanted_lse).abs().max()) > 1e-3:
        found.append(f"attention is off by {error:.4f}")
    return found


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw one bar per shape: the ops stacked, the whole graph as a line."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    bottom = [0.0] * len(rows)
    for name in [name for name in rows[0] if name not in ("shape", "whole")]:
        heights = [row[name] for row in rows]
        axes.bar([row["shape"] for row in rows], heights, bottom=bottom, label=name)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.plot([row["shape"] for row in rows], [row["whole"] for row in rows], "k_", label="graph")
    axes.set_ylabel("us of one layer, H200")
    axes.tick_params(axis="x", rotation=60)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.sparse_step")
    parser.add_argument("--json", help="write the rows here too")
    parser.add_argument("--plot", help="a picture, as .png")
    parser.add_argument(
        "--measured", metavar="FILE", help="draw what was written there, run nothing"
    )
    options = parser.parse_args(arguments)
    if options.plot and find_spec("matplotlib") is None:
        raise UnsupportedError('bench: --plot needs matplotlib: pip install "openmla[plot]".')
    if options.measured:
        with open(options.measured) as file:
            draw(json.load(file)["rows"], options.plot)
        return
    if not torch.cuda.is_available():
        raise UnsupportedError("bench: sparse_step needs a GPU.")
    machine = describe_machine("cuda")
    print(machine)
    rows: list[dict[str, Any]] = []
    for H, B, S in SHAPES:
        step = Step(H, B, S, "cuda", "auto")
        shape, wrong = f"h{H}-b{B}-s{S // 1024}k", problems(step)
        if wrong:
            print(f"{shape:<14} WRONG: {'; '.join(wrong)}")
            continue
        times = timed({**step.parts(), "whole": step.whole}, CALLS)
        total = sum(times.values()) - times["whole"]
        shares = "  ".join(
            f"{name} {us:.1f} us {us / total:.0%}" for name, us in times.items() if name != "whole"
        )
        print(f"{shape:<14} graph {times['whole']:>7.1f} us   {shares}", flush=True)
        rows.append({"shape": shape, **times})
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)
    if options.plot and rows:
        draw(rows, options.plot)


if __name__ == "__main__":
    run()
