"""Small random checkpoints of the model families, made once and kept in .vllm-tests/.

What vLLM's CPU build asks of them: a latent of 512 + 64, the only width its own backend has; YaRN,
because its rotary op is wrong for plain interleaved rope; one expert group in V2. An indexer has at
least 16 heads, so that few keys score nothing.
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
    config = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "norm" in path and path.endswith("weight"):  # all ones would hide a norm left out
                weight.uniform_(0.5, 1.5)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):  # zeros would hide a bias left out
                buffer.uniform_(-0.1, 0.1)
    model.to(dtype).save_pretrained(folder)
