"""The last merge of two partial attentions, quantized: the rows of a prefill chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.bench.quantized import output_inputs
from openmla.ops import merge_quantize, merge_states
from openmla.ops.merge_quantize import cost
from openmla.outputs import QuantizedOutput, decode_output
from openmla.testing import Inputs, out_budget

SIDES = ("out", "lse", "other_out", "other_lse")


def merged(inputs: Inputs, backend: str) -> torch.Tensor:
    fresh = inputs.clone()
    fresh.run(merge_quantize, backend=backend)
    buffers = QuantizedOutput(
        fresh["values"], fresh["scales"], fresh.scalars["global_scale"], fresh.scalars["format"]
    )
    return decode_output(buffers)


def check(inputs: Inputs, backend: str) -> float:
    exact = {name: inputs[name].double() for name in SIDES}
    merge_states(*exact.values(), backend="reference")
    peer = merged(inputs, "reference")
    return out_budget(merged(inputs, backend), exact["out"].flatten(1), peer)


def job(n: int, H: int, V: int, format: str, device: str) -> Job:
    sides = {}
    for side in ("", "other_"):
        sides[f"{side}out"] = torch.randn(n, H, V, device=device).bfloat16()
        sides[f"{side}lse"] = torch.randn(n, H, device=device)
    inputs = output_inputs(sides, format, n, H * V, device)
    return Job(inputs, cost(n, H=H, V=V, itemsize=2, format=format), check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        merge_quantize,
        {
            "tiny-64x4": partial(job, 64, 4, 32, "fp8_128"),
            "v3-tp8-prefill-8k": partial(job, 8192, 16, 128, "fp8_128"),
            "v3-prefill-8k": partial(job, 8192, 128, 128, "fp8_128"),
            "v3-prefill-8k-nvfp4": partial(job, 8192, 128, 128, "nvfp4"),
        },
    )


if __name__ == "__main__":
    run()
