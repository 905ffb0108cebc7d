"""How the bytes of one cached token are laid out; FORMATS is the dict of all layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmla.errors import ConfigError

FP8_MAX = 448.0  # largest finite e4m3


@dataclass(frozen=True)
class CacheFormat:
    """One element per column: row (block, offset) of a cache [N, BS, W] holds D values, W = D.

    `scaled` formats store value / kv_scale and are read back times kv_scale; in the others
    kv_scale is not looked at.
    """

    name: str
    dtype: torch.dtype
    scaled: bool = False

    def width(self, D: int) -> int:
        """W, the stored elements of a row of D values."""
        return D

    def row_bytes(self, D: int) -> int:
        """Bytes one cached token takes."""
        return self.width(D) * self.dtype.itemsize

    def encode(self, rows: Tensor, kv_scale: Tensor) -> Tensor:
        """Values [..., D] into stored elements [..., W], rounded to nearest even.

        fp8: the fp32 quotient value / kv_scale, clamped to +-448 (infinities too), NaN kept.
        """
        if not self.scaled:
            return rows.to(self.dtype)
        quotient = rows.to(torch.float32) / kv_scale
        return quotient.clamp(-FP8_MAX, FP8_MAX).to(self.dtype)

    def decode(self, stored: Tensor, kv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Stored elements [..., W] into values [..., D]: one product, rounded to dtype once."""
        if not self.scaled:
            return stored.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return (stored.to(wide) * kv_scale.to(wide)).to(dtype)

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor, kv_scale: Tensor) -> None:
        """Store rows [n, D] at slots [n] (block * BS + offset), all valid and distinct."""
        BS = cache.shape[1]
        encoded = self.encode(rows, kv_scale)
        # moved as raw bytes: torch has no index_put for fp8 on every device
        raw_view(cache)[slots // BS, slots % BS] = raw_view(encoded)

    def read(self, cache: Tensor, slots: Tensor, kv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [n, D] in dtype from slots [n], all valid."""
        BS = cache.shape[1]
        stored = raw_view(cache)[slots // BS, slots % BS].view(self.dtype)
        return self.decode(stored, kv_scale, dtype)


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_view(tensor: Tensor) -> Tensor:
    """The same bytes as integers of the same width, which every indexing op can move."""
    return tensor.view(_RAW[tensor.dtype.itemsize])


FORMATS: dict[str, CacheFormat] = {
    "fp32": CacheFormat("fp32", torch.float32),
    "bf16": CacheFormat("bf16", torch.bfloat16),
    "fp16": CacheFormat("fp16", torch.float16),
    "fp8": CacheFormat("fp8", torch.float8_e4m3fn, scaled=True),
}


def get_format(name: str) -> CacheFormat:
    """FORMATS[name], or a ConfigError that lists the names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(
            f"cache: format {name!r} is not known. Known: {', '.join(FORMATS)}."
        ) from None
