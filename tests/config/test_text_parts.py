"""from_hf reads a model around a text model by its text part, and refuses it by that one's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openmla import PRESETS, ConfigError, MLAConfig
from tests.config.checkpoints import CHECKPOINTS

transformers = pytest.importorskip("transformers")
MISTRAL4 = CHECKPOINTS["mistral-4"]


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
@pytest.mark.parametrize("name", ["mistral-4", "kimi-k2", "deepseek-v2", "deepseek-v4-flash"])
def test_every_name_of_the_text_part(part: str, name: str) -> None:
    text = CHECKPOINTS[name]
    assert MLAConfig.from_hf({"model_type": "wrapper", part: text}) == PRESETS[name]
    nested = {"model_type": "omni", "thinker_config": {"model_type": "omni_thinker", part: text}}
    assert MLAConfig.from_hf(nested) == PRESETS[name]


def test_wrapper_objects_and_their_files(tmp_path: Path) -> None:
    """Mistral Small 4: mistral3 around mistral4, as object, as text object, and as saved."""
    from transformers import Mistral3Config

    theirs = Mistral3Config(text_config=CHECKPOINTS["mistral-4"])
    assert MLAConfig.from_hf(theirs) == PRESETS["mistral-4"]
    assert MLAConfig.from_hf(theirs.get_text_config()) == PRESETS["mistral-4"]
    theirs.save_pretrained(tmp_path)
    assert MLAConfig.from_hf(tmp_path) == PRESETS["mistral-4"]


def test_objects_that_know_their_text_part() -> None:
    """A class of its own may keep the text config anywhere; get_text_config() finds it."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    class Wrapper(PreTrainedConfig):  # type: ignore[misc]
        model_type = "wrapper"

        def get_text_config(self, **options: Any) -> Any:
            return self.reader

    theirs = Wrapper()
    theirs.reader = CONFIG_MAPPING["deepseek_v3"]()
    assert MLAConfig.from_hf(theirs) == MLAConfig.from_hf(theirs.reader)
    theirs.reader = CONFIG_MAPPING["llama"]()
    with pytest.raises(ConfigError, match="model_type 'llama', the text model of 'wrapper', is n"):
        MLAConfig.from_hf(theirs)


@pytest.mark.parametrize("text_type", ["mistral", "glm5_next_text"])
def test_other_text_models_are_refused_by_name(text_type: str) -> None:
    text = {**MISTRAL4, "model_type": text_type}
    for source, of in (
        (text, ""),
        ({"model_type": "mistral3", "text_config": text}, ", the text model of 'mistral3',"),
    ):
        with pytest.raises(ConfigError) as error:
            MLAConfig.from_hf(source)
        assert f"config: model_type {text_type!r}{of} is not supported" in str(error.value)


def test_default_wrapper_of_transformers_is_refused_by_its_text_model() -> None:
    from transformers import Mistral3Config

    with pytest.raises(ConfigError, match="model_type 'mistral', the text model of 'mistral3', is"):
        MLAConfig.from_hf(Mistral3Config())


def test_a_text_model_is_not_guessed() -> None:
    """Kimi K2.5 alone means DeepSeek V3 where its text part does not say."""
    text = {name: value for name, value in CHECKPOINTS["kimi-k2"].items() if name != "model_type"}
    wrapped = {"model_type": "kimi_k25", "text_config": text}
    assert MLAConfig.from_hf(wrapped) == PRESETS["kimi-k2"]
    message = "config: text_config of 'mistral3' has no model_type"
    with pytest.raises(ConfigError, match=message):
        MLAConfig.from_hf({**wrapped, "model_type": "mistral3"})
    with pytest.raises(ConfigError, match="text_config is missing for kimi_k25"):
        MLAConfig.from_hf({"model_type": "kimi_k25"})


def test_several_text_models_are_refused() -> None:
    from transformers import PreTrainedConfig

    theirs = PreTrainedConfig()
    theirs.decoder = theirs.text_config = PreTrainedConfig()
    with pytest.raises(ConfigError, match="config: the model has several text models: "):
        MLAConfig.from_hf(theirs)
