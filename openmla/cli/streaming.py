"""Streamed tokens: as whole characters, on the screen, and when each arrived."""

from __future__ import annotations

import sys
import time
from typing import Any

from torch import Tensor

from openmla.cli.terminal import shows_progress

HALF = "\N{REPLACEMENT CHARACTER}"  # what half a character decodes to


class TextStream:
    """Text of tokens that come one by one; all parts together are the text of all tokens.

    A tokenizer may write a token differently behind another one, as spaces between words. So each
    part is decoded together with the one before it, and a character is shown when it is whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.before = self.shown = 0  # where the part before begins, and where it ends

    def put(self, new: list[int], *, last: bool = False) -> str:
        """What can be shown now."""
        self.tokens += new
        known = self._decode(self.tokens[self.before : self.shown])
        whole = self._decode(self.tokens[self.before :])
        if not last and whole.endswith(HALF):
            return ""
        self.before, self.shown = self.shown, len(self.tokens)
        return whole[len(known) :]

    def end(self) -> str:
        """The rest, be it half a character."""
        return self.put([], last=True)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Watch:
    """A streamer of generate() that prints text and keeps the time of every token."""

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
    """Shows the progress of a long prompt on the error stream."""

    def __init__(self, num_tokens: int, chunk: int) -> None:
        self.num_tokens, self.chunk, self.seen = num_tokens, chunk, 0

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        self.seen += 0 if ids is None else ids.shape[1]
        if self.num_tokens > self.chunk and self.seen <= self.num_tokens and shows_progress():
            end = "\n" if self.seen == self.num_tokens else ""
            text = f"\rprefill {self.seen} of {self.num_tokens} tokens"
            print(text, end=end, file=sys.stderr, flush=True)
