"""That vLLM has what the stand-ins of tests/integrations say, and does what they do.

python -m tests.vllm.stand_ins
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import SimpleNamespace
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
            "scale", "W_UK_T", "W_UV", "kv_cache", "impl", "indexer", "use_sparse", "layer_name",
            "_chunked_prefill_workspace_size",
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


def outcome(function: Any, *args: Any) -> Any:
    """What a call returns, or the name of what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__


def behaviour(modules: dict[str, Any]) -> dict[str, Any]:
    """What the classes that the plugin builds on do, by probes that both kinds can run."""
    common = modules["vllm.model_executor.layers.attention.mla_attention"]
    builder: Any = type(
        "Probe", (common.MLACommonMetadataBuilder,), {"build": lambda *args, **given: "built"}
    )
    seen: dict[str, Any] = {}
    for threshold, requests, tokens, longest in (
        (None, 4, 4, 1), (1, 4, 4, 1), (1, 2, 4, 2), (3, 2, 6, 3), (1, 5, 4, 1),
    ):  # fmt: skip
        made = object.__new__(builder)
        made.reorder_batch_threshold = threshold
        step = SimpleNamespace(num_reqs=requests, num_actual_tokens=tokens, max_query_len=longest)
        seen[f"capture {threshold} {requests}x{tokens} {longest}"] = outcome(
            made.build_for_cudagraph_capture, step
        )
    seen["threshold"] = common.MLACommonMetadataBuilder.reorder_batch_threshold
    whole = modules["vllm.v1.attention.backend"].AttentionMetadataBuilder
    seen["no threshold"] = whole.reorder_batch_threshold
    seen["drafts rebuild"] = whole.supports_draft_decode_metadata_update

    def plain() -> None: ...

    broken = modules["vllm.compilation.breakable_cudagraph"].eager_break_during_capture
    seen["no break unless asked"] = broken(plain) is plain
    registry = modules["vllm.v1.attention.backends.mla.prefill.registry"]
    custom = registry.MLAPrefillBackendEnum.CUSTOM
    registry.register_mla_prefill_backend(custom, "somebody.Prefill")
    seen["prefill backend"] = custom.get_path()
    base = modules["vllm.v1.attention.backends.mla.prefill.base"].MLAPrefillBackend
    seen["quantized by default"] = base.supports_quant_output(None, "fp8")
    return seen


def behave_alike() -> list[str]:
    """Probes with different outcomes."""
    ours = {name: SimpleNamespace(**each) for name, each in stand_ins.modules("").items()}
    theirs = {name: import_module(name) for name in ours}
    mine, real = behaviour(ours), behaviour(theirs)
    return [f"{name}: {mine[name]} where vLLM has {real[name]}" for name in mine
            if mine[name] != real[name]]  # fmt: skip


def main() -> None:
    found = behave_alike()
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
