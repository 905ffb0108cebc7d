"""On a GPU, every call of an op's tests is repeated as backends/replay.py would: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends import forget_choices
from openmla.backends.replay import Replay, record
from openmla.ops import _register as register

Inputs = Sequence[Tensor | None]
# what a call allocates or how often it does something, which here it does twice over
COUNTING = ("test_memory_on_cuda", "test_triton_decodes_rows_of_many_tokens_once")
LARGE = 1 << 28  # bytes that are not worth moving
IN_NO_ORDER = ("index_topk", "index_select")  # of what they choose
WATCHED: list[register.Decided] = []  # the decision of the call that is being recorded


def moved(inputs: Inputs) -> list[Tensor | None]:
    """The same tensors elsewhere; those that shared memory share it there."""
    stores: dict[int, torch.UntypedStorage] = {}
    found: list[Tensor | None] = []
    for tensor in inputs:
        if tensor is None:
            found.append(None)
            continue
        store = tensor.untyped_storage()
        if store.data_ptr() not in stores:
            stores[store.data_ptr()] = store.clone()
        own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        own.set_(stores[store.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
        found.append(own)
    return found


def tensors_of(result: Any) -> list[Tensor]:
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


def same_bits(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> None:
    for left, right in zip(one, other, strict=True):
        if left is not None and right is not None:
            left, right = (as_bytes(each) for each in (left, right))
            assert torch.equal(left, right), "replayed, a call gives other bits"


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def in_order(chosen: Sequence[Tensor]) -> list[Tensor]:
    return [each.sort(-1).values if each.dim() == 2 else each for each in chosen]


def checked(call: Callable[..., Any], inputs: Inputs) -> tuple[Any, Replay | None]:
    """record(), then the replay of the same inputs elsewhere."""
    size = sum(0 if each is None else each.untyped_storage().nbytes() for each in inputs)
    if torch.cuda.is_current_stream_capturing() or size > LARGE:
        return record(call, inputs)
    warm, again = moved(inputs), moved(inputs)
    call(*warm)  # compiles
    result, replay = record(call, inputs)
    if replay is not None:
        stream = torch.cuda.current_stream().cuda_stream
        repeated = tensors_of(replay(again, stream))
        expected = tensors_of(result)
        if WATCHED[-1].runner.run.__module__.rpartition(".")[2] in IN_NO_ORDER:
            expected, repeated = in_order(expected), in_order(repeated)
        same_bits(expected, repeated)
        same_bits(inputs, again)
    return result, replay


def is_watched(found: register.Decided) -> bool:
    """Every call is, not only the second and the next few."""
    WATCHED[:] = [found]
    return found.replayed


@pytest.fixture(autouse=torch.cuda.is_available())
def replayed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_choices()
    if request.node.originalname in COUNTING:
        yield
        return
    monkeypatch.setattr(register, "record", checked)
    monkeypatch.setattr(register.Decided, "is_watched", is_watched)
    yield
    forget_choices()
