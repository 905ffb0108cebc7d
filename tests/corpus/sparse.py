"""Cases of models with an indexer, K = 8."""

from __future__ import annotations

from typing import Any

import torch

from openmla import OUTPUT_FORMATS
from tests.corpus.common import Run
from tests.corpus.dense import STORES, add

K = 8
PHASES: dict[str, dict[str, Any]] = {
    "under": {"held": [0, 2, 0], "steps": [[7, 3, 4]]},  # nobody has more than K keys
    "at": {"held": [0, 7, 3], "steps": [[8, 1, 5]]},
    "past": {"held": [0, 7, 0], "steps": [[20, 2, 9]]},
    "context": {"held": [21, 6, 40, 0], "steps": [[9, 5, 3, 6]]},
    "chunked": {
        "held": [60, 33, 0, 90], "steps": [[7, 12, 5, 9]], "plan": {"workspace_tokens": 16},
    },
    "decode": {"held": [37, 16, 0, 9, 6], "steps": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]},
    "several": {"held": [30, 17, 2], "steps": [[3, 2, 4], [1, 2, 3]]},
    "mixed": {"held": [50, 0, 13, 0, 70, 2], "steps": [[1, 12, 1, 5, 40, 1]]},
    "empty": {"held": [20, 9, 0, 33], "steps": [[1, 0, 6, 0], [0, 3, 5, 0]]},
    "padded": {"held": [20, 0, 33], "steps": [[1, 11, 2]], "padding": 3},
}  # fmt: skip
BASE: dict[str, Any] = {"topk": K}
INDEXES = {"fp8": "index_fp8", "fp8-exact": "index_fp8_exact", "bf16": "index_bf16"}

CASES: dict[str, Run] = {}


def _add(name: str, *parts: dict[str, Any], **more: Any) -> None:
    add(CASES, f"sparse-{name}", BASE, *parts, **more)


def _add_phases() -> None:
    for phase, fields in PHASES.items():
        for form in ("auto", "absorbed", "expanded"):
            _add(f"{phase}-{form}", fields, plan={"form": form})
        _add(f"{phase}-bf16", fields, STORES["bf16"], index_format="index_bf16")
    for name, index_format in INDEXES.items():
        for phase in ("mixed", "past"):
            store = STORES["f32" if name == "fp8-exact" else "bf16"]
            _add(f"{phase}-keys-{name}", PHASES[phase], store, index_format=index_format)
    for phase in ("mixed", "chunked"):
        for store_name in ("fp8", "fp8-scales"):
            for form in ("auto", "expanded"):
                _add(f"{phase}-{store_name}-{form}", PHASES[phase], STORES[store_name],
                     plan={"form": form})  # fmt: skip
        _add(f"{phase}-packed", PHASES[phase], STORES["packed"], index_format="index_fp8")


def _add_options() -> None:
    for phase in ("context", "chunked", "decode", "mixed", "padded"):
        for form in ("auto", "expanded"):
            _add(f"{phase}-{form}-batch-invariant", PHASES[phase],
                 plan={"batch_invariant": True, "form": form})  # fmt: skip
            _add(f"{phase}-{form}-compiled", PHASES[phase],
                 plan={"compiled": True, "form": form})  # fmt: skip
    long: dict[str, Any] = {"held": [1100, 700, 3], "steps": [[1, 2, 5]], "block_size": 16}
    for form in ("absorbed", "expanded"):
        _add(f"longest-{form}-batch-invariant", long, topk=600,
             plan={"form": form, "batch_invariant": True})  # fmt: skip
    for phase in ("under", "mixed", "decode", "several", "empty"):
        _add(f"{phase}-chosen", PHASES[phase], plan={"form": "chosen"})
    for form in ("auto", "expanded"):
        _add(f"workspace-{form}", held=[60, 33, 0, 90], steps=[[7, 12, 5, 9], [1, 9, 30, 2]],
             workspace_tokens=32, plan={"form": form})  # fmt: skip
    for number, backend in enumerate(("reference", {"mha_masked": "reference"})):
        for form in ("auto", "expanded"):
            _add(f"mixed-{form}-backend-{number}", PHASES["mixed"],
                 plan={"backend": backend, "form": form})  # fmt: skip
    drafts: dict[str, Any] = {"held": [30, 17, 41, 0], "steps": [[3, 2, 4, 12]], "slack": 6}
    _add("device-lengths", drafts, unknown=[0, 1, 2, 3])
    _add("device-lengths-some-exact", drafts, unknown=[0, 2], padding=2)
    _add("device-lengths-compiled", drafts, unknown=[0, 2], plan={"compiled": True})


