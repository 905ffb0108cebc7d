"""The four exceptions, all under OpenMLAError; messages follow one grammar.

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
