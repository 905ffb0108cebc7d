"""Streamed tokens: as whole characters, on the terminal, with arrival times."""

from __future__ import annotations

import sys
import time
from typing import Any

from torch import Tensor

from openmla.cli.terminal import shows_progress

HALF = "\N{REPLACEMENT CHARACTER}"  # a partial character decodes to this


class TextStream:
    """Text of streamed tokens; all parts joined are the text of all tokens.

    A tokenizer may decode a token differently after another one, such as spaces between words.
    Therefore each part is decoded together with the previous one, and a character is printed when
    it is complete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.before = self.shown = 0  # start and end of the previous part

    def put(self, new: list[int], *, last: bool = False) -> str:
        """The text that can be printed now."""
        self.tokens += new
        known = self._decode(self.tokens[self.before : self.shown])
        whole = self._decode(self.tokens[self.before :])
        if not last and whole.endswith(HALF):
            return ""
        self.before, self.shown = self.shown, len(self.tokens)
        return whole[len(known) :]

    def end(self) -> str:
        """The rest, even if it is a partial character."""
        return self.put([], last=True)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Watch:
    """A streamer for generate() that prints text and records the time of every token."""

    def __init__(self, tokenizer: Any, *, shown: bool, num_tokens: int) -> None:
        self.stream, self.shown, self.num_tokens = TextStream(tokenizer), shown, num_tokens
        self.parts: list[str] = []
        self.times = [time.perf_counter()]
        self.prompt_passed = False

    @property
    def tokens(self) -> list[int]:
        return self.stream.tokens

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def put(self, value: Tensor) -> None:
        if not self.prompt_passed:  # generate() sends the prompt first
            self.prompt_passed = True
            return
        new = value.flatten().tolist()  # waits for the device
        self.times.append(time.perf_counter())
        self._tell(self.stream.put(new))
        if not self.shown and shows_progress():
            line = f"\r{len(self.tokens)} of {self.num_tokens} tokens"
            print(line, end="", file=sys.stderr, flush=True)

    def _tell(self, text: str) -> None:
        self.parts.append(text)
        if self.shown:
            print(text, end="", flush=True)

    def end(self) -> None:
        self._tell(self.stream.end())
        if self.shown:
            print(flush=True)
        elif shows_progress():
            print(file=sys.stderr, flush=True)


class PrefillProgress:
    """Shows progress for a long prompt on stderr."""

    def __init__(self, num_tokens: int, chunk: int) -> None:
        self.num_tokens, self.chunk, self.seen = num_tokens, chunk, 0

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        self.seen += 0 if ids is None else ids.shape[1]
        if self.num_tokens > self.chunk and self.seen <= self.num_tokens and shows_progress():
            end = "\n" if self.seen == self.num_tokens else ""
            text = f"\rprefill {self.seen} of {self.num_tokens} tokens"
            print(text, end=end, file=sys.stderr, flush=True)
