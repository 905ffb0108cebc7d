"""Makes .venv with what `make demo` and `make test` need. Does nothing if it is up to date.

    python3 tools/setup_env.py --torch 2.15.0 --transformers 5.23.0 --triton 3.9.0

makes another one for any such versions, in a folder named after them, which is what `make test
TORCH=2.15.0` does. Standard library only, no root, no python3-venv package: the environment is made
without pip and filled by the pip of the Python that runs this.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ".[triton,hf,dev]"
PACKAGES = ("torch", "transformers", "triton")
# The oldest Triton that kernels support, in addition to the environment's own: a test compiles some
# kernels with it, in a process that imports it first. Only Linux has it.
OLDEST_TRITON = "3.6.0"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="setup_env")
    for package in PACKAGES:
        parser.add_argument(f"--{package}", default="", help="a version other than the usual one")
    options = vars(parser.parse_args(arguments))
    versions = {package: options[package] for package in PACKAGES if options[package]}
    require_python()
    venv = ROOT / "-".join([".venv", *(name + number for name, number in versions.items())])
    constraints = constraints_for(versions)
    wanted = fingerprint(constraints)
    if complete(venv) and stamp(venv).read_text() == wanted:
        return
    require_pip()
    if venv.exists():  # pip keeps what is installed, so changed requirements need a new environment
        say(f"{venv.name} is half-made or of other requirements, building it anew")
        shutil.rmtree(venv)
    say(f"making {venv.name}")
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], "Python's venv module")
    announce_torch(venv, constraints)
    say("installing (the first time takes some minutes)")
    kept = venv / "constraints.txt"
    kept.write_text(constraints)
    run(pip(venv, "install", "-c", str(kept), "-e", EXTRAS), "pip install")
    if platform.system() == "Linux":
        oldest = ("--no-deps", "--upgrade", "--target", str(venv / "oldest-triton"))
        run(pip(venv, "install", *oldest, f"triton=={OLDEST_TRITON}"), "pip install")
    stamp(venv).write_text(wanted)
    say("ready")


def constraints_for(versions: dict[str, str]) -> str:
    """constraints.txt with its versions replaced by these."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for package, version in versions.items():
        lines = [line for line in lines if not line.startswith((f"{package}=", f"{package}<"))]
        lines.append(f"{package}=={version}")
    return "\n".join(lines) + "\n"


def interpreter(venv: Path) -> Path:
    return venv / "bin" / "python"


def stamp(venv: Path) -> Path:
    return venv / "openmla-setup"


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def stop(text: str) -> None:
    say(text)
    raise SystemExit(1)


def require_python() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - the point is to tell people with an older one
        stop(
            f"Python 3.10 or newer is needed, this is {platform.python_version()}. "
            "Point make at another: make test PYTHON=python3.12"
        )


def require_pip() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True
    )
    if found.returncode != 0:
        stop(f"pip is missing for {sys.executable}. On Debian: apt install python3-pip")
    version = tuple(int(part) for part in found.stdout.split()[1].split(".")[:2])
    if version < (22, 3):
        stop(
            f"pip 22.3 or newer is needed, this is {found.stdout.split()[1]}. "
            f"Try: {sys.executable} -m pip install --user --upgrade pip"
        )


def pip(venv: Path, *arguments: str) -> list[str]:
    quiet = "--disable-pip-version-check"
    return [sys.executable, "-m", "pip", "--python", str(interpreter(venv)), quiet, *arguments]


def run(command: list[str], what: str) -> None:
    """Run a command with one line of progress; all its output is printed only if it fails."""
    words: list[str] = []
    steps = ("Collecting", "Downloading", "Using cached", "Processing", "Building", "Installing")
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            words.append(line)
            if sys.stdout.isatty() and line.strip().startswith(steps):
                print(f"\r\033[K  {line.strip()[:76]}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
    if child.returncode != 0:
        print("".join(words[-40:]), end="")
        stop(f"{what} failed; its own words are above. Mend that and run make again.")


def fingerprint(constraints: str) -> str:
    """A hash that changes with the requirements and the interpreter."""
    digest = hashlib.sha256(constraints.encode())
    for name in ("pyproject.toml", "tools/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    digest.update(f"{sys.version} {platform.machine()} {ROOT}".encode())
    return digest.hexdigest()


def complete(venv: Path) -> bool:
    """Whether an earlier setup finished and its interpreter still starts."""
    if not stamp(venv).exists():
        return False
    try:
        return subprocess.run([str(interpreter(venv)), "-c", ""]).returncode == 0
    except OSError:
        return False


def announce_torch(venv: Path, constraints: str) -> None:
    """Announce it if torch will bring gigabytes of GPU libraries."""
    pins = constraints.split()
    version = next(pin.partition("==")[2] for pin in pins if pin.startswith("torch=="))
    seen = subprocess.run(pip(venv, "index", "versions", "torch"), capture_output=True, text=True)
    if seen.returncode != 0:
        say("pip cannot see torch. Check the network and pip's index settings.")
        return  # the installation below reports the exact error
    offered = seen.stdout.replace(",", " ").split()
    if f"{version}+cpu" in offered:
        say(f"torch {version}: taking the CPU build that pip sees")
    elif platform.system() == "Linux" and platform.machine() == "x86_64":
        say(
            f"torch {version}: pip sees only the GPU build, which brings several GB of GPU "
            "libraries. To avoid that, point PIP_FIND_LINKS at a folder with a CPU wheel."
        )


if __name__ == "__main__":
    main()
