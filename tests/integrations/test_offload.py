"""Weights that accelerate keeps on the CPU or on disk: the same tokens as without attach()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openmla.errors import ConfigError

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from openmla.integrations.transformers import attach, attachment_of  # noqa: E402
from tests.integrations.models import IDS, MAKERS  # noqa: E402


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def offloaded(model: Any, where: str, folder: Path, device: str = "cpu") -> Any:
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device(device))
    elif where == "disk":
        accelerate.disk_offload(model, str(folder), execution_device=torch.device(device))
    else:  # as device_map does it: some layers here, some away
        away = {f"model.layers.{layer}": "disk" for layer in range(1, len(model.model.layers))}
        rest = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
        here = dict.fromkeys([*rest, "lm_head", "model.layers.0"], device)
        accelerate.dispatch_model(
            model, {**here, **away}, main_device=device, offload_dir=str(folder)
        )
    return model


@pytest.mark.parametrize("where", ["cpu", "disk", "map"])
@pytest.mark.parametrize("kind", MAKERS)
def test_offloaded_weights(kind: str, where: str, device: str, tmp_path: Path) -> None:
    model = MAKERS[kind]()
    options = {"max_new_tokens": 8, "do_sample": False}
    ids = IDS.to(device)
    expected = model.to(device).generate(ids, **options)
    offloaded(model, where, tmp_path, device)
    assert any(parameter.is_meta for parameter in model.parameters())
    attach(model)
    assert torch.equal(model.generate(ids, **options), expected)
    modules = attachment_of(model).modules
    assert any(parameter.is_meta for module in modules for parameter in module.parameters())


def test_a_graph_needs_its_weights(tmp_path: Path) -> None:
    model = offloaded(MAKERS["dense"](), "cpu", tmp_path)
    with pytest.raises(ConfigError, match="accelerate has offloaded some"):
        attach(model, capture=True)
