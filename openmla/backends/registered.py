"""register_backend(): add your own implementation of an op to the table of backends.

It is tried before the other backends with "auto", unless its `why_not` or `slower` says otherwise.
There is no discovery: call register_backend() to use a backend.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

from openmla.backends import BACKENDS, OTHERS, forget_choices, load
from openmla.backends.choice import check_op, nearest
from openmla.errors import ConfigError

# Optional functions of a module besides why_not and run, each of a problem; see
# docs/adding-a-kernel.md.
OPTIONAL = ("slower", "kernel_of", "efficiency", "prefers_slots", "reads_apart")
OWN = frozenset(name for row in BACKENDS.values() for name in row)
_CHANGING = threading.Lock()  # guards writes to the table; reads do not lock


def register_backend(op: str, name: str, module: Any) -> None:
    """Register a module, or any object with the same functions, as a backend of an op.

    Register each op separately; one name can serve several ops. Plans that exist already may not
    use the backend. See docs/adding-a-kernel.md.

    Args:
        op: name of the op.
        name: a new name, for backend=.
        module: it must have why_not(problem), which returns None if it can run the problem, or a
            sentence that completes "this backend ...", and run(), with the arguments and results of
            the reference. It may have slower, kernel_of, efficiency, prefers_slots, reads_apart,
            LAUNCHES, and prepare_step(plan), which is called once per step before its layers run.

    Raises:
        ConfigError: the op is not known, the name is taken or not valid, or a function is missing
            or has other arguments.

    ```python
    import openmla, torch
    from openmla.backends.reference import merge_states

    class Mine:
        def why_not(self, problem):
            return None if problem.device == "cpu" else f"runs on cpu, this is {problem.device}"

        def run(self, out, lse, other_out, other_lse):
            print("mine")
            merge_states.run(out, lse, other_out, other_lse)

    openmla.register_backend("merge_states", "mine", Mine())
    part = torch.ones(1, 2, 4), torch.zeros(1, 2)
    openmla.ops.merge_states(*part, torch.ones(1, 2, 4), torch.zeros(1, 2), backend="mine")
    openmla.unregister_backend("merge_states", "mine")
    ```
    """
    where = "register_backend"
    check_op(where, op)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise ConfigError(
            f"{where}: name must begin with a letter and contain only letters, digits, '_', '-' "
            f"and '.', got {name!r}."
        )
    if name in OWN or name == "auto":
        raise ConfigError(f"{where}: name {name!r} is used by openmla itself. Choose another name.")
    _check_module(where, op, module)
    with _CHANGING:
        if name in BACKENDS[op]:
            raise ConfigError(
                f"{where}: op {op} already has a backend {name!r}. Call "
                f"unregister_backend({op!r}, {name!r}) first."
            )
        OTHERS[op, name] = module  # before the table names it
        BACKENDS[op] = (name, *BACKENDS[op])
        forget_choices()


def unregister_backend(op: str, name: str) -> None:
    """Remove a backend that register_backend() added. Plans that name it can no longer run.

    Args:
        op: name of the op.
        name: name of the backend.

    Raises:
        ConfigError: the op has no registered backend of that name.

    ```python
    import openmla
    from openmla.backends import BACKENDS
    from openmla.backends.reference import merge_states

    openmla.register_backend("merge_states", "mine", merge_states)
    print(BACKENDS["merge_states"])  # mine is first
    openmla.unregister_backend("merge_states", "mine")
    print(BACKENDS["merge_states"])
    ```
    """
    where = "unregister_backend"
    check_op(where, op)
    with _CHANGING:
        if (op, name) not in OTHERS:
            known = [taken for known_op, taken in OTHERS if known_op == op]
            raise ConfigError(
                f"{where}: op {op} has no registered backend {name!r}.{nearest(name, known)}"
            )
        BACKENDS[op] = tuple(kept for kept in BACKENDS[op] if kept != name)
        del OTHERS[op, name]
        forget_choices()


def _check_module(where: str, op: str, module: Any) -> None:
    for needed in ("why_not", "run"):
        if not callable(getattr(module, needed, None)):
            raise ConfigError(f"{where}: module must have a function {needed}(), got {module!r}.")
    for found in OPTIONAL:
        if hasattr(module, found) and not callable(getattr(module, found)):
            raise ConfigError(
                f"{where}: module's {found} must be a function of a problem, got "
                f"{getattr(module, found)!r}."
            )
    launches = getattr(module, "LAUNCHES", None)
    if launches is not None and (not isinstance(launches, int) or launches < 0):
        raise ConfigError(
            f"{where}: module's LAUNCHES must be an integer of at least 0, got {launches!r}."
        )
    for asked in ("why_not", *(name for name in OPTIONAL if hasattr(module, name))):
        _check_call(where, asked, getattr(module, asked), ["problem"], [])
    if hasattr(module, "prepare_step"):
        if not callable(module.prepare_step):
            raise ConfigError(
                f"{where}: module's prepare_step must be a function of a plan, got "
                f"{module.prepare_step!r}."
            )
        _check_call(where, "prepare_step", module.prepare_step, ["plan"], [])
    parameters = inspect.signature(load(op, "reference").run).parameters.values()
    scalars = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    tensors = [each.name for each in parameters if each.name not in scalars]
    _check_call(where, "run", module.run, tensors, scalars)


def _check_call(
    where: str, name: str, function: Callable[..., Any], tensors: list[str], scalars: list[str]
) -> None:
    """Raise unless a function accepts these positional arguments and keywords."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a compiled function without a signature
        return
    try:
        signature.bind(*tensors, **dict.fromkeys(scalars))
    except TypeError as error:
        wanted = ", ".join(tensors) + (f", *, {', '.join(scalars)}" if scalars else "")
        raise ConfigError(
            f"{where}: module's {name} must take ({wanted}), got {name}{signature}: {error}."
        ) from error
