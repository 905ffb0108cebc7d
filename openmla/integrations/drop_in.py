"""Installs a module under another package's name; its errors and constants."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from openmla.backends import forget_choices
from openmla.errors import ConfigError, OpenMLAError, ShapeError, UnsupportedError

_LOGGER = logging.getLogger("openmla")

# Tensors, or tuples of them, that depend on sizes alone, made once. None is ever dropped, because a
# graph may read it.
MOST_KEPT = 4096
_KEPT: dict[Any, Any] = {}
Made = TypeVar("Made")


class DropInError(ShapeError, RuntimeError, AssertionError):
    """Raised for an invalid call. It is also a RuntimeError and an AssertionError, because the
    original raises the former where its C++ checks tensors and the latter where its Python does."""


def refused(where: str, error: OpenMLAError, names: Mapping[str, str]) -> OpenMLAError:
    """Convert an op's error to the class and the argument names of the original package."""
    if isinstance(error, DropInError):
        return error
    said = re.sub(r"^\w+: ", f"{where}: ", str(error))
    pattern = rf"\b({'|'.join(names)})\b"
    said = re.sub(pattern, lambda found: names[found[0]], said)
    if isinstance(error, UnsupportedError):  # already a RuntimeError
        return UnsupportedError(said)
    return DropInError(said)


def kept(make: Callable[..., Made], like: Tensor, *sizes: int) -> Made:
    """make(device, *sizes), cached per device, which saves a launch in every call. While a graph is
    captured or traced the tensor is not cached, because its memory then belongs to the graph."""
    device = like.device
    if type(like) is not Tensor or is_compiling():
        return make(device, *sizes)
    key = (make, device, sizes)
    found: Made | None = _KEPT.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = make(device, *sizes)
        on_gpu = device.type == "cuda"
        if len(_KEPT) >= MOST_KEPT or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return found
        if on_gpu:  # another stream may be the next to read it
            torch.cuda.current_stream(device).synchronize()
        _KEPT[key] = found
    return found


def starts(device: torch.device, num_requests: int, tokens: int) -> Tensor:
    """Cumulative lengths of requests of equal length."""
    return tokens * torch.arange(num_requests + 1, dtype=torch.int32, device=device)


def install(module: str, name: str, *submodules: str, force: bool) -> bool:
    """Make `import name` find an openmla module. Returns whether it does. See their install()."""
    ours = sys.modules[module]
    if sys.modules.get(name) is ours:
        return True
    names = (name, *(f"{name}.{each}" for each in submodules))
    taken = next((each for each in names if each in sys.modules), None)
    if taken is not None:
        raise ConfigError(
            f"install: {name} is already imported, from {sys.modules[taken]!r}. Call install() "
            "before anything imports it."
        )
    if find_spec(name) is not None and not force:
        _LOGGER.warning(
            "openmla: %s is installed and stays what `import %s` finds; install(force=True) takes "
            "its place.", name, name,
        )  # fmt: skip
        return False
    for each in submodules:
        sys.modules[f"{name}.{each}"] = _submodule(ours, each)
    sys.modules[name] = ours
    forget_choices()
    _LOGGER.warning("openmla: `import %s` finds %s from now on.", name, module)
    return True


def uninstall(module: str, name: str, *submodules: str) -> None:
    """Undo install(). Code that has imported the module keeps it."""
    ours = sys.modules[module]
    given = {name: ours} | {f"{name}.{each}": _submodule(ours, each) for each in submodules}
    for each, found in given.items():
        if sys.modules.get(each) is found:
            del sys.modules[each]
    forget_choices()


def _submodule(ours: ModuleType, name: str) -> ModuleType:
    """The module's submodule of that name; else the module, where the original has submodules."""
    found = getattr(ours, name, ours)
    return found if isinstance(found, ModuleType) else ours
