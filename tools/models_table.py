"""Tables of docs/models.md: every model type with MLA, where it exists, what openmla does with it.

`make table` writes them, with the other tables of support_table.
"""

from __future__ import annotations

from typing import NamedTuple

from openmla.config.families import FAMILIES, REFUSED, SUPPORTED

TRANSFORMERS, VLLM, SGLANG = "transformers", "vLLM", "SGLang"
WHERE = (TRANSFORMERS, VLLM, SGLANG)


class Model(NamedTuple):
    """The name of a model type, and which projects have it."""

    title: str
    where: tuple[str, ...]


EVERYWHERE = WHERE
ENGINES = (VLLM, SGLANG)

# Every entry of the table of families, by its model type.
TYPES = {
    "axk1": Model("A.X-K1", (TRANSFORMERS, VLLM)),
    "axk2": Model("A.X-K2", (TRANSFORMERS,)),
    "bailing_hybrid": Model("Ling 3.0", EVERYWHERE),
    "deepseek_v2": Model("DeepSeek V2, V2-Lite, V2.5", EVERYWHERE),
    "deepseek_v3": Model("DeepSeek V3, R1, V3.1", EVERYWHERE),
    "deepseek_v32": Model("DeepSeek V3.2", EVERYWHERE),
    "deepseek_v4": Model("DeepSeek V4", EVERYWHERE),
    "deepseek_v41": Model("DeepSeek V4.1", ENGINES),
    "dots3_note": Model("dots3, its flat `config.json`", EVERYWHERE),
    "dots3_note_text": Model("dots3", EVERYWHERE),
    "gigachat3_5": Model("GigaChat 3.5", (SGLANG,)),
    "glm4_moe_lite": Model("GLM-4.7-Flash", EVERYWHERE),
    "glm5_next_text": Model("GLM-5.3-Flash", EVERYWHERE),
    "glm_moe_dsa": Model("GLM-5.x", EVERYWHERE),
    "hy_v4": Model("HY V4", EVERYWHERE),
    "kimi_k2": Model("Kimi K2", ENGINES),
    "kimi_linear": Model("Kimi-Linear", EVERYWHERE),
    "longcat_flash": Model("LongCat-Flash", EVERYWHERE),
    "minicpm3": Model("MiniCPM3", EVERYWHERE),
    "mistral4": Model("Mistral 4", (TRANSFORMERS,)),
    "mistral_large4_text": Model("Mistral Large 4", (TRANSFORMERS,)),
    "pangu_ultra_moe": Model("openPangu Ultra MoE", (VLLM,)),
    "sarvam_mla": Model("Sarvam 105B", ENGINES),
    "youtu": Model("Youtu", (TRANSFORMERS,)),
}
# Models around one of these, and the model type of their text model.
WRAPPERS = {
    "bailing_moe_v3_vl": (Model("Ling 3.0 VL", ENGINES), "bailing_hybrid"),
    "deepseek_vl_v2": (Model("DeepSeek-VL2", ENGINES), "deepseek_v2"),
    "glm5_next": (Model("GLM-5.3-Flash", EVERYWHERE), "glm5_next_text"),
    "kimi_k25": (Model("Kimi K2.5", EVERYWHERE), "deepseek_v3"),
    "kimi_k3": (Model("Kimi K3", ENGINES), "kimi_linear"),
    "kimi_vl": (Model("Kimi-VL", ENGINES), "deepseek_v3"),
    "mistral3": (Model("Mistral Small 4", (TRANSFORMERS,)), "mistral4"),
    "mistral_large4": (Model("Mistral Large 4", (TRANSFORMERS,)), "mistral_large4_text"),
}


def places(model: Model) -> list[str]:
    """A cell per project."""
    return ["yes" if where in model.where else "" for where in WHERE]


def models_rows() -> list[list[str]]:
    """One row per model type, from the table of families."""
    rows = []
    for name, family in FAMILIES.items():
        kind = "dense" if family.indexer_pairing is None else "sparse"
        kind = "V4" if family.compressed else kind
        kind += ", sliding window" if family.by_layer else ""
        layer = "`MLAAttentionV4`" if family.compressed else "`MLAAttention`"
        attached = f"as `{family.reads_as}`" if family.reads_as else "yes"
        if family.unattached:
            attached = "no: " + family.unattached
        if family.unknown_gate:
            layer = "no: output gate"
        model = TYPES[name]
        rows.append([model.title, f"`{name}`", kind, *places(model), attached, layer])
    for name, why in REFUSED.items():
        model = TYPES[name]
        rows.append([model.title, f"`{name}`", "", *places(model), f"no: {why}", "no"])
    return rows


def wrappers_rows() -> list[list[str]]:
    """One row per model around a text model."""
    rows = []
    for name, (model, text) in WRAPPERS.items():
        attached = "yes" if text in SUPPORTED and TRANSFORMERS in model.where else "no"
        rows.append([model.title, f"`{name}`", f"`{text}`", *places(model), attached])
    return rows
