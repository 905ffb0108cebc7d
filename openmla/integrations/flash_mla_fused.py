"""A stub for FlashMLA's fused_norm_rope_attn_rope_cast, which SGLang imports with the rest."""

from __future__ import annotations

from typing import Any, NoReturn

from openmla.errors import UnsupportedError

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]


def prefill(*args: Any, **kwargs: Any) -> NoReturn:
    raise _not_here("prefill")


def decode(*args: Any, **kwargs: Any) -> NoReturn:
    raise _not_here("decode")


def permute_q_b_proj(*args: Any, **kwargs: Any) -> NoReturn:
    raise _not_here("permute_q_b_proj")


def permute_wv_proj(*args: Any, **kwargs: Any) -> NoReturn:
    raise _not_here("permute_wv_proj")


def _not_here(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"flash_mla: fused_norm_rope_attn_rope_cast.{name} is not supported by openmla's "
        "drop-in. Turn the engine's MegaAttention off."
    )
