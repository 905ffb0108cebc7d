"""from_hf: dict, file and transformers object agree for every preset; the rest is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmla import PRESETS, ConfigError, MLAConfig
from openmla.config.families import FAMILIES, NO_CLASS
from tests.config.checkpoints import CHECKPOINTS, DOTS3_TINY

transformers = pytest.importorskip("transformers")


def transformers_config(fields: dict[str, Any]) -> Any:
    """The object AutoConfig would make: kimi_k2 is loaded as deepseek_v3."""
    from transformers import CONFIG_MAPPING

    model_type = fields["model_type"]
    known = "deepseek_v3" if model_type == "kimi_k2" else model_type
    given = {name: value for name, value in fields.items() if name != "model_type"}
    if model_type == "deepseek_v4":  # its strict config has no such field
        given = {name: value for name, value in given.items() if name != "v_head_dim"}
    return CONFIG_MAPPING[known](**json.loads(json.dumps(given)))


def test_every_preset_has_a_checkpoint() -> None:
    assert set(CHECKPOINTS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_dict_file_and_object_agree(name: str, tmp_path: Path) -> None:
    fields = CHECKPOINTS[name]
    assert MLAConfig.from_hf(fields) == PRESETS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    assert MLAConfig.from_hf(path) == PRESETS[name]
    assert MLAConfig.from_hf(str(tmp_path)) == PRESETS[name]
    if FAMILIES[fields["model_type"]].unattached == NO_CLASS:
        return
    config = transformers_config(fields)
    assert MLAConfig.from_hf(config) == PRESETS[name]
    config.save_pretrained(tmp_path / "again")
    assert MLAConfig.from_hf(tmp_path / "again") == PRESETS[name]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, config in PRESETS.items()
        if config.rope.kind != "longrope" and FAMILIES[config.model_type].unattached != NO_CLASS
    ],
)
def test_scales_equal_transformers(name: str) -> None:
    """The softmax scale and the cos/sin factor, as transformers' own functions compute them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    ours, theirs = PRESETS[name], transformers_config(CHECKPOINTS[name])
    if ours.compressor is not None:
        assert ours.scale == theirs.head_dim**-0.5
        assert ours.compressor.rope.cos_sin_scale == 1.0
        return
    if ours.rope.kind == "none":
        assert ours.scale == ours.qk_head_dim**-0.5
        return
    expected = yarn_apply_mscale(theirs.rope_parameters, ours.qk_head_dim**-0.5)
    assert math.isclose(ours.scale, expected, rel_tol=1e-15)
    if ours.rope.kind == "yarn":
        _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
        assert math.isclose(ours.rope.cos_sin_scale, factor, rel_tol=1e-15)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"attention_factor": 1.5},
        {"attention_factor": None},
        {"mscale": 0.5, "mscale_all_dim": 1.0},
        {"mscale": 0.5},
        {"mscale_all_dim": 1.0},
    ],
    ids=str,
)
def test_v4_scales_cos_and_sin_as_transformers(terms: dict[str, Any], nested: bool) -> None:
    """The compressed layers' rope, also under its own name in rope_parameters."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {k: v for k, v in CHECKPOINTS["tiny-v4"].items() if not k.startswith("rope")}
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, **terms}
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    compress = {**yarn, "rope_theta": 160000.0, "partial_rotary_factor": 0.25}
    fields["rope_parameters"] = {"main": main, "compress": compress} if nested else yarn
    ours, theirs = MLAConfig.from_hf(fields), transformers_config(fields)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"), layer_type="compress")
    assert ours.compressor is not None
    assert math.isclose(ours.compressor.rope.cos_sin_scale, factor, rel_tol=1e-15)
    assert ours.compressor.rope.logit_scale == 1.0 and ours.scale == theirs.head_dim**-0.5
    assert ours == MLAConfig.from_hf(theirs)


def test_longrope_factor_equals_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = CHECKPOINTS["tiny-minicpm3"]
    for factor in (None, 1.0, 4.0):
        scaling = {**fields["rope_scaling"], "factor": factor}
        stretched = {**fields, "rope_scaling": scaling, "max_position_embeddings": 65536}
        _, expected = ROPE_INIT_FUNCTIONS["longrope"](
            transformers_config(stretched), torch.device("cpu")
        )
        actual = MLAConfig.from_hf(stretched).rope.cos_sin_scale
        assert math.isclose(actual, expected, rel_tol=1e-15)


@pytest.mark.parametrize("text_type", [None, "kimi_k2", "deepseek_v3"])
def test_text_config_of_a_wrapper(text_type: str | None) -> None:
    text = {**CHECKPOINTS["kimi-k2"], "model_type": text_type}
    if text_type is None:
        del text["model_type"]
    wrapped = {"model_type": "kimi_k25", "text_config": text}
    assert MLAConfig.from_hf(wrapped) == PRESETS["kimi-k2"]


def test_kimi_linear_never_rotates() -> None:
    fields = {
        **{k: v for k, v in CHECKPOINTS["tiny-v2-lite"].items() if not k.startswith("rope")},
        "model_type": "kimi_linear",
        "mla_use_nope": True,
    }
    config = MLAConfig.from_hf(fields)
    assert config.rope.kind == "none" and config.latent_dim == 40
    assert config == MLAConfig.from_hf(transformers_config(fields))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny-v3", {"model_type": "llama"}, "model_type 'llama' is not supported. Supported: "),
        ("tiny-v3", {"model_type": None}, "model_type None is not supported"),
        ("tiny-v3", {"kv_lora_rank": None}, "kv_lora_rank must be an integer, got None"),
        ("tiny-v3", {"kv_lora_rank": 32.0}, "kv_lora_rank must be an integer, got 32.0"),
        ("tiny-v3", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, got 0"),
        ("tiny-v3", {"num_attention_heads": True}, "num_attention_heads must be an integer"),
        ("tiny-v3", {"num_key_value_heads": 2}, "num_key_value_heads must be 4 "),
        ("tiny-v3", {"sliding_window": 4096}, "sliding_window must be None for this model type"),
        ("tiny-v3", {"is_causal": False}, "is_causal must be True (bidirectional attention is not"),
        ("tiny-v4", {"is_causal": False}, "is_causal must be True (bidirectional attention is not"),
        ("tiny-v3", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be F"),
        ("tiny-v3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping must be None (soft-"),
        ("tiny-v4", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping must be None (soft-"),
        ("tiny-v3", {"alibi": True}, "alibi must be False (ALiBi is not supported), got True"),
        ("tiny-v3", {"mla_use_nope": True}, "mla_use_nope must be False where the shared columns"),
        ("tiny-v3", {"qk_head_dim": 25}, "qk_head_dim must be 24 = "),
        ("tiny-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even and positive, got 7"),
        ("tiny-v3", {"rms_norm_eps": 0}, "latent_eps must be a positive number, got 0.0"),
        ("tiny-v3", {"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ("tiny-v3", {"rope_scaling": "yarn"}, "rope_parameters must be a dict, got 'yarn'"),
        ("tiny-v3", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
        (
            "tiny-v3",
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_mid": 3}},
            "RoPE field 'beta_mid' is not supported, got 3",
        ),
        ("tiny-v3", {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rope factor must be"),
        (
            "tiny-v3",
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}},
            "rope beta_fast must be at least beta_slow=2.0, got 1.0",
        ),
        ("tiny-v3", {"rope_theta": -1}, "rope_theta must be a positive number, got -1.0"),
        (
            "tiny-minicpm3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope short_factor must be a list of R/2=4 numbers, got '1 numbers'",
        ),
        (
            "tiny-minicpm3",
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "rope short_factor must be a list of numbers, got None",
        ),
        ("tiny-minicpm3", {"rope_interleave": True}, "rope_interleave must be False where"),
        ("tiny-longcat", {"q_lora_rank": None}, "q_lora_rank is missing for longcat_flash"),
        ("tiny-longcat", {"head_dim": 16}, "head_dim must be 8 = qk_rope_head_dim, got 16"),
        ("tiny-mistral4", {"rope_parameters": None}, "rope_parameters is missing for mistral4"),
        (
            "tiny-mistral4",
            {
                "rope_parameters": {
                    **CHECKPOINTS["mistral-4"]["rope_parameters"],
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor must be 8/24",
        ),
        ("tiny-v3.2", {"index_topk": None}, "index_topk must be an integer, got None"),
        ("tiny-v3.2", {"index_head_dim": 4}, "index_head_dim must be at least qk_rope_head_dim=8"),
        ("tiny-v3.2", {"index_topk_freq": 0}, "index_topk_freq must be at least 1, got 0"),
        ("tiny-glm-5.2", {"indexer_types": ["full"]}, "indexer_types must list 'full' or 'shared'"),
        ("tiny-glm-5.2", {"indexer_types": ["shared", "full", "full"]}, "indexer_types[0] must be"),
        ("tiny-v4", {"num_key_value_heads": 4}, "num_key_value_heads must be 1 for deepseek_v4"),
        ("tiny-v4", {"compress_ratios": [0, 4, 64]}, "compress_ratios[2] must be 0, 1, 4 or 128"),
        ("tiny-v4", {"compress_ratios": [0, 4]}, "compress_ratios must be one per layer (3)"),
        ("tiny-v4", {"compress_ratios": None}, "compress_ratios must be a list of integers"),
        ("tiny-v4", {"compress_ratios": [0, 4, 128, 4]}, "compress_ratios must be"),
        ("tiny-v4", {"layer_types": ["full_attention"] * 3}, "layer_types must be"),
        (
            "tiny-v4",
            {
                "layer_types": ["sliding_attention"] * 3,
                "compress_rates": {"compressed_sparse_attention": 8},
            },
            "compressed_sparse_attention must be 4 (other rates are not supported), got 8",
        ),
        ("tiny-v4", {"o_groups": 3}, "o_groups must be a divisor of num_attention_heads=4, got 3"),
        ("tiny-v4", {"qk_rope_head_dim": 64}, "qk_rope_head_dim must be at most head_dim=32"),
    ],
)
def test_contradictions_name_field_and_value(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        MLAConfig.from_hf({**CHECKPOINTS[name], **changes})
    assert f"config: {message}" in str(error.value)


def test_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config: cannot read .*missing.*No such file"):
        MLAConfig.from_hf(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        MLAConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must contain a JSON object"):
        MLAConfig.from_hf(tmp_path)
    with pytest.raises(ConfigError, match="source must be a dict, a path or a transformers config"):
        MLAConfig.from_hf(7)


def test_v4_ratio_one_means_none() -> None:
    fields = {**CHECKPOINTS["tiny-v4"], "compress_ratios": [1, 4, 128, 1, 0]}
    assert MLAConfig.from_hf(fields) == PRESETS["tiny-v4"]


dims = st.integers(1, 300)


@given(
    heads=dims, q_lora=st.none() | dims, latent=dims, nope=dims, half_rope=dims, value=dims,
    theta=st.floats(2, 1e9), eps=st.floats(1e-9, 1e-3), factor=st.floats(1, 200),
)  # fmt: skip
def test_any_dimensions_survive(
    heads: int,
    q_lora: int | None,
    latent: int,
    nope: int,
    half_rope: int,
    value: int,
    theta: float,
    eps: float,
    factor: float,
) -> None:
    """Whatever the numbers: dict and file agree, and what was said is what is there."""
    fields = {
        **CHECKPOINTS["tiny-v3"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": q_lora,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 2 * half_rope,
        "v_head_dim": value,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": 4096,
        },
    }
    config = MLAConfig.from_hf(fields)
    assert config == MLAConfig.from_hf(json.loads(json.dumps(fields)))
    assert (config.num_heads, config.q_lora_rank, config.v_head_dim) == (heads, q_lora, value)
    assert config.latent_dim == latent + 2 * half_rope
    assert config.rope.theta == theta and config.latent_eps == eps
    assert math.isclose(config.scale, (nope + 2 * half_rope) ** -0.5)
    assert math.isclose(config.rope.cos_sin_scale, 1 + 0.1 * math.log(factor))


UNSAID = ["layer_types", "compress_rates", "indexer_types", "index_topk_pattern", "head_dim"]
UNSAID += ["rope_parameters", "rope_scaling", "rope_theta", "text_config", "qk_head_dim"]
UNSAID += ["partial_rotary_factor", "model_max_length", "mla_scale_q_lora", "mla_use_nope"]
junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.none() | st.integers(-2, 2) | st.lists(st.text()), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "factor", "partial_rotary_factor", "main", "compress", "x"]),
        st.none() | st.integers(-1, 3) | st.sampled_from(["yarn", "longrope", "s"]) | st.just({}),
        max_size=3,
    ),
)


@given(data=st.data())
def test_junk_gives_a_config_or_a_config_error(data: st.DataObject) -> None:
    """No field's value, however odd, gets anything but ConfigError out of the reader."""
    name = data.draw(st.sampled_from([n for n in CHECKPOINTS if n.startswith("tiny")]))
    fields = dict(CHECKPOINTS[name])
    for field in data.draw(st.lists(st.sampled_from(sorted({*fields, *UNSAID})), max_size=3)):
        fields[field] = data.draw(junk)
    try:
        MLAConfig.from_hf(fields)
    except ConfigError as error:
        assert str(error).startswith("config: ")


