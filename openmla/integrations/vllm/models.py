"""V3.2, GLM-5 and their drafts, with our indexer where this backend is chosen.

That is vLLM's model for every platform. On CUDA vLLM has another one, which writes rows and calls
kernels of its own: it stays where this backend is not chosen.
"""

from __future__ import annotations

from typing import Any

V4 = "openmla.integrations.vllm.v4:DeepseekV4ForCausalLM"
# architecture: vLLM's own, and its model for every platform
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
    """By name: vLLM looks at a model in another process, and imports it when it is asked for."""
    from vllm import ModelRegistry

    for architecture in MODELS:
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")
    ModelRegistry.register_model("DeepseekV4ForCausalLM", V4)


def __getattr__(architecture: str) -> Any:
    """A model that is vLLM's own, unless this backend is chosen."""
    from importlib import import_module

    if architecture not in MODELS:
        raise AttributeError(architecture)
    own, common = (getattr(import_module(module), name) for module, name in MODELS[architecture])

    def __new__(cls: type, *args: Any, vllm_config: Any, **given: Any) -> Any:
        from openmla.integrations.vllm.backend import is_chosen

        if not is_chosen(vllm_config):
            return own.__new__(cls)
        return with_our_indexer(common, *args, vllm_config=vllm_config, **given)

    made = type(architecture, (own,), {"__new__": __new__, "__module__": __name__})
    globals()[architecture] = made
    return made


def with_our_indexer(common: Any, *args: Any, vllm_config: Any, **given: Any) -> Any:
    from vllm.model_executor.models.deepseek_v2 import Indexer

    from openmla.integrations.vllm import indexer

    indexer.register()
    ops = vllm_config.compilation_config.splitting_ops
    if ops and indexer.SELECT not in ops:  # not in a graph of one piece: it reads the step's plan
        ops.append(indexer.SELECT)
    model = common(*args, vllm_config=vllm_config, **given)
    for module in model.modules():
        if isinstance(module, Indexer):
            module.__class__ = indexer.OpenMLAIndexer
            module.take_over()
    return model
