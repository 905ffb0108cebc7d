"""Train the checkpoint in openmla/demo: a DeepSeek-V3.2 of 5.5 M parameters that writes Python.

    python examples/train_demo.py --out openmla/demo

1. Text: the installed sources of the standard library and torch (their licenses allow it).
   A few modules of the standard library are held out and written next to the weights.
2. The model learns the text with dense attention (transformers' `deepseek_v3`); in the last part
   of it with cached rows rounded to fp8, so that an fp8 cache costs little accuracy.
3. With its weights frozen, the lightning indexer of each layer learns to give every key its share
   of the layer's attention, averaged over heads, so that its top-k selection is meaningful.

Seeded throughout. Other GPUs and versions round differently: the same loss, but not bitwise
identical weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
)

CONTEXT = 4096
ROUNDED = 0.7  # after this fraction of the steps, latents and rope keys are rounded to fp8
END = 0  # the byte between two files
HELD_OUT = ["bisect.py", "fractions.py", "heapq.py", "sched.py", "shelve.py", "textwrap.py"]
# Tests and tables of characters are excluded; the rest of the two libraries is used.
LEFT_OUT = {"test", "tests", "testing", "encodings", "site-packages", "dist-packages", "pydoc_data"}

ATTENTION = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
}
MODEL = {
    **ATTENTION,
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "intermediate_size": 640,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
}
# Sixteen index heads: with few, many keys score exactly zero and the cutoff falls among ties.
INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 256}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=4600, help="of the language model")
    parser.add_argument("--index-steps", type=int, default=1000, help="of the indexer")
    parser.add_argument("--batch", type=int, default=16, help="windows of 4096 bytes per step")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--measure", type=int, help="held-out windows at the end; default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def sources(root: Path) -> list[Path]:
    """Python files under root in a fixed order."""
    files = (path for path in root.rglob("*.py") if not path.is_symlink())
    return sorted(
        (path for path in files if not LEFT_OUT & set(path.relative_to(root).parts[:-1])),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def read(files: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() + bytes([END]) for path in files)


def load_text() -> tuple[list[Tensor], bytes]:
    """(one tensor of bytes per library, the held-out text)."""
    library = Path(sysconfig.get_path("stdlib"))
    held_out = [library / name for name in HELD_OUT]
    texts = [
        read(path for path in sources(library) if path not in held_out),
        read(sources(Path(torch.__file__).parent)),
    ]
    for name, text in zip(("standard library", "torch"), texts, strict=True):
        print(f"{name:<18}{len(text):>11,} bytes  sha256 {hashlib.sha256(text).hexdigest()[:16]}")
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts], read(held_out)


class Windows:
    """Random windows of the text, half of them from each library."""

    def __init__(self, texts: list[Tensor], device: str, seed: int) -> None:
        self.texts = [text.to(device) for text in texts]
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, num: int) -> Tensor:
        rows = []
        for row in range(num):
            text = self.texts[row % len(self.texts)]
            start = int(torch.randint(len(text) - CONTEXT, (), generator=self.generator))
            rows.append(text[start : start + CONTEXT])
        return torch.stack(rows).long()


class MasterWeights:
    """AdamW on float32 copies of the parameters; the model itself computes in bfloat16."""

    def __init__(self, parameters: Iterable[Tensor], rate: float, steps: int) -> None:
        self.parameters = list(parameters)
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        decayed = [master for master in self.masters if master.dim() > 1]
        others = [master for master in self.masters if master.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        warm = max(steps // 20, 1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps))),
        )

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


class Balance:
    """Balances the experts' load with the router's bias, a small step against each imbalance."""

    def __init__(self, model: Any) -> None:
        for router in (layer.mlp.gate for layer in model.model.layers[1:]):
            router.e_score_correction_bias = router.e_score_correction_bias.float()
            router.register_forward_hook(self.adjust)

    def adjust(self, router: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        if router.training:
            load = torch.bincount(out[2].flatten(), minlength=router.num_experts).float()
            router.e_score_correction_bias += 1e-3 * torch.sign(load.mean() - load)


class Rounding:
    """Rows as read back from an fp8 cache; gradients pass through unchanged.

    A cache holds rope keys after their rotation, and that matters: rounding before it would give a
    key the same error at every position.
    """

    def __init__(self, model: Any, device: str) -> None:
        self.on = False
        self.rope = model.config.qk_rope_head_dim
        positions = torch.arange(CONTEXT, device=device)[None]
        self.cos, self.sin = model.model.rotary_emb(torch.zeros((), device=device), positions)
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.register_forward_hook(self.latent)
            layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(self.rope_key)

    def latent(self, module: Any, args: Any, out: Tensor) -> Tensor:
        return self.instead(out, self.rounded(out.detach())) if self.on else out

    def rope_key(self, module: Any, args: Any, out: Tensor) -> Tensor:
        if not self.on:
            return out
        latent, k_pe = out[..., : -self.rope], out[..., -self.rope :]
        turned = self.rounded(rotate_pairs(k_pe.detach().float(), self.cos, self.sin))
        back = rotate_halves(turned, self.cos, -self.sin)  # first members of the pairs come first
        back = torch.stack(back.chunk(2, -1), -1).flatten(-2)
        return torch.cat([latent, self.instead(k_pe, back)], -1)

    def rounded(self, x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

    def instead(self, x: Tensor, value: Tensor) -> Tensor:
        return x + (value - x.detach()).to(x.dtype)


def train_language_model(model: Any, windows: Windows, args: argparse.Namespace) -> None:
    optimizer = MasterWeights(model.parameters(), args.rate, args.steps)
    Balance(model)
    rounding = Rounding(model, args.device)
    progress = Progress("text", args.steps, "bits per byte")
    model.train()
    for step in range(args.steps):
        rounding.on = step >= ROUNDED * args.steps
        ids = windows(args.batch)
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        progress(step, loss.detach() / math.log(2))
    rounding.on = False
    model.eval().requires_grad_(False)


class LayerInputs:
    """Records the arguments of each attention module's calls."""

    def __init__(self, model: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.calls.append({"module": module, **kwargs})


def train_indexer(model: Any, sparse: Any, windows: Windows, args: argparse.Namespace) -> None:
    """Train each layer's indexer on that layer's attention, for some queries of every window."""
    indexers = [layer.self_attn.indexer for layer in sparse.model.layers]
    optimizer = MasterWeights(
        (p for indexer in indexers for p in indexer.parameters()), args.rate, args.index_steps
    )
    inputs = LayerInputs(model)
    generator = torch.Generator().manual_seed(2)
    progress = Progress("indexer", args.index_steps, "nats from attention, and its top-k share")
    for step in range(args.index_steps):
        inputs.calls.clear()
        with torch.no_grad():
            model.model(windows(max(args.batch // 4, 1)), use_cache=False)
        rows = torch.randperm(CONTEXT, generator=generator)[:256].to(args.device)
        losses, shares = [], []
        for call, indexer in zip(inputs.calls, indexers, strict=True):
            with torch.no_grad():
                target = attention_shares(call, rows)
            scores = index_scores(call, indexer, rows)
            logs = torch.log_softmax(scores, -1).where(target > 0, 0)
            losses.append((target * (target.clamp_min(1e-20).log() - logs)).sum(-1).mean())
            chosen = scores.topk(INDEXER["index_topk"], -1).indices
            shares.append(target.gather(-1, chosen).sum(-1).mean())
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        progress(step, torch.stack([loss.detach(), torch.stack(shares).mean()]))


def attention_shares(call: dict[str, Any], rows: Tensor) -> Tensor:
    """[B, rows, T]: the attention of some queries, averaged over the heads."""
    module, hidden = call["module"], call["hidden_states"]
    heads, nope, rope = module.num_heads, module.qk_nope_head_dim, module.qk_rope_head_dim
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden[:, rows])))
    q = q.unflatten(-1, (heads, nope + rope))
    latent, k_pe = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, rope], -1)
    k = module.kv_b_proj(module.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))[..., :nope]
    cos, sin = call["position_embeddings"]
    q_pe = rotate_pairs(q[..., nope:], cos[:, rows, None], sin[:, rows, None])
    k_pe = rotate_pairs(k_pe, cos, sin)
    scores = torch.einsum("bqhd,bkhd->bhqk", q[..., :nope], k)
    scores = (scores + torch.einsum("bqhd,bkd->bhqk", q_pe, k_pe)).float() * module.scaling
    return scores.masked_fill(later(rows, hidden.shape[1]), -math.inf).softmax(-1).mean(1)


