"""A fresh interpreter: `import openmla` loads torch and nothing else, and that is enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# One process, because importing torch takes longer than all the rest.
CODE = """
import sys
import torch  # which looks for triton itself

def loaded():
    return {name.split(".")[0] for name in sys.modules}

before = loaded()
import openmla
assert not (extra := loaded() - before - set(sys.stdlib_module_names) - {"openmla"}), extra

from openmla.cli.__main__ import main
assert main(["size", "--model", "deepseek-v3.2", "--gpu", "h200", "--format", "fp8_ds_mla"]) == 0
assert not (extra := {"matplotlib", "transformers", "safetensors"} & loaded()), extra

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "transformers", "safetensors", "flash_mla", "vllm"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
from openmla.testing import PagedCase, RaggedCase
inputs = PagedCase("blocked", (1, 2), (33, 7)).make()
out, lse = inputs.run(openmla.ops.mqa_paged, backend="auto")
assert out.isfinite().all() and lse.isfinite().all()
try:
    openmla.attach(torch.nn.Linear(1, 1))
    raise SystemExit("attached without transformers")
except openmla.UnsupportedError as error:
    assert 'pip install "openmla[hf]"' in str(error), error
out, lse = RaggedCase("blocked", (5,), (5,)).make().run(openmla.ops.mha_ragged, backend="auto")
for command in ("generate", "eval"):
    try:
        main([command, "--help"])
    except SystemExit as ended:
        print(command, "ended with", ended.code)
"""


def test_torch_is_all_that_is_needed_and_loaded() -> None:
    """By ops, by the size of a preset, and by the help of commands that run models."""
    child = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "generate ended with 0" in child.stdout and "eval ended with 0" in child.stdout
    assert "--compare" in child.stdout
