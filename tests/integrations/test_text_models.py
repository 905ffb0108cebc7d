"""attach() decides by the text model: bare, inside another model, with layers that are not MLA's,
with any kind of rope that its modules know."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError, UnsupportedError

transformers = pytest.importorskip("transformers")

from openmla.integrations.transformers import attach, attachment_of, detach  # noqa: E402
from tests.integrations.models import (  # noqa: E402
    MODELS,
    SPARSE,
    fill,
    make_mistral3,
    make_model,
    make_sparse,
    make_v4,
    on,
    padded_prompts,
)

LING: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "head_dim": 16,  # of its linear attention
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "linear-mscale": {"factor": 4.0, "mscale_all_dim": 1.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def generate(model: Any, **options: Any) -> Tensor:
    ids, mask = on(str(model.device), *padded_prompts())
    settings = {"max_new_tokens": 16, "do_sample": False, **options}
    out: Tensor = model.generate(ids.clamp(max=80), attention_mask=mask, **settings)
    return out


def test_a_vision_model_around_mistral_4(device: str) -> None:
    model = make_mistral3(make_model("mistral4").config.to_dict()).to(device)
    ids = torch.cat([torch.full((4,), 90), torch.arange(20)])[None].to(device)  # an image, text
    image = {
        "pixel_values": torch.randn(1, 3, 16, 16, device=device),
        "image_sizes": torch.tensor([[16, 16]]),
    }
    expected, seen = generate(model), model(input_ids=ids, **image).logits
    attach(model, block_size=4)
    assert len(attachment_of(model).modules) == 3
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(generate(model), expected)
    assert (model(input_ids=ids, **image).logits - seen).norm() / seen.norm() < 1e-5
    detach(model)
    assert torch.equal(generate(model), expected)


def test_the_text_model_by_itself() -> None:
    """The inner one of a vision model: what is around it keeps its config."""
    model = make_mistral3(make_model("mistral4").config.to_dict())
    text = model.model.language_model
    ids, mask = padded_prompts()
    expected = text(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert attach(text, block_size=4) is text
    actual = text(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert (actual - expected).norm() / expected.norm() < 1e-5
    assert model.config.text_config._attn_implementation == "sdpa"


def test_a_vision_model_around_another_text_model() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 97}
    text = {"model_type": "mistral", "num_attention_heads": 2, "num_key_value_heads": 2, **small}
    with pytest.raises(
        UnsupportedError, match="'mistral', the text model of mistral3, is not supported"
    ):
        attach(make_mistral3(text))
    with pytest.raises(
        UnsupportedError, match=r"expected a loaded Hugging Face model, got Linear. Load it"
    ):
        attach(torch.nn.Linear(1, 1))


def make_ling(**changes: Any) -> Any:
    if "bailing_hybrid" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no bailing_hybrid")
    name = "transformers.models.bailing_hybrid.modeling_bailing_hybrid"
    config = transformers.CONFIG_MAPPING["bailing_hybrid"](**{**LING, **changes})
    return fill(import_module(name).BailingHybridForCausalLM(config))


def test_ling(device: str) -> None:
    """MLA in every second layer, with a gate per head; the others keep a state of their own."""
    model = make_ling().to(device)
    ids, mask = on(device, *padded_prompts())
    expected, beams = generate(model), generate(model, num_beams=3)
    logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    attach(model, block_size=4)
    assert len(attachment_of(model).modules) == 2
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model, num_beams=3), beams)
    actual = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert (actual - logits).norm() / logits.norm() < 1e-5


def test_ling_2_5_is_another_model() -> None:
    with pytest.raises(ConfigError, match=r"supported for Ling 3\.0 only"):
        attach(make_ling(architectures=["BailingMoeV2_5ForCausalLM"]))


# by default on a GPU, and some models' own code waits for the host in every step
@pytest.mark.filterwarnings("ignore:attach. the decode step of this model cannot be captured")
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3", "longcat_flash", "glm_moe_dsa"])
def test_ropes_of_the_modules(family: str, rope: str, device: str) -> None:
    """Also past the config's positions, where dynamic ones begin to change."""
    assert family in MODELS or family in SPARSE
    given = {"rope_type": rope.split("-")[0], "rope_theta": 10000.0, **ROPES[rope]}
    fields: dict[str, Any] = {
        "rope_parameters": given,
        "rope_scaling": None,
        "max_position_embeddings": 28,
    }
    model = (make_model if family in MODELS else make_sparse)(family, **fields).to(device)
    expected = generate(model)
    attach(model, block_size=4)
    assert attachment_of(model).config.rope.kind == "external"
    assert torch.equal(generate(model), expected)


@pytest.mark.filterwarnings("ignore:attach. the decode step of this model cannot be captured")
@pytest.mark.parametrize("rope", ["linear", "dynamic", "llama3"])
def test_ropes_of_v4_entries(rope: str, device: str) -> None:
    kept = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    ropes = {
        "main": {"rope_type": "default", **kept},
        "compress": {"rope_type": rope, **kept, **ROPES[rope]},
    }
    model = make_v4(rope_parameters=ropes, rope_scaling=None, max_position_embeddings=80).to(device)
    ids = torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(0)).to(device)
    options = {"max_new_tokens": 32, "do_sample": False}
    expected = model.generate(ids, **options)
    attach(model)
    assert torch.equal(model.generate(ids, **options), expected)
    if rope == "dynamic":
        with pytest.raises(UnsupportedError, match="a dynamic RoPE supports at most 80 tokens"):
            model(torch.cat([ids] * 3, dim=1))
