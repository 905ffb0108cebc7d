"""A plan's groups as tests look at them: how a form's tokens attend, and how many there are."""

from __future__ import annotations

from openmla import Plan
from openmla.plan.rows import num_rows
from openmla.plan.types import Absorbed, Expanded, KeyChunk


def forms_of(plan: Plan) -> set[str]:
    """Each form is that of one group."""
    forms = [group.form for group in plan.groups]
    assert len(set(forms)) == len(forms)
    return set(forms)


def routes_of(plan: Plan) -> dict[str, list[int]]:
    """The requests of each form."""
    return {group.form: list(group.requests) for group in plan.groups}


def ends_of(plan: Plan) -> dict[str, str]:
    """The ops that quantize each form's outputs."""
    return {group.form: group.end for group in plan.groups}


def absorbed_of(plan: Plan, form: str = "absorbed") -> Absorbed:
    group = plan.group(form)
    assert group is not None and isinstance(group.part, Absorbed)
    return group.part


def expanded_of(plan: Plan, form: str = "expanded") -> Expanded:
    group = plan.group(form)
    assert group is not None and isinstance(group.part, Expanded)
    return group.part


def num_chosen(plan: Plan) -> int:
    """Tokens that attend in latent space to keys they selected."""
    group = plan.group("chosen")
    if group is None:
        return 0
    assert group.selected == slice(0, num_rows(group.rows))
    return num_rows(group.rows)


def masked_chunks(plan: Plan) -> tuple[KeyChunk, ...]:
    """The keys of tokens that attend under masks of what they selected."""
    if plan.group("masked") is None:
        return ()
    part = expanded_of(plan, "masked")
    assert part.route == "masked" and part.chunks
    return part.chunks
