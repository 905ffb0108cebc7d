"""Later: a tensor that is computed when it is first looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from openmla.errors import UnsupportedError


class Later(Tensor):
    """What an engine gets and throws away costs nothing; any operation on it computes it first.

    `make` reads `sources`, which must be what they were. Where torch counts writes (outside
    inference mode) that is checked.
    """

    _make: Callable[[], Tensor]
    _sources: tuple[tuple[Tensor, int], ...]
    _made: Tensor | None

    @staticmethod
    def __new__(
        cls: Any, shape: Sequence[int], make: Callable[[], Tensor], sources: Sequence[Tensor]
    ) -> Later:
        # no storage: whatever would read memory raises instead
        new: Later = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=torch.float32, device=sources[0].device
        )
        new._make, new._made = make, None
        new._sources = tuple((each, each._version) for each in sources if not each.is_inference())
        return new

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def made(self) -> Tensor:
        if self._made is None:
            if any(each._version != version for each, version in self._sources):
                raise UnsupportedError(
                    "max_logits: its inputs must not be written to before it is read, for it is "
                    "computed then. Read it first, or hand over copies."
                )
            self._made = self._make()
            self._sources = ()
            del self._make
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


def _computed(value: Any) -> Any:
    return value.made() if isinstance(value, Later) else value
