"""pack_mask: pack each query's selected keys into one bit per key, for mha_masked.

    bit j of mask[t] is set if some topk_positions[t, k] == key_starts[t] + j, 0 <= j < key_lens[t]

Bit j is bit j % 32 of word j // 32, of `num_words` int32 words, which hold every key_lens. A
selection may name keys outside the range (other chunks' keys, or -1): they set nothing. Repeated
entries set their bit once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, register

_SPEC = "topk_positions:T K i32 row, key_starts:T i32, key_lens:T i32"


def problem(device: torch.device) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "pack_mask")


def _decide(*tensors: Tensor, num_words: int, backend: str) -> Decided:
    dims = bind("pack_mask", _SPEC, tensors)
    if num_words < 0:
        raise ShapeError(f"pack_mask: num_words must not be negative, got {num_words}.")
    return decided(dims, problem(tensors[0].device), backend)


def _run(known: Decided, *tensors: Tensor, num_words: int) -> Tensor:
    positions, _, key_lens = tensors
    if positions.device.type == "cpu" and key_lens.numel():
        low, high = (int(value) for value in key_lens.aminmax())
        if low < 0 or high > 32 * num_words:
            raise ShapeError(
                f"pack_mask: key_lens must be within num_words={num_words} words, "
                f"got {low}..{high}."
            )
    mask: Tensor = known.runner.run(*tensors, num_words=num_words)
    return mask


def _fake(*tensors: Tensor, num_words: int, backend: str) -> Tensor:
    dims = bind("pack_mask", _SPEC, tensors)
    return tensors[0].new_empty((dims["T"], num_words))


_OP = register(
    "pack_mask(Tensor topk_positions, Tensor key_starts, Tensor key_lens, *, SymInt num_words,"
    " str backend) -> Tensor",
    _decide,
    _run,
    _fake,
)


def pack_mask(
    topk_positions: Tensor,  # [T, K] i32
    key_starts: Tensor,  # [T] i32, position of the first key of each row's range
    key_lens: Tensor,  # [T] i32
    *,
    num_words: int,
    backend: str = "auto",
) -> Tensor:  # [T, num_words] i32
    """Pack selections; see the module's text for the contract."""
    mask: Tensor = _OP(topk_positions, key_starts, key_lens, num_words=num_words, backend=backend)
    return mask


def cost(num_rows: int, *, K: int, num_words: int) -> Cost:
    """Positions read once, words written once."""
    return Cost(num_rows * (4 * K + 8 + 4 * num_words), 0)
