"""The quantized end of a step on a GPU: one op compared with the ops that it replaces.

    python3 -m bench.outputs --json outputs.json
    python3 -m bench.outputs --sweep --only decode-b1-h16-fp8_128

Decode projects out of latent space and quantizes: project_quantize, against torch.bmm and
quantize_out, and against torch.bmm and the quantizer in torch's own ops, as in an engine without
either. w_uv is another layer's at each call, over more layers than a cache holds. Prefill is the
last merge: merge_quantize, against merge_states and quantize_out, and against merge_states and
torch's ops. Contenders are checked against one another, captured in CUDA graphs, and replayed in
rotation; times are medians. Ratios are to the two ops, and to torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from bench.absorbed import tiles
from bench.report import Report, judged, script_parser
from openmla.bench.harness import relative_error, time_graphs
from openmla.ops import merge_quantize, merge_states, project_quantize, quantize_out
from openmla.outputs import QuantizedOutput, decode_output, get_output_format, make_output

C, V = 512, 128
HEADS, BATCHES, CHUNKS = (16, 128), (1, 16, 128), (512, 8192)
FORMATS = ("fp8", "fp8_128", "fp8_128_pow2", "nvfp4")
COLD_BYTES = 1 << 28  # total size of the weights read in turn
FUSED, TWO_OPS, TORCH = "one op", "two ops", "torch's quantiser"
Contenders = dict[str, Callable[[], None]]
Make = Callable[[int, int, QuantizedOutput], tuple[Contenders, int]]


def quantize_by_torch(out: QuantizedOutput, x: Tensor) -> None:
    """Quantize to fp8 formats with torch's own ops; x is [n, H, V]."""
    format = get_output_format(out.format)
    wide = x.flatten(1).float()
    if not format.group:
        assert out.global_scale is not None
        out.values.copy_((wide / out.global_scale).clamp(-448, 448).to(out.values.dtype))
        return
    groups = wide.unflatten(1, (-1, format.group))
    scales = groups.abs().amax(-1).clamp_min(1e-10) / 448
    if format.power_of_two:
        scales = torch.exp2(scales.log2().ceil())
    assert out.scales is not None
    out.scales.copy_(scales)
    values = (groups / scales[..., None]).clamp(-448, 448).to(out.values.dtype)
    out.values.copy_(values.flatten(1))


def buffers(n: int, H: int, format: str) -> QuantizedOutput:
    scale = {"fp8": 0.01, "nvfp4": 400.0}.get(format)
    layout = "tma" if format.startswith("fp8_") else "row"
    return make_output(format, n, H * V, global_scale=scale, layout=layout, device="cuda")


def plainly(out: QuantizedOutput, x: Tensor) -> None:
    quantize_out(out.values, out.scales, x, out.global_scale, format=out.format)


