"""Scales of attached models: found by calibrate(), kept in files, used, refused and reported."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import openmla
from openmla import ConfigError, LayerScales, Scales, attach, calibrate, detach, expect_scales
from openmla.backends import requirements
from openmla.cache.scales import SCALE_PATTERNS
from openmla.integrations.transformers import attachment_of
from tests.integrations.models import IDS, MAKERS, MODELS, SPARSE, make_model, make_v4, model_of

MAKE: dict[str, Any] = {
    **{family: lambda family=family: model_of(family) for family in (*MODELS, *SPARSE)},
    "deepseek_v4": make_v4,
}


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def warnings_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Warnings of the package, as if none had come up before."""
    monkeypatch.setattr(requirements, "_SAID", set())
    caplog.set_level(logging.WARNING)
    return lambda: [record.message for record in caplog.records if "attach" in record.message]


def logits_of(model: Any, ids: Tensor = IDS, **options: Any) -> Tensor:
    """A prompt, then one token at a time out of the cache."""
    from transformers import DynamicCache

    v4 = model.config.model_type == "deepseek_v4"
    attach(model, block_size=128 if v4 else 4, **options)
    past = DynamicCache(config=model.config)
    parts = [model(ids[:, :30], past_key_values=past).logits]
    parts += [model(ids[:, i : i + 1], past_key_values=past).logits for i in range(30, 36)]
    return torch.cat(parts, dim=1)


def scale_latents(model: Any, factor: float) -> None:
    for module in model.modules():
        if hasattr(module, "kv_a_layernorm"):
            module.kv_a_layernorm.weight.mul_(factor)
            module.kv_b_proj.weight.div_(factor)


@pytest.mark.parametrize("family", MAKE)
def test_every_family(family: str, tmp_path: Path) -> None:
    """Calibrated, saved, loaded, and nothing is cut off; the model is as it was in between."""
    model = MAKE[family]()
    expected = model(IDS[:, :36]).logits
    scales = calibrate(model, [IDS, {"input_ids": IDS[:1, :7]}])
    assert isinstance(scales, Scales)
    assert torch.equal(model(IDS[:, :36]).logits, expected)
    scales.save(tmp_path / "scales.safetensors")
    assert Scales.load(tmp_path / "scales.safetensors") == scales
    ours = logits_of(model, cache_format="fp8", kv_scale=tmp_path / "scales.safetensors")
    attachment = attachment_of(model)
    assert len(scales.layers) == len(attachment.modules) == len(attachment.scales)
    assert attachment.clamped() == {}
    error = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 0.2
    assert "clamped: no value was too large for its scale" in attachment.explain()


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "longcat_flash"])
@pytest.mark.parametrize("factor", [2.0**12, 2.0**-12])
def test_latents_of_any_size(family: str, factor: float, capture: bool, device: str) -> None:
    """Calibrated, the same bits come out; the latent's scale alone follows."""
    plain, scaled = model_of(family).to(device), model_of(family).to(device)
    scale_latents(scaled, factor)
    ids = IDS.to(device)
    found = [calibrate(model, [ids]) for model in (plain, scaled)]
    for place, scales in found[0].layers.items():  # type: ignore[union-attr]
        other = found[1].layers[place]  # type: ignore[union-attr]
        assert (other.v, other.k_pe) == (scales.v * factor, scales.k_pe)
    outs = [
        logits_of(model, ids, cache_format="fp8", kv_scale=scales, capture=capture)
        for model, scales in zip((plain, scaled), found, strict=True)
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=0 if device == "cpu" else 1e-5)


