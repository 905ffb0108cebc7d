"""judge_layer: each component on its dumped inputs, against float64, within a derived budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.bisect.layer import STORED, Component, Layer, MissingError
from openmla.bisect.precision import EXACT, Precision
from openmla.testing import lse_budget, out_budget


@dataclass(frozen=True)
class Verdict:
    """One component of one layer: the share of its budget that the subject's error uses."""

    layer: int
    component: Component
    used: float  # above 1: wrong; nan: not judged
    error: float = math.nan  # root mean square; for lse and scores the maximum
    budget: float = math.nan
    size: float = math.nan  # size of the exact values, in the same measure
    rows: tuple[int, ...] = ()  # tokens (entries) outside the budget
    note: str = ""  # what numbers do not show, or why it was not judged

    @property
    def judged(self) -> bool:
        return not math.isnan(self.used)

    @property
    def wrong(self) -> bool:
        return self.judged and self.used > 1


# The layer's input is not computed, only checked for NaN and infinity.
INPUT = Component("hidden_in", "input of the layer", lambda layer, p: layer.get("hidden_in", p), ())


class Measured(NamedTuple):
    """The subject's errors and their budgets, overall and row by row."""

    used: float
    error: float
    budget: float
    size: float
    by_row: Tensor  # [n] share of the budget


def judge_layer(layer: Layer) -> Iterator[Verdict]:
    """Verdicts for all components of the layer, in order; for its input if that is not finite."""
    if layer.has("hidden_in"):
        wrong = _unusable(layer.dumped("hidden_in"), INPUT)
        if wrong:
            yield Verdict(layer.number, INPUT, math.inf, note=wrong)
    for component in layer.components.values():
        if not layer.has(component.name):
            yield Verdict(layer.number, component, math.nan, note="not in the dump")
            continue
        try:
            if component.kind == "choice":
                yield judge_choice(layer, component)
            else:
                yield _judge_values(layer, component)
        except MissingError as missing:
            note = f"needs {missing}, which is not in the dump"
            yield Verdict(layer.number, component, math.nan, note=note)


def _judge_values(layer: Layer, component: Component) -> Verdict:
    if component.kind == "scores" and not bool(layer.usable_scores.any()):
        note = "no token has so many keys that they were scored"
        return Verdict(layer.number, component, math.nan, note=note)
    actual = layer.dumped(component.name)
    exact = component.compute(layer, EXACT)
    if bool(exact.isnan().any()):
        return Verdict(layer.number, component, math.nan, note="its inputs are not numbers")
    loose = Precision(layer.dtype)
    peers = [compute(layer, loose) for compute in component.peers or (component.compute,)]
    wrong = _unusable(actual, component)
    if wrong:
        bad = (~actual.isfinite()).flatten(1).any(1) if actual.dim() > 1 else torch.zeros(0)
        rows = tuple(bad.nonzero().flatten().tolist())
        note = explain(layer, component, actual, exact, peers, ())
        return Verdict(layer.number, component, math.inf, rows=rows, note=note or wrong)
    if component.name in STORED:
        lost = _lost(layer, component, exact, peers[0])
        if lost:
            return Verdict(layer.number, component, math.inf, note=lost)
    found = measure(component, actual, exact, peers)
    if component.name in STORED:
        found = with_factor(found, actual, exact, peers[0])
    rows = tuple((found.by_row > 1).nonzero().flatten().tolist())
    note = ""
    if found.used > 1:
        note = explain(layer, component, actual, exact, peers, rows)
    return Verdict(
        layer.number, component, found.used, found.error, found.budget, found.size, rows, note
    )


def _unusable(actual: Tensor, component: Component) -> str:
    """Why no tolerance can apply to these values, or an empty string."""
    bad = int((~actual.isfinite()).sum())
    if bad:
        return f"{bad} of {actual.numel()} values are NaN or infinite"
    if component.kind == "lse" and actual.dtype.itemsize < 4:
        return f"lse must be float32, got {actual.dtype}"
    return ""


def _lost(layer: Layer, component: Component, exact: Tensor, peer: Tensor) -> str:
    """Why no bytes could be right: at the dump's scale the format keeps so little of the true rows
    that the budget would exceed the rows, and any bytes would pass."""
    e, p = exact.double(), peer.double()
    if not e.numel() or 1.5 * _rms(p - e, None) < _rms(e, None) or not bool(e.any()):
        return ""
    format, scale = layer.format_of(component.name), float(layer.kv_scale)
    return (
        f"true rows of size {float(_rms(e, None)):.3g} are lost in {format} under a kv_scale of "
        f"{scale:.3g}, whatever the bytes"
    )


