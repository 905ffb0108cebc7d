"""Byte layouts of cached tokens. FORMATS is the dict of all layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmla.errors import ConfigError, ShapeError

FP8_MAX = 448.0  # largest finite e4m3
FP8_ROUNDED = 464.0  # largest value that rounds to it
GROUP = 128  # values that share a scale in the packed formats, except V4's
V4_GROUP = 64  # values that share a scale in fp8_dsv4
V4_ROPE = 64  # columns that fp8_dsv4 keeps in bf16


@dataclass(frozen=True)
class CacheFormat:
    """How rows of values are stored in a cache [N, BS, W]. openmla.FORMATS has all formats.

    This class stores one element per value, W = D. Its subclasses pack rows of several dtypes into
    bytes.

    Attributes:
        name: the key in FORMATS.
        dtype: dtype of the cache tensor; uint8 for packed formats.
        scaled: whether value / kv_scale is stored. Other formats ignore kv_scale.
        holds: "latent" or "index", for latent rows or indexer keys.
    """

    name: str
    dtype: torch.dtype
    scaled: bool = False
    holds: str = "latent"

    @property
    def packed(self) -> bool:
        """Whether a row holds bytes of several dtypes."""
        return self.dtype == torch.uint8

    def width(self, D: int) -> int:
        """Return W, the stored elements of a row of D values."""
        return D

    def row_bytes(self, D: int) -> int:
        """Return the bytes of one cached token."""
        return self.width(D) * self.dtype.itemsize

    def page_width(self, D: int, BS: int) -> int:
        """Return the stored elements from one block to the next, including padding."""
        return BS * self.width(D)

    def encode(self, rows: Tensor, kv_scale: Tensor) -> Tensor:
        """Encode values [..., D] as stored elements [..., W], rounded to nearest even.

        The format fp8 stores the float32 quotient value / kv_scale, clamped to +-448 (infinities
        too). NaN stays NaN.
        """
        if not self.scaled:
            return rows.to(self.dtype)
        return to_fp8(rows.to(torch.float32) / kv_scale)

    def num_clamped(self, rows: Tensor, kv_scale: Tensor) -> Tensor:
        """Count the values that encode() clips, those whose quotient rounds above 448: [] int64.

        Formats without kv_scale clip nothing: their scales follow the values.
        """
        if not self.scaled:
            return torch.zeros((), dtype=torch.int64, device=rows.device)
        return ((rows.to(torch.float32) / kv_scale).abs() > FP8_ROUNDED).sum()

    def decode(self, stored: Tensor, kv_scale: Tensor, dtype: torch.dtype, D: int) -> Tensor:
        """Decode elements [..., W] to values [..., D]: one product, rounded once to dtype."""
        if not self.scaled:
            return stored.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return (stored.to(wide) * kv_scale.to(wide)).to(dtype)

    def query_dtype(self, dtype: torch.dtype, DI: int) -> torch.dtype:
        """Return the dtype of indexer queries after encode_query()."""
        return dtype

    def encode_query(self, q_idx: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encode indexer queries for keys of this format; returns them and their scales or None."""
        return q_idx, None

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor, kv_scale: Tensor) -> None:
        """Store rows [n, D] at slots [n] (block * BS + offset), all valid and distinct."""
        N, BS, W = cache.shape
        encoded = self.encode(rows, kv_scale)
        # Raw bytes, because torch does not support index_put for fp8 on every device.
        raw = raw_view(cache)
        if raw.stride() == (BS * W, W, 1):  # slots are rows
            raw.view(N * BS, W).index_copy_(0, slots, raw_view(encoded))
        else:
            raw[slots // BS, slots % BS] = raw_view(encoded)

    def move(self, cache: Tensor, sources: Tensor, targets: Tensor, D: int) -> None:
        """Copy the bytes of rows at slots `sources` to `targets` [n], all valid and distinct."""
        BS, data = cache.shape[1], raw_view(cache)
        data[targets // BS, targets % BS] = data[sources // BS, sources % BS]

    def read(
        self, cache: Tensor, slots: Tensor, kv_scale: Tensor, dtype: torch.dtype, D: int
    ) -> Tensor:
        """Read and decode rows [n, D] from slots [n], all valid."""
        return self.decode(self.stored(cache, slots, D), kv_scale, dtype, D)

    def stored(self, cache: Tensor, slots: Tensor, D: int) -> Tensor:
        """Read the stored elements at slots [n], as encode() returned them: [n, W]."""
        BS = cache.shape[1]
        return raw_view(cache)[slots // BS, slots % BS].view(self.dtype)


@dataclass(frozen=True)
class PackedLatent(CacheFormat):
    """fp8 latents with a scale per 128 values, and bf16 RoPE columns: 656 bytes for 512 + 64.

    A row of D = C + R values, C the largest multiple of 128 in it (so R < 128), is
    C bytes e4m3 | C/128 float32 scales | R bf16. A scale is amax / 448 of its 128 values (`exact`),
    or the next power of two, which every reader of this layout handles without loss.
    """

    exact: bool = False

    def width(self, D: int) -> int:
        C = self._latent_width(D)
        return C + 4 * (C // GROUP) + 2 * (D - C)

    def _latent_width(self, D: int) -> int:
        if D < GROUP:
            raise ConfigError(
                f"cache: format {self.name} needs latents of at least {GROUP} values, got {D}."
            )
        return D // GROUP * GROUP

    def encode(self, rows: Tensor, kv_scale: Tensor) -> Tensor:
        C = self._latent_width(rows.shape[-1])
        groups = rows[..., :C].to(torch.float32).unflatten(-1, (-1, GROUP))
        scales = _over_fp8_max(groups.abs().amax(-1))
        smallest = torch.finfo(torch.float32).tiny if self.exact else 1e-4
        scales = scales.clamp_min(smallest)
        if not self.exact:
            scales = power_of_two(scales)
        values = to_fp8(groups / scales[..., None]).flatten(-2)
        rope = rows[..., C:].to(torch.bfloat16)
        return torch.cat([_as_bytes(part) for part in (values, scales, rope)], dim=-1)

    def decode(self, stored: Tensor, kv_scale: Tensor, dtype: torch.dtype, D: int) -> Tensor:
        C = self._latent_width(D)
        wide = torch.promote_types(dtype, torch.float32)
        end = C + 4 * (C // GROUP)
        values = _from_bytes(stored[..., :C], torch.float8_e4m3fn).to(wide)
        scales = _from_bytes(stored[..., C:end], torch.float32).to(wide)
        latent = (values.unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2)
        rope = _from_bytes(stored[..., end:], torch.bfloat16).to(wide)
        return torch.cat([latent, rope], dim=-1).to(dtype)


@dataclass(frozen=True)
class ScalesBehind(CacheFormat):
    """Packed rows with all scales of a block after its values.

    A block is BS x values, row after row, then BS x scales. The tensor is [N, BS, W], but the bytes
    of a row are not adjacent: pages must be contiguous, and only write(), move() and stored() use
    the real layout. encode() and decode() place the scales of a row after its values.
    """

    def value_bytes(self, D: int) -> int:
        """Return the bytes of a row that are stored before the scales of the block."""
        raise NotImplementedError

    def _regions(self, cache: Tensor, D: int) -> tuple[Tensor, Tensor]:
        """Return views of both parts of blocks: values [N, BS, n] and scales [N, BS, W - n]."""
        N, BS, W = cache.shape
        page, n = cache.stride(0), self.value_bytes(D)
        first = cache.storage_offset()
        values = cache.as_strided((N, BS, n), (page, n, 1))
        scales = cache.as_strided((N, BS, W - n), (page, W - n, 1), first + BS * n)
        return values, scales

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor, kv_scale: Tensor) -> None:
        BS, W, n = cache.shape[1], cache.shape[2], self.value_bytes(rows.shape[-1])
        parts = self.encode(rows, kv_scale).split([n, W - n], -1)
        for region, part in zip(self._regions(cache, rows.shape[-1]), parts, strict=True):
            region[slots // BS, slots % BS] = part

    def move(self, cache: Tensor, sources: Tensor, targets: Tensor, D: int) -> None:
        BS = cache.shape[1]
        for region in self._regions(cache, D):
            region[targets // BS, targets % BS] = region[sources // BS, sources % BS]

    def stored(self, cache: Tensor, slots: Tensor, D: int) -> Tensor:
        BS = cache.shape[1]
        parts = [region[slots // BS, slots % BS] for region in self._regions(cache, D)]
        return torch.cat(parts, -1)


@dataclass(frozen=True)
class PackedV4(ScalesBehind):
    """V4's rows, raw or compressed: 584 bytes for 512 values.

    Values: D - 64 e4m3 | 64 bf16 (the rotated columns), 576 bytes. Scales: one byte per 64 e4m3
    values, the float32 exponent of a power of two (2^(byte - 127)), then zeros up to a multiple of
    8. Rows are rounded to bf16 first. A scale is the power of two at or above max(amax, 1e-4) /
    448. Blocks start at multiples of 576 bytes, the values of a row.
    """

    def width(self, D: int) -> int:
        n = self.value_bytes(D)
        return n + -(-(D - V4_ROPE) // V4_GROUP // 8) * 8

    def value_bytes(self, D: int) -> int:
        if D <= V4_ROPE or D % V4_GROUP:
            raise ConfigError(
                f"cache: format {self.name} needs rows of a multiple of {V4_GROUP} values, at "
                f"least {V4_ROPE + V4_GROUP}, got {D}."
            )
        return D - V4_ROPE + 2 * V4_ROPE

    def page_width(self, D: int, BS: int) -> int:
        n = self.value_bytes(D)
        return -(-BS * self.width(D) // n) * n

    def encode(self, rows: Tensor, kv_scale: Tensor) -> Tensor:
        D = rows.shape[-1]
        rounded = rows.to(torch.bfloat16)
        groups = rounded[..., :-V4_ROPE].to(torch.float32).unflatten(-1, (-1, V4_GROUP))
        values, scales = quantize_groups(groups, exact=False)
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
        spare = self.width(D) - self.value_bytes(D) - exponents.shape[-1]
        filled = torch.nn.functional.pad(exponents, (0, spare))
        rope = rounded[..., -V4_ROPE:]
        return torch.cat([_as_bytes(values.flatten(-2)), _as_bytes(rope), filled], dim=-1)

    def decode(self, stored: Tensor, kv_scale: Tensor, dtype: torch.dtype, D: int) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        P, n = D - V4_ROPE, self.value_bytes(D)
        values = _from_bytes(stored[..., :P], torch.float8_e4m3fn).to(wide)
        exponents = stored[..., n : n + P // V4_GROUP].to(torch.int32) << 23
        scales = exponents.view(torch.float32).to(wide)
        scaled = (values.unflatten(-1, (-1, V4_GROUP)) * scales[..., None]).flatten(-2)
        rope = _from_bytes(stored[..., P:n], torch.bfloat16).to(wide)
        return torch.cat([scaled, rope], dim=-1).to(dtype)


@dataclass(frozen=True)
class PackedIndex(ScalesBehind):
    """Indexer keys in fp8, with scales after all values of a block: 132 bytes for a key of 128.

    Values: DI e4m3. Scales: DI/128 float32 (one where DI < 128), each max(amax, 1e-4) / 448, or
    the next power of two unless `exact`.
    """

    exact: bool = False

    def value_bytes(self, D: int) -> int:
        return D

    def width(self, D: int) -> int:
        return D + 4 * self._num_scales(D)

    def _num_scales(self, D: int) -> int:
        if D > GROUP and D % GROUP:
            raise ConfigError(
                f"cache: format {self.name} needs keys of at most {GROUP} values, or of a multiple "
                f"of {GROUP}, got {D}."
            )
        return max(D // GROUP, 1)

    def encode(self, rows: Tensor, kv_scale: Tensor) -> Tensor:
        """Encode to [..., W], values and then scales, which write() distributes over the block."""
        groups = rows.to(torch.float32).unflatten(-1, (self._num_scales(rows.shape[-1]), -1))
        values, scales = quantize_groups(groups, exact=self.exact)
        return torch.cat([_as_bytes(values.flatten(-2)), _as_bytes(scales)], dim=-1)

    def decode(self, stored: Tensor, kv_scale: Tensor, dtype: torch.dtype, D: int) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        values = _from_bytes(stored[..., :D], torch.float8_e4m3fn).to(wide)
        scales = _from_bytes(stored[..., D:], torch.float32).to(wide)
        groups = values.unflatten(-1, (scales.shape[-1], -1))
        return (groups * scales[..., None]).flatten(-2).to(dtype)

    def query_dtype(self, dtype: torch.dtype, DI: int) -> torch.dtype:
        """Return fp8 if possible; heads wider than a group need several scales in the ReLU."""
        return dtype if DI > GROUP or dtype == torch.float64 else torch.float8_e4m3fn

    def encode_query(self, q_idx: Tensor) -> tuple[Tensor, Tensor | None]:
        """Quantize queries with a scale per token and head."""
        if self.query_dtype(q_idx.dtype, q_idx.shape[-1]) == q_idx.dtype:
            return q_idx, None
        return quantize_groups(q_idx.to(torch.float32), exact=self.exact)


def _as_bytes(values: Tensor) -> Tensor:
    """View [..., n] as [..., n * itemsize] bytes; torch cannot view empty tensors this way."""
    if values.numel() == 0:
        shape = (*values.shape[:-1], values.shape[-1] * values.dtype.itemsize)
        return values.new_empty(shape, dtype=torch.uint8)
    return values.contiguous().view(torch.uint8)


def _from_bytes(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert _as_bytes()."""
    if stored.numel() == 0:
        shape = (*stored.shape[:-1], stored.shape[-1] // dtype.itemsize)
        return stored.new_empty(shape, dtype=dtype)
    return stored.contiguous().view(dtype)


def state_width(D: int, *, overlap: bool) -> int:
    """Return the values per row of V4's compressor state, in the layout of compress_kv."""
    return 4 * D if overlap else 3 * D


def state_rows(ratio: int, *, overlap: bool) -> int:
    """Return the state rows of a request without rollback; each rollback token adds one."""
    return 2 * ratio - 1 if overlap else 1


def to_fp8(values: Tensor) -> Tensor:
    """Round to nearest even e4m3, saturating; torch's cast turns values out of range into NaN."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _over_fp8_max(values: Tensor) -> Tensor:
    """Divide by a FP8_MAX tensor: for a Python number, torch on a GPU multiplies by the
    reciprocal."""
    return values / torch.full((), FP8_MAX, dtype=values.dtype, device=values.device)


def power_of_two(values: Tensor) -> Tensor:
    """Round float32 values, positive and normal, up to powers of two.

    NaN stays NaN, so a group that contains NaN is NaN as a whole for every reader.
    """
    bits = values.view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32).where(~values.isnan(), values)


def quantize_groups(groups: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
    """Quantize [..., n] as the indexer does: e4m3 values, and float32 scales [...]."""
    scales = _over_fp8_max(groups.abs().amax(-1).clamp_min(1e-4))
    if not exact:
        scales = power_of_two(scales)
    return to_fp8(groups / scales[..., None]), scales


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_view(tensor: Tensor) -> Tensor:
    """View as integers of the same width, which every indexing op supports."""
    return tensor.view(_RAW[tensor.dtype.itemsize])


FORMATS: dict[str, CacheFormat] = {
    layout.name: layout
    for layout in (
        CacheFormat("fp32", torch.float32),
        CacheFormat("bf16", torch.bfloat16),
        CacheFormat("fp16", torch.float16),
        CacheFormat("fp8", torch.float8_e4m3fn, scaled=True),
        PackedLatent("fp8_ds_mla", torch.uint8),
        PackedLatent("fp8_ds_mla_exact", torch.uint8, exact=True),
        PackedV4("fp8_dsv4", torch.uint8),
        CacheFormat("index_fp32", torch.float32, holds="index"),
        CacheFormat("index_bf16", torch.bfloat16, holds="index"),
        PackedIndex("index_fp8", torch.uint8, holds="index"),
        PackedIndex("index_fp8_exact", torch.uint8, holds="index", exact=True),
    )
}


def get_format(name: str, holds: str | None = None) -> CacheFormat:
    """Return FORMATS[name], or raise a ConfigError that lists the names that hold such rows."""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None or holds not in (None, found.holds):
        known = [key for key, layout in FORMATS.items() if holds in (None, layout.holds)]
        kind = f" for {holds} rows" if holds and name in FORMATS else ""
        raise ConfigError(f"cache: format {name!r} is not known{kind}. Known: {', '.join(known)}.")
    return found


def check_blocks_apart(where: str, name: str, cache: Tensor) -> None:
    """Raise unless the rows of blocks [N, BS, W] are disjoint in memory."""
    N, BS, W = cache.shape
    # the smaller stride first: within a block or between blocks
    (near, count), (far, others) = sorted(((cache.stride(1), BS), (cache.stride(0), N)))
    if (count > 1 and near < W) or (others > 1 and far < (count - 1) * near + W):
        raise ShapeError(
            f"{where}: blocks of {name} must not overlap in memory, got strides "
            f"{tuple(cache.stride())} for {tuple(cache.shape)}. Call .contiguous()."
        )


def check_pages(where: str, cache: Tensor, format: str) -> None:
    """Raise unless a cache tensor [N, BS, W] has the dtype and strides of its format."""
    layout = get_format(format)
    if cache.dtype != layout.dtype:
        raise ShapeError(
            f"{where}: cache must be {layout.dtype} for format {format}, got {cache.dtype}."
        )
    BS, W = cache.shape[1:]
    if BS < 1:
        raise ShapeError(f"{where}: blocks must have at least 1 row, got BS={BS}.")
    if isinstance(layout, ScalesBehind) and cache.shape[1] > 1 and cache.stride(1) != W:
        raise ShapeError(
            f"{where}: each block must be contiguous for format {format}, got strides "
            f"{cache.stride()}."
        )
