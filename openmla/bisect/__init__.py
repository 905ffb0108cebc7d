"""Find the wrong component of a model's attention: compare each with float64 on its own inputs.

dump = record(model, tokens)            # openmla's own steps, or read_dump(file)
verdicts = compare(model, dump)         # one per layer and component
first_wrong(verdicts)                   # None: all are within their budgets
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from openmla.bisect.dump import Dump, Settings, read_dump
from openmla.bisect.judge import Verdict
from openmla.bisect.reference import Reference, check_prompt

__all__ = [
    "Dump",
    "Reference",
    "Settings",
    "Verdict",
    "check_prompt",
    "compare",
    "first_wrong",
    "read_dump",
    "record",
    "reference_of",
]


def reference_of(model: Any) -> Reference:
    """The weights and config of a transformers model that is not attached."""
    from openmla.integrations.options import AttachOptions
    from openmla.integrations.transformers.check import check_model

    attachment = check_model(model, AttachOptions())
    reference = Reference(attachment.config, attachment.modules)
    reference.check()
    return reference


def record(model: Any, tokens: Any, **options: Any) -> Dump:
    """Dump openmla's own steps over tokens [T], with attach()'s options."""
    from openmla.bisect.recorder import record

    return record(model, tokens, **options)


def compare(model: Any, dump: Dump) -> list[Verdict]:
    """A verdict for every component of every layer of a dump, in order."""
    return list(reference_of(model).judge(dump))


def first_wrong(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The first component that exceeds its budget."""
    return next((verdict for verdict in verdicts if verdict.wrong), None)
