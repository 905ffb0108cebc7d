"""Packages that backends need but openmla does not install: versions and install commands.

Versions older than the oldest tested are not supported. Newer ones are used with one warning: they
probably work, and if one does not, the error lists the tested versions.
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
    """A package by its import name, which is the same in all its distributions."""

    package: str
    cure: str
    oldest: str = ""  # oldest tested version; "" if any version works
    newest: str = ""


REQUIRES: dict[str, Requirement] = {
    "flashmla": Requirement("flash_mla", "Install FlashMLA for your GPU"),
    "gluon": Requirement("triton", 'pip install "openmla[triton]"', "3.6", "3.9"),
    "triton": Requirement("triton", 'pip install "openmla[triton]"', "3.6", "3.9"),
}


def missing(backend: str) -> str | None:
    """Return why a backend's package cannot be used: not installed or too old. None if it can."""
    needed = REQUIRES.get(backend)
    if needed is None:
        return None
    if is_ours(needed.package):  # an openmla.integrations drop-in would recurse
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
    """Whether the module imported under a package's name belongs to openmla."""
    return getattr(sys.modules.get(package), "__name__", "").startswith("openmla.")


def untested(backend: str) -> bool:
    """Whether a backend's package is newer than the versions that were tested."""
    needed = REQUIRES.get(backend)
    if needed is None or not needed.newest or find_spec(needed.package) is None:
        return False
    return _numbers(version_of(needed.package)) > _numbers(needed.newest)


@cache
def version_of(package: str) -> str:
    """Return a package's __version__, because its distributions have several names. It is
    installed, so errors of its import are not hidden."""
    return str(import_module(package).__version__)


def _numbers(text: str) -> tuple[int, ...]:
    """Parse 3.9.0+git to (3, 9)."""
    parts = [*text.split("+")[0].split("."), "0"][:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def say_once(text: str) -> None:
    """Log a warning once per process."""
    if text not in _SAID:
        _SAID.add(text)
        _LOGGER.warning(text)


def without_kernels(device: str) -> str | None:
    """Return which package keeps kernels from running on a GPU and how to install it, or None."""
    reason = missing("triton") if device == "cuda" else None
    if reason is None:
        return None
    return (
        "running on a GPU without kernels, by the reference, which is many times slower: "
        f"{reason}. {REQUIRES['triton'].cure}"
    )


def warn_of_reference(where: str, device: str) -> None:
    """Warn once that the reference backend runs on a GPU although it was not requested."""
    told = without_kernels(device)
    if told is not None:
        say_once(f"{where}: {told}")


def explain_failure(op: str, error: Exception) -> None:
    """Replace an error that a Triton version newer than the tested ones may have caused."""
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
