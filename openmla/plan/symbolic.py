"""Plans for torch.compile: integers that follow a step's lengths become sizes of empty tensors.

The compiler treats an integer as a constant until it has seen it change, and then recompiles. A
tensor size that is marked dynamic is a symbol from the start, so one graph serves all lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.plan.types import (
    Absorbed,
    Across,
    Ask,
    Bring,
    Brought,
    Expanded,
    Group,
    KeyChunk,
    Keys,
    Plan,
    Pool,
    ScoreChunk,
    Select,
)

# what follows the lengths: integers, slices, or tuples of slices
FOLLOWING: dict[type, tuple[str, ...]] = {
    Plan: ("num_tokens", "padding"),
    Group: ("rows", "selected"),
    Across: ("rows", "inside"),
    Brought: ("num_rows",),
    Bring: ("num_bytes",),
    Keys: (),
    Absorbed: ("max_query_len", "cuts"),
    Ask: ("rows", "max_query_len"),
    KeyChunk: ("max_key_len", "num_keys", "ended", "continued"),
    Expanded: ("alone",),
    ScoreChunk: ("rows", "num_keys"),
    Select: ("rows", "num_rows"),
    Pool: ("max_entries",),
}
# The compiler treats a size of 1 as a constant. A second column equal to the first changes nothing:
# no position of a request is looked up in it, and both columns of a ring name the same block.
_PAST_ONE = 2  # added to carried integers, for the same reason
_CARRIES = torch.bool  # no other tensor of a plan has it


@torch.inference_mode(False)  # inference tensors do not count writes
def symbolic(plan: Plan) -> Plan:
    """The same plan with sizes that a compiler treats as symbols."""
    made: Plan = _symbolic(plan, plan.slot_mapping.device)
    return made


def _symbolic(node: Any, device: torch.device) -> Any:
    """A part of a plan, or a plan, with what is in it."""
    if isinstance(node, Tensor):
        return _own(node)
    if type(node) is tuple and node and not isinstance(node[0], int):  # lengths are for explain()
        return tuple(_symbolic(each, device) for each in node)
    sized = _SIZED.get(type(node))
    if sized is None:
        return node
    made: Any = object.__new__(sized)
    for name, value in vars(node).items():
        if name in FOLLOWING[type(node)]:
            vars(made)[f"_{name}"] = _carried(value, device)
        elif name == "block_table" and value.shape[1] == 1:
            vars(made)[name] = _marked(value.repeat(1, 2))
        else:
            vars(made)[name] = _symbolic(value, device)
    return made


def _carried(value: Any, device: torch.device) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_carried(each, device) for each in value)
    if isinstance(value, Tensor):  # rows, one by one
        return _own(value)
    sizes = (value.start, value.stop) if isinstance(value, slice) else (value + _PAST_ONE,)
    return _marked(torch.empty((*sizes, 0), dtype=_CARRIES, device=device))


def _own(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that is not a view and begins its own storage. A step's integers
    are sent in one piece, and the offset of a tensor in it, which depends on the batch, would
    become a guard."""
    tensor = tensor.contiguous()
    first = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[first : first + tensor.numel() * tensor.element_size()]
    return _marked(tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride()))


def _marked(tensor: Tensor) -> Tensor:
    for dim in range(tensor.dim()):
        if tensor.shape[dim] > 1:  # the compiler specializes on 0 and 1
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def _read(carried: Any) -> Any:
    """The carried integers; inside a graph, as symbols."""
    if carried is None:
        return None
    if isinstance(carried, tuple):
        return tuple([_read(each) for each in carried])
    if carried.dtype != _CARRIES:
        return carried
    if carried.dim() == 2:
        return carried.shape[0] - _PAST_ONE
    return slice(carried.shape[0], carried.shape[1])


def _reading(name: str) -> property:
    return property(lambda part: _read(getattr(part, name)))


# parts that read their integers from tensor sizes
_SIZED = {
    part: type(part.__name__, (part,), {name: _reading(f"_{name}") for name in following})
    for part, following in FOLLOWING.items()
}
