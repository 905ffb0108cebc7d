"""MemoryReport: the memory of an attached model besides its weights."""

from __future__ import annotations

from dataclasses import dataclass

from openmla.cache import shown_bytes
from openmla.plan import Plan
from openmla.plan.explain import expanded_bytes, expanded_size, sparse_bytes
from openmla.plan.rows import num_rows

ABSORBED = "absorbed  "  # prefix of the line on fp8 weights


@dataclass(frozen=True)
class MemoryReport:
    """Bytes over all layers and devices. Print it for a summary.

    Blocks, copied weights, graphs and gathered context stay allocated. The workspace is allocated
    while a layer attends in prefill, and then returned to torch's allocator.
    """

    block_bytes: int  # the block pool; for V4 including windows and states
    used_bytes: int  # the part that requests hold
    num_blocks: int  # for V4 blocks of entries
    free_blocks: int
    decoded_bytes: int  # decoded copies of kv_b_proj that is not plain, in all live caches
    graph_bytes: int | None  # the graphs' pool; None if the allocator does not report it
    num_graphs: int
    workspace_bytes: int  # the most that any pass planned for, since attach()
    absorbed_bytes: int = 0  # fp8 kv_b_proj, besides the model's own
    absorbed_error: float | None = None  # its largest relative error over heads
    gathered_bytes: int = 0  # buffers for context gathered from other ranks

    @property
    def held_bytes(self) -> int:
        """Everything except the workspace, as far as it is known."""
        weights = self.decoded_bytes + self.absorbed_bytes
        return self.block_bytes + weights + (self.graph_bytes or 0) + self.gathered_bytes

    def __str__(self) -> str:
        used = self.num_blocks - self.free_blocks
        lines = [
            f"blocks    {shown_bytes(self.block_bytes)}, {shown_bytes(self.used_bytes)} in use: "
            f"{used} of {self.num_blocks} blocks"
        ]
        if self.decoded_bytes:
            lines.append(f"decoded   {shown_bytes(self.decoded_bytes)}: copies of kv_b_proj")
        if self.absorbed_error is not None:
            what = "fp8 copy of kv_b_proj, besides the model's own; largest error of a head "
            what += f"{self.absorbed_error:.4f}"
            if self.absorbed_error == 0:
                what = "the model's own fp8 kv_b_proj, without a copy"
            lines.append(f"{ABSORBED}{shown_bytes(self.absorbed_bytes)}: {what}")
        if self.num_graphs:
            size = "unknown" if self.graph_bytes is None else shown_bytes(self.graph_bytes)
            lines.append(f"graphs    {size}, shared by {self.num_graphs} captured decode steps")
        if self.gathered_bytes:
            size = shown_bytes(self.gathered_bytes)
            lines.append(f"gathered  {size}: a buffer for context from all ranks, kept")
        if self.workspace_bytes:
            size = shown_bytes(self.workspace_bytes)
            lines.append(f"workspace {size} at most, while a layer attends to a prompt")
        return "\n".join(lines)


def workspace_bytes(plan: Plan) -> int:
    """The most that one layer allocates besides inputs and outputs: gathered and expanded rows, and
    a sparse model's scores and selections. 0 for a captured step, whose memory is the graph's."""
    if plan.captured:
        return 0
    total, group = sum(sparse_bytes(plan).values()), plan.group("expanded")
    if group is not None:
        most, _ = expanded_size(plan, group)
        total += expanded_bytes(plan, most, most, num_rows(group.rows))
    return total
