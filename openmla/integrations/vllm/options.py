"""Options given as --additional-config '{"openmla": {...}}'."""

from __future__ import annotations

from typing import Any

OPTIONS = frozenset({"index_format", "backend", "query_dtype", "prefill_dtype", "fp8_per_tensor"})


def option(vllm_config: Any, name: str, default: Any) -> Any:
    """One option, or its default: {"openmla": {"index_format": "index_bf16"}}."""
    given = vllm_config.additional_config
    options = given.get("openmla", {}) if isinstance(given, dict) else {}
    unknown = set(options) - OPTIONS
    if unknown:
        raise ValueError(f"openmla: unknown option {sorted(unknown)[0]!r} in additional_config.")
    return options.get(name, default)
