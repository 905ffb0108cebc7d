"""docs/bisect.md: its hook writes dumps of transformers' own models, its tables are complete."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from openmla.bisect import Settings, compare, first_wrong, read_dump, reference_of
from openmla.bisect.dump import OF_ALL
from openmla.bisect.report import sentence
from tests.bisect.models import prompt
from tests.integrations.models import make_model, make_sparse, make_v4

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "bisect.md"


def test_the_page_stays_short_and_names_everything() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 200
    models = (make_sparse("deepseek_v32"), make_v4())
    keys = {key for model in models for i in range(3) for key in reference_of(model).components(i)}
    for name in (*keys, *OF_ALL, *(field.name for field in fields(Settings))):
        assert f"`{name}`" in text, f"the page does not name {name}"


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_the_hook(family: str, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, PAGE.name, "exec"), names)
    model = make_model(family) if family == "deepseek_v3" else make_sparse(family)
    path = str(tmp_path / "dump.safetensors")
    names["dump"](model, prompt(50)[None], path)
    verdicts = compare(model, read_dump(path))
    assert first_wrong(verdicts) is None, sentence(verdicts, "transformers")
    judged = {verdict.component.name for verdict in verdicts if verdict.judged}
    assert {"q_a", "q_a_normed", "q", "kv_a", "kv_c", "out", "output"} <= judged
    if family == "deepseek_v32":
        assert {"index_q", "index_k", "index_k_normed", "index_weights", "chosen"} <= judged
    wrong = make_model(family, seed=1) if family == "deepseek_v3" else make_sparse(family, seed=1)
    first = first_wrong(compare(wrong, read_dump(path)))
    assert first is not None and (first.layer, first.component.name) == (0, "q_a")