def index_scores(call: dict[str, Any], indexer: Any, rows: Tensor) -> Tensor:
    """[B, rows, T]: the lightning indexer's scores, later keys at -inf."""
    module, hidden = call["module"], call["hidden_states"]
    rope = module.qk_rope_head_dim
    cos, sin = call["position_embeddings"]
    q = indexer.wq_b(module.q_a_layernorm(module.q_a_proj(hidden[:, rows])))
    q = q.unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden))
    q = torch.cat(
        [rotate_halves(q[..., :rope], cos[:, rows, None], sin[:, rows, None]), q[..., rope:]], -1
    )
    k = torch.cat([rotate_halves(k[..., :rope], cos, sin), k[..., rope:]], -1)
    weights = indexer.weights_proj(hidden[:, rows]).float() * indexer.n_heads**-0.5
    products = torch.einsum("bqhd,bkd->bqhk", q, k).float() * indexer.head_dim**-0.5
    scores = torch.einsum("bqhk,bqh->bqk", products.relu(), weights)
    return scores.masked_fill(later(rows, hidden.shape[1]), -math.inf)


def later(rows: Tensor, num_keys: int) -> Tensor:
    return torch.arange(num_keys, device=rows.device) > rows[:, None]


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of adjacent columns; the result has the pairs' first members first."""
    return rotate_halves(torch.cat([x[..., 0::2], x[..., 1::2]], -1), cos, sin)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Progress:
    """Prints a line every hundred steps, with the means since the last line."""

    def __init__(self, name: str, steps: int, unit: str) -> None:
        self.name, self.steps, self.unit = name, steps, unit
        self.values: list[Tensor] = []
        self.start = time.perf_counter()

    def __call__(self, step: int, value: Tensor) -> None:
        self.values.append(value)
        if (step + 1) % 100 == 0 or step + 1 == self.steps:
            mean = torch.stack(self.values).mean(0).flatten().tolist()
            passed = time.perf_counter() - self.start
            shown = ", ".join(f"{number:.3f}" for number in mean)
            print(
                f"{self.name} {step + 1}/{self.steps}  {shown} {self.unit}  {passed:.0f} s",
                flush=True,
            )
            self.values.clear()


