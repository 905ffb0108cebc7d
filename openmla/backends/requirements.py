"""Packages that backends need and this one does not install: which versions, and what to do.

A version older than the oldest tested is refused. A newer one is tried, with one warning: it is
more likely to work than not, and where it does not, the error says which versions were tested.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from openmla.errors import OpenMLAError, UnsupportedError

_LOGGER = logging.getLogger("openmla")
_SAID: set[str] = set()


class Requirement(NamedTuple):
    """A package by the name it is imported by, which is the same whoever distributes it."""

    package: str
    cure: str
    oldest: str = ""  # of the tested versions; "" where any will do
    newest: str = ""


REQUIRES: dict[str, Requirement] = {
    "flashmla": Requirement("flash_mla", "Install FlashMLA for your GPU"),
    "gluon": Requirement("triton", 'pip install "openmla[triton]"', "3.6", "3.9"),
    "triton": Requirement("triton", 'pip install "openmla[triton]"', "3.6", "3.9"),
}


def missing(backend: str) -> str | None:
    """Why a backend's package cannot be used: it is not there, or too old. None if it can."""
    needed = REQUIRES.get(backend)
    if needed is None:
        return None
    if is_ours(needed.package):  # a drop-in of openmla.integrations, which would call us again
        return f"package {needed.package} is openmla's own drop-in"
    if find_spec(needed.package) is None:
        return f"package {needed.package} is not installed"
    if not needed.oldest:
        return None
    found = version_of(needed.package)
    if _numbers(found) < _numbers(needed.oldest):
        return f"needs {needed.package}>={needed.oldest}, this is {found}"
    if untested(backend):
        say_once(
            f"openmla: {needed.package} {found} is newer than those tested, {needed.oldest} to "
            f"{needed.newest}; it is tried. If a kernel fails: pip install "
            f'"{needed.package}<={needed.newest}.*"'
        )
    return None


def is_ours(package: str) -> bool:
    """Whether what is imported under a package's name is a module of openmla."""
    return getattr(sys.modules.get(package), "__name__", "").startswith("openmla.")


def untested(backend: str) -> bool:
    """Whether a backend's package is newer than the versions that were tested."""
    needed = REQUIRES.get(backend)
    if needed is None or not needed.newest or find_spec(needed.package) is None:
        return False
    return _numbers(version_of(needed.package)) > _numbers(needed.newest)


@cache
def version_of(package: str) -> str:
    """A package's own __version__: its distributions go by several names. It is known
    to be there, so an error while it is imported is not hidden."""
    return str(import_module(package).__version__)


def _numbers(text: str) -> tuple[int, ...]:
    """3.9.0+git as (3, 9)."""
    parts = [*text.split("+")[0].split("."), "0"][:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def say_once(text: str) -> None:
    """A warning, the first time it comes up in this process."""
    if text not in _SAID:
        _SAID.add(text)
        _LOGGER.warning(text)


def without_kernels(device: str) -> str | None:
    """On a GPU, what keeps kernels from running if that is a package, and what to do."""
    reason = missing("triton") if device == "cuda" else None
    if reason is None:
        return None
    return (
        "running on a GPU without kernels, by the reference, which is many times slower: "
        f"{reason}. {REQUIRES['triton'].cure}"
    )


def warn_of_reference(where: str, device: str) -> None:
    """Say so once. Asked where the reference was chosen, or will be, and nobody asked for it."""
    told = without_kernels(device)
    if told is not None:
        say_once(f"{where}: {told}")


def explain_failure(op: str, error: Exception) -> None:
    """Raise in the place of an error that a Triton newer than the tested ones may have caused."""
    needed = REQUIRES["triton"]
    of_triton = type(error).__module__.split(".")[0] == "triton"
    if isinstance(error, OpenMLAError) or not untested("triton"):
        return
    if of_triton or isinstance(error, (ImportError, AttributeError, TypeError)):
        raise UnsupportedError(
            f"{op}: a kernel failed with triton {version_of('triton')}, which is newer than the "
            f"tested versions, {needed.oldest} to {needed.newest}: {error}. "
            f'Run pip install "triton<={needed.newest}.*".'
        ) from error