def test_the_demos_rows_err_no_more_than_at_scale_1() -> None:
    """Over text it was not calibrated with. Bits per byte say so too, but for their noise."""
    from transformers import AutoModelForCausalLM

    folder = Path(openmla.__file__).parent / "demo"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = torch.tensor(list((folder / "heldout.txt").read_bytes()[:1024]))[None]
    scales = calibrate(model, [text[:, :512]])
    assert isinstance(scales, Scales)
    attach(model, cache_format="fp32")
    model(text[:, 512:], use_cache=True)
    C = model.config.kv_lora_rank
    for layer, cache in attachment_of(model).caches.items():
        assert cache.latent is not None
        rows = cache.latent.data.flatten(0, 1)
        found = scales.layers[f"layers.{layer}.self_attn"]
        assert found.row != 1 and found.rope_ratio != 1
        by_column = torch.full((rows.shape[1],), found.row)
        by_column[C:] *= found.rope_ratio

        def error(scale: Tensor, rows: Tensor = rows) -> float:
            stored = (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            return float((stored.float() * scale - rows).norm() / rows.norm())

        assert error(by_column) <= error(torch.ones(())), layer


def test_masked_tokens_are_not_measured() -> None:
    model = make_model("deepseek_v3")
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, :10], mask[0, :10] = 0, 0
    model.model.embed_tokens.weight[0] = torch.nan
    scales = calibrate(model, [{"input_ids": ids, "attention_mask": mask}])
    assert isinstance(scales, Scales)
    with pytest.raises(ConfigError, match=r"calibrate: layers\.0\.self_attn: latent must be fin"):
        calibrate(model, [ids])
    with pytest.raises(ConfigError, match="the model is not attached"):
        attachment_of(model)  # not even after an error


def test_values_too_large_are_told(device: str, warnings_said: Any) -> None:
    """Latents times 300 at scale 1: what was silent."""
    model, ids = make_model("deepseek_v3").to(device), IDS.to(device)
    scale_latents(model, 300.0)
    expected = model(ids[:, :36]).logits
    ours = logits_of(model, ids, cache_format="fp8", kv_scale=1.0)
    attachment = attachment_of(model)
    found = attachment.clamped()
    assert set(found) == {0, 1, 2} and min(found.values()) > 100
    told = f"clamped: {sum(found.values())} values were too large for fp8 at their scales"
    assert told in attachment.explain()
    said = warnings_said()
    assert len(said) == 1 and "openmla.calibrate() finds scales" in said[0]
    detach(model)
    scales = calibrate(model, [IDS])
    better = logits_of(model, ids, cache_format="fp8", kv_scale=scales)
    errors = [float((out - expected).norm() / expected.norm()) for out in (ours, better)]
    assert errors[1] < 0.5 * errors[0]
    assert len(warnings_said()) == 1


def test_the_warning_comes_by_itself(device: str, warnings_said: Any) -> None:
    """Nobody asks; on a GPU a later pass finds what an earlier one has sent to the host."""
    model, ids = make_model("deepseek_v3").to(device), IDS.to(device)
    attach(model, cache_format="fp8", kv_scale=1.0)
    model(ids)
    assert not warnings_said()
    scale_latents(model, 300.0)
    for _ in range(4):
        model(ids)
        if device == "cuda":
            torch.cuda.synchronize()
    said = warnings_said()
    assert len(said) == 1 and "values were too large for fp8 at their scales" in said[0]


def test_bf16_counts_nothing() -> None:
    model = make_model("deepseek_v3")
    logits_of(model, cache_format="bf16")
    assert attachment_of(model).clamped() == {}
    assert "clamped" not in attachment_of(model).explain()


