"""Small random checkpoints of the model families, made once and kept in .vllm-tests/.

vLLM's CPU build needs a latent of 512 + 64, the only width its own backend has; YaRN, because its
rotary op is wrong for plain interleaved rope; one expert group in V2. An indexer has at least 16
heads, so that few keys score nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".vllm-tests"
VOCABULARY = 512

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 16384,
    "rope_parameters": YARN,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
V2 = {
    **{name: value for name, value in V3.items() if name != "scoring_func"},
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "topk_method": "greedy",
    "n_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 64}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
# Its heads: keys of 192 + 64, values of 256; its indexer pairs neighbours, which vLLM is told.
GLM_5 = {**V3, **INDEXER, **ONE_GROUP, "model_type": "glm_moe_dsa"}
GLM_5 |= {"num_attention_heads": 4, "num_key_value_heads": 4, "indexer_rope_interleave": True}
GLM_5 |= {"qk_nope_head_dim": 192, "v_head_dim": 256}
# Where rounding is coarse, a router, an indexer or a large weight makes another text of every last
# bit; here they are calm.
CALM = {"first_k_dense_replace": 3, "initializer_range": 0.05}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "v2": V2,
    "v3": V3,
    # Kimi K2 is V3 with one expert group, more experts and half the heads
    "kimi-k2": {**V3, **ONE_GROUP, "num_attention_heads": 4, "num_key_value_heads": 4}
    | {"n_routed_experts": 12, "routed_scaling_factor": 2.827, "num_hidden_layers": 4},
    "v3.2": {**V3, **INDEXER, "model_type": "deepseek_v32"},
    "glm-5": GLM_5,
    # GLM-5.2: some layers take what another one's indexer chose
    "glm-5.2": {**GLM_5, "num_hidden_layers": 5, "index_topk_pattern": "FSSFS"},
    "v3.2-calm": {**V3, **INDEXER, **CALM, "model_type": "deepseek_v32"},
    "v3-calm": {**V3, **CALM},
    "v3-bf16": {**V3, **CALM, "dtype": "bfloat16"},
    "v3-fp16": {**V3, **CALM, "dtype": "float16"},
    # for speed: heads as wide as V3's own
    "large": {**V3, "dtype": "bfloat16", "q_lora_rank": None, "initializer_range": 0.02}
    | {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16}
    | {"hidden_size": 1024, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
# For GPUs: heads as wide as V3's own, no experts, so that rounding changes few tokens.
GPU_V3 = {**V3, "dtype": "bfloat16", "hidden_size": 512, "intermediate_size": 512}
GPU_V3 |= {"num_hidden_layers": 4, "first_k_dense_replace": 9, "initializer_range": 0.06}
GPU_V3 |= {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 256}
GPU_V3 |= {"qk_nope_head_dim": 128, "v_head_dim": 128}
GPU_V32 = {**GPU_V3, **INDEXER, "index_n_heads": 32, "model_type": "deepseek_v32"}
MANY_HEADS = {"num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 2}
CHECKPOINTS |= {
    "gpu-v3": GPU_V3,
    "gpu-v3-f32": {**GPU_V3, "dtype": "float32"},
    "gpu-v3-128": {**GPU_V3, **MANY_HEADS},
    "gpu-v3-mtp": {**GPU_V3, "num_nextn_predict_layers": 1},
    "gpu-v3-moe": {**GPU_V3, "first_k_dense_replace": 1, "moe_intermediate_size": 128},
    "gpu-v2": {**GPU_V3, "model_type": "deepseek_v2", "q_lora_rank": None, **ONE_GROUP}
    | {"topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "gpu-v3.2": GPU_V32,
    "gpu-v3.2-f32": {**GPU_V32, "dtype": "float32"},
    "gpu-v3.2-2048": {**GPU_V32, "index_topk": 2048, "num_hidden_layers": 2},
    "gpu-v3.2-mtp": {**GPU_V32, "num_nextn_predict_layers": 1},
    "gpu-glm-5": {**GPU_V32, **ONE_GROUP, "model_type": "glm_moe_dsa"}
    | {"indexer_rope_interleave": True, "qk_nope_head_dim": 192, "v_head_dim": 256},
    # for speed; 16 heads: V2-Lite, or V3 on 8 ranks; vLLM makes up the weights
    "speed-16": {**GPU_V3, "hidden_size": 2048, "intermediate_size": 4096, "q_lora_rank": 1536}
    | {"vocab_size": 32768, "num_hidden_layers": 8, "max_position_embeddings": 65536}
    | {"rope_parameters": {**YARN, "factor": 16.0}},
}
CHECKPOINTS["speed-128"] = CHECKPOINTS["speed-16"] | MANY_HEADS | {"num_hidden_layers": 4}
CHECKPOINTS["speed-v3.2"] = CHECKPOINTS["speed-16"] | {**INDEXER, "index_topk": 2048}
CHECKPOINTS["speed-v3.2"] |= {"index_n_heads": 64, "model_type": "deepseek_v32"}
SPARSE = ("v3.2", "v3.2-calm", "glm-5", "glm-5.2")


def dtype_of(name: str) -> str:
    return str(CHECKPOINTS[name]["dtype"])


def checkpoint(name: str) -> Path:
    """The folder of a checkpoint, made if it is not there or of other numbers."""
    wanted = hashlib.sha256(json.dumps(CHECKPOINTS[name], sort_keys=True).encode()).hexdigest()
    folder = FOLDER / "checkpoints" / name
    stamp = folder / "made-of"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        make(name, folder)
        stamp.write_text(wanted)
    return folder


def make(name: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    numbers = dict(CHECKPOINTS[name])
    dtype = getattr(torch, numbers.pop("dtype"))
    drafts = numbers.pop("num_nextn_predict_layers", 0)
    config = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    if name.startswith("speed"):  # the config alone
        config.dtype = dtype
        with torch.device("meta"):
            config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
        config.save_pretrained(folder)
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "norm" in path and path.endswith("weight"):  # all ones would hide a norm left out
                weight.uniform_(0.5, 1.5)
            if name.startswith("gpu") and path.endswith("o_proj.weight"):  # attention must matter
                weight.mul_(2.0)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):  # zeros would hide a bias left out
                buffer.uniform_(-0.1, 0.1)
    model.to(dtype).save_pretrained(folder)
    if drafts:
        add_draft_layer(folder, config.num_hidden_layers, config.hidden_size)


def add_draft_layer(folder: Path, layers: int, hidden: int) -> None:
    """An MTP layer as DeepSeek's checkpoints have it: the last layer again, over the hidden state
    alone, so that its drafts are often right."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    weights |= {
        draft + key.removeprefix(last): value.clone()
        for key, value in weights.items()
        if key.startswith(last)
    }
    norm = weights["model.norm.weight"]
    for added in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        weights[draft + added] = norm.clone()
    both = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    weights[draft + "eh_proj.weight"] = both.to(norm.dtype)
    weights[draft + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[draft + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    config = folder / "config.json"
    numbers = json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}
    config.write_text(json.dumps(numbers))
