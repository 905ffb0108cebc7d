"""Models of a hub: the files of an id, through Hugging Face's own cache, if the network allows."""

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
    """Whether a name is owner/model and nothing on this disk."""
    return ID.fullmatch(name) is not None and not os.path.exists(name)


def stay_offline(name: str) -> None:
    """Nothing is asked of a hub for a model on disk. Before transformers loads, which reads it."""
    if not is_hub_id(name):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def fetched(name: str, *, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """The folder with an id's files. Weights come after the config has been understood."""
    from huggingface_hub import hf_hub_download, logging, snapshot_download

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # each failed attempt would have a line
    note(f"{name} is no folder here: asking the hub, or its cache on this disk")
    try:
        config = hf_hub_download(name, "config.json", revision=revision)
        read_config(Path(config).parent, rotated=True)
        patterns = FILES + (PICKLES if allow_pickle else [])
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except OpenMLAError:
        raise
    except Exception as error:  # of many kinds: no network, no such id, no permission, no room
        reason = str(error).strip().splitlines() or [type(error).__name__]
        first = reason[0].split(". ")[0].rstrip(".")
        raise ConfigError(
            "--model must be demo, a folder with config.json or an id that a hub has, "
            f"got {name!r}: {first}."
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def called(folder: Path) -> str:
    """What people call a folder: its name, of the hub's cache the id."""
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
