"""Released models by name, as in their published configs, and tiny variants."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from openmla.config.schema import CompressorConfig, IndexerConfig, MLAConfig, RopeConfig
from openmla.errors import ConfigError


class _UnknownPreset(ConfigError, KeyError):
    """Both error types, so that code that uses PRESETS as a dict works as usual."""

    __str__ = Exception.__str__  # KeyError would quote the message


class _Presets(dict[str, MLAConfig]):
    """A dict whose error for a missing name suggests similar ones."""

    def __missing__(self, name: object) -> MLAConfig:
        near = get_close_matches(str(name).lower().replace("_", "-"), self, cutoff=0.5)
        nearest = f" Nearest: {', '.join(near)}." if near else ""
        raise _UnknownPreset(
            f"config: preset {name!r} is not known.{nearest} list(openmla.PRESETS) has all."
        )


_YARN_V2 = RopeConfig(
    kind="yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707
)
_YARN_V3 = replace(_YARN_V2, mscale=1.0, mscale_all_dim=1.0)
_YARN_KIMI = replace(_YARN_V3, theta=50000.0, factor=32.0, beta_fast=1.0, beta_slow=1.0)
_YARN_V4 = RopeConfig(
    kind="yarn", theta=160000.0, factor=16.0, original_positions=65536, attention_factor=1.0
)
_YARN_MISTRAL4 = replace(_YARN_V3, factor=128.0, original_positions=8192)
_MINICPM3_FACTORS = (
    1.0591234137867171,
    1.1241891283591912,
    1.2596935748670968,
    1.5380380402321725,
    2.093982484148734,
    3.1446935121267696,
    4.937952647693647,
    7.524541999994549,
    10.475458000005451,
    13.062047352306353,
    14.85530648787323,
    15.906017515851266,
    16.461961959767827,
    16.740306425132907,
    16.87581087164081,
    16.940876586213285,
)
_LONGROPE_MINICPM3 = RopeConfig(
    kind="longrope",
    pairing="halves",
    original_positions=32768,
    short_factor=_MINICPM3_FACTORS,
    long_factor=_MINICPM3_FACTORS,
)

_V3 = MLAConfig(
    model_type="deepseek_v3",
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_positions=163840,
    rope=_YARN_V3,
)
_V2 = replace(_V3, model_type="deepseek_v2", hidden_size=5120, num_layers=60, rope=_YARN_V2)
_GLM5 = MLAConfig(
    model_type="glm_moe_dsa",
    hidden_size=6144,
    num_layers=78,
    num_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    max_positions=202752,
    rope=RopeConfig(theta=1e6),
    latent_eps=1e-5,
    indexer=IndexerConfig(num_heads=32, head_dim=128, topk=2048, pairing="pairs"),
)
_V4_FLASH = MLAConfig(
    model_type="deepseek_v4",
    hidden_size=4096,
    num_layers=43,
    num_heads=64,
    q_lora_rank=1024,
    kv_lora_rank=512,
    qk_nope_head_dim=448,
    qk_rope_head_dim=64,
    v_head_dim=512,
    max_positions=1048576,
    indexer=IndexerConfig(num_heads=64, head_dim=128, topk=512, pairing="pairs", rope_side="last"),
    compressor=CompressorConfig(
        ratios=(0, 0) + (4, 128) * 20 + (4,),
        window=128,
        output_groups=8,
        output_lora_rank=1024,
        rope=_YARN_V4,
    ),
)
_MINICPM3 = MLAConfig(
    model_type="minicpm3",
    hidden_size=2560,
    num_layers=62,
    num_heads=40,
    q_lora_rank=768,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    max_positions=32768,
    rope=_LONGROPE_MINICPM3,
    latent_eps=1e-5,
)
_LONGCAT = MLAConfig(
    model_type="longcat_flash",
    hidden_size=6144,
    num_layers=56,
    num_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_positions=131072,
    rope=RopeConfig(theta=1e7),
    latent_eps=1e-5,
    q_factor=(6144 / 1536) ** 0.5,
    latent_factor=(6144 / 512) ** 0.5,
)
_KIMI_LINEAR = MLAConfig(
    model_type="kimi_linear",
    hidden_size=2304,
    num_layers=27,
    num_heads=32,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_positions=1048576,
    rope=RopeConfig(kind="none"),
    latent_eps=1e-5,
)
_KIMI_K3 = replace(
    _KIMI_LINEAR,
    hidden_size=7168,
    num_layers=93,
    num_heads=96,
    q_lora_rank=1536,
    output_gate="element",
)
# These two: the defaults of the config classes of engines, as no config.json was at hand.
_SARVAM = replace(
    _V3,
    model_type="sarvam_mla",
    hidden_size=4096,
    num_layers=32,
    num_heads=64,
    q_lora_rank=None,
    max_positions=131072,
)
_PANGU = replace(
    _V3,
    model_type="pangu_ultra_moe",
    hidden_size=7680,
    max_positions=131072,
    rope=RopeConfig(theta=25.6e6),
    latent_eps=1e-5,
)
_MISTRAL4 = MLAConfig(
    model_type="mistral4",
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    q_lora_rank=1024,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_positions=1048576,
    rope=_YARN_MISTRAL4,
    llama4_beta=0.1,
    llama4_positions=8192,
)


def _v4_pro() -> MLAConfig:
    assert _V4_FLASH.indexer is not None and _V4_FLASH.compressor is not None
    return replace(
        _V4_FLASH,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        q_lora_rank=1536,
        indexer=replace(_V4_FLASH.indexer, topk=1024),
        compressor=replace(
            _V4_FLASH.compressor, ratios=(128, 128) + (4, 128) * 29 + (4,), output_groups=16
        ),
    )


def _tiny(config: MLAConfig, *, R: int = 8) -> MLAConfig:
    """Return the same kind of attention with dimensions small enough for CPU tests."""
    rope = config.rope
    if rope.kind == "longrope":
        short = rope.short_factor[: R // 2]
        rope = replace(rope, short_factor=short, long_factor=(2.0,) * (R // 2))
    indexer, compressor = config.indexer, config.compressor
    if indexer is not None:
        # 16 heads: with fewer, scores of exactly 0 tie (a key that is positive in no head).
        shared = (False, False, True) if indexer.shared else ()
        indexer = replace(indexer, num_heads=16, head_dim=16, topk=32, shared=shared)
    scaled = config.latent_factor != 1
    width = 32 if compressor is not None else 24
    if compressor is not None:
        compressor = replace(
            compressor, ratios=(0, 4, 128), window=32, output_groups=2, output_lora_rank=16
        )
    return replace(
        config,
        hidden_size=64,
        num_layers=3 if config.model_type != "longcat_flash" else 4,
        num_heads=4,
        q_lora_rank=None if config.q_lora_rank is None else 16,
        kv_lora_rank=32,
        qk_nope_head_dim=width - R if compressor is not None else 16,
        qk_rope_head_dim=R,
        v_head_dim=width,
        rope=rope,
        q_factor=2.0 if scaled else 1.0,
        latent_factor=2**0.5 if scaled else 1.0,
        indexer=indexer,
        compressor=compressor,
    )


PRESETS: dict[str, MLAConfig] = _Presets()
PRESETS |= {
    "deepseek-v2": _V2,
    "deepseek-v2-lite": replace(
        _V2, hidden_size=2048, num_layers=27, num_heads=16, q_lora_rank=None
    ),
    "deepseek-v3": _V3,
    "deepseek-r1": _V3,
    "deepseek-v3.2": replace(
        _V3,
        model_type="deepseek_v32",
        indexer=IndexerConfig(num_heads=64, head_dim=128, topk=2048, pairing="halves"),
    ),
    "deepseek-v4-flash": _V4_FLASH,
    "deepseek-v4-pro": _v4_pro(),
    "kimi-k2": replace(_V3, num_heads=64, max_positions=131072, rope=_YARN_KIMI),
    "kimi-linear": _KIMI_LINEAR,
    "kimi-k3": _KIMI_K3,
    "sarvam-105b": _SARVAM,
    "pangu-ultra-moe": _PANGU,
    "glm-4.7-flash": replace(
        _GLM5,
        model_type="glm4_moe_lite",
        hidden_size=2048,
        num_layers=47,
        num_heads=20,
        q_lora_rank=768,
        indexer=None,
    ),
    "glm-5": _GLM5,
    "glm-5.2": replace(
        _GLM5,
        max_positions=1048576,
        rope=RopeConfig(theta=8e6),
        indexer=IndexerConfig(
            num_heads=32,
            head_dim=128,
            topk=2048,
            pairing="pairs",
            shared=(False, False) + (False, True, True, True) * 19,
        ),
    ),
    "longcat-flash": _LONGCAT,
    "minicpm3": _MINICPM3,
    "mistral-4": _MISTRAL4,
}
PRESETS |= {
    "tiny-v2-lite": _tiny(PRESETS["deepseek-v2-lite"]),
    "tiny-v3": _tiny(PRESETS["deepseek-v3"]),
    "tiny-v3.2": _tiny(PRESETS["deepseek-v3.2"]),
    "tiny-v4": _tiny(PRESETS["deepseek-v4-flash"]),
    "tiny-glm": _tiny(PRESETS["glm-4.7-flash"]),
    "tiny-glm-5.2": _tiny(PRESETS["glm-5.2"]),
    "tiny-longcat": _tiny(PRESETS["longcat-flash"]),
    "tiny-minicpm3": _tiny(PRESETS["minicpm3"]),
    "tiny-mistral4": _tiny(PRESETS["mistral-4"]),
    "tiny-kimi-linear": _tiny(PRESETS["kimi-linear"]),
    "tiny-kimi-k3": _tiny(PRESETS["kimi-k3"]),
    "tiny-gigachat3.5": replace(
        _tiny(_LONGCAT),
        model_type="gigachat3_5",
        num_layers=3,
        rope=RopeConfig(theta=100000.0),
        latent_eps=1e-6,
        output_gate="element",
        norm_gate=2.0,
    ),
}
