"""Error budgets: the allowed error of an op, relative to the reference in the same precision."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Budget(NamedTuple):
    """Share of the error budget that an implementation used; above 1 it is wrong."""

    out: float
    lse: float


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def out_budget(actual: Tensor, exact: Tensor, peer: Tensor) -> float:
    """Return RMS error / bound: 1.5 times the peer's, or 0.25 * eps * RMS(exact) if larger.

    The floor is for cases in which the peer happens to be exact.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"out must be {tuple(exact.shape)}, got {tuple(actual.shape)}")
    if bool(actual.isnan().any()):
        raise AssertionError(f"out has {int(actual.isnan().sum())} NaN of {actual.numel()} values")
    error = _rms(actual.double() - exact.double())
    bound = max(
        1.5 * _rms(peer.double() - exact.double()),
        0.25 * torch.finfo(actual.dtype).eps * _rms(exact),
    )
    return 0.0 if error == 0 else error / bound if bound else float("inf")


def lse_budget(actual: Tensor, exact: Tensor, peer: Tensor) -> float:
    """Return largest error / bound: 2 * (the peer's + float32 eps * the largest value).

    This is the sensitive test: a lost key, wrong scale or wrong base is visible at every size.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"lse must be {tuple(exact.shape)}, got {tuple(actual.shape)}")
    if actual.dtype.itemsize < 4:
        raise AssertionError(f"lse must be float32, got {actual.dtype}")
    finite = exact.isfinite()
    if bool((actual[~finite] != -torch.inf).any()) or not bool(actual[finite].isfinite().all()):
        raise AssertionError("lse must be -inf exactly where a query sees no key")
    if not bool(finite.any()):
        return 0.0
    wanted = exact[finite].double()
    error = float((actual[finite].double() - wanted).abs().max())
    peer_error = float((peer[finite].double() - wanted).abs().max())
    eps = torch.finfo(torch.float32).eps
    bound = 2 * (peer_error + eps * max(float(wanted.abs().max()), 1.0))
    return error / bound


Attended = tuple[Tensor, Tensor]


def e4m3_slack(lse: Tensor, columns: int) -> float:
    """Return the error, as a fraction, that a tensor core may add to logits of e4m3 products.

    Tensor cores on SM90 (as measured by others) keep about 13 bits after the leading one of a sum
    and truncate. Each step of 32 columns can lose up to the last bit of a sum whose size is
    estimated by the largest lse.
    """
    finite = lse[lse.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return -(-columns // 32) * 2.0**-13 * max(largest, 1.0)


def budget_used(actual: Attended, exact: Attended, peer: Attended, e4m3: int = 0) -> Budget:
    """Return both shares for the (out, lse) of an attention op. Raises for errors without a
    tolerance. `e4m3`: columns of e4m3 that were multiplied on a tensor core."""
    empty = exact[1] == -torch.inf
    lse = lse_budget(actual[1], exact[1], peer[1])
    out = out_budget(actual[0], exact[0], peer[0])
    if e4m3 and max(lse, out) > 1:
        slack = e4m3_slack(exact[1], e4m3)
        finite = exact[1].isfinite()
        lse = float((actual[1] - exact[1])[finite].abs().max()) / slack
        bound = 1.5 * _rms(peer[0].double() - exact[0].double()) + slack * _rms(exact[0])
        out = _rms(actual[0].double() - exact[0].double()) / bound
    if bool((actual[0][empty] != 0).any()):
        raise AssertionError("out must be 0 where a query sees no key")
    return Budget(out, lse)


def assert_within_budget(actual: Attended, exact: Attended, peer: Attended) -> None:
    """Raise AssertionError if the error of an attention op exceeds its budget."""
    used = budget_used(actual, exact, peer)
    if used.lse > 1:
        raise AssertionError(f"lse errs {used.lse:.2f} times its budget (out: {used.out:.2f})")
    if used.out > 1:
        raise AssertionError(f"out errs {used.out:.2f} times its budget (lse: {used.lse:.2f})")
