"""The public API as help() shows it: summaries, documented parameters, and examples that run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import openmla
from openmla import attention, layers, ops, parallel, plan
from openmla.integrations.options import AttachOptions
from openmla.testing import poisoned_memory

EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:(?:    .*)?\n?)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): ", re.MULTILINE)

# What has an example in its docstring, besides all functions of openmla: classes, methods, ops.
MAIN = (
    "BlockPool", "CompressedPool", "Batch", "MLAAttention", "MLAAttentionV4", "MLAConfig",
    "MLAConfig.from_hf", "MLAConfig.from_numbers", "IndexerConfig", "DecodePlanner", "PagedCache",
    "QuantizedOutput", "RopeTable", "Scales", "Workspace", *ops.__all__,
)  # fmt: skip
FUNCTIONS = [name for name in openmla.__all__ if inspect.isfunction(getattr(openmla, name))]


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes of the public modules, and methods of the classes, by name."""
    for module in (openmla, attention, layers, ops, parallel, plan):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield name, found
            if inspect.isclass(found):
                for attribute in vars(found):
                    member = getattr(found, attribute)
                    called = inspect.isfunction(member) or inspect.ismethod(member)
                    if called and not attribute.startswith("_"):
                        yield f"{name}.{attribute}", member


PUBLIC = dict(public())


def text(name: str) -> str:
    return inspect.getdoc(PUBLIC[name]) or ""


def section(name: str, *titles: str) -> str:
    return "".join(body for title, body in SECTION.findall(text(name)) if title in titles)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_begin_with_a_sentence(name: str) -> None:
    doc = inspect.cleandoc(PUBLIC[name].__doc__ or "")
    assert not doc.startswith(f"{name}("), "the signature that dataclasses write"
    summary = doc.split("\n\n")[0]
    assert summary[:1].isupper() and summary.endswith("."), f"{name}: {summary!r}"


@pytest.mark.parametrize("name", [name for name in PUBLIC if section(name, "Args", "Attributes")])
def test_parameters_are_documented_once_and_all(name: str) -> None:
    documented = ENTRY.findall(section(name, "Args", "Attributes"))
    found = PUBLIC[name]
    wanted = [each for each in inspect.signature(found).parameters if each != "self"]
    assert [each for each in documented if each in wanted] == wanted
    assert set(documented) <= {*wanted, *getattr(found, "__dataclass_fields__", ())}


def test_attach_shows_its_options() -> None:
    parameters = list(inspect.signature(openmla.attach).parameters.values())[1:]
    assert all(each.kind is each.KEYWORD_ONLY for each in parameters)
    shown = {each.name: each.default for each in parameters}
    assert shown == AttachOptions._field_defaults
    assert tuple(shown) == AttachOptions._fields
    annotations = AttachOptions.__annotations__
    assert all(each.annotation is not each.empty for each in parameters) and len(annotations) == 13


EXAMPLES = [pytest.param(code, id=name) for name in PUBLIC for code in EXAMPLE.findall(text(name))]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str) -> None:
    if "transformers" in code:
        pytest.importorskip("transformers")
    with torch.inference_mode(False), poisoned_memory(on=False):  # as readers run it
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", [*FUNCTIONS, *MAIN])
def test_main_entry_points_have_an_example(name: str) -> None:
    assert EXAMPLE.search(text(name))


@pytest.mark.parametrize("name", ops.__all__)
def test_ops_document_arguments_results_and_errors(name: str) -> None:
    found = PUBLIC[name]
    assert section(name, "Args", "Attributes")
    if inspect.isfunction(found):
        returns = inspect.signature(found, eval_str=True).return_annotation
        assert bool(section(name, "Returns")) == (returns is not None)
        assert section(name, "Raises")