NAMES = (
    "self_attn.k_scale",
    "self_attn.attn.k_scale",
    "self_attn.mla_attn.k_scale",
    "attn.mla_attn.v_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.v_scale",
    "self_attn.attn_mqa.k_scale",
    "self_attn.kv_scale",
    "self_attn.k_proj.output_scale",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", ["model.", "", "language_model.model.", "model.language_model."])
def test_names_that_are_in_use(name: str, before: str, tmp_path: Path) -> None:
    """One of k and v, under any of these names, stands for both."""
    tensors = {f"{before}layers.{i}.{name}": torch.tensor([0.5 + i]) for i in range(3)}
    tensors[f"{before}layers.0.self_attn.kv_b_proj.weight_scale"] = torch.ones(4)
    tensors["mtp.layers.0.self_attn.k_scale"] = torch.tensor(9.0)
    save_file(tensors, tmp_path / "scales.safetensors")
    found = Scales.load(tmp_path / "scales.safetensors")
    place = "attn" if name.startswith("attn") else "self_attn"
    assert found.layers == {f"layers.{i}.{place}": LayerScales(0.5 + i, 0.5 + i) for i in range(3)}


def with_scales(folder: Path, **kinds: float) -> Any:
    """A model from a checkpoint that has scales beside its weights."""
    from transformers import AutoModelForCausalLM

    make_model("deepseek_v3").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(3):
        for kind, value in kinds.items():
            name = f"model.layers.{layer}.self_attn.attn.{kind}_scale"
            weights[name] = torch.tensor(value * (layer + 1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_checkpoints_own_scales(tmp_path: Path, warnings_said: Any) -> None:
    """Used without being asked for; k alone is both k and v, and the one scale of a row."""
    model = with_scales(tmp_path, k=0.5)
    attach(model, cache_format="fp8")
    model(IDS, use_cache=True)
    for layer, cache in attachment_of(model).caches.items():
        assert cache.latent is not None and cache.latent.rope_ratio is None
        assert float(cache.latent.kv_scale) == 0.5 * (layer + 1)
    detach(model)
    attach(model, cache_format="fp8", kv_scale=tmp_path)  # its folder says the same
    assert attachment_of(model).scales[2] == LayerScales(1.5, 1.5)
    assert warnings_said() == []


def test_a_class_can_expect_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """from_pretrained lists scales as unexpected keys, unless its class was told of them."""
    from transformers import AutoModelForCausalLM

    ignored = "_keys_to_ignore_on_load_unexpected"
    kind = type(with_scales(tmp_path, k=0.5))
    before = getattr(kind, ignored)
    monkeypatch.setattr(kind, ignored, before)  # and back, after the test

    def unexpected() -> set[str]:
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        return set(info["unexpected_keys"])

    assert len(unexpected()) == 3
    expect_scales(kind)
    expect_scales(kind)
    assert unexpected() == set()
    assert getattr(kind, ignored) == [*(before or ()), *SCALE_PATTERNS]
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.other_scale"] = torch.ones(())
    save_file(weights, file, metadata={"format": "pt"})
    assert unexpected() == {"model.layers.0.self_attn.other_scale"}
    for what in (kind.config_class, "deepseek_v3", int):
        if not hasattr(what, "from_pretrained"):
            with pytest.raises(ConfigError, match="must be a class with from_pretrained"):
                expect_scales(what)


def test_no_scales_are_told_once(warnings_said: Any) -> None:
    for model in (make_model("deepseek_v3"), make_model("deepseek_v3")):
        attach(model, cache_format="fp8")
        assert attachment_of(model).scales == {}
    assert len(warnings_said()) == 1 and "kv_scale 1" in warnings_said()[0]
    attach(make_model("deepseek_v3"), cache_format="fp8", kv_scale=1.0)
    assert len(warnings_said()) == 1


def test_copies_keep_scales() -> None:
    model = make_model("deepseek_v3")
    expected = logits_of(model, cache_format="fp8", kv_scale=0.25)
    twin = deepcopy(model)
    detach(model)
    from transformers import DynamicCache

    ours = twin(IDS[:, :30], past_key_values=DynamicCache(config=twin.config)).logits
    assert torch.equal(ours, expected[:, :30])
    assert attachment_of(twin).scales[1] == LayerScales(0.25, 0.25)


def layers(*numbers: int, **kinds: Any) -> Scales:
    one = LayerScales(**{"k": 1.0, "v": 1.0, **kinds})
    return Scales({f"layers.{number}.self_attn": one for number in numbers})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_scale": 0.0}, "kv_scale must be positive and finite, got 0.0"),
        ({"kv_scale": -2.0}, "kv_scale must be positive and finite, got -2.0"),
        ({"kv_scale": float("nan")}, "kv_scale must be positive and finite, got nan"),
        ({"kv_scale": float("inf")}, "kv_scale must be positive and finite, got inf"),
        ({"kv_scale": torch.ones(3)}, "kv_scale must be one number for the whole tensor, got"),
        ({"kv_scale": [1.0]}, "kv_scale must be a number, got list"),
        ({"kv_scale": layers(0, 1)}, "scales for the 3 MLA layers of the model, got 2"),
        ({"kv_scale": layers(0, 1, 2, 3)}, "scales for the 3 MLA layers of the model, got 4"),
        ({"kv_scale": layers(0, 1, 3)}, "scales for the 3 MLA layers of the model, got 3"),
        ({"kv_scale": "nowhere.safetensors"}, "'nowhere.safetensors' is neither a safetensors"),
        ({"kv_scale": 2.0, "cache_format": "bf16"}, "kv_scale must be None with cache_format"),
        ({"kv_scale": layers(0), "cache_format": None}, "kv_scale must be None with cache_for"),
        ({"kv_scale": 2.0, "cache_format": "fp8_ds_mla"}, "kv_scale must be None with cache_f"),
    ],
)
def test_attach_refuses(options: dict[str, Any], message: str) -> None:
    changes = {"kv_lora_rank": 128} if options.get("cache_format") == "fp8_ds_mla" else {}
    model = make_model("deepseek_v3", **changes)
    with pytest.raises(ConfigError) as error:
        attach(model, **{"cache_format": "fp8", **options})
    assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="the model is not attached"):
        attachment_of(model)
    attach(model)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "has no k_scale or v_scale of any layer"),
        ({"model.layers.0.self_attn.q_scale": torch.ones(())}, "has no k_scale or v_scale"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(2)}, "k_scale must be one number for the"),
        ({"model.layers.0.self_attn.k_scale": torch.zeros(())}, "k_scale must be positive and fin"),
        (
            {
                "model.layers.0.self_attn.k_scale": torch.tensor(1.0),
                "model.layers.0.self_attn.attn.k_scale": torch.tensor(2.0),
            },
            "layers.0.self_attn has two values of k_scale, 2.0 and",
        ),
    ],
)
def test_bad_files(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "scales.safetensors")
    with pytest.raises(ConfigError, match=message):
        Scales.load(tmp_path / "scales.safetensors")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ConfigError, match="'text' is not a valid safetensors file"):
        Scales.load(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"or a folder with model\.safetensors"):
        Scales.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="must contain a weight_map of tensors to files"):
        Scales.load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        layers(0).save(tmp_path / "missing" / "scales.safetensors")
    with pytest.raises(ConfigError, match=r"must look like 'layers\.0\.self_attn', got 'x'"):
        Scales({"x": LayerScales(1.0, 1.0)})


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches is empty"),
        ([[1, 2]], "a batch must be a tensor of tokens, or a dict of forward.. arg"),
        ([{"input_ids": [1]}], "a batch must be a tensor of tokens, or a dict of forward.. arg"),
        ([torch.ones(2, 3)], "input_ids must be integers .B, S."),
        ([torch.ones(1, 0, dtype=torch.int64)], "input_ids must be integers .B, S."),
    ],
)
def test_calibrate_refuses(batches: Any, message: str) -> None:
    model = make_model("deepseek_v3")
    with pytest.raises(ConfigError, match=f"calibrate: {message}"):
        calibrate(model, batches)
    attach(model)
    with pytest.raises(ConfigError, match="already attached"):
        calibrate(model, [IDS])
    assert attachment_of(model)


@pytest.mark.parametrize("kind", MAKERS)
def test_tokens_in_one_row(kind: str) -> None:
    """[S] is one sequence; the layers' largest values do not depend on how they come."""
    model = MAKERS[kind]()
    assert calibrate(model, [IDS[0], IDS[1]]) == calibrate(model, [IDS[:1], IDS[1:]])


def test_the_page_on_scales_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/scales.md shows runs."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "scales.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"model": make_model("deepseek_v3"), "batches": [IDS]}
    exec(compile(code, "scales.md", "exec"), names)
    assert Scales.load("scales.safetensors") == names["scales"]
    assert attachment_of(names["model"]).scales[0] == names["scales"].layers["layers.0.self_attn"]
