"""What a step will do: host integers in, a frozen plan of tensors and names out."""

from openmla.plan.batch import Batch
from openmla.plan.captured import plan_buffers, slice_buffers
from openmla.plan.decode import DecodePlanner
from openmla.plan.explanation import Explanation
from openmla.plan.plan import make_plan
from openmla.plan.types import (
    Absorbed,
    Expanded,
    Group,
    KeyChunk,
    Keys,
    Plan,
    Pool,
    ScoreChunk,
    Select,
)
from openmla.plan.workspace import Workspace, default_workspace_tokens, reserve

__all__ = [
    "Absorbed",
    "Batch",
    "DecodePlanner",
    "Expanded",
    "Explanation",
    "Group",
    "KeyChunk",
    "Keys",
    "Plan",
    "Pool",
    "ScoreChunk",
    "Select",
    "Workspace",
    "default_workspace_tokens",
    "make_plan",
    "plan_buffers",
    "reserve",
    "slice_buffers",
]
