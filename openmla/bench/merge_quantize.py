"""The last merge of two partial attentions, quantized: the rows of a prefill chunk."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from openmla.bench.harness import Job, Op, results
from openmla.bench.inputs import output_inputs
from openmla.bench.merge_states import partials
from openmla.ops import merge_states
from openmla.ops.merge_quantize import cost
from openmla.outputs import QuantizedOutput, decode_output
from openmla.testing import Inputs, out_budget


def merged(op: Op, inputs: Inputs, backend: str) -> Tensor:
    values, scales = results(op, inputs, backend, ("values", "scales"))
    global_scale, format = inputs.scalars["global_scale"], inputs.scalars["format"]
    return decode_output(QuantizedOutput(values, scales, global_scale, format))


def check(op: Op, inputs: Inputs, backend: str) -> float:
    """Compare with a merge in float64 that is not quantized."""
    exact = [inputs[name].double() for name in ("out", "lse", "other_out", "other_lse")]
    merge_states(*exact, backend="reference")
    peer = merged(op, inputs, "reference")
    return out_budget(merged(op, inputs, backend), exact[0].flatten(1), peer)


def job(n: int, H: int, V: int, format: str, device: str) -> Job:
    inputs = output_inputs(partials(n, H, V, device), format, n, H * V, device)
    return Job(inputs, cost(n, H=H, V=V, itemsize=2, format=format), check)


SHAPES = {
    "tiny-64x4": partial(job, 64, 4, 32, "fp8_128"),
    "v3-tp8-prefill-8k": partial(job, 8192, 16, 128, "fp8_128"),
    "v3-prefill-8k": partial(job, 8192, 128, 128, "fp8_128"),
    "v3-prefill-8k-nvfp4": partial(job, 8192, 128, 128, "nvfp4"),
}
