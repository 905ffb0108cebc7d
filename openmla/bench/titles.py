"""Titles of benchmark shapes: v3-tp8-decode-b64-s8k is for command lines, not for plots."""

from __future__ import annotations

import re

MODELS = {
    "v2-lite": "DeepSeek-V2-Lite",
    "v4-flash": "DeepSeek-V4-Flash",
    "v4-pro": "DeepSeek-V4-Pro",
    "v32": "DeepSeek-V3.2",
    "v3": "DeepSeek-V3",
    "v4": "DeepSeek-V4",
    "glm5": "GLM-5",
    "glm": "GLM-4.7-Flash",
    "tiny": "tiny",
}
# What a part of a name means; the first match counts.
PARTS = (
    (r"tp(\d+)", r"heads of one of \1 GPUs"),
    (r"cp(\d+)", r"one of \1 ranks"),
    (r"verify(\d+)", r"\1 draft tokens each"),
    (r"b(\d+)", r"\1 requests"),
    (r"s(\d+k?)", r"\1 keys each"),
    (r"k(\d+)", r"\1 selected keys"),
    (r"c(\d+)a?", r"one entry per \1 tokens"),
    (r"(\d+)x(\d+k)", r"\1 requests of \2 tokens"),
    (r"(\d+)x(\d+)", r"\1 tokens x \2"),
    (r"(\d+k?)", r"\1 tokens"),
    (r"score", "scores"),
    (r"ties", "equal scores"),
    (r"index", "indexer keys"),
    (r"chunk", "a chunk of the context"),
)


def in_words(shape: str) -> str:
    """A shape's name in words; parts without a known meaning are kept."""
    code = next((code for code in MODELS if f"{shape}-".startswith(f"{code}-")), None)
    if code is None:
        return shape  # already in words
    rest = shape[len(code) :].strip("-")
    rest = re.sub(r"(\d+k?)-on-(\d+k?)", r"\1 new tokens over \2 keys", rest)
    rest = re.sub(r"(\d+)-heads", r"\1 heads", rest)
    words = [_part(part) for part in rest.split("-") if part]
    return re.sub(r"\b1 (\w+)s\b", r"1 \1", ", ".join([MODELS[code], *words]))


def _part(part: str) -> str:
    for pattern, text in PARTS:
        if re.fullmatch(pattern, part):
            return re.sub(pattern, text, part)
    return part