def projecting(
    n: int, H: int, out: QuantizedOutput, one_op: Callable[..., None] = project_quantize
) -> tuple[Contenders, int]:
    """Contenders by name, and how many calls use different weights."""
    calls = max(COLD_BYTES // (2 * H * C * V), 1)
    latent = (torch.randn(n, H, C, device="cuda") / 3).bfloat16()
    kv_b = (torch.randn(calls, H, V, C, device="cuda") / C**0.5).bfloat16()
    weights = list(kv_b.transpose(2, 3))  # views of kv_b_proj, as in layers
    turns = {name: cycle(weights) for name in (FUSED, TWO_OPS, TORCH)}

    def product(name: str) -> Tensor:
        return torch.bmm(latent.transpose(0, 1), next(turns[name])).transpose(0, 1)

    def fused() -> None:
        w_uv, scale = next(turns[FUSED]), out.global_scale
        one_op(out.values, out.scales, latent, w_uv, None, scale, format=out.format)

    made: Contenders = {FUSED: fused, TWO_OPS: lambda: plainly(out, product(TWO_OPS))}
    if out.format != "nvfp4":
        made[TORCH] = lambda: quantize_by_torch(out, product(TORCH))
    return made, calls


def merging(n: int, H: int, out: QuantizedOutput) -> tuple[Contenders, int]:
    sides = []
    for _ in range(2):
        sides += [torch.randn(n, H, V, device="cuda").bfloat16(), torch.randn(n, H, device="cuda")]
    first, lse, other, other_lse = sides

    def fused() -> None:
        merge_quantize(
            out.values, out.scales, first, lse, other, other_lse, out.global_scale,
            format=out.format,
        )  # fmt: skip

    def merged() -> Tensor:  # in place: each call moves the mean a little, no time depends on it
        merge_states(first, lse, other, other_lse)
        return first

    made: Contenders = {FUSED: fused, TWO_OPS: lambda: plainly(out, merged())}
    if out.format != "nvfp4":
        made[TORCH] = lambda: quantize_by_torch(out, merged())
    return made, 5


def shapes() -> Iterator[tuple[str, Make, int, int, str]]:
    for format in FORMATS:
        for H in HEADS:
            for n in BATCHES:
                yield f"decode-b{n}-h{H}-{format}", projecting, n, H, format
            for n in CHUNKS:
                yield f"merge-{n}-h{H}-{format}", merging, n, H, format


def differences(make: Make, n: int, H: int, out: QuantizedOutput) -> dict[str, float]:
    """How far each contender is from the one op, in dequantized values. Inputs are rebuilt for
    each, since merge_states changes them."""
    found: dict[str, Tensor] = {}
    torch.manual_seed(0)
    for name in make(n, H, out)[0]:
        torch.manual_seed(0)
        make(n, H, out)[0][name]()
        found[name] = decode_output(out)
    return {name: relative_error(each, found[FUSED]) for name, each in found.items()}


def swept(shape: str, n: int, H: int, out: QuantizedOutput) -> Contenders:
    """The one op with other tiles that the machine can launch and that give right results."""
    runs = tiles("project_quantize", n, C, get_output_format(out.format).group)

    def attempt(one_op: Callable[..., None]) -> tuple[Callable[[], None], Tensor]:
        torch.manual_seed(0)
        contender = projecting(n, H, out, one_op)[0][FUSED]
        contender()
        return contender, decode_output(out)

    _, exact = attempt(project_quantize)
    attempts = {
        name: partial(attempt, partial(run, rows=None, first_row=0)) for name, run in runs.items()
    }
    found: Contenders = {}
    for name, (contender, made) in judged(shape, attempts, lambda pair: pair).items():
        apart = relative_error(made, exact)
        if apart < 0.02:
            found[name] = contender
        else:
            print(f"{name} WRONG: {apart}")
    return found


def run(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser("outputs", __doc__)
    parser.add_argument("--sweep", action="store_true", help="also time other tiles of decode")
    header = f"{'shape':<30} {'contender':<18} {'us':>9} {'two ops':>8} {'torch':>6}  difference"
    report = Report(parser, arguments, header)
    with torch.inference_mode():
        for shape, make, n, H, format in shapes():
            if not report.wants(shape):
                continue
            out = buffers(n, H, format)
            apart = differences(make, n, H, out)
            wrong = {name: each for name, each in apart.items() if not each < 0.02}
            if wrong:
                print(f"{shape:<30} WRONG: {wrong}")
                continue
            contenders, calls = make(n, H, out)
            if report.options.sweep and make is projecting:
                contenders |= swept(shape, n, H, out)
            times = time_graphs(contenders, calls)
            for name, us in times.items():
                ratios = {other: times[other] / us for other in (TWO_OPS, TORCH) if other in times}
                print(
                    f"{shape:<30} {name:<18} {us:>9.2f} {ratios[TWO_OPS]:>8.2f} "
                    f"{ratios.get(TORCH, float('nan')):>6.2f}  {apart.get(name, 0.0):.5f}",
                    flush=True,
                )
                row = {"shape": shape, "contender": name, "us": us, "ratios": ratios}
                report.rows.append(row)
            report.save()


if __name__ == "__main__":
    run()
