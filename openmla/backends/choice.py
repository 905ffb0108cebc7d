"""BackendChoice, the value of `backend=`: "auto", one backend name, or a name per op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from openmla.backends import BACKENDS, all_backends
from openmla.errors import ConfigError

BackendChoice = str | Mapping[str, str]


def check_backend_choice(where: str, choice: BackendChoice) -> None:
    """Raise unless every op and backend named exists. The plan checks whether a backend can run."""
    if isinstance(choice, str):
        if choice != "auto" and choice not in all_backends():
            raise ConfigError(
                f"{where}: backend {choice!r} is not known. Known: auto, "
                f"{', '.join(all_backends())}.{nearest(choice, all_backends())}"
            )
        return
    if not isinstance(choice, Mapping):
        raise ConfigError(
            f"{where}: backend must be a name, or a dict of names per op such as "
            f"{{'mqa_paged': 'triton'}}, got {choice!r}."
        )
    for op, name in choice.items():
        check_op(where, op)
        if name != "auto" and name not in BACKENDS[op]:
            raise ConfigError(
                f"{where}: backend of {op} must be auto or one of {', '.join(BACKENDS[op])}, "
                f"got {name!r}.{nearest(name, BACKENDS[op])}"
            )


def check_op(where: str, op: object) -> None:
    if not isinstance(op, str) or op not in BACKENDS:
        raise ConfigError(f"{where}: op {op!r} is not known.{nearest(op, BACKENDS)}")


def backend_for(op: str, choice: BackendChoice) -> str:
    """Return the backend requested for an op, or "auto". A single name applies to the ops that the
    backend implements; all other ops use "auto"."""
    if isinstance(choice, str):
        return choice if choice in BACKENDS[op] else "auto"
    return choice.get(op, "auto")


def nearest(name: object, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" if a known name is close, else an empty string."""
    found = get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
