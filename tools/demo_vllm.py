"""Serves the demo checkpoint with vLLM's OpenAI-compatible server, on openmla and on vLLM's own
backend, and sends both the same requests with curl: `make demo-vllm`. Runs in .venv-vllm."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".vllm-tests"
DEMO = ROOT / "openmla" / "demo"
PROMPT = "def merge(left, right):\n    "
NEW, TIMES = 128, 3
# The only latent size that vLLM's own CPU backend supports.
RANK, ROPE = 512, 64
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
SPINNER = "|/-\\"
OURS = ("--attention-backend", "CUSTOM")
SMALL = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
    "--kv-cache-memory-bytes", str(256 << 20),
)  # fmt: skip


def padded(name: str, weight: Any, numbers: dict[str, Any]) -> Any:
    """Pad a weight of the demo checkpoint to a latent of RANK + ROPE: zeros for new columns, and
    scales that compensate for the wider mean of the norm and the smaller scale of the scores."""
    import torch

    H, C = numbers["num_attention_heads"], numbers["kv_lora_rank"]
    P, R = numbers["qk_nope_head_dim"], numbers["qk_rope_head_dim"]
    if name.endswith("q_b_proj.weight"):
        heads = weight.view(H, P + R, -1) * ((P + ROPE) / (P + R)) ** 0.5
        return torch.nn.functional.pad(heads, (0, 0, 0, ROPE - R)).flatten(0, 1)
    if name.endswith("kv_a_proj_with_mqa.weight"):
        latent, rope = weight.split([C, R])
        pad = torch.nn.functional.pad
        return torch.cat([pad(latent, (0, 0, 0, RANK - C)), pad(rope, (0, 0, 0, ROPE - R))])
    if name.endswith("kv_a_layernorm.weight"):
        return torch.nn.functional.pad(weight * (C / RANK) ** 0.5, (0, RANK - C))
    if name.endswith("kv_b_proj.weight"):
        return torch.nn.functional.pad(weight, (0, RANK - C))
    return weight


def demo_checkpoint() -> Path:
    """Write the demo checkpoint, dense and padded, with a byte tokenizer; its text stays the same.

    With twice the rope columns, squaring theta gives the demo's frequencies. YaRN by a factor of 1
    changes nothing, but vLLM's CPU build rotates plain interleaved RoPE wrongly.
    """
    from safetensors.torch import load_file, save_file

    folder = FOLDER / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = json.loads((DEMO / "config.json").read_text())
    weights = load_file(DEMO / "model.safetensors")
    save_file(
        {
            name: padded(name, weight.float(), numbers).contiguous()
            for name, weight in weights.items()
            if ".indexer." not in name
        },
        folder / "model.safetensors",
        {"format": "pt"},
    )
    numbers = {
        name: value
        for name, value in numbers.items()
        if not name.startswith("index_") and name not in ("layer_types", "head_dim")
    }
    theta = numbers["rope_parameters"]["rope_theta"]
    yarn = {"rope_type": "yarn", "rope_theta": theta ** (ROPE / numbers["qk_rope_head_dim"])}
    yarn |= {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn |= {"original_max_position_embeddings": numbers["max_position_embeddings"]}
    numbers |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": numbers["qk_nope_head_dim"] + ROPE,
        "rope_parameters": yarn,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    (folder / "config.json").write_text(json.dumps(numbers, indent=2))
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """A tokenizer with one token per byte, as the demo checkpoint was trained with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Answer(NamedTuple):
    text: str
    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Server:
    """vLLM's OpenAI-compatible server on a free port, until it is closed."""

    def __init__(
        self, name: str, model: Path, *options: str, variables: dict[str, str] | None = None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = FOLDER / "logs" / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # not `vllm serve`, which for vllm-cpu looks for a distribution called vllm
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "demo"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **VARIABLES, **(variables or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether the server is ready. Raises if it has ended."""
        if self.process.poll() is not None:
            words = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"the server ended with {self.process.returncode}:\n{words}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def request(self, prompt: str, new: int) -> list[str]:
        """A curl command for greedy decoding."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": new, "temperature": 0}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        sort = "Content-Type: application/json"
        return ["curl", "-sS", "--fail-with-body", url, "-H", sort, "-d", json.dumps(body)]

    def ask(self, prompt: str, new: int) -> Answer:
        began = time.perf_counter()
        done = subprocess.run(self.request(prompt, new), capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"curl: {done.stderr.strip()} {done.stdout.strip()}")
        reply = json.loads(done.stdout)
        return Answer(reply["choices"][0]["text"], reply["usage"]["completion_tokens"], seconds)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_for(servers: list[Server], most: float = 300.0, quiet: bool = False) -> None:
    """Wait until all are ready, with a spinner in a terminal, else with a line now and then."""
    began, told = time.monotonic(), 0.0
    while not all(server.is_ready() for server in servers):
        seconds = time.monotonic() - began
        if seconds > most:
            raise RuntimeError(f"no server after {most:.0f} s; see {servers[0].log.parent}")
        if quiet:
            pass
        elif sys.stdout.isatty():
            print(f"\r{SPINNER[int(seconds * 2) % 4]} {seconds:3.0f} s", end="", flush=True)
        elif seconds - told >= 10:
            told = seconds
            print(f"  {seconds:3.0f} s", flush=True)
        time.sleep(0.5)
    if sys.stdout.isatty() and not quiet:
        print("\r\033[K", end="", flush=True)


def main() -> None:
    if shutil.which("curl") is None:
        raise SystemExit("curl is missing. On Debian: apt install curl")
    print(
        "The demo checkpoint for vLLM: dense, its latent padded with zeros to 512 + 64.", flush=True
    )
    model = demo_checkpoint()
    print("Two servers start, one by openmla, one by vLLM's own backend (about a minute):")
    servers = {
        "openmla": Server("demo-openmla", model, *SMALL, *OURS),
        "vLLM's own": Server("demo-own", model, *SMALL),
    }
    try:
        wait_for(list(servers.values()))
        answers = {who: [server.ask(PROMPT, NEW)] for who, server in servers.items()}
        for turn in range(TIMES):  # the first round is not measured
            for who in list(servers)[:: 1 if turn % 2 else -1]:
                answers[who].append(servers[who].ask(PROMPT, NEW))
    except RuntimeError as error:
        raise SystemExit(f"\n{error}") from error
    finally:
        for server in servers.values():
            server.close()
    ours, own = answers.values()
    command = servers["openmla"].request(PROMPT, NEW)
    print("$", " ".join(f"'{word}'" if " " in word or "{" in word else word for word in command))
    print(f"\n{PROMPT}\033[1m{ours[0].text}\033[0m\n" if sys.stdout.isatty() else ours[0].text)
    for who, given in answers.items():
        print(f"{who:12} {median(each.speed for each in given[1:]):6.1f} tokens/s")
    same = {answer.text for answer in (*ours, *own)} == {ours[0].text}
    print("The same text, byte by byte." if same else f"vLLM's own says:\n{own[0].text}")


if __name__ == "__main__":
    main()
