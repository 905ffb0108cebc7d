"""Cases of models without an indexer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from openmla import OUTPUT_FORMATS
from tests.corpus.common import Run
from tests.corpus.latent import SCALES, Spec, run_latent

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

PHASES: dict[str, dict[str, Any]] = {
    "fresh": {"held": [0, 0, 0], "steps": [[9, 17, 4]]},
    "context": {"held": [21, 6, 40], "steps": [[9, 5, 3]]},
    "chunked": {
        "held": [60, 33, 0, 90], "steps": [[7, 12, 5, 9]], "plan": {"workspace_tokens": 16},
    },
    "decode": {"held": [37, 16, 0, 9], "steps": [[1, 1, 1, 1], [1, 1, 1, 1]]},
    "several": {"held": [30, 17, 41], "steps": [[3, 2, 4], [1, 2, 3]]},
    "mixed": {"held": [50, 0, 13, 0, 70], "steps": [[1, 12, 1, 5, 40]]},
    "empty": {"held": [20, 9, 0, 33], "steps": [[1, 0, 6, 0], [0, 3, 1, 0]]},
    "nobody": {"held": [10, 5], "steps": [[0, 0]]},
    "padded": {"held": [20, 0, 33], "steps": [[1, 11, 2]], "padding": 3},
}  # fmt: skip
STORES: dict[str, dict[str, Any]] = {
    "f32": {"dtype": F32, "format": "fp32"},
    "bf16": {"dtype": BF16, "format": "bf16"},
    "fp8": {"dtype": BF16, "format": "fp8", "kv_scale": 0.05},
    "fp8-scales": {"dtype": F32, "format": "fp8", "kv_scale": SCALES},
    "f64": {"dtype": F64, "format": "fp32"},
    "f16": {"dtype": F16, "format": "fp16"},
    "packed": {"dtype": BF16, "format": "fp8_ds_mla", "shape": "wide"},
    "packed-exact": {"dtype": F32, "format": "fp8_ds_mla_exact", "shape": "wide"},
    "bf16-of-f32": {"dtype": F32, "format": "bf16", "shape": "odd", "block_size": 16},
}

CASES: dict[str, Run] = {}


def _run(spec: Spec, name: str) -> Any:
    return run_latent(name, spec)


def add(cases: dict[str, Run], name: str, *parts: dict[str, Any], **more: Any) -> None:
    """A case of these fields, later ones first; options of make_plan are joined."""
    fields: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    for part in (*parts, more):
        fields |= part
        plan |= part.get("plan", {})
    assert name not in cases, name
    cases[name] = partial(_run, Spec(**fields | {"plan": plan}))


def _add_phases() -> None:
    for phase, fields in PHASES.items():
        for form in ("auto", "absorbed", "expanded"):
            for store in ("f32", "bf16"):
                if store == "bf16" and form == "absorbed" and phase not in ("mixed", "several"):
                    continue
                add(CASES, f"dense-{phase}-{store}-{form}", fields, STORES[store],
                    plan={"form": form})  # fmt: skip
    for store in ("fp8", "fp8-scales"):
        for phase in ("context", "chunked", "decode", "mixed", "padded"):
            add(CASES, f"dense-{phase}-{store}-auto", PHASES[phase], STORES[store])
        for form in ("absorbed", "expanded"):
            add(CASES, f"dense-mixed-{store}-{form}", PHASES["mixed"], STORES[store],
                plan={"form": form})  # fmt: skip
    for store in ("f64", "f16", "packed", "packed-exact", "bf16-of-f32"):
        for phase in ("decode", "chunked", "mixed"):
            add(CASES, f"dense-{phase}-{store}-auto", PHASES[phase], STORES[store])
    for shape in ("odd", "five"):
        for size in (8, 16):
            add(CASES, f"dense-mixed-{shape}-blocks-of-{size}", PHASES["mixed"], shape=shape,
                block_size=size)  # fmt: skip
    add(CASES, "dense-long-contexts", held=[190, 150, 3], steps=[[1, 4, 30]], block_size=16)
    # longer than the runs of keys that batch-invariant plans sum by themselves
    long: dict[str, Any] = {"held": [1100, 700, 3], "steps": [[1, 2, 5]], "block_size": 16}
    for store in ("f32", "bf16"):
        for form in ("absorbed", "expanded"):
            add(CASES, f"dense-longest-{store}-{form}-batch-invariant", long, STORES[store],
                shape="five", plan={"form": form, "batch_invariant": True})  # fmt: skip
    add(CASES, "dense-longest-buffers-batch-invariant", long, shape="five", into=(3, 15),
        plan={"batch_invariant": True})  # fmt: skip


def _add_options() -> None:
    for phase in ("context", "chunked", "decode", "mixed", "padded"):
        for store in ("f32", "bf16"):
            add(CASES, f"dense-{phase}-{store}-batch-invariant", PHASES[phase], STORES[store],
                plan={"batch_invariant": True})  # fmt: skip
        add(CASES, f"dense-{phase}-compiled", PHASES[phase], plan={"compiled": True})
    add(CASES, "dense-mixed-batch-invariant-absorbed", PHASES["mixed"],
        plan={"batch_invariant": True, "form": "absorbed"})  # fmt: skip
    add(CASES, "dense-chunked-compiled-bf16", PHASES["chunked"], STORES["bf16"],
        plan={"compiled": True, "form": "expanded"})  # fmt: skip
    for form in ("auto", "expanded"):
        for store in ("f32", "bf16", "fp8"):
            add(CASES, f"dense-workspace-{store}-{form}", STORES[store], held=[60, 33, 0, 90],
                steps=[[7, 12, 5, 9], [1, 9, 30, 2]], workspace_tokens=32,
                plan={"form": form})  # fmt: skip
    add(CASES, "dense-workspace-batch-invariant", held=[60, 33, 0, 90], steps=[[7, 12, 5, 9]],
        workspace_tokens=32, plan={"form": "expanded", "batch_invariant": True})  # fmt: skip
    for number, backend in enumerate(
        ("reference", {"mha_ragged": "reference"}, {"mqa_paged": "reference"}, "sdpa")
    ):
        for phase in ("mixed", "chunked"):
            name = backend if isinstance(backend, str) else "-".join(backend)
            add(CASES, f"dense-{phase}-backend-{number}-{name}", PHASES[phase],
                plan={"backend": backend})  # fmt: skip


def _add_lengths() -> None:
    drafts: dict[str, Any] = {"held": [30, 17, 41], "steps": [[3, 2, 4]], "slack": 6}
    add(CASES, "dense-device-lengths", drafts, unknown=[0, 1, 2])
    add(CASES, "dense-device-lengths-bf16", drafts, STORES["bf16"], unknown=[0, 1, 2])
    mixed: dict[str, Any] = {"held": [30, 0, 41, 5], "steps": [[3, 20, 4, 9]], "slack": 6}
    for name, plan in {
        "auto": {}, "absorbed": {"form": "absorbed"}, "compiled": {"compiled": True},
        "batch-invariant": {"batch_invariant": True},
    }.items():  # fmt: skip
        add(CASES, f"dense-device-lengths-some-exact-{name}", mixed, unknown=[0, 2], padding=2,
            plan=plan)  # fmt: skip


def _add_captured() -> None:
    story: dict[str, Any] = {
        "held": [37, 16, 1], "steps": [[1, 1, 1], [2, 1, 0], [0, 0, 0], [1, 2, 2]],
    }  # fmt: skip
    for store in ("f32", "bf16", "fp8", "packed"):
        add(CASES, f"dense-buffers-{store}", story, STORES[store], into=(4, 9))
    add(CASES, "dense-buffers-sliced", story, into=(6, 18),
        slices=[(3, 3), (3, 6), (4, 4), (5, 12)])  # fmt: skip
    add(CASES, "dense-buffers-batch-invariant", story, into=(4, 9), plan={"batch_invariant": True})
    add(CASES, "dense-buffers-device-lengths", story, into=(4, 9), unknown=[0, 1, 2], slack=5)
    add(CASES, "dense-buffers-latent", story, into=(4, 9), call="latent")
    add(CASES, "dense-buffers-output-fp8", story, shape="grouped", into=(4, 9),
        plan={"output": "fp8"})  # fmt: skip
    ones: dict[str, Any] = {
        "held": [37, 16, 1, 20], "steps": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]],
    }  # fmt: skip
    twos = {**ones, "steps": [[2, 2, 2, 2], [2, 2, 0, 0], [2, 0, 0, 0]]}
    for name, steps in {"one": ones, "two": twos}.items():
        for store in ("f32", "bf16", "fp8"):
            add(CASES, f"dense-planner-{name}-{store}", steps, STORES[store], planner=8)
    add(CASES, "dense-planner-batch-invariant", twos, planner=8, plan={"batch_invariant": True})
    add(CASES, "dense-planner-output", twos, shape="grouped", planner=8,
        plan={"output": "fp8_128"})  # fmt: skip
    add(CASES, "dense-planner-latent", twos, planner=8, call="latent")
    add(CASES, "dense-planner-reference", twos, planner=8, plan={"backend": "reference"})
    add(CASES, "dense-planner-fp8-queries", ones, STORES["fp8"], planner=8,
        plan={"query_dtype": "fp8"})  # fmt: skip


def _add_outputs() -> None:
    for format in OUTPUT_FORMATS:
        for phase in ("mixed", "chunked"):
            add(CASES, f"dense-{phase}-output-{format}", PHASES[phase], STORES["bf16"],
                shape="grouped", plan={"output": format})  # fmt: skip
        add(CASES, f"dense-padded-output-{format}-sink", PHASES["padded"], shape="grouped",
            sink=True, plan={"output": format})  # fmt: skip
    for layout in ("column", "tma"):
        add(CASES, f"dense-mixed-output-{layout}", PHASES["mixed"], STORES["bf16"],
            shape="grouped", layout=layout, plan={"output": "fp8_64"})  # fmt: skip
    add(CASES, "dense-padded-output-expanded", PHASES["padded"], STORES["bf16"], shape="grouped",
        plan={"output": "nvfp4", "form": "expanded"})  # fmt: skip
    add(CASES, "dense-empty-output", PHASES["empty"], shape="grouped",
        plan={"output": "fp8_64_pow2"})  # fmt: skip
    for out in ("given", "strided"):
        for phase in ("mixed", "padded", "decode"):
            add(CASES, f"dense-{phase}-out-{out}", PHASES[phase], STORES["bf16"], out=out)
    add(CASES, "dense-mixed-out-strided-sink", PHASES["mixed"], out="strided", sink=True)


def _add_eight_bits() -> None:
    for kind in ("fp8", "fp8_static"):
        store = {**STORES["fp8"], "kv_scale": SCALES}
        for phase in ("decode", "mixed", "several"):
            add(CASES, f"dense-{phase}-queries-{kind}", PHASES[phase], store,
                plan={"query_dtype": kind})  # fmt: skip
        add(CASES, f"dense-several-queries-{kind}-batch-invariant", PHASES["several"], store,
            plan={"query_dtype": kind, "batch_invariant": True})  # fmt: skip
        add(CASES, f"dense-latent-queries-{kind}", PHASES["several"], store, call="latent",
            plan={"query_dtype": kind, "form": "absorbed"})  # fmt: skip
    add(CASES, "dense-decode-queries-fp8-packed", PHASES["decode"], STORES["packed"],
        plan={"query_dtype": "fp8"})  # fmt: skip
    for store_name in ("bf16", "fp8", "fp8-scales", "f32"):
        for phase in ("context", "chunked"):
            add(CASES, f"dense-{phase}-prefill-fp8-{store_name}", PHASES[phase],
                STORES[store_name], plan={"prefill_dtype": "fp8", "form": "expanded"})  # fmt: skip
    add(CASES, "dense-mixed-prefill-fp8", PHASES["mixed"], STORES["fp8"],
        plan={"prefill_dtype": "fp8", "query_dtype": "fp8"})  # fmt: skip
    add(CASES, "dense-workspace-prefill-fp8", STORES["fp8"], held=[60, 33, 0, 90],
        steps=[[7, 12, 5, 9]], workspace_tokens=32,
        plan={"prefill_dtype": "fp8", "form": "expanded"})  # fmt: skip


def _add_calls() -> None:
    for phase in ("mixed", "chunked", "padded"):
        add(CASES, f"dense-{phase}-sink", PHASES[phase], sink=True)
        add(CASES, f"dense-{phase}-partial", PHASES[phase], call="partial", sink=True)
        add(CASES, f"dense-{phase}-partial-bf16", PHASES[phase], STORES["bf16"], call="partial")
        add(CASES, f"dense-{phase}-written-before", PHASES[phase], STORES["fp8"], write=False)
        add(CASES, f"dense-{phase}-raw", PHASES[phase], raw=True)
        add(CASES, f"dense-{phase}-raw-fp8", PHASES[phase], STORES["fp8-scales"], raw=True)
    add(CASES, "dense-mixed-partial-raw", PHASES["mixed"], call="partial", raw=True)
    for phase in ("decode", "mixed", "empty", "padded"):
        add(CASES, f"dense-{phase}-latent", PHASES[phase], call="latent",
            plan={"form": "absorbed"})  # fmt: skip
    add(CASES, "dense-several-latent-scales", PHASES["several"], STORES["fp8-scales"],
        call="latent", plan={"form": "absorbed"})  # fmt: skip
    parts: dict[str, Any] = {"held": [21, 12, 40, 9], "steps": [[9, 1, 3, 0]]}
    for form in ("auto", "absorbed", "expanded"):
        add(CASES, f"dense-parts-{form}", parts, call="parts", plan={"form": form})
    add(CASES, "dense-parts-bf16", parts, STORES["bf16"], call="parts")
    add(CASES, "dense-parts-fp8", parts, STORES["fp8-scales"], call="parts",
        plan={"workspace_tokens": 8, "form": "expanded"})  # fmt: skip
    add(CASES, "dense-parts-batch-invariant", parts, call="parts", plan={"batch_invariant": True})


for _make in (
    _add_phases, _add_options, _add_lengths, _add_captured, _add_outputs, _add_eight_bits,
    _add_calls,
):  # fmt: skip
    _make()
