"""pack_mask: pack each query's selected keys into one bit per key, for mha_masked.

    bit j of mask[t] is set if some topk_positions[t, k] == key_starts[t] + j, 0 <= j < key_lens[t]

Bit j is bit j % 32 of word j // 32; a row has `num_words` int32 words, enough for every key_lens. A
selection may contain keys outside the range (keys of other chunks, or -1), which set no bit.
Repeated entries set their bit once.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import Size, op
from openmla.ops._register import Cost


def check(op: str, num_words: int) -> None:
    if num_words < 0:
        raise ShapeError(f"{op}: num_words must not be negative, got {num_words}.")


def check_values(op: str, key_lens: Tensor, num_words: int) -> None:
    if key_lens.numel():
        low, high = (int(value) for value in key_lens.aminmax())
        if low < 0 or high > 32 * num_words:
            raise ShapeError(
                f"{op}: key_lens must be within num_words={num_words} words, got {low}..{high}."
            )


def fake(topk_positions: Tensor, T: int, num_words: int) -> Tensor:
    return topk_positions.new_empty((T, num_words))


def problem(device: torch.device) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "pack_mask")


@op(problem=problem, check=check, check_values=check_values, fake=fake)
def pack_mask(
    topk_positions: Annotated[Tensor, "[T, K] i32 row"],
    key_starts: Annotated[Tensor, "[T] i32"],
    key_lens: Annotated[Tensor, "[T] i32"],
    *,
    num_words: Size,
    backend: str = "auto",
) -> Tensor:  # [T, num_words] i32
    """Pack selections; see the module docstring for the contract.

    Args:
        topk_positions: selected positions of each query.
        key_starts: position of the first key of each row's range.
        key_lens: keys of the range.
        num_words: int32 words per row.
        backend: "auto", or the name of a backend.

    Returns:
        Masks [T, num_words] int32.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call.

    ```python
    import torch
    from openmla.ops import pack_mask

    selected = torch.tensor([[0, 2, -1], [33, 1, 2]], dtype=torch.int32)
    key_starts = torch.tensor([0, 0], dtype=torch.int32)
    key_lens = torch.tensor([3, 34], dtype=torch.int32)
    mask = pack_mask(selected, key_starts, key_lens, num_words=2)
    print(mask)  # [[0b101, 0], [0b110, 0b10]]
    ```
    """


def cost(num_rows: int, *, K: int, num_words: int) -> Cost:
    """Positions read once, words written once."""
    return Cost(num_rows * (4 * K + 8 + 4 * num_words), 0)
