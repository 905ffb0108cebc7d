"""What the declaration of an op promises: how it traces, and what it refuses unwritten."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.testing import Inputs

E4M3 = torch.float8_e4m3fn
OTHER_DTYPE = {"i32": torch.int64, "i64": torch.int32, "f32": torch.float64}


def check_declaration(op: Callable[..., Any], given: Inputs | dict[str, Any], grad: str) -> None:
    """check_traced() and check_refusals() of a good call. `grad`: what must not require grad."""
    if isinstance(given, Inputs):
        given = {**given.tensors, **given.scalars}
    overload = getattr(torch.ops.openmla, op.__name__).default
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(op).parameters.items()
    }
    given = {
        each.name: given.get(each.name, defaults[each.name]) for each in overload._schema.arguments
    }
    given["backend"] = "reference"
    check_traced(op, overload, given)
    check_refusals(op, given, grad)


def check_traced(op: Callable[..., Any], overload: Any, given: dict[str, Any]) -> None:
    """opcheck() accepts the op, and a compiled graph of it gives the same bits."""
    given = cloned(given)
    for value in given.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != E4M3:
            value.nan_to_num_()  # opcheck compares values, and NaN differs from itself
    keywords = {each.name for each in overload._schema.arguments if each.kwarg_only}
    args = tuple(value for name, value in cloned(given).items() if name not in keywords)
    scalars = {name: given[name] for name in keywords}
    narrow = any(isinstance(each, Tensor) and each.dtype == E4M3 for each in args)
    # the other checks multiply and compare their arguments, which e4m3 tensors cannot
    tests: dict[str, Any] = {"test_utils": "test_faketensor"} if narrow else {}
    torch.library.opcheck(overload, args, scalars, **tests)
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    one, other = cloned(given), cloned(given)
    found, wanted = compiled(**one), op(**other)
    for left, right in zip(tensors_of(found, one), tensors_of(wanted, other), strict=True):
        assert torch.equal(as_bytes(left), as_bytes(right))


def check_refusals(op: Callable[..., Any], given: dict[str, Any], grad: str) -> None:
    """Every tensor of another rank, dtype, device or layout than declared is named in an error, and
    so is one that requires grad; a size that fits no other tensor raises. Nothing is written."""
    before = [as_bytes(tensor) for tensor in tensors_of(None, given)]
    for name, change, says in changes(op, given):
        with pytest.raises(ShapeError) as error:
            op(**{**given, name: change})
        assert re.match(f"{op.__name__}: {says}", str(error.value)), f"{name}: {error.value}"
    for name in grad.split():
        with torch.inference_mode(False), torch.enable_grad():
            needs = given[name].clone().requires_grad_()
            with pytest.raises(UnsupportedError, match=f"^{op.__name__}: .* must not require grad"):
                op(**{**cloned(given), name: needs})
    with pytest.raises(ConfigError, match=f"^{op.__name__}: backend 'abacus' is not known"):
        op(**{**given, "backend": "abacus"})
    after = [as_bytes(tensor) for tensor in tensors_of(None, given)]
    assert all(map(torch.equal, before, after)), "written before it raised"


def changes(op: Callable[..., Any], given: dict[str, Any]) -> Iterator[tuple[str, Tensor, str]]:
    """(argument, what it must not be, what the error says)."""
    texts = {
        parameter.name: get_args(parameter.annotation)[1]
        for parameter in inspect.signature(op, eval_str=True).parameters.values()
        if get_origin(parameter.annotation) is Annotated and given.get(parameter.name) is not None
        and isinstance(given[parameter.name], Tensor)
    }  # fmt: skip
    dims = {name: text[1 : text.index("]")].split(", ") for name, text in texts.items()}
    for place, (name, text) in enumerate(texts.items()):
        tensor, words = given[name], text.partition("]")[2].split()
        must = f"{name} must be "
        if dims[name] != ["..."]:
            yield name, tensor[None], r"\w+ must be \["  # or another one, of sizes that it gives
        if place:
            yield name, tensor.to("meta"), must + f"on {tensor.device}, got meta"
        for word in words:
            if word in OTHER_DTYPE or word.startswith("float"):
                yield name, tensor.to(OTHER_DTYPE.get(word, torch.int32)), must
            elif word == "row" and tensor.shape[-1] > 1:
                yield name, spread(tensor), must + "contiguous along its last dimension"
        for dim, letter in enumerate(dims[name]):
            shared = any(letter in each for other, each in dims.items() if other != name)
            if letter.isalpha() and shared and tensor.shape[dim]:
                yield name, tensor.narrow(dim, 1, tensor.shape[dim] - 1), ".*"


def spread(tensor: Tensor) -> Tensor:
    """The same values with a gap after each."""
    room = tensor.new_empty(*tensor.shape, 2)
    room[..., 0] = tensor
    return room[..., 0]


def cloned(given: dict[Any, Any]) -> dict[Any, Any]:
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    return {**given, **Inputs(tensors, {}, ()).clone().tensors}


def tensors_of(result: Any, given: dict[str, Any]) -> list[Tensor]:
    """Results and arguments, which an op may write to."""
    results = [result] if isinstance(result, Tensor) else list(result or ())
    return [*results, *(value for value in given.values() if isinstance(value, Tensor))]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