@pytest.mark.parametrize(
    "model_type", sorted(name for name, family in FAMILIES.items() if not family.reads_as)
)
def test_default_configs_of_transformers_are_read(model_type: str, tmp_path: Path) -> None:
    """Every family, with whatever defaults its class has."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    theirs = CONFIG_MAPPING[model_type]()
    ours = MLAConfig.from_hf(theirs)
    heads = theirs.to_dict()["num_attention_heads"]
    assert ours.num_heads == heads and ours.model_type == model_type
    theirs.save_pretrained(tmp_path)
    assert MLAConfig.from_hf(tmp_path) == ours


NONSENSE: list[Any] = [math.nan, math.inf, -math.inf, -1, 0, 1.5, 2**40, 10**400, True, "x", [], {}]


TINY = {name: fields for name, fields in CHECKPOINTS.items() if name.startswith("tiny")}
TINY["tiny-dots3"] = DOTS3_TINY


@pytest.mark.parametrize("name", TINY)
def test_nonsense_in_any_field_is_a_sentence_or_no_matter(name: str) -> None:
    """Nothing but ConfigError comes out, and nothing is made in sizes that nobody has."""
    fields = TINY[name]
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    for value in NONSENSE:
        tries = [{**fields, field: value} for field in fields]
        tries += [{**fields, "rope_scaling": {**rope, field: value}} for field in rope]
        for changed in tries:
            try:
                MLAConfig.from_hf(changed)
            except ConfigError as error:
                assert str(error).startswith("config: ") and "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2**40}, "num_hidden_layers must be at most 100000, got 1099511"),
        ({"max_position_embeddings": 2**40}, "max_position(s|_embeddings) must be"),
        ({"hidden_size": 2**40}, "hidden_size must be at most 1048576"),
        ({"qk_nope_head_dim": 2**40}, "qk_nope_head_dim must be at most 1048576"),
        ({"num_attention_heads": 2**40, "num_key_value_heads": None}, "num_heads must be at most"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number, got nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number, got 1000"),
        ({"hidden_size": math.inf}, "hidden_size must be an integer, got inf"),
    ],
)
def test_sizes_have_bounds(changes: dict[str, Any], message: str) -> None:
    """Before memory is taken by them: a layer's list of 2**40 entries would be all of it."""
    for name in ("tiny-v3", "tiny-v3.2", "tiny-v4"):
        if changes.keys() <= CHECKPOINTS[name].keys():
            with pytest.raises(ConfigError, match=message):
                MLAConfig.from_hf({**CHECKPOINTS[name], **changes})


def test_a_config_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not valid JSON"):
        MLAConfig.from_hf(tmp_path)
