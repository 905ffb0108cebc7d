"""Heads in e4m3 for tests of the ops that attend to them: quantised inputs and what is exact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from openmla.testing import Inputs, budget_used
from tests.ops.contract import run_or_skip

E4M3 = torch.float8_e4m3fn
# Eight-bit WGMMA keeps 13 bits behind the point of the largest number it adds, and what is cut off
# goes one way. A score of 192 columns is six such sums, none larger than the sum of all magnitudes,
# and each cuts off what it adds and what it has: so that a logit errs by up to 12 * 2^-13 of that,
# and lse no more than a logit. An H200 used two thirds of it for outliers.
CUT_OFF = 12 * 2.0**-13
# Probabilities and outputs rounded to bf16, 2^-8 at most each.
SIXTEEN_BITS = 2.0**-7


def quantised(inputs: Inputs, *, keys_contiguous: bool, outliers: bool = False) -> Inputs:
    """The same call in e4m3: scales per row and head of q, per request and head of k and v, odd
    strides."""
    tensors, scalars = dict(inputs.tensors), dict(inputs.scalars)
    for name in ("q", "k", "v"):
        x = tensors[name].float()
        if outliers:
            x = x.clone()
            x[:, :, :2] *= 30
            x[::7] *= 20
        seen = x.nan_to_num(0).abs()
        scale = seen.amax(2)
        if name != "q":
            lens = tensors["key_start_loc"].diff().tolist()
            parts = scale[: sum(lens)].split(lens) if lens else ()
            largest = [part.amax(0) if len(part) else scale.new_zeros(x.shape[1]) for part in parts]
            scale = torch.stack(largest) if lens else scale.new_zeros(0, x.shape[1])
        scale = scale.clamp_min(1e-3) / 300  # no power of two
        tensors[f"{name}_scale"] = scale
        by_row = scale if name == "q" else by_key(scale, tensors["key_start_loc"], len(x))
        codes = (x / by_row[:, :, None]).clamp(-448, 448)
        tensors[name] = codes.to(E4M3)
    if keys_contiguous:
        tensors["v"] = tensors["v"].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if "mask" not in tensors:  # mha_ragged has k_pe between the others and scales
        scales = {name: tensors.pop(name) for name in ("q_scale", "k_scale", "v_scale")}
        tensors |= {"k_pe": None, **scales}  # type: ignore[dict-item]
    scalars["out_dtype"] = torch.bfloat16
    return Inputs(tensors, scalars, ())


def by_key(scale: Tensor, key_start_loc: Tensor, S: int) -> Tensor:
    """[S, H] from [B, H]: each key's; 1 for keys of no request."""
    rows = scale.new_ones(S, scale.shape[1])
    bounds = key_start_loc.tolist()
    for b, (start, end) in enumerate(pairwise(bounds)):
        rows[start:end] = scale[b]
    return rows


def exact(op: Callable[..., Any], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The op over the same values in float64, by the reference."""
    tensors = {name: each for name, each in inputs.tensors.items() if "scale" not in name}
    tensors["q"] = inputs["q"].double() * inputs["q_scale"].double()[:, :, None]
    for name in ("k", "v"):
        scale = by_key(inputs[f"{name}_scale"], inputs["key_start_loc"], len(inputs[name]))
        tensors[name] = (inputs[name].double() * scale.double()[:, :, None]).contiguous()
    scalars = {name: each for name, each in inputs.scalars.items() if name != "out_dtype"}
    found: tuple[Tensor, Tensor] = Inputs(tensors, scalars, ()).run(op, backend="reference")
    return found


def largest_sum(inputs: Inputs) -> float:
    """Of the magnitudes that any logit is the sum of."""
    q = inputs["q"].double() * inputs["q_scale"].double()[:, :, None]
    scale = by_key(inputs["k_scale"], inputs["key_start_loc"], len(inputs["k"]))
    k = inputs["k"].double() * scale.double()[:, :, None]
    if not q.numel() or not k.numel():
        return 0.0
    products = torch.einsum("qhe,khe->hqk", q.nan_to_num(0).abs(), k.nan_to_num(0).abs())
    return float(products.max()) * float(inputs.scalars["scale"])


def check_beside_a_large_token(
    op: Callable[..., Any], inputs: Inputs, large: int, backend: str
) -> None:
    """A key and value of 1e6 in request `large`: the others meet the contract alone, and beside it
    have the same bits."""
    queries, keys = (inputs[f"{name}_start_loc"].tolist() for name in ("query", "key"))
    for name in ("k", "v"):
        inputs[name][keys[large] + 2] = 1e6
    together = run_or_skip(op, quantised(inputs, keys_contiguous=False), backend)
    for b, (q_rows, k_rows) in enumerate(zip(pairwise(queries), pairwise(keys), strict=True)):
        if b == large:
            continue
        n, S = q_rows[1] - q_rows[0], k_rows[1] - k_rows[0]
        alone = dict(inputs.tensors)
        for name, rows in (("q", q_rows), ("mask", q_rows), ("k", k_rows), ("v", k_rows)):
            if name in alone:
                alone[name] = alone[name][slice(*rows)]
        alone["query_start_loc"] = inputs["query_start_loc"].new_tensor([0, n])
        alone["key_start_loc"] = inputs["key_start_loc"].new_tensor([0, S])
        scalars = {**inputs.scalars, "max_query_len": n, "max_key_len": S}
        one = quantised(Inputs(alone, scalars, ()), keys_contiguous=False)
        check_fp8(op, one, backend)
        for found, wanted in zip(together, run_or_skip(op, one, backend), strict=True):
            assert torch.equal(found[slice(*q_rows)], wanted)


def check_fp8(op: Callable[..., Any], inputs: Inputs, backend: str) -> None:
    """The contract: out as the reference, whose probabilities are rounded alike; lse as it, plus
    what eight-bit products cut off on a GPU."""
    actual = run_or_skip(op, inputs, backend)
    wanted, peer = exact(op, inputs), inputs.run(op, backend="reference")
    assert actual[0].dtype == peer[0].dtype == torch.bfloat16 and actual[1].dtype == torch.float32
    assert all(part.is_contiguous() for part in (*actual, *peer))
    used = budget_used(actual, wanted, peer)
    assert used.out <= 1, f"out errs {used.out:.2f} times its budget"
    cut_off = actual[0].is_cuda and backend != "reference"
    most = CUT_OFF * max(largest_sum(inputs), 1.0) if cut_off else 0.0
    if backend != "reference":  # which rounds probabilities to e4m3, as a backend may; none does
        error = float((actual[0].double() - wanted[0]).norm())
        assert error <= (SIXTEEN_BITS + most) * float(wanted[0].norm()), f"out errs {error:.2e}"
    if cut_off:
        finite = wanted[1].isfinite()
        error = (actual[1].double() - wanted[1])[finite].abs()
        assert not error.numel() or float(error.max()) <= most, f"lse errs {float(error.max()):.2e}"
    else:
        assert used.lse <= 1, f"lse errs {used.lse:.2f} times its budget"
