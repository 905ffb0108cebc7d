"""Prompts for the command line: from options, files or standard input, plain or as a chat."""

from __future__ import annotations

import argparse
import select
import sys
from typing import Any

from openmla.cli.checkpoint import read_text
from openmla.cli.models import ByteTokenizer, demo_prompt
from openmla.cli.terminal import note
from openmla.errors import ConfigError, UnsupportedError

Messages = list[dict[str, str]]
PATIENCE = 1.0  # seconds to wait for piped text if there is a default prompt


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The texts to continue; none for an interactive chat."""
    if options.prompt:
        if options.prompt.count("-") > 1:
            raise ConfigError(
                "generate: --prompt - is given more than once, but there is only one standard "
                "input. Give it once."
            )
        return [read_prompt(text, options.model, "generate") for text in options.prompt]
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    if options.chat and at_terminal and not (options.json or options.quiet or options.compare):
        return []
    return [read_prompt(None, options.model, "generate")]


def read_prompt(prompt: str | None, model: str, command: str) -> str:
    """One text: given, from @FILE, from standard input if it is - or piped, or the demo's own."""
    if prompt is None and model == "demo":
        text = _standard_input(command) if _is_waiting() else ""
        if not text:
            note("no prompt given: using the demo's own")
        text = text or demo_prompt()
    elif prompt == "-" or (prompt is None and sys.stdin is not None and not sys.stdin.isatty()):
        if not _is_waiting():
            note("waiting for a prompt on standard input")
        text = _standard_input(command)
        if not text:
            raise ConfigError(
                f"{command}: no prompt: standard input is empty. Give --prompt TEXT or @FILE."
            )
    elif not prompt:
        what = "no prompt is given" if prompt is None else "--prompt is empty"
        raise ConfigError(f"{command}: {what}. Give --prompt TEXT or @FILE, or pipe a text in.")
    elif prompt.startswith("@"):
        text = read_text(f"{command}: --prompt", prompt[1:])
    else:
        text = prompt
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # command-line bytes that are not text
            raise ConfigError(f"{command}: --prompt must be text in UTF-8: {error}.") from error
    if not text.strip():
        raise ConfigError(
            f"{command}: the prompt is only white space, {text[:20]!r}. Give a text to continue."
        )
    return text


def _is_waiting() -> bool:
    """Whether standard input has text or has ended. A pipe without a writer has neither: the demo,
    which needs no input, must not wait for it."""
    try:
        return not sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], PATIENCE)[0])
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return False


def _standard_input(command: str) -> str:
    """Read all of standard input, without the final newline."""
    try:
        text = sys.stdin.buffer.read().decode() if hasattr(sys.stdin, "buffer") else ""
    except (OSError, ValueError) as error:  # closed, or not text
        raise ConfigError(f"{command}: standard input must be text in UTF-8: {error}.") from error
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
    """The first messages of a conversation."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def encode(tokenizer: Any, text: str, options: argparse.Namespace) -> list[int]:
    """Tokens of a text, as a user's message in chat mode."""
    if not options.chat:
        return list(tokenizer.encode(text))
    return encode_chat(tokenizer, messages(text, options.system_prompt))


def encode_chat(tokenizer: Any, history: Messages) -> list[int]:
    """Tokens of a conversation, up to the start of the model's next message."""
    try:
        found = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is code written by the model's authors
        raise ConfigError(
            f"--chat: the chat template rejects this conversation: {type(error).__name__}: {error}"
        ) from error
    return list(found)
