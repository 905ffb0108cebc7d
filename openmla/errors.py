"""The four exceptions, all under OpenMLAError, and a check; messages follow one grammar.

`<where>: <what> must be <expectation>, got <value>. <what to do>.`
"""


class OpenMLAError(Exception):
    """Base of every error this package raises on purpose."""


class ShapeError(OpenMLAError, ValueError):
    """A tensor argument has the wrong shape, dtype, device, stride or values."""


class ConfigError(OpenMLAError, ValueError):
    """A configuration is contradictory, or says something that is not understood."""


class UnsupportedError(OpenMLAError, NotImplementedError):
    """The request is sound, but nothing here can run it; the message says why."""


class CacheFullError(OpenMLAError, RuntimeError):
    """The block pool cannot serve a request; nothing was taken."""


def check_kind(where: str, name: str, given: object, kind: type) -> None:
    """Raise unless an argument is of the class that is asked for."""
    if not isinstance(given, kind):
        got = type(given).__name__
        raise ConfigError(f"{where}: {name} must be of type {kind.__name__}, got {got}.")
