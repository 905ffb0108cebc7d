"""What transformers generates, by itself and with openmla attached; in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from tests.vllm.checkpoints import ROOT, checkpoint, dtype_of
from tests.vllm.engine import VARIABLES


class Question(NamedTuple):
    """Tokens of these prompts, greedy; by transformers alone, or with openmla attached."""

    model: str
    prompts: list[list[int]]
    new: list[int]  # tokens wanted of each
    attach: dict[str, str] | None = None  # openmla's options


def tokens(question: Question) -> list[list[int]]:
    answer: list[list[int]] = ask("generate", question)
    return answer


def regrets(model: str, prompts: list[list[int]], given: list[list[int]]) -> list[list[float]]:
    """By how much of the logits' deviation the model, in float32, prefers another token."""
    answer: list[list[float]] = ask("regret", (model, prompts, given))
    return answer


def continued(prompts: list[str], new: int) -> list[str]:
    """Texts of openmla's demo checkpoint as it is, its indexers left out."""
    answer: list[str] = ask("continue", (prompts, new))
    return answer


def ask(what: str, arguments: tuple[Any, ...]) -> Any:
    """In a process, whose memory is given back."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.reference", what],
        cwd=ROOT,
        env={**os.environ, **VARIABLES},
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"transformers failed on {arguments[0]}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def load(name: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=getattr(torch, dtype))
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def regret(name: str, prompts: list[list[int]], given: list[list[int]]) -> list[list[float]]:
    import torch

    model = load(name, "float32")
    answers = []
    with torch.inference_mode():
        for prompt, chosen in zip(prompts, given, strict=True):
            given_ids = torch.tensor([prompt + chosen], device=model.device)
            logits = model(given_ids).logits[0, len(prompt) - 1 : -1]
            taken = logits.gather(1, given_ids[0, len(prompt) :, None])[:, 0]
            answers.append(((logits.amax(1) - taken) / logits.std(1)).tolist())
    return answers


def continue_texts(prompts: list[str], new: int) -> list[str]:
    """A byte is a token; nothing is padded here."""
    import torch

    from openmla.cli.models import load_model

    model = load_model(ROOT / "openmla" / "demo", "cpu", "fp32", dense=True)
    answers = []
    for prompt in prompts:
        given = torch.tensor([list(prompt.encode())])
        out = model.generate(given, max_new_tokens=new, do_sample=False, eos_token_id=None)
        answers.append(bytes(out[0, given.shape[1] :].tolist()).decode())
    return answers


def generate(*asked: Any) -> list[list[int]]:
    import torch

    question = Question(*asked)
    model = load(question.model, dtype_of(question.model))
    if question.attach is not None:
        from openmla import attach

        attach(model, **question.attach)  # type: ignore[arg-type]
    answers = []
    with torch.inference_mode():
        for prompt, new in zip(question.prompts, question.new, strict=True):
            out = model.generate(
                input_ids=torch.tensor([prompt], device=model.device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


if __name__ == "__main__":
    functions: dict[str, Any] = {
        "continue": continue_texts,
        "generate": generate,
        "regret": regret,
    }
    print(json.dumps(functions[sys.argv[1]](*json.loads(sys.stdin.read()))))
