"""Models of the Hugging Face Hub: a model ID's files, through the local Hub cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from openmla.cli.terminal import note
from openmla.config.huggingface import read_config
from openmla.errors import ConfigError, OpenMLAError

ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt"]
PICKLES = ["pytorch_model*.bin"]


def is_hub_id(name: str) -> bool:
    """Whether a name is owner/model and not a local path."""
    return ID.fullmatch(name) is not None and not os.path.exists(name)


def stay_offline(name: str) -> None:
    """Prevent requests to the Hub for a local model. Call it before transformers is imported."""
    if not is_hub_id(name):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def fetched(
    name: str, *, revision: str | None = None, allow_pickle: bool = False, weights: bool = True
) -> Path:
    """The folder with a model ID's files. Weights are fetched once the config has been read."""
    from huggingface_hub import hf_hub_download, logging, snapshot_download

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # otherwise each failed attempt prints a line
    note(f"{name} is not a local folder: looking it up on the Hugging Face Hub")
    try:
        config = hf_hub_download(name, "config.json", revision=revision)
        read_config(Path(config).parent, rotated=True)
        if not weights:
            return Path(config).parent
        patterns = FILES + (PICKLES if allow_pickle else [])
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except OpenMLAError:
        raise
    except Exception as error:  # any type: no network, no such ID, no permission, no space
        reason = str(error).strip().splitlines() or [type(error).__name__]
        first = reason[0].split(". ")[0].rstrip(".")
        raise ConfigError(
            f"model {name!r} cannot be fetched from the Hugging Face Hub: {first}. Check the model "
            "ID, or give a local folder."
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def called(folder: Path) -> str:
    """A folder's display name: its own, or the model ID if it is in the Hub's cache."""
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
