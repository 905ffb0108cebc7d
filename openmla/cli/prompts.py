"""Prompts of the command line: given, from files or standard input, plain or as a chat."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from openmla.cli.checkpoint import read_text
from openmla.cli.models import ByteTokenizer, demo_prompt
from openmla.cli.terminal import note
from openmla.errors import ConfigError, UnsupportedError

Messages = list[dict[str, str]]


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The texts to continue; none where a chat is to be held with whoever is at the terminal."""
    if options.prompt:
        if options.prompt.count("-") > 1:
            raise ConfigError("generate: --prompt - must be given once: there is one input.")
        return [read_prompt(text, "generate") for text in options.prompt]
    if options.model == "demo" and not options.chat:
        note("the demo's own prompt; --prompt - reads standard input")
        return [demo_prompt()]
    if sys.stdin is not None and not sys.stdin.isatty():
        return [read_prompt("-", "generate")]
    if options.chat and not (options.json or options.quiet or options.compare):
        return []
    raise ConfigError("generate: --prompt must be given, and not be empty.")


def read_prompt(prompt: str | None, command: str) -> str:
    """One text: given, of @FILE, or of standard input if it is -."""
    if not prompt:
        raise ConfigError(f"{command}: --prompt must be given, and not be empty.")
    if prompt == "-":
        text = _standard_input(command)
    elif prompt.startswith("@"):
        text = read_text(f"{command}: --prompt", prompt[1:])
    else:
        text = prompt
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of a command line that are no text
            raise ConfigError(f"{command}: --prompt must be text in UTF-8: {error}.") from error
    if not text.strip():
        raise ConfigError(f"{command}: --prompt must hold more than white space.")
    return text


def _standard_input(command: str) -> str:
    """All of it, less the newline that ends the last line."""
    try:
        text = sys.stdin.buffer.read().decode() if hasattr(sys.stdin, "buffer") else ""
    except (OSError, ValueError) as error:  # closed, or bytes that are no text
        raise ConfigError(f"{command}: standard input must be text in UTF-8: {error}.") from error
    if not text:
        raise ConfigError(f"{command}: --prompt must be given, for standard input is empty.")
    return text.removesuffix("\n")


def check_chat(tokenizer: Any, name: str) -> None:
    if isinstance(tokenizer, ByteTokenizer):
        raise UnsupportedError(f"{name}: --chat needs a tokenizer, and the folder has none.")
    if not getattr(tokenizer, "chat_template", None):
        raise UnsupportedError(
            f"{name}: --chat needs a tokenizer with a chat template, and this one has none. "
            "Leave --chat out to continue a text."
        )


def messages(text: str, system: str | None) -> Messages:
    """A conversation's beginning."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def encode(tokenizer: Any, text: str, options: argparse.Namespace) -> list[int]:
    """Tokens of a text, as a user's message where a chat is wanted."""
    if not options.chat:
        return list(tokenizer.encode(text))
    return encode_chat(tokenizer, messages(text, options.system_prompt))


def encode_chat(tokenizer: Any, history: Messages) -> list[int]:
    """Tokens of a conversation, up to where the model's next message begins."""
    try:
        found = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program of the model's authors
        raise ConfigError(
            f"--chat: the chat template refused this conversation: {type(error).__name__}: {error}"
        ) from error
    return list(found)