def _add_captured() -> None:
    story: dict[str, Any] = {
        "held": [37, 5, 1], "steps": [[1, 1, 1], [2, 1, 0], [0, 0, 0], [1, 2, 2]],
    }  # fmt: skip
    _add("buffers", story, into=(4, 9))
    _add("buffers-bf16", story, STORES["bf16"], index_format="index_bf16", into=(4, 9))
    _add("buffers-packed", story, STORES["packed"], index_format="index_fp8", into=(4, 9))
    _add("buffers-sliced", story, into=(6, 18), slices=[(3, 3), (3, 6), (4, 4), (5, 12)])
    _add("buffers-batch-invariant", story, into=(4, 9), plan={"batch_invariant": True})
    _add("buffers-given", story, into=(4, 9), selection="lens")
    _add("buffers-latent", story, into=(4, 9), call="latent")
    for name, steps in {
        "one": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]],
        "two": [[2, 2, 2, 2], [2, 2, 0, 0], [2, 0, 0, 0]],
    }.items():
        engine: dict[str, Any] = {"held": [37, 16, 1, 20], "steps": steps, "planner": 8}
        _add(f"planner-{name}", engine)
        _add(f"planner-{name}-bf16", engine, STORES["bf16"], index_format="index_fp8")
        _add(f"planner-{name}-batch-invariant", engine, plan={"batch_invariant": True})
        _add(f"planner-{name}-latent", engine, call="latent")


def _add_outputs() -> None:
    for format in OUTPUT_FORMATS:
        _add(f"mixed-output-{format}", PHASES["mixed"], STORES["bf16"], shape="grouped",
             plan={"output": format})  # fmt: skip
    for form in ("absorbed", "expanded"):
        _add(f"padded-output-{form}", PHASES["padded"], shape="grouped",
             plan={"output": "fp8_64", "form": form})  # fmt: skip
    _add("chunked-output-expanded", PHASES["chunked"], STORES["bf16"], shape="grouped",
         plan={"output": "nvfp4", "form": "expanded"})  # fmt: skip
    store = {**STORES["fp8-scales"], "dtype": torch.bfloat16}
    for kind in ("fp8", "fp8_static"):
        for phase in ("decode", "mixed"):
            _add(f"{phase}-queries-{kind}", PHASES[phase], store, plan={"query_dtype": kind})
    for name in ("bf16", "fp8"):
        for phase in ("context", "chunked"):
            _add(f"{phase}-prefill-fp8-{name}", PHASES[phase], STORES[name],
                 plan={"prefill_dtype": "fp8", "form": "expanded"})  # fmt: skip
    _add("mixed-prefill-fp8", PHASES["mixed"], STORES["fp8"], plan={"prefill_dtype": "fp8"})


def _add_calls() -> None:
    for selection in ("given", "lens"):
        for form in ("auto", "expanded", "chosen"):
            _add(f"mixed-{form}-selection-{selection}", PHASES["mixed"], selection=selection,
                 plan={"form": form})  # fmt: skip
    _add("under-selection-given", PHASES["under"], selection="given")
    for form in ("auto", "expanded"):
        _add(f"mixed-{form}-two-layers", PHASES["mixed"], layers=2, plan={"form": form})
    for phase in ("mixed", "padded"):
        for form in ("auto", "expanded"):
            _add(f"{phase}-{form}-partial", PHASES[phase], call="partial", sink=True,
                 plan={"form": form})  # fmt: skip
            _add(f"{phase}-{form}-sink", PHASES[phase], sink=True, plan={"form": form})
            _add(f"{phase}-{form}-written-before", PHASES[phase], STORES["fp8"], write=False,
                 plan={"form": form})  # fmt: skip
        _add(f"{phase}-raw", PHASES[phase], raw=True)
        _add(f"{phase}-out-strided", PHASES[phase], out="strided")
        for form in ("absorbed", "chosen"):
            _add(f"{phase}-{form}-latent", PHASES[phase], call="latent", plan={"form": form})


for _make in (_add_phases, _add_options, _add_captured, _add_outputs, _add_calls):
    _make()
