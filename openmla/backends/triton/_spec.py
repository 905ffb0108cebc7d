"""KernelSpec: one declaration of a kernel, from which its launches and its builds follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from openmla.backends.triton._build import TARGETS, Build, signature_of
from openmla.backends.triton._prepare import Launch, prepare


class Fixed(NamedTuple):
    """What a kernel is compiled with. `options` holds other options of Triton, such as maxnreg;
    `tile` what the host has to know of the tile."""

    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    options: Mapping[str, Any] = {}
    tile: Any = None


class Case(NamedTuple):
    """A call that is compiled ahead of time: its name, the arguments of KernelSpec.fix, and types
    and constants beside those of the spec, by argument."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    types: Mapping[str, str]
    constants: Mapping[str, Any]


def case(
    name: str, *args: Any, types: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None, **kwargs: Any,
) -> Case:  # fmt: skip
    return Case(name, args, kwargs, types or {}, constants or {})


class KernelSpec:
    """A kernel and what fixes it.

    Args:
        kernel: the jitted function.
        fix: computes constants and options from sizes and flags of a call, which are hashable. Its
            results are kept.
        types: names of arguments by their Triton type, such as {"*bf16": "q out"}. Arguments that
            are not named are integers.
        cases: the calls that released models make on a target, given by its capability.
        targets: the capabilities that it is compiled for.
        fp_fusion: whether the compiler may contract products and sums. Triton's default depends on
            its version, and results depend on this.
    """

    def __init__(
        self, kernel: Any, fix: Callable[..., Fixed], *, types: Mapping[str, str],
        cases: Callable[[int], Iterable[Case]], targets: Iterable[int] = TARGETS, fp_fusion: bool,
    ) -> None:  # fmt: skip
        self.kernel, self.cases, self.targets = kernel, cases, targets
        self.fp_fusion = fp_fusion
        self.types = {name: kind for kind, names in types.items() for name in names.split()}
        self.fix = lru_cache(maxsize=4096)(fix)
        self.launch = lru_cache(maxsize=4096)(self._launch)

    def _launch(self, *args: Any, **kwargs: Any) -> Launch:
        """The launch for these arguments of `fix`; `launch` keeps it."""
        fixed = self.fix(*args, **kwargs)
        return prepare(
            self.kernel, fixed.constants, num_warps=fixed.num_warps, num_stages=fixed.num_stages,
            enable_fp_fusion=self.fp_fusion, **fixed.options,
        )  # fmt: skip

    def forget(self) -> None:
        """Clear what was kept, because what `fix` looks up has changed."""
        self.fix.cache_clear()
        self.launch.cache_clear()

    def builds(self) -> Iterator[Build]:
        """The ahead-of-time builds of all cases."""
        for capability in self.targets:
            for name, args, kwargs, types, constants in self.cases(capability):
                fixed = self.fix(*args, **kwargs)
                constants = {**fixed.constants, **constants}
                signature = signature_of(self.kernel, constants, {**self.types, **types})
                yield Build(
                    name, self.kernel, signature, constants, fixed.num_warps, fixed.num_stages,
                    capability, self.fp_fusion, fixed.options.get("maxnreg"),
                )  # fmt: skip
