"""PRESETS: a dict whose KeyError helps; what a config looks like."""

from __future__ import annotations

import pytest

from openmla import PRESETS, ConfigError, MLAConfig


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("deepseek-v33", "deepseek-v3"),
        ("DeepSeek_V3", "deepseek-v3"),
        ("kimi", "kimi-k2"),
        ("glm5", "glm-5"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(KeyError) as error:
        PRESETS[name]
    assert isinstance(error.value, ConfigError)
    text = str(error.value)
    assert text.startswith(f"config: preset {name!r} is not known. Nearest: ")
    assert near in text.split("Nearest: ")[1].split(". list")[0].split(", ")
    assert text.endswith(" list(openmla.PRESETS) has all.")


def test_nothing_is_near_nonsense() -> None:
    with pytest.raises(KeyError) as error:
        PRESETS["qqqqqqqqqqqq"]
    assert str(error.value) == (
        "config: preset 'qqqqqqqqqqqq' is not known. list(openmla.PRESETS) has all."
    )


def test_it_is_a_dict_all_the_same() -> None:
    assert isinstance(PRESETS, dict) and "nope" not in PRESETS and PRESETS.get("nope") is None
    assert all(isinstance(config, MLAConfig) for config in PRESETS.values())
    with pytest.raises(KeyError):
        PRESETS.pop("nope")


def test_reprs_say_what_tells_models_apart() -> None:
    assert repr(PRESETS["deepseek-v3"]) == (
        "MLAConfig(deepseek_v3: 61 layers, 128 heads, hidden 7168; q_lora 1536, C=512, P=128, R=64,"
        " V=128; rope yarn 40, 163840 positions)"
    )
    text = repr(PRESETS["deepseek-v4-flash"])
    assert "indexer of 64 heads, DI=128, K=512; window 128, compress ratios 0/4/128" in text
    assert all(len(repr(config)) < 240 for config in PRESETS.values())
