"""V4's outputs, rotated back and quantized on the way out of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openmla import attend_compressed, decode_output, make_output, ops
from openmla.outputs import QuantizedOutput
from tests.layers.v4 import RATIOS, Server, make_layer, sequence, tiny_config
from tests.parallel.v4 import inputs_of

STEPS: tuple[list[tuple[str, int]], ...] = (
    [("a", 140), ("b", 5)],
    [("b", 2), ("a", 1), ("c", 7)],
    [("a", 1), ("b", 1), ("c", 1)],
)


@pytest.mark.parametrize("format", ["fp8", "fp8_64", "nvfp4"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_outputs_are_those_of_two_ops(ratio: int, format: str) -> None:
    """The bytes of attend_compressed(), the inverse rotation and quantize_out, one by one."""
    layer = make_layer(tiny_config(), ratio)
    given = {name: sequence(200, seed) for seed, name in enumerate("abc")}
    plain, direct = Server(layer, given), Server(layer, given)
    table, sink = layer.rope_table.table, layer.sinks.float()
    H, D, R = layer.config.num_heads, layer.config.latent_dim, layer.config.qk_rope_head_dim
    scale = None if format == "fp8_64" else 0.02
    for wanted in STEPS:
        found: list[QuantizedOutput] = []
        for server, output in ((plain, None), (direct, format)):
            plan = server.plan(server.batch(wanted), output=output)
            hidden, positions = server.tokens(wanted)
            inputs: dict[str, Any] = vars(inputs_of(layer, hidden, positions, plan, slice(None)))
            buffers = make_output(format, len(hidden), H * D, global_scale=scale, device="cpu")
            inputs |= {"cache": server.cache, "plan": plan, "sink": sink, "table": table}
            if output is not None:
                assert attend_compressed(**inputs, out=buffers) is buffers
                assert "quantize_out" in plan.explain()
            else:
                out = attend_compressed(**inputs)
                ops.rope(out[:, :, D - R :], positions, table, pairing="pairs", inverse=True)
                parts = buffers.values, buffers.scales, out, buffers.global_scale
                ops.quantize_out(*parts, format=format)
            found.append(buffers)
        first, second = found
        assert torch.equal(first.values.view(torch.uint8), second.values.view(torch.uint8))
        assert torch.equal(decode_output(first), decode_output(second))
