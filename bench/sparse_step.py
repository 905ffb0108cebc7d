"""A decode step of one DeepSeek-V3.2 layer's attention, op by op and as one captured graph.

    python3 -m bench.sparse_step --json sparse_step.json
    python -m bench.sparse_step --measured sparse_step.json --plot sparse_step.png

Write both caches, score every key, select 2048, attend: what a layer does for B requests between
its projections. The whole chain is captured as one CUDA graph, and each op as a graph of its own;
all are replayed in rotation, and times are medians. Shares are of the ops' sum, which is larger
than the time of the whole graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.report import Report, script_parser
from openmla.bench.harness import relative_error, time_graphs
from openmla.bench.inputs import random_cache, rotation
from openmla.cli.options import add_plot
from openmla.cli.pictures import INK, check_plot, picture
from openmla.ops import Segment, index_logits, index_topk, index_write, latent_write, mqa_sparse

BS, C, R, D, HI, DI, K = 64, 512, 64, 576, 64, 128, 2048
CALLS = 10  # per graph
SHAPES = [(H, B, S) for H in (16, 128) for B in (1, 16, 64) for S in (32768, 131072)]


class Step:
    """B requests of S cached tokens each, about to decode one more."""

    def __init__(self, H: int, B: int, S: int, device: str, backend: str) -> None:
        self.B, self.S, self.backend = B, S, backend
        torch.manual_seed(0)
        blocks = S // BS + 1
        self.latent = random_cache(B * blocks, BS, "fp8_ds_mla", D, device)
        self.index = random_cache(B * blocks, BS, "index_fp8", DI, device)
        self.table = torch.randperm(B * blocks, device=device).int().view(B, blocks)
        self.start_loc = torch.arange(B + 1, device=device, dtype=torch.int32)
        self.positions = torch.full((B,), S, device=device)
        self.lens = torch.full((B,), S + 1, dtype=torch.int32, device=device)
        self.slots = (self.table[:, S // BS] * BS + S % BS).long()
        self.one = torch.ones((), device=device)
        self.rotation = rotation(S + 1, R, device)
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
    error = relative_error(out, wanted)
    if error > 0.01 or float((lse - wanted_lse).abs().max()) > 1e-3:
        found.append(f"attention is off by {error:.4f}")
    return found


def draw(rows: Sequence[dict[str, Any]], machine: str, path: str) -> None:
    """Draw one bar per shape: the ops stacked, the whole graph as a line."""
    with picture(path, 4.5, f"A layer's decode step, us\n{machine}") as figure:
        axes = figure.subplots()
        bottom, shapes = [0.0] * len(rows), [row["shape"] for row in rows]
        for name in [name for name in rows[0] if name not in ("shape", "whole")]:
            heights = [row[name] for row in rows]
            axes.bar(shapes, heights, bottom=bottom, label=name)
            bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        axes.plot(shapes, [row["whole"] for row in rows], "_", color=INK, label="graph")
        axes.tick_params(axis="x", rotation=60)
        axes.legend()


def run(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser("sparse_step", __doc__, only="")
    add_plot(parser, "the results")
    parser.add_argument("--measured", metavar="FILE", help="draw the rows of a file, run nothing")
    options = parser.parse_args(arguments)
    check_plot("bench", options.plot)
    if options.measured:
        with open(options.measured) as file:
            found = json.load(file)
        draw(found["rows"], found["machine"], options.plot)
        return
    report = Report(parser, arguments)
    for H, B, S in SHAPES:
        step = Step(H, B, S, "cuda", "auto")
        shape, wrong = f"h{H}-b{B}-s{S // 1024}k", problems(step)
        if wrong:
            print(f"{shape:<14} WRONG: {'; '.join(wrong)}")
            continue
        times = time_graphs({**step.parts(), "whole": step.whole}, CALLS)
        total = sum(times.values()) - times["whole"]
        shares = "  ".join(
            f"{name} {us:.1f} us {us / total:.0%}" for name, us in times.items() if name != "whole"
        )
        print(f"{shape:<14} graph {times['whole']:>7.1f} us   {shares}", flush=True)
        report.rows.append({"shape": shape, **times})
        report.save()
    if options.plot and report.rows:
        draw(report.rows, report.machine, options.plot)


if __name__ == "__main__":
    run()
