"""Loads a config as a dict, finds the part of its text model, and reads typed fields."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from openmla.config.schema import is_finite
from openmla.errors import ConfigError

Fields = Mapping[str, Any]

# Fields in which wrappers around a text model (vision, audio) store its config.
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
# Model type of the text part, for wrappers whose text part has none.
UNSAID_TEXT = {"kimi_k25": "deepseek_v3"}


def text_fields(source: Any) -> tuple[Fields, str | None]:
    """Return the fields of the text model, and the model_type of the wrapper around it, if any."""
    wrapper = None
    text_config: Callable[[], Any] | None = getattr(source, "get_text_config", None)
    if text_config is not None:
        try:
            text = text_config()
        except ValueError as error:  # several text models
            raise ConfigError(f"config: the model has several text models: {error}") from error
        if text is not source:
            wrapper, source = str(getattr(source, "model_type", None)), text
    fields = _fields(source)
    while name := next((n for n in TEXT_PARTS if isinstance(fields.get(n), Mapping)), None):
        wrapper, fields = str(fields.get("model_type") or wrapper), fields[name]
        if fields.get("model_type") is None and not any(part in fields for part in TEXT_PARTS):
            if wrapper not in UNSAID_TEXT:
                raise ConfigError(
                    f"config: {name} of {wrapper!r} has no model_type. Add it, or pass the "
                    "config of the text model."
                )
            fields = {**fields, "model_type": UNSAID_TEXT[wrapper]}
    return fields, wrapper


def _fields(source: Any) -> Fields:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if os.path.isdir(path):
            path = os.path.join(path, "config.json")
        try:
            with open(path, encoding="utf-8") as file:
                loaded = json.load(file)
        except OSError as error:
            raise ConfigError(
                f"config: cannot read {path!r}: {error.strerror}. Pass the path of a config.json "
                "or of its folder."
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"config: {path!r} is not valid JSON: {error}.") from error
        if not isinstance(loaded, dict):
            raise ConfigError(
                f"config: {path!r} must contain a JSON object, got {type(loaded).__name__}."
            )
        return loaded
    to_dict: Callable[[], Fields] | None = getattr(source, "to_dict", None)
    if to_dict is None:
        raise ConfigError(
            "config: source must be a dict, a path or a transformers config, got "
            f"{type(source).__name__}."
        )
    return to_dict()


def read_integer(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"config: {name} must be an integer, got {value!r}.")
    return value


def read_number(fields: Fields, name: str, default: float | None = None) -> float:
    value = fields.get(name)
    if value is None:
        value = default
    if not is_finite(value):
        raise ConfigError(f"config: {name} must be a finite number, got {value!r}.")
    assert value is not None
    return float(value)


def read_share(fields: Fields, name: str, default: float | None = None) -> float:
    value = read_number(fields, name, default)
    if not 0 <= value <= 1:
        raise ConfigError(f"config: {name} must be in 0..1, got {value!r}.")
    return value


def read_flag(fields: Fields, name: str, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config: {name} must be true or false, got {value!r}.")
    return value


def expect(fields: Fields, name: str, expected: object, reason: str) -> None:
    """Raise if a field is given and is not the supported value."""
    value = fields.get(name)
    if value is not None and value != expected:
        raise ConfigError(f"config: {name} must be {expected!r} {reason}, got {value!r}.")
