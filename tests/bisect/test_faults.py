"""Seeded faults: each is found, and named by component, layer and kind; sound engines are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from openmla.bisect import compare, first_wrong
from openmla.bisect.report import sentence
from openmla.errors import ConfigError
from tests.bisect.engine import BLOCK, Engine
from tests.bisect.models import in_dtype, prompt
from tests.bisect.v4 import dump_v4
from tests.integrations.models import make_model, make_sparse, make_v4

DTYPES = (torch.float32, torch.bfloat16)
TOKENS = prompt(61)
# fault, where, the component that must be named, and what must be said of it
DENSE = {
    "rope pairing swapped": ("q_pe", "as if columns were paired the other way"),
    "rope off by one position": ("q_pe", "as if every token stood one position later"),
    "row start off by one": ("lse", "as if every row of keys began one key late"),
    "lse in base 2": ("lse", "as if it were in base 2"),
    "softmax scale forgotten": ("lse", "as if the softmax scale were left out"),
    "one wrong block in a block table": (
        "lse",
        "as if block 2 of the block table were block 4",
    ),
}
SPARSE = {
    "index keys not rotated": ("index_k_rotated", "as if it were not rotated at all"),
    "index rows start off by one": ("chosen", "as if every row of keys began one key late"),
}
FP8 = {
    "fp8 scale wrong": ("cache", "as if everything were multiplied by 1.2"),
    "one wrong block in a block table": ("cache", "as if block 2 of the block table were block 4"),
}


def assert_named(model: Any, dump: Any, layer: int, component: str, said: str) -> None:
    verdicts = compare(model, dump)
    first = first_wrong(verdicts)
    assert first is not None
    assert (first.layer, first.component.name) == (layer, component)
    text = sentence(verdicts, "the engine")
    assert f"outside its budget is {component} (" in text and f"of layer {layer}." in text
    assert said in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize("options", [{}, {"fp8": True}, {"latent": True}], ids=str)
def test_a_sound_engine_is_within_its_budgets(
    family: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    make = make_model if family == "deepseek_v3" else make_sparse
    model = in_dtype(make(family), dtype)
    verdicts = compare(model, Engine(model, **options).dump(TOKENS))
    assert first_wrong(verdicts) is None, sentence(verdicts, "the engine")
    judged = [verdict for verdict in verdicts if verdict.judged]
    assert len(judged) == 3 * (11 + options.get("latent", 0) + 8 * (family == "deepseek_v32"))
    assert "are within their budgets" in sentence(verdicts, "the engine")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", DENSE)
def test_faults_of_a_dense_model(fault: str, dtype: torch.dtype) -> None:
    model = in_dtype(make_model("deepseek_v3"), dtype)
    for layer in (0, 2):
        assert_named(
            model, Engine(model, fault=fault, layer=layer).dump(TOKENS), layer, *DENSE[fault]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [*DENSE, *SPARSE])
def test_faults_of_a_sparse_model(fault: str, dtype: torch.dtype) -> None:
    model = in_dtype(make_sparse("deepseek_v32"), dtype)
    expected = {**DENSE, **SPARSE}[fault]
    assert_named(model, Engine(model, fault=fault, layer=1).dump(TOKENS), 1, *expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FP8)
def test_faults_of_an_fp8_cache(fault: str, dtype: torch.dtype) -> None:
    model = in_dtype(make_model("deepseek_v3"), dtype)
    dump = Engine(model, fault=fault, layer=1, fp8=True).dump(TOKENS)
    assert_named(model, dump, 1, *FP8[fault])


@pytest.mark.parametrize(
    "fault", ["row start off by one", "softmax scale forgotten", "one wrong block in a block table"]
)
def test_attention_is_named_without_lse(fault: str) -> None:
    """By its output, where an engine has no lse to dump."""
    model = make_model("deepseek_v3")
    dump = Engine(model, fault=fault, layer=1).dump(TOKENS)
    for name in [name for name in dump.tensors if name.endswith(".lse")]:
        dump.tensors.pop(name)  # type: ignore[attr-defined]
    assert_named(model, dump, 1, "out", DENSE[fault][1])
    first = first_wrong(compare(model, dump))
    assert first is not None
    if "block" in fault:
        assert first.rows[0] == 2 * BLOCK


def test_rope_off_by_one_position_changes_no_logit() -> None:
    """Which is why each component is judged on its own inputs."""
    model = make_model("deepseek_v3")
    sound, faulty = Engine(model), Engine(model, fault="rope off by one position")
    sound.dump(TOKENS), faulty.dump(TOKENS)
    torch.testing.assert_close(sound.logits, faulty.logits, rtol=1e-4, atol=1e-4)


def test_one_wrong_token_is_not_lost_among_many() -> None:
    model = in_dtype(make_model("deepseek_v3"), torch.bfloat16)
    dump = Engine(model).dump(prompt(400))
    dump.tensors["layers.1.kv_c"][333] *= 1.05
    verdict = first_wrong(compare(model, dump))
    assert verdict is not None and verdict.component.name == "kv_c" and verdict.rows == (333,)


def test_a_scale_that_is_off_by_less_than_fp8_rounds() -> None:
    model = in_dtype(make_model("deepseek_v3"), torch.bfloat16)
    dump = Engine(model, fp8=True).dump(TOKENS)
    dump.tensors["layers.2.kv_scale"].mul_(1.01)
    assert_named(model, dump, 2, "cache", "as if everything were multiplied by 1.0")


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_random_bytes_under_a_scale_that_keeps_nothing(scale: float) -> None:
    """The scale is named: no bytes are right under it."""
    model = in_dtype(make_model("deepseek_v3"), torch.bfloat16)
    dump = Engine(model, fp8=True).dump(TOKENS)
    stored = dump.tensors["layers.1.cache"]
    torch.manual_seed(0)
    stored.copy_(torch.randn(stored.shape).to(stored.dtype))
    dump.tensors["layers.1.kv_scale"].fill_(scale)
    assert_named(model, dump, 1, "cache", f"lost in fp8 under a kv_scale of {scale:.3g}")


@pytest.mark.parametrize("name", ["kv_scale", "rope_ratio"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_not_positive_and_finite(name: str, value: float) -> None:
    model = in_dtype(make_model("deepseek_v3"), torch.bfloat16)
    dump = Engine(model, fp8=True).dump(TOKENS)
    dump.tensors[f"layers.1.{name}"] = torch.tensor(value)  # type: ignore[index]
    with pytest.raises(ConfigError, match=rf"layers\.1\.{name} must be positive and finite, got"):
        compare(model, dump)


def test_a_dump_that_was_written_in_more_bits() -> None:
    """Values of bf16 in float32 are judged as bf16; a model's own precision makes no difference."""
    model = in_dtype(make_model("deepseek_v3"), torch.bfloat16)
    dump = Engine(model).dump(TOKENS)
    for name, tensor in dump.tensors.items():
        if tensor.is_floating_point():
            dump.tensors[name] = tensor.float()  # type: ignore[index]
    verdicts = compare(model.float(), dump)
    assert first_wrong(verdicts) is None, sentence(verdicts, "the engine")


