"""What `backend=` may be: "auto", a name for all ops that have it, or a name per op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from openmla.backends import BACKENDS, all_backends
from openmla.errors import ConfigError

Asked = str | Mapping[str, str]


def check_asked(where: str, asked: Asked) -> None:
    """Raise unless every op and backend named exists; whether one can run is asked by the plan."""
    if isinstance(asked, str):
        if asked != "auto" and asked not in all_backends():
            raise ConfigError(
                f"{where}: backend {asked!r} is not known. Known: auto, "
                f"{', '.join(all_backends())}.{nearest(asked, all_backends())}"
            )
        return
    if not isinstance(asked, Mapping):
        raise ConfigError(
            f"{where}: backend must be a name or a name per op, such as "
            f"{{'mqa_paged': 'triton'}}, got {asked!r}."
        )
    for op, name in asked.items():
        check_op(where, op)
        if name != "auto" and name not in BACKENDS[op]:
            raise ConfigError(
                f"{where}: backend of {op} must be auto or one of {', '.join(BACKENDS[op])}, "
                f"got {name!r}.{nearest(name, BACKENDS[op])}"
            )


def check_op(where: str, op: object) -> None:
    if not isinstance(op, str) or op not in BACKENDS:
        raise ConfigError(f"{where}: op {op!r} is not known.{nearest(op, BACKENDS)}")


def named(op: str, asked: Asked) -> str:
    """The backend that was named for an op, or "auto". One name for all serves the ops it has; the
    others choose freely."""
    if isinstance(asked, str):
        return asked if asked in BACKENDS[op] else "auto"
    return asked.get(op, "auto")


def nearest(name: object, known: Iterable[str]) -> str:
    """A question to end a sentence with, if a known name is near."""
    found = get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