def measure(
    component: Component, actual: Tensor, exact: Tensor, peers: Sequence[Tensor]
) -> Measured:
    """Check openmla.testing's budgets for the whole and for each row by itself, so that one wrong
    token is not lost among thousands. Among several peers the largest error counts."""
    if actual.numel() == 0:
        return Measured(0.0, 0.0, 0.0, 0.0, torch.zeros(0))
    a, e = actual.double().flatten(1), exact.double().flatten(1)
    eps = torch.finfo(torch.float32 if component.kind != "values" else _floating(actual)).eps
    if component.kind == "values":
        used = min(out_budget(_as_floating(actual), exact, peer) for peer in peers)
        error, size = _rms(a - e, None), _rms(e, None)
        errors, allowed = _rms(a - e, 1), 0.25 * eps * _rms(e, 1).max()
        peer_errors = [1.5 * _rms(peer.double().flatten(1) - e, 1).max() for peer in peers]
    else:
        used = min(lse_budget(actual.float(), exact, peer) for peer in peers)
        error, size = (a - e).abs().max(), e.abs().max()
        errors, allowed = (a - e).abs().amax(1), 2 * eps * size.clamp_min(1.0)
        peer_errors = [2 * (peer.double().flatten(1) - e).abs().max() for peer in peers]
        allowed = allowed + max(peer_errors)
    bound = max([allowed, *peer_errors])
    by_row = torch.where(errors == 0, torch.zeros_like(errors), errors / bound)
    budget = float(error) / used if used else float(bound)
    worst = float(by_row.max())
    if worst > max(used, 1.0):  # one row is wrong, and the others hide it
        error, budget = errors.max(), float(bound)
    return Measured(max(used, worst), float(error), budget, float(size), by_row)


def with_factor(found: Measured, actual: Tensor, exact: Tensor, peer: Tensor) -> Measured:
    """Check rows in few bits: a wrong scale can be less than their rounding, but has one sign.

    Rounding leaves the factor between stored and true values at 1, except for chance (six standard
    deviations, from the peer's errors) and for saturated values, which the peer has as well.
    """
    a, e, p = (part.double().flatten() for part in (actual, exact, peer))
    total = e.square().sum()
    spread = 6 * ((p - e) * e).square().sum().sqrt() / total
    allowed = float(spread + ((p - e) @ e / total).abs())
    off = float(((a - e) @ e / total).abs())
    if not allowed > 0 or off <= allowed or off / allowed <= found.used:
        return found
    return found._replace(used=off / allowed, error=off * found.size, budget=allowed * found.size)


def _floating(tensor: Tensor) -> torch.dtype:
    """The dtype whose epsilon applies to an exact peer; cached values are float64."""
    usual = (torch.float32, torch.bfloat16, torch.float16)
    return tensor.dtype if tensor.dtype in usual else torch.float32


def _as_floating(tensor: Tensor) -> Tensor:
    return tensor.to(_floating(tensor)) if tensor.dtype.itemsize < 4 else tensor


def _rms(values: Tensor, dim: int | None) -> Tensor:
    return values.square().mean(dim).sqrt()


def explain(
    layer: Layer,
    component: Component,
    actual: Tensor,
    exact: Tensor,
    peers: Sequence[Tensor],
    rows: tuple[int, ...],
) -> str:
    """A known mistake that reproduces the dump within the same budget, or an empty string."""
    for text, alternative in component.alternatives.items():
        other = alternative(layer, EXACT)
        if _agrees(component, actual, other, peers, exact):
            return text
        if 0 < len(rows) < len(exact) and other.shape == exact.shape:
            mixed = exact.clone()
            mixed[list(rows)] = other[list(rows)]
            if _agrees(component, actual, mixed, peers, exact):
                return f"{text}, in these rows"
    if not bool(actual.isfinite().all()):
        return ""
    if rows == (0,) and component.first_row:
        return component.first_row
    flat, true = actual.double().flatten(), exact.double().flatten()
    factor = float(flat @ true / (true @ true)) if bool(true.any()) else 0.0
    if factor and _agrees(component, actual, exact * factor, peers, exact):
        return f"as if everything were multiplied by {factor:.4g}"
    return _moved_block(layer, component, actual, exact, peers, rows)