@torch.no_grad()
def bits_per_byte(model: Any, text: bytes, device: str, num_windows: int | None) -> float:
    """Mean over whole windows of the held-out text, the first ones or all."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:num_windows]
    losses = [
        F.cross_entropy(model(row[None], use_cache=False).logits[0, :-1], row[1:]) / math.log(2)
        for row in windows
    ]
    return torch.stack(losses).mean().item()


def save(sparse: Any, held_out: bytes, folder: Path) -> None:
    """Save in Hugging Face layout: bf16 weights, computed in float32 unless requested otherwise."""
    for parameter in sparse.parameters():  # not the routers' biases
        parameter.data = parameter.data.bfloat16()
    sparse.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "heldout.txt").write_bytes(held_out)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    texts, held_out = load_text()
    windows = Windows(texts, args.device, seed=1)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**MODEL)).to(args.device, dtype)
    if args.device == "cuda":
        model.set_experts_implementation("grouped_mm")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, dense")
    train_language_model(model, windows, args)

    sparse = DeepseekV32ForCausalLM(DeepseekV32Config(**MODEL, **INDEXER)).to(args.device, dtype)
    Balance(sparse)
    missing = sparse.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert all(".indexer." in name for name in missing), missing
    train_indexer(model, sparse, windows, args)

    save(sparse, held_out, args.out)
    exact, model = sparse.float().eval(), model.float().eval()
    exact.set_experts_implementation("eager")
    model.set_experts_implementation("eager")
    model.load_state_dict(exact.state_dict(), strict=False)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"wrote {args.out}, {size / 1e6:.2f} MB")
    for name, each in (("dense", model), (f"top {INDEXER['index_topk']}", exact)):
        bits = bits_per_byte(each, held_out, args.device, args.measure)
        print(f"held out, {name}: {bits:.4f} bits per byte (float32)")


if __name__ == "__main__":
    main()
