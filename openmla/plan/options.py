"""PlanOptions: the options of a plan, and which of them can be combined.

Everything else that make_plan() takes is a resource: buffers, a workspace, another plan, ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from openmla.backends.choice import BackendChoice, check_backend_choice
from openmla.config import MLAConfig
from openmla.errors import ConfigError

FORMS = ("auto", "absorbed", "expanded", "chosen")
CONTEXTS = ("auto", "place", "gather")
FrozenChoice = str | frozenset[tuple[str, str]]


@dataclass(frozen=True)
class PlanOptions:
    """The arguments of make_plan() under the same names; hashable."""

    dtype: torch.dtype | None = None
    backend: FrozenChoice = "auto"
    form: str = "auto"
    workspace_tokens: int | None = None
    batch_invariant: bool = False
    compiled: bool = False
    output: str | None = None
    query_dtype: str | None = None
    prefill_dtype: str | None = None
    context: str = "auto"

    @property
    def uniform(self) -> bool:
        """Whether the ops that attend to a request must not depend on its length."""
        return self.compiled or self.batch_invariant


def frozen(backend: BackendChoice) -> FrozenChoice:
    """The requested backends in a hashable form."""
    check_backend_choice("plan", backend)
    return backend if isinstance(backend, str) else frozenset(backend.items())


def thawed(backend: FrozenChoice) -> BackendChoice:
    return backend if isinstance(backend, str) else dict(backend)


class Combination(NamedTuple):
    """The options of one plan, and which resources it has."""

    options: PlanOptions
    config: MLAConfig
    captured: bool = False  # into= is given
    beside: bool = False
    over_ranks: bool = False

    @property
    def v4(self) -> bool:
        return self.config.compressor is not None


class Refusal(NamedTuple):
    """An unsupported combination and the reason, both shown in docs/support.md."""

    name: str  # the argument that the error names
    what: str  # a short form for the table
    applies: Callable[[Combination], bool]
    sentence: Callable[[Combination], str]


REFUSALS = (
    Refusal(
        "compiled",
        "compiled with into=",
        lambda asked: asked.options.compiled and asked.captured,
        lambda asked: "must be False with into=, whose sizes never change.",
    ),
    Refusal(
        "workspace_tokens",
        "workspace_tokens for V4",
        lambda asked: asked.v4 and asked.options.workspace_tokens is not None,
        lambda asked: f"must be None for {asked.config.model_type}, which expands nothing.",
    ),
    Refusal(
        "form",
        "expanded or chosen form for V4",
        lambda asked: asked.v4 and asked.options.form not in ("auto", "absorbed"),
        lambda asked: (
            f"must be auto or absorbed for {asked.config.model_type}, got {asked.options.form!r}."
        ),
    ),
    Refusal(
        "form",
        "expanded form with into=",
        lambda asked: asked.captured and asked.options.form == "expanded",
        lambda asked: "must be auto or absorbed with into=, got 'expanded'.",
    ),
    Refusal(
        "form",
        "form='chosen' over ranks",
        lambda asked: asked.over_ranks and asked.options.form == "chosen",
        lambda asked: (
            "must be auto, absorbed or expanded over ranks, got 'chosen': ranks select keys "
            "together."
        ),
    ),
    Refusal(
        "ranks",
        "ranks for layers with a window",
        lambda asked: asked.over_ranks and asked.config.window > 0,
        lambda asked: f"must be None for layers with a window of {asked.config.window} tokens.",
    ),
    Refusal(
        "context",
        "context='gather' with into=, over ranks",
        lambda asked: asked.captured and asked.options.context == "gather",
        lambda asked: (
            "must be auto or place with into=, got 'gather': the size of the gathered context "
            "changes in every step."
        ),
    ),
    Refusal(
        "beside",
        "beside= for models other than V4",
        lambda asked: asked.beside and not asked.v4,
        lambda asked: f"must be None for {asked.config.model_type}: one plan serves all layers.",
    ),
    Refusal(
        "beside",
        "beside= over ranks",
        lambda asked: asked.beside and asked.over_ranks,
        lambda asked: "must be None over ranks: block tables differ by compress ratio.",
    ),
    Refusal(
        "query_dtype",
        "fp8 queries for V4",
        lambda asked: asked.v4 and asked.options.query_dtype is not None,
        lambda asked: (
            f"must be None for {asked.config.model_type}, got {asked.options.query_dtype!r}: its "
            "rows mix fp8 and bf16 values, which no kernel multiplies in one product."
        ),
    ),
    Refusal(
        "prefill_dtype",
        "fp8 prefill for V4",
        lambda asked: asked.v4 and asked.options.prefill_dtype is not None,
        lambda asked: f"must be None for {asked.config.model_type}: it expands nothing.",
    ),
    Refusal(
        "prefill_dtype",
        "fp8 prefill with into=",
        lambda asked: asked.captured and asked.options.prefill_dtype is not None,
        lambda asked: "must be None with into=, which supports only the absorbed form.",
    ),
)


NOTHING_ELSE = (False, False, False)


def _is_plain(options: PlanOptions) -> bool:
    """Whether no refusal can apply."""
    form, context, dtype = options.form, options.context, options.prefill_dtype
    return form in FORMS and context == "auto" and dtype is None


def check_combination(where: str, asked: Combination) -> None:
    """Raise for the first unsupported combination."""
    options = asked.options
    if not asked.v4 and asked[2:] == NOTHING_ELSE and _is_plain(options):
        return  # decode, at every step
    for name, value, known in (
        ("form", options.form, FORMS),
        ("context", options.context, CONTEXTS),
    ):
        if value not in known:
            names = ", ".join(map(str, known[:-1]))
            raise ConfigError(f"{where}: {name} must be {names} or {known[-1]}, got {value!r}.")
    if options.prefill_dtype not in (None, "fp8"):
        raise ConfigError(
            f"{where}: prefill_dtype must be 'fp8' or None, got {options.prefill_dtype!r}."
        )
    for refusal in REFUSALS:
        if refusal.applies(asked):
            raise ConfigError(f"{where}: {refusal.name} {refusal.sentence(asked)}")
