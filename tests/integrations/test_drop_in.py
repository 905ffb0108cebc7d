"""install(): a module of ours under the original's name, where that is allowed."""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from openmla.backends import Problem, choose_backend, why_not
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations import deep_gemm, flash_mla

DROP_INS = {"flash_mla": flash_mla, "deep_gemm": deep_gemm}
ON_HOPPER = Problem(
    "mqa_sparse", device="cuda", capability=(9, 0), multiprocessors=132, dtype=torch.bfloat16,
    format="fp8_ds_mla", H=128, D=576, C=512, tokens=256, kinds=("slots",),
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if neither original were there, nor imported."""
    for name in (*DROP_INS, *(f"flash_mla.{each}" for each in flash_mla.SUBMODULES)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("openmla.integrations.drop_in.find_spec", lambda name: None)
    yield
    for module in DROP_INS.values():
        module.uninstall()


@pytest.mark.parametrize("name", DROP_INS)
def test_an_import_line_finds_ours(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ours: Any = DROP_INS[name]
    with caplog.at_level(logging.WARNING, "openmla"):
        assert ours.install() and ours.install() and ours.install(force=True)
    (said,) = caplog.records
    assert f"`import {name}` finds openmla.integrations.{name}" in said.message
    assert importlib.import_module(name) is ours
    assert find_spec(name) is not None
    with pytest.raises(ImportError, match="nothing_like_it"):
        exec(f"from {name} import nothing_like_it")
    assert not hasattr(ours, "fp8_gemm_nt")
    with pytest.raises(AttributeError, match="not part of openmla's drop-in"):
        ours.fp8_gemm_nt  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module(f"{name}.cuda")
    ours.uninstall()
    assert name not in sys.modules


def test_their_submodule_is_found_too() -> None:
    flash_mla.install()
    found = importlib.import_module("flash_mla.flash_mla_interface")
    assert found.FlashMLASchedMeta is flash_mla.FlashMLASchedMeta


# Import lines of released callers: SGLang 0.5.23 and earlier, vLLM's and FlashMLA's own examples.
RELEASED = (
    "from flash_mla import flash_mla_with_kvcache, get_mla_metadata",
    "from flash_mla import flash_mla_sparse_fwd, get_mla_decoding_metadata, has_legacy",
    "from flash_mla.flash_mla_interface import FlashMLASchedMeta",
    "from flash_mla import fused_norm_rope_attn_rope_cast as mega",
    "import flash_mla.fused_norm_rope_attn_rope_cast as mega",
)


def test_lines_of_released_callers_import() -> None:
    flash_mla.install()
    for line in RELEASED:
        exec(line, {})
    theirs: Any = importlib.import_module("flash_mla.fused_norm_rope_attn_rope_cast")
    for name in ("prefill", "decode", "permute_q_b_proj", "permute_wv_proj"):
        said = rf"fused_norm_rope_attn_rope_cast\.{name} is not supported"
        with pytest.raises(UnsupportedError, match=said):
            getattr(theirs, name)(1, q=2)
    assert not hasattr(flash_mla, "flash_attn_varlen_func")  # whoever looks for it finds none
    flash_mla.uninstall()
    assert not any(name.startswith("flash_mla") for name in sys.modules)


def sglang_file() -> Path:
    """SGLang's own file that imports flash_mla: from a folder that its wheel was unpacked into, or
    from the installed package."""
    inside = Path("kernels", "ops", "attention", "flash_mla_interface.py")
    unpacked = os.environ.get("OPENMLA_TEST_SGLANG")
    if unpacked is not None:
        return Path(unpacked) / "sglang" / inside
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed, and OPENMLA_TEST_SGLANG names no unpacked wheel")
    return Path(spec.submodule_search_locations[0]) / inside


def test_sglang_calls_it() -> None:
    file = sglang_file()
    flash_mla.install()
    spec = spec_from_file_location("sglang_flash_mla_interface", file)
    assert spec is not None and spec.loader is not None
    theirs: Any = module_from_spec(spec)
    spec.loader.exec_module(theirs)
    q = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
    pages = torch.randn(2, 64, 1, 576, dtype=torch.bfloat16)
    table, lens = torch.tensor([[0], [1]]).int(), torch.tensor([3, 64]).int()
    expected = flash_mla.flash_mla_with_kvcache(
        q, pages, table, lens, 512, flash_mla.get_mla_metadata()[0]
    )
    for schedule in (theirs.get_mla_metadata(), theirs.get_mla_metadata(lens, 16, 1)):
        found = theirs.flash_mla_with_kvcache(q, pages, table, lens, 512, *schedule)
        assert all(map(torch.equal, found, expected))
    one, small = torch.ones(1), (q.to(torch.float8_e4m3fn), pages.to(torch.float8_e4m3fn))
    schedule = theirs.get_mla_metadata(lens, 16, 1, is_fp8_kvcache=True)
    eight, _ = theirs.flash_mla_with_kvcache(
        *small, table, lens, 512, *schedule, descale_q=one, descale_k=one
    )
    assert eight.dtype == torch.bfloat16 and eight.isfinite().all()
    listed = torch.tensor([[[0, 3]], [[2, -1]]]).int()
    _, _, lse = theirs.flash_mla_sparse_fwd(q[:, 0], pages.flatten(0, 1), listed, 0.1)
    natural = flash_mla.flash_mla_sparse_fwd(q[:, 0], pages.flatten(0, 1), listed, 0.1)[2]
    assert natural is not None
    torch.testing.assert_close(lse, natural * math.log2(math.e))
    with pytest.raises(UnsupportedError, match="decode is not supported in openmla's drop-in"):
        theirs.flash_mla_mega_decode(q[:, 0], pages, listed, lens, pages, 0.1)


@pytest.mark.parametrize("name", DROP_INS)
def test_what_is_imported_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, original)
    for force in (False, True):
        with pytest.raises(ConfigError, match="is already imported"):
            DROP_INS[name].install(force=force)
    DROP_INS[name].uninstall()
    assert sys.modules[name] is original


@pytest.mark.parametrize("name", DROP_INS)
def test_an_installed_original_is_replaced_only_by_force(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ModuleSpec(name, None)
    monkeypatch.setattr("openmla.integrations.drop_in.find_spec", lambda name: spec)
    assert not DROP_INS[name].install() and name not in sys.modules
    assert "is installed and stays" in caplog.text
    assert DROP_INS[name].install(force=True) and sys.modules[name] is DROP_INS[name]


def test_our_backend_never_takes_it_for_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openmla.backends.requirements.find_spec", lambda name: object())
    monkeypatch.setattr("openmla.backends.requirements.version_of", lambda package: "3.9.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_backend(ON_HOPPER) == "flashmla"
    flash_mla.install()
    assert why_not(ON_HOPPER, "flashmla") == "package flash_mla is openmla's own drop-in"
    assert choose_backend(ON_HOPPER) != "flashmla"
    flash_mla.uninstall()
    assert why_not(ON_HOPPER, "flashmla") is None


def test_a_call_through_the_name_runs() -> None:
    """Backends are chosen as always, "auto": the op does not come back to the drop-in."""
    flash_mla.install()
    theirs: Any = importlib.import_module("flash_mla")
    q = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
    pages = torch.randn(2, 64, 1, 576, dtype=torch.bfloat16)
    table, lens = torch.tensor([[0], [1]]).int(), torch.tensor([3, 64]).int()
    schedule, splits = theirs.get_mla_metadata()
    out, lse = theirs.flash_mla_with_kvcache(q, pages, table, lens, 512, schedule, splits)
    assert out.shape == (2, 1, 16, 512) and lse.isfinite().all()


def test_an_engine_in_a_process_of_its_own() -> None:
    """The lines of docs/drop-in.md, where nothing else was imported before."""
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "drop-in.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    lines += (
        "from flash_mla import flash_mla_with_kvcache, get_mla_metadata\n"
        "from deep_gemm import fp8_paged_mqa_logits\n"
        "print(flash_mla_with_kvcache.__module__, fp8_paged_mqa_logits.__module__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=True, cwd=root
    )
    assert run.stdout.split() == [f"openmla.integrations.{name}" for name in DROP_INS]
