"""Makes .venv with what `make demo` and `make test` need. Run again, it finds nothing to do.

Standard library only, no root, no python3-venv package: the environment is made without pip and
filled by the pip of the Python that runs this.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "openmla-setup"
EXTRAS = ".[triton,hf,dev]"


def main() -> None:
    require_python()
    wanted = fingerprint()
    if complete() and STAMP.read_text() == wanted:
        return
    require_pip()
    if not complete():
        if VENV.exists():
            say("found a half-made .venv, building it anew")
            shutil.rmtree(VENV)
        say("making .venv")
        run([sys.executable, "-m", "venv", "--without-pip", str(VENV)], "Python's venv module")
    announce_torch()
    say("installing (the first time takes some minutes)")
    constraints = str(ROOT / "constraints.txt")
    run(pip("install", "-c", constraints, "-e", EXTRAS), "pip install")
    STAMP.write_text(wanted)
    say("ready")


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


def pip(*arguments: str) -> list[str]:
    quiet = "--disable-pip-version-check"
    return [sys.executable, "-m", "pip", "--python", str(VENV_PYTHON), quiet, *arguments]


def run(command: list[str], what: str) -> None:
    """Run a command, showing in one line what it is at; all its words only if it fails."""
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


def fingerprint() -> str:
    """Changes when the requirements or the interpreter change."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", "tools/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    digest.update(f"{sys.version} {platform.machine()} {ROOT}".encode())
    return digest.hexdigest()


def complete() -> bool:
    """Whether an earlier set-up ran to its end and its interpreter still starts."""
    if not STAMP.exists():
        return False
    try:
        return subprocess.run([str(VENV_PYTHON), "-c", ""]).returncode == 0
    except OSError:
        return False


def announce_torch() -> None:
    """Say beforehand when torch will bring gigabytes of GPU libraries."""
    pins = (ROOT / "constraints.txt").read_text().split()
    version = next(pin.partition("==")[2] for pin in pins if pin.startswith("torch=="))
    seen = subprocess.run(pip("index", "versions", "torch"), capture_output=True, text=True)
    if seen.returncode != 0:
        say("pip cannot see torch. Check the network and pip's index settings.")
        return  # the install below will say exactly what is wrong
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
