"""The OpenAI-compatible server with `--attention-backend CUSTOM`: the texts of several clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.vllm.reference import continued
from tools.demo_vllm import OURS, SMALL, Server, demo_checkpoint, wait_for

PROMPTS = ("def ", "class Stack:\n", "import os\n\n\ndef walk(path):\n    ", "for x in ")
NEW = 48


def server() -> str:
    """The engine has a process of its own here, as people run it; requests come together."""
    running = Server("server", demo_checkpoint(), *SMALL, *OURS)
    try:
        wait_for([running], quiet=True)
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            answers = list(clients.map(lambda prompt: running.ask(prompt, NEW), PROMPTS))
    finally:
        running.close()
    log = running.log.read_text()
    assert "CUSTOM" in log and "CPU_MLA" not in log, "the server took another backend"
    texts = [answer.text for answer in answers]
    expected = continued(list(PROMPTS), NEW)
    assert texts == expected, f"texts differ: {texts} {expected}"
    return f"{len(PROMPTS)} clients at once, texts as transformers' of the demo checkpoint"
