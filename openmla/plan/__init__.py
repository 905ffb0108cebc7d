"""What a step will do: host integers in, a frozen plan of tensors and names out."""

from openmla.plan.batch import Batch
from openmla.plan.captured import plan_buffers, slice_buffers
from openmla.plan.decode import DecodePlanner
from openmla.plan.explanation import Explanation
from openmla.plan.plan import make_plan
from openmla.plan.types import (
    CompressedPlan,
    ContextChunk,
    DecodePlan,
    KeyChunk,
    Plan,
    PrefillPlan,
    ScoreChunk,
    SparsePlan,
)
from openmla.plan.workspace import Workspace, default_workspace_tokens, reserve

__all__ = [
    "Batch",
    "CompressedPlan",
    "ContextChunk",
    "DecodePlan",
    "DecodePlanner",
    "Explanation",
    "KeyChunk",
    "Plan",
    "PrefillPlan",
    "ScoreChunk",
    "SparsePlan",
    "Workspace",
    "default_workspace_tokens",
    "make_plan",
    "plan_buffers",
    "reserve",
    "slice_buffers",
]
