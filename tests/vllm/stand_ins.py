"""That vLLM has what the stand-ins of tests/integrations say: names, fields, parameters.

python -m tests.vllm.stand_ins
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from tests.integrations import vllm_stand_ins as stand_ins

# Classes without fields of their own: what is read of their instances is set in __init__.
ATTRIBUTES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.model_executor.models.deepseek_v2": {
        "Indexer": (
            "vllm_config", "prefix", "topk_indices_buffer", "n_head", "head_dim", "rope_dim",
            "wq_b", "wk_weights_proj", "k_norm", "softmax_scale", "n_head_scale", "k_cache",
            "indexer_op",
        ),
        "DeepseekV32IndexerCache": ("head_dim", "dtype", "kv_cache"),
    },
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLAAttention": (
            "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "scale", "W_UK_T", "W_UV", "kv_cache", "impl", "indexer", "use_sparse",
        ),
    },
}  # fmt: skip
# Methods that vLLM calls on ours: it gives all of these.
CALLED = {
    ("MLACommonMetadataBuilder", "_build_decode"): ("OpenMLABuilder", "builder"),
    ("MLACommonMetadataBuilder", "build"): ("OpenMLABuilder", "builder"),
    ("MLACommonImpl", "forward_mha"): ("OpenMLAImpl", "layer"),
    ("MLACommonImpl", "forward_mqa"): ("OpenMLAImpl", "layer"),
}


def compare(name: str, ours: Any, theirs: Any) -> list[str]:
    """What ours has and theirs has not."""
    if is_dataclass(ours):
        missing = {field.name for field in fields(ours)} - {field.name for field in fields(theirs)}
        return [f"{name}.{field}" for field in sorted(missing)]
    if not inspect.isclass(ours):
        return []
    found = [
        f"{name}.{method}()"
        for method in vars(ours)
        if callable(getattr(ours, method)) and not hasattr(theirs, method)
    ]
    members = getattr(ours, "__members__", {})
    return found + [f"{name}.{member}" for member in members if not hasattr(theirs, member)]


def main() -> None:
    found = []
    for module, attributes in stand_ins.modules("").items():
        theirs = import_module(module)
        for name, ours in attributes.items():
            if not hasattr(theirs, name):
                found.append(f"{module}.{name}")
            else:
                found += compare(f"{module}.{name}", ours, getattr(theirs, name))
    for module, classes in ATTRIBUTES.items():
        for name, wanted in classes.items():
            source = inspect.getsource(getattr(import_module(module), name))
            found += [
                f"{module}.{name}.{attribute}"
                for attribute in wanted
                if f"self.{attribute}" not in source and f'"{attribute}"' not in source
            ]
    backend = import_module("vllm.v1.attention.backend")
    found += compare(
        "CommonAttentionMetadata",
        stand_ins.CommonAttentionMetadata,
        backend.CommonAttentionMetadata,
    )
    common = import_module("vllm.model_executor.layers.attention.mla_attention")
    for (theirs_name, method), (ours_name, file) in CALLED.items():
        given = inspect.signature(getattr(getattr(common, theirs_name), method)).parameters
        plugin = import_module(f"openmla.integrations.vllm.{file}")
        taken = inspect.signature(getattr(getattr(plugin, ours_name), method)).parameters
        if list(given) != list(taken):
            found.append(f"{theirs_name}.{method}: vLLM gives {list(given)}, taken {list(taken)}")
    if found:
        raise SystemExit("vLLM has not:\n  " + "\n  ".join(found))
    print("the stand-ins of tests/integrations have nothing that vLLM has not")


if __name__ == "__main__":
    main()
