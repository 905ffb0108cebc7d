"""Makes .venv-docs, in which `make docs` builds the site. Does nothing if it is up to date.

    python3 -m tools.setup_docs

The site is built from text: the environment has no torch and takes only seconds.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys

from tools import setup_env as setup

NAME = ".venv-docs"


def requirements() -> list[str]:
    """The extra `docs` of pyproject.toml, parsed by hand since Python 3.10 has no tomllib."""
    text = (setup.ROOT / "pyproject.toml").read_text()
    (found,) = re.findall(r"^docs = \[(.*?)\]$", text, re.MULTILINE)
    return re.findall(r'"([^"]+)"', found)


def main() -> None:
    setup.require_python()
    venv, packages = setup.ROOT / NAME, requirements()
    wanted = hashlib.sha256(f"{packages} {sys.version} {setup.ROOT}".encode()).hexdigest()
    if setup.complete(venv) and setup.stamp(venv).read_text() == wanted:
        return
    setup.require_pip()
    if venv.exists():
        setup.say(f"{NAME} is half-made or of other requirements, building it anew")
        shutil.rmtree(venv)
    setup.say(f"making {NAME}")
    setup.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], "Python's venv module")
    setup.run(setup.pip(venv, "install", *packages), "pip install")
    setup.stamp(venv).write_text(wanted)
    setup.say("ready")


if __name__ == "__main__":
    main()
