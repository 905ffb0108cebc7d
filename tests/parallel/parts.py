"""Parts of plans over ranks, as tests ask for them."""

from __future__ import annotations

from openmla.plan import Expanded, KeyChunk, Plan
from openmla.plan.types import Across


def context_of(plan: Plan) -> Across | None:
    """Context of expanded tokens that is attended to in place."""
    group = plan.group("expanded")
    return None if group is None else group.across


def gathered_chunks(plan: Plan) -> list[KeyChunk]:
    """Chunks of context that are gathered from all ranks."""
    group = plan.group("expanded")
    if group is None or not isinstance(group.part, Expanded):
        return []
    return [chunk for chunk in group.part.chunks if chunk.brought is not None]