def _agrees(
    component: Component, actual: Tensor, other: Tensor, peers: Sequence[Tensor], exact: Tensor
) -> bool:
    """Whether an alternative explains the dump, allowing it the peers' errors."""
    if other.shape != actual.shape or not torch.equal(other == -torch.inf, actual == -torch.inf):
        return False
    seen = other != -torch.inf  # False where a query sees no key
    actual, other = actual.where(seen, 0), other.where(seen, 0)
    if not bool(actual.isfinite().all() and other.isfinite().all()):
        return False
    larger = other.abs().max() / exact.abs().max().clamp_min(1e-300)
    moved = [other + (peer.double() - exact) * larger.clamp_min(1.0) for peer in peers]
    try:
        return measure(component, actual, other, moved).used <= 1
    except AssertionError:
        return False


def _moved_block(
    layer: Layer,
    component: Component,
    actual: Tensor,
    exact: Tensor,
    peers: Sequence[Tensor],
    rows: tuple[int, ...],
) -> str:
    """Whether one block of the cache was read in place of another: tries the first wrong block."""
    size = layer.settings.block_rows
    if not size or not rows or component.reread is None:
        return ""
    block = rows[0] // size
    for other in range(-(-layer.num_tokens // size)):
        if other == block:
            continue
        moved = component.reread(layer, EXACT, (block * size, other * size, size))
        if _agrees(component, actual, moved, peers, exact):
            return f"as if block {block} of the block table were block {other}"
    return ""


def judge_choice(layer: Layer, component: Component) -> Verdict:
    """Compare selected keys with scores: no key left out may beat a selected one by more than the
    error budget of the scores. Keys after a token's own, and negative ones, are ignored."""
    chosen = layer.dumped("chosen").long()
    exact = layer.get("index_scores", EXACT)
    if bool(exact.isnan().any()):
        return Verdict(layer.number, component, math.nan, note="its inputs are not numbers")
    loose = layer.get("index_scores", Precision(layer.dtype)).double()
    given = layer.has("index_scores")  # the subject's own scores, which have no error
    slack = 0.0 if given else 2 * float((loose - exact).abs().max())
    slack += 2 * torch.finfo(torch.float32).eps * max(float(exact.abs().max()), 1.0)
    limits = layer.num_choices()  # [T] keys each token may select from
    K = layer.config.indexer.topk if layer.config.indexer else 0
    gaps, notes = torch.zeros(len(chosen), dtype=torch.float64), {}
    for t, limit in enumerate(limits.tolist()):
        picked = chosen[t][(chosen[t] >= 0) & (chosen[t] < limit)]
        wanted = min(K, limit)
        unique = picked.unique()
        if len(unique) != wanted or len(unique) != len(picked):
            gaps[t] = math.inf
            notes[t] = f"token {t} has {len(unique)} different keys of its own past, not {wanted}"
            continue
        if wanted == limit:
            continue
        left_out = torch.ones(limit, dtype=torch.bool)
        left_out[unique] = False
        gaps[t] = (exact[t, :limit][left_out].max() - exact[t, unique].min()).clamp_min(0)
    wrong = (gaps > slack).nonzero().flatten().tolist()
    note = notes.get(wrong[0], "better keys were left out") if wrong else ""
    if wrong:
        note = _shifted(layer, chosen, exact, slack, limits, K) or note
    worst = float(gaps.max()) if len(gaps) else 0.0
    return Verdict(
        layer.number, component, worst / slack, worst, slack, float(exact.abs().max()),
        tuple(wrong), note,
    )  # fmt: skip


def _shifted(
    layer: Layer, chosen: Tensor, exact: Tensor, slack: float, limits: Tensor, K: int
) -> str:
    """Whether every selection is right except for an offset of one position."""
    for by, text in ((1, "late"), (-1, "early")):
        good = True
        for t, limit in enumerate(limits.tolist()):
            if limit <= K:
                continue
            picked = chosen[t][chosen[t] >= 0].unique() - by
            picked = picked[(picked >= 0) & (picked < limit)]
            if len(picked) < min(K, limit) - 1:
                good = False
                break
            best = exact[t, :limit].topk(min(K, limit)).values.min()
            good = bool((exact[t, picked] >= best - slack).all())
            if not good:
                break
        if good:
            return f"as if every row of keys began one key {text}"
    return ""
