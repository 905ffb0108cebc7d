"""The four exceptions, all derived from OpenMLAError, and a type check.

Messages follow `<where>: <what> must be <expectation>, got <value>. <Fix>.` If that would hide the
cause, the message states the cause instead: `request 'a' has no blocks in the pool. Call
pool.take() ...`.
"""


class OpenMLAError(Exception):
    """Base class of all errors that openmla raises."""


class ShapeError(OpenMLAError, ValueError):
    """A tensor argument has the wrong shape, dtype, device, stride or values."""


class ConfigError(OpenMLAError, ValueError):
    """An option or a config is not valid, or contradicts another."""


class UnsupportedError(OpenMLAError, NotImplementedError):
    """The request is valid but not supported. The message gives the reason."""


class CacheFullError(OpenMLAError, RuntimeError):
    """The block pool does not have enough free blocks; nothing was taken."""


def check_kind(where: str, name: str, given: object, kind: type) -> None:
    """Raise unless an argument has the expected type."""
    if not isinstance(given, kind):
        got = type(given).__name__
        raise ConfigError(f"{where}: {name} must be of type {kind.__name__}, got {got}.")