def test_frequencies_that_were_cast_with_the_model() -> None:
    """What model.to(bf16) does to transformers' rope."""
    model = make_sparse("deepseek_v32").to(torch.bfloat16)
    assert_named(
        model, Engine(model).dump(prompt(200)), 0, "q_pe", "as if frequencies were rounded to bf16"
    )


@pytest.mark.parametrize("where", ["hidden_in", "kv_c", "lse"])
def test_values_that_are_no_numbers(where: str) -> None:
    model = make_model("deepseek_v3")
    dump = Engine(model).dump(prompt(12))
    dump.tensors[f"layers.1.{where}"][7, 1] = torch.nan
    assert_named(model, dump, 1, where, "are NaN or infinite")


class Stale:
    """A compressor's state from before, put into transformers' cache between two passes."""

    def __init__(self, model: Any, layer: int, tokens: slice, dump: Any) -> None:
        self.layer = layer
        D = model.config.head_dim
        bias = model.model.layers[layer].self_attn.compressor.position_bias
        kv, score = (dump.tensors[f"layers.{layer}.pool_{part}"] for part in ("kv", "score"))
        self.state = kv[tokens, :D], (score[tokens] + bias)[:, :D]

    def __call__(self, past: Any) -> None:
        kept = past.layers[self.layer]
        kv, gate = (part[None].clone() for part in self.state)
        kept.overlap_kv["compressor"], kept.overlap_gate["compressor"] = kv, gate


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stale_state_of_a_compressor(dtype: torch.dtype) -> None:
    model, tokens = in_dtype(make_v4(), dtype), prompt(150)
    sound = dump_v4(model, tokens, first=70)
    verdicts = compare(model, sound)
    assert first_wrong(verdicts) is None, sentence(verdicts, "transformers")
    # 68 tokens are in full windows: the state is that of 64 to 67, or stale that of 60 to 63
    for layer in (1, 3):
        stale = Stale(model, layer, slice(60, 64), sound)
        dump = dump_v4(model, tokens, first=70, between=stale)
        said = "as if the compressor's state were one window old, in these rows."
        assert_named(model, dump, layer, "entries", f"{said} Affected rows: 17.")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_that_was_not_reset(dtype: torch.dtype) -> None:
    model, tokens = in_dtype(make_v4(), dtype), prompt(60)
    earlier = dump_v4(model, prompt(60, seed=9), first=0)
    dump = dump_v4(model, tokens, first=0, between=Stale(model, 3, slice(56, 60), earlier))
    assert_named(model, dump, 3, "entries", "of an earlier request had not been reset")
