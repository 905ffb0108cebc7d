"""This package's own steps: every family and format is within its budgets, and a fault is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openmla import ConfigError, ShapeError, UnsupportedError
from openmla.attention import attend_step
from openmla.bisect import (
    Dump,
    Settings,
    attend,
    compare,
    compressed,
    first_wrong,
    read_dump,
    record,
)
from openmla.bisect.report import sentence
from openmla.integrations.transformers import attention
from tests.bisect.models import in_dtype, prompt
from tests.integrations.models import MODELS, SPARSE, make_model, make_sparse, make_v4, model_of

REFUSED = ("minicpm3-longrope", "longcat_flash", "mistral4", "kimi_linear", "axk2", "hy_v4")
TAKEN = sorted({*MODELS, *SPARSE} - {*REFUSED})


def assert_sound(model: Any, num_tokens: int, **options: Any) -> Dump:
    dump = record(model, prompt(num_tokens), **options)
    verdicts = compare(model, dump)
    assert first_wrong(verdicts) is None, sentence(verdicts, "our own step")
    assert len({verdict.layer for verdict in verdicts if verdict.judged}) == len(dump.layers)
    return dump


@pytest.mark.parametrize("family", TAKEN)
def test_families(family: str) -> None:
    assert_sound(model_of(family), 40)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 33])
@pytest.mark.parametrize("format", [None, "fp8", "fp16"])
def test_formats_of_a_dense_model(format: str | None, num_tokens: int) -> None:
    model = in_dtype(make_model("deepseek_v3"), torch.bfloat16)
    assert_sound(model, num_tokens, cache_format=format, block_size=4, backend="reference")


@pytest.mark.parametrize("index_format", ["index_fp32", "index_bf16", "index_fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_formats_of_a_sparse_model(index_format: str, dtype: torch.dtype) -> None:
    model = in_dtype(model_of("deepseek_v32"), dtype)
    assert_sound(model, 70, cache_format="fp8", kv_scale=0.05, index_format=index_format)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"cache_format": "fp8", "kv_scale": 0.05}),
        (torch.bfloat16, {"cache_format": "fp8_dsv4", "index_format": "index_fp8"}),
    ],
    ids=str,
)
def test_v4(dtype: torch.dtype, options: dict[str, Any]) -> None:
    head_dim = 128 if options.get("cache_format") == "fp8_dsv4" else 32
    assert_sound(in_dtype(make_v4(head_dim=head_dim), dtype), 150, **options)


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_chunks_of_queries_make_no_difference(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_v4() if family == "deepseek_v4" else model_of(family)
    dump = record(model, prompt(50))
    whole = [verdict.used for verdict in compare(model, dump) if verdict.judged]
    for module in (attend, compressed):
        monkeypatch.setattr(module, "AT_ONCE", 7 * 4 * 60)
    apart = [verdict.used for verdict in compare(model, dump) if verdict.judged]
    torch.testing.assert_close(torch.tensor(apart), torch.tensor(whole), rtol=0.1, atol=0.02)


def test_a_fault_of_our_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries twice as long, in the attention of one layer."""
    model, true = model_of("deepseek_v32"), attend_step
    calls = []

    def faulty(projected: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(projected)
        if len(calls) % 3 == 2:
            projected = projected._replace(q_nope=2 * projected.q_nope)
        return true(projected, *args, **kwargs)

    monkeypatch.setattr(attention, "attend_step", faulty)
    first = first_wrong(compare(model, record(model, prompt(40))))
    assert first is not None and (first.layer, first.component.name) == (1, "out")


def test_a_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("deepseek_v3")
    before = model(prompt(9)[None]).logits
    hooks = [len(module._forward_hooks) for module in model.modules()]
    record(model, prompt(9))
    monkeypatch.setattr(attention, "attend_step", None)
    with pytest.raises(TypeError):
        record(model, prompt(9))
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(model(prompt(9)[None]).logits, before)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_a_file_says_the_same(family: str, tmp_path: Path) -> None:
    model = make_model(family) if family == "deepseek_v3" else make_sparse(family)
    dump = record(model, prompt(20), cache_format="fp8")
    dump.save(str(tmp_path / "dump.safetensors"))
    again = read_dump(str(tmp_path / "dump.safetensors"))
    assert again.settings == dump.settings and again.settings.cache_format == "fp8"
    ours, theirs = ([v.used for v in compare(model, each) if v.judged] for each in (dump, again))
    assert ours == theirs


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_not_compared(family: str) -> None:
    model = model_of(family)
    with pytest.raises(UnsupportedError, match=f"bisect: {model.config.model_type} "):
        compare(model, Dump({"layers.0.q": torch.zeros(1)}))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, r"has no tensors named layers\.\{i\}\.\{component\}"),
        ({"layers.9.hidden_in": (5, 64)}, r"must be in 0\.\.2 for this model, got layer 9"),
        ({"layers.0.hidden_in": (5, 63)}, r"layers.0.hidden_in must be \[5, 64\] .*\[5, 63\]"),
        ({"layers.0.q_a": (5, 16), "layers.1.q_a": (6, 16)}, r"layers.1.q_a must be \[5, "),
        ({"layers.0.wrong": (5, 64)}, "got 'layers.0.wrong'"),
        ({"layers.0.kv_scale": (1,)}, "has neither tokens nor hidden_in"),
        ({"layers.0.hidden_in": (5, 64), "fresh_from": (4,)}, r"fresh_from must be \[5\]"),
        ({"layers.0.hidden_in": (5, 64), "layers.0.kv_scale": (2,)}, "kv_scale must be one number"),
    ],
    ids=str,
)
def test_dumps_that_are_refused(tensors: dict[str, tuple[int, ...]], said: str) -> None:
    dump = Dump({name: torch.zeros(shape) for name, shape in tensors.items()})
    with pytest.raises((ConfigError, ShapeError), match=said):
        compare(make_model("deepseek_v3"), dump)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"lse_base": "10"}, "lse_base of the dump must be one of e, 2, got '10'"),
        ({"dtype": "int4"}, "dtype of the dump must be one of fp32, bf16, fp16"),
        ({"cache_format": "fp7"}, "format 'fp7' is not known"),
        ({"block_size": "-4"}, "block_size of the dump must be a positive integer"),
    ],
    ids=str,
)
def test_settings_that_are_refused(metadata: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings(**metadata)
