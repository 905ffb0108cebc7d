"""V3.2, GLM-5 and their MTP drafts, with openmla's indexer if this backend is selected.

openmla then uses vLLM's generic model. On CUDA vLLM has another model, which writes rows and calls
kernels itself; it is still used if this backend is not selected.
"""

from __future__ import annotations

from typing import Any

V4 = "openmla.integrations.vllm.v4:DeepseekV4ForCausalLM"
# architecture: vLLM's own model, and its model for every platform
MODELS = {
    "DeepseekV32ForCausalLM": (
        ("vllm.models.deepseek_v32", "DeepseekV32ForCausalLM"),
        ("vllm.model_executor.models.deepseek_v2", "DeepseekV3ForCausalLM"),
    ),
    "GlmMoeDsaForCausalLM": (
        ("vllm.models.deepseek_v32", "GlmMoeDsaForCausalLM"),
        ("vllm.model_executor.models.deepseek_v2", "GlmMoeDsaForCausalLM"),
    ),
    "DeepseekV32MTPModel": (
        ("vllm.models.deepseek_v32", "DeepseekV32MTP"),
        ("vllm.model_executor.models.deepseek_mtp", "DeepSeekMTP"),
    ),
}


def register() -> None:
    """Register by name: vLLM inspects a model in another process and imports it when needed."""
    from vllm import ModelRegistry

    for architecture in MODELS:
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")
    ModelRegistry.register_model("DeepseekV4ForCausalLM", V4)


def __getattr__(architecture: str) -> Any:
    """vLLM's own model, or openmla's if this backend is selected."""
    from importlib import import_module

    if architecture not in MODELS:
        raise AttributeError(architecture)
    own, common = (getattr(import_module(module), name) for module, name in MODELS[architecture])

    def __new__(cls: type, *args: Any, vllm_config: Any, **given: Any) -> Any:
        from openmla.integrations.vllm.backend import is_selected

        if not is_selected(vllm_config):
            return own.__new__(cls)
        return with_openmla_indexer(common, *args, vllm_config=vllm_config, **given)

    made = type(architecture, (own,), {"__new__": __new__, "__module__": __name__})
    globals()[architecture] = made
    return made


def with_openmla_indexer(common: Any, *args: Any, vllm_config: Any, **given: Any) -> Any:
    from vllm.model_executor.models.deepseek_v2 import Indexer

    from openmla.integrations.vllm import indexer

    indexer.register()
    use_packed_fp8_rows(vllm_config)
    ops = vllm_config.compilation_config.splitting_ops
    if ops and indexer.SELECT not in ops:  # it reads the step's plan, so no graph may contain it
        ops.append(indexer.SELECT)
    model = common(*args, vllm_config=vllm_config, **given)
    for module in model.modules():
        if isinstance(module, Indexer):
            module.__class__ = indexer.OpenMLAIndexer
            module.take_over()
    return model


def use_packed_fp8_rows(vllm_config: Any) -> None:
    """Make `fp8` mean DeepSeek's packed rows for sparse models, with a scale per 128 columns and
    16-bit rope columns, as vLLM's own backends do."""
    from vllm.logger import init_logger

    from openmla.integrations.vllm.options import option

    cache = vllm_config.cache_config
    if cache.cache_dtype in ("fp8", "fp8_e4m3") and not option(
        vllm_config, "fp8_per_tensor", False
    ):
        init_logger("vllm.openmla").info_once(
            "openmla uses the fp8_ds_mla KV cache format for this sparse model, as vLLM's own "
            'backends do. --additional-config \'{"openmla": {"fp8_per_tensor": true}}\' keeps one '
            "scale per tensor."
        )
        cache.cache_dtype = "fp8_ds_mla"
