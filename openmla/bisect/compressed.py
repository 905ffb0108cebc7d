"""Components of V4's kind of layer: window, entries, sink, grouped output."""

from __future__ import annotations

from collections.abc import Mapping

from openmla.bisect.layer import Component
from openmla.config import MLAConfig
from openmla.errors import UnsupportedError


def compressed_components(config: MLAConfig, layer: int) -> Mapping[str, Component]:
    raise UnsupportedError("bisect: deepseek_v4 is not compared here yet.")
