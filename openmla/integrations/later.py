"""Later: a tensor that is computed on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from openmla.errors import UnsupportedError


class Later(Tensor):
    """A tensor that costs nothing if it is never used; any operation on it computes it first.

    make(*sources, *rest) reads `sources`, which must not have changed. Outside inference mode,
    where torch counts writes, that is checked.
    """

    _todo: tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[Any, ...], Any] | None
    _made: Tensor | None = None

    @staticmethod
    def __new__(
        cls: Any,
        shape: Sequence[int],
        make: Callable[..., Tensor],
        sources: tuple[Tensor, ...],
        *rest: Any,
    ) -> Later:
        # no storage: anything that would read memory raises instead
        new: Later = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=sources[0].device
        )
        counted = None if torch.is_inference_mode_enabled() else _versions(sources)
        new._todo = (make, sources, rest, counted)
        return new

    def __init__(self, *_: Any) -> None:
        pass

    def made(self) -> Tensor:
        if self._made is None:
            assert self._todo is not None
            make, sources, rest, versions = self._todo
            if versions is not None and _versions(sources) != versions:
                raise UnsupportedError(
                    "max_logits: an input was written to before max_logits was read, which is when "
                    "it is computed. Read it first, or pass copies."
                )
            self._made, self._todo = make(*sources, *rest), None
        return self._made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        args, kwargs = tree_map(_computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.made())

    def numpy(self, *, force: bool = False) -> Any:
        return self.made().numpy(force=force)

    def tolist(self) -> Any:
        return self.made().tolist()


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    """How often each tensor was written to; -1 where torch does not count."""
    return [-1 if each.is_inference() else each._version for each in tensors]


def _computed(value: Any) -> Any:
    return value.made() if isinstance(value, Later) else value
