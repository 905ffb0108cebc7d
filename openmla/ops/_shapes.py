"""bind(): tensors checked against shape texts such as "[T, H, D] float row"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.cache.format import CacheFormat
from openmla.errors import ShapeError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "float": ("fp16, bf16, fp32 or fp64", _FLOATS),
    "float|e4m3": ("e4m3, fp16, bf16, fp32 or fp64", (*_FLOATS, torch.float8_e4m3fn)),
    "f32": ("float32", (torch.float32,)),
    "i32": ("int32", (torch.int32,)),
    "i64": ("int64", (torch.int64,)),
}


class _Shape(NamedTuple):
    dims: tuple[str, ...]
    letters: tuple[tuple[str, int], ...]  # of each dim: "B+1" is ("B", 1)
    dtype: str | None
    row: bool


@cache
def _parse(text: str) -> _Shape:
    inside, _, rest = text.removeprefix("[").partition("]")
    dims = tuple(dim.strip() for dim in inside.split(",") if dim)
    letters = ((letter, int(more or 0)) for letter, _, more in (dim.partition("+") for dim in dims))
    words = rest.split()
    dtype = next((word for word in words if word in _DTYPES), None)
    return _Shape(dims, tuple(letters), dtype, "row" in words)


def bind(
    op: str,
    shapes: Mapping[str, str],
    tensors: Sequence[Tensor | None],
    known: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Check tensors against their shape texts and return the sizes that these name.

    {"q_latent": "[T, H, D] float row", "seq_lens": "[B] i32"} says: q_latent is [T, H, D] of a
    floating dtype with contiguous rows, seq_lens is [B] int32. A letter means the same number
    everywhere; `known` fixes letters beforehand. "[...]" is any shape. All tensors are on the first
    one's device. What is None is passed over.
    """
    dims = dict(known or {})
    device = None
    for (name, text), tensor in zip(shapes.items(), tensors, strict=True):
        if tensor is None:
            continue
        must, shape = _parse(text), tensor.shape
        if must.dims != ("...",):
            fits = len(shape) == len(must.dims)
            if fits:
                for (letter, more), size in zip(must.letters, shape, strict=True):
                    number = size - more if more else size
                    if dims.setdefault(letter, number) != number:
                        fits = False
            if not fits:
                raise ShapeError(_shape_message(op, name, must, shape, dims))
        if must.dtype is not None and tensor.dtype not in _DTYPES[must.dtype][1]:
            raise ShapeError(f"{op}: {name} must be {_DTYPES[must.dtype][0]}, got {tensor.dtype}.")
        device = device or tensor.device
        if tensor.device != device:
            raise ShapeError(f"{op}: {name} must be on {device}, got {tensor.device}.")
        if must.row:
            check_row(op, name, tensor)
    return dims


def check_row(op: str, name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ShapeError(
            f"{op}: {name} must be contiguous along its last dimension, "
            f"got strides {tensor.stride()}. Call .contiguous()."
        )


def _shape_message(
    op: str, name: str, must: _Shape, shape: Sequence[int], dims: dict[str, int]
) -> str:
    message = f"{op}: {name} must be [{', '.join(must.dims)}]"
    if len(shape) == len(must.dims):
        wrong = [
            f"{dim}={dims[letter] + more}"
            for dim, (letter, more), size in zip(must.dims, must.letters, shape, strict=True)
            if dims[letter] + more != size
        ]
        message += f" with {', '.join(wrong)}"
    return f"{message}, got {tuple(shape)}."


def row_width(layout: CacheFormat, *parts: Tensor) -> int:
    """W of cached rows that hold the last dimensions of some tensors; 0 if one has no dimension,
    which bind() says then."""
    if not all(part.dim() for part in parts):
        return 0
    return layout.width(sum(part.shape[-1] for part in parts))
