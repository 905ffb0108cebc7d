"""DeepSeek V4 in the real engine, on a CPU: every token is what others would have taken.

python -m tests.vllm.v4              the main cases
python -m tests.vllm.v4 --all        every case
python -m tests.vllm.v4 long         one case

vLLM's V4 is bf16, logits included: among 512 of them the two best are often neighbours, or the same
number. Two comparisons: transformers in float32 with openmla attached, whose caches hold the same
bytes, is given our tokens, and must prefer no other by more than rounding; and vLLM's own kernels
choose and attend in our place: their tokens are ours up to a request's first tie. What a step hands
to them is ours as well, for vLLM 0.32 fails there (openmla/integrations/vllm/v4.py).
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".vllm-tests"
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # AMX, where it is masked, kills bf16 products
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function is sent to workers
    "VLLM_NO_USAGE_STATS": "1",
}
VOCABULARY = 512
TIE = 0.25  # two steps of bf16 between 16 and 32, where the best logits are
LEAST = 0.5  # of the tokens come before a tie
REGRET = 0.1  # of the logits' standard deviation
# What vLLM's CPU kernels ask: 64 experts of which 6 are taken, heads of 512, keys of 128.
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_hash_layers": 0,
    "q_lora_rank": 128,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 16384,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ALWAYS = {"max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True, "seed": 0}
ALWAYS |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": 256 << 20}
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 200}
UNEVEN = (5, 17, 40, 133, 300, 64, 1, 90, 700)


class Case(NamedTuple):
    lengths: tuple[int, ...]  # of prompts
    options: dict[str, Any]  # of the engine
    topk: int = 32  # entries a token may choose; of vLLM's own kernels 512 and nothing else
    shared: int = 0  # tokens that all prompts begin with
    new: int = 24
    seen: str = ""  # what must be counted, or it is no such case


CASES = {
    "uneven": Case(UNEVEN, {}),
    "own kernels": Case(UNEVEN, {}, topk=512),
    "chunks and prefixes": Case(
        (40, 133, 17, 64, 90, 3), {**CHUNKS, "enable_prefix_caching": True}, shared=600, seen="hits"
    ),
    "long": Case((2600, 700), {"max_model_len": 4096, **CHUNKS}, topk=512, new=16),
    "compiled": Case(UNEVEN, {"enforce_eager": False}),
    "two ranks": Case(UNEVEN, {"tensor_parallel_size": 2}),
}
MAIN = ("uneven", "own kernels", "chunks and prefixes")


def prompts_of(case: Case) -> list[list[int]]:
    draw = random.Random(1)
    head = [draw.randrange(2, VOCABULARY) for _ in range(case.shared)]
    return [head + [draw.randrange(2, VOCABULARY) for _ in range(n)] for n in case.lengths]


def checkpoint(topk: int) -> Path:
    """vLLM's, by DeepSeek's names; transformers' is in its folder "hf"."""
    folder = FOLDER / f"v4-{topk}"
    if not (folder / "config.json").exists():
        ask("make", topk=topk)
    return folder


def make(topk: int) -> None:
    """Random weights, such that what is attended to matters and the same experts are always taken:
    a token that changes its experts for a rounding error changes all that follows."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    config = {**MODEL, "index_topk": topk}
    copied = json.loads(json.dumps(config))  # which transformers changes
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("deepseek_v4", initializer_range=0.1, **copied), dtype=torch.bfloat16
    )
    factors = {"experts": 0.3, "o_b_proj": 0.1, "embed_tokens": 5.0}
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.uniform_(0.5, 1.5)
        elif "sinks" in name or "position_bias" in name or "lm_head" in name:
            weight.data.normal_(generator=draw).mul_(1.0 if "sinks" in name else 0.4)
        for part, factor in factors.items():
            weight.data.mul_(factor if part in name else 1.0)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(torch.randperm(len(buffer), generator=draw) * 5.0)
    folder = FOLDER / f"v4-{topk}"
    model.save_pretrained(folder / "hf")
    renamed = {}
    for name, weight in load_file(folder / "hf" / "model.safetensors").items():
        name = re.sub(r"^model\.", "", name).replace("embed_tokens.", "embed.")
        name = name.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
        wide = re.search(r"hc_|attn_sink|\.ape|gate\.bias", name)
        renamed[name] = (weight.float() if wide else weight).contiguous()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    more: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    more |= {"topk_method": "noaux_tc", "torch_dtype": "bfloat16", "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps({**config, **more}))


def ask(what: str, **arguments: Any) -> Any:
    """In a process of its own, whose log is shown if it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        answer, log = Path(scratch, "answer"), Path(scratch, "log")
        with log.open("w") as printed:
            done = subprocess.run(
                [sys.executable, "-m", "tests.vllm.v4", f"--{what}", str(answer)],
                cwd=ROOT,
                env={**os.environ, **VARIABLES},
                input=json.dumps(arguments),
                stdout=printed,
                stderr=subprocess.STDOUT,
                text=True,
            )
        if done.returncode:
            raise RuntimeError(f"{what} failed:\n{log.read_text(errors='replace')[-4000:]}")
        return json.loads(answer.read_text())


def attached(prompts: list[list[int]], tokens: list[list[int]], topk: int) -> list[list[float]]:
    """By how much of the logits' deviation the attached model would rather have had another."""
    import torch
    from transformers import AutoModelForCausalLM

    import openmla

    folder = checkpoint(topk) / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    openmla.attach(model, cache_format="fp8_dsv4", index_format="index_fp8")
    regrets = []
    with torch.inference_mode():
        for prompt, given in zip(prompts, tokens, strict=True):
            logits = model(torch.tensor([prompt + given])).logits[0, len(prompt) - 1 : -1]
            taken = logits.gather(1, torch.tensor(given)[:, None])[:, 0]
            regrets.append(((logits.amax(1) - taken) / logits.std(1)).tolist())
    return regrets


def with_own_kernels() -> type:
    """Our model, whose layers are given back what vLLM attends and chooses with."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.forward_context import get_forward_context

    from openmla.integrations.vllm import v4

    class OwnChooser(v4.Chooser):
        def forward(self, hidden_states: Any, q: Any, k: None, weights: Any) -> Any:
            steps = get_forward_context().attn_metadata
            if not isinstance(steps, dict):
                return self.chosen
            step, keys = steps[self.k_cache.prefix], self.k_cache.kv_cache
            T, table = len(step.row_lens), step.block_table[step.token_to_req_indices]
            scores = ops.fp8_paged_mqa_logits_cpu(
                q[:T], keys.view(len(keys), -1), weights[:T], step.row_lens, table, keys.shape[1],
                int(step.row_lens.max()),
            )  # fmt: skip
            self.chosen[:T] = -1
            slots = torch.empty((T, 512), dtype=torch.int32)  # not looked at
            ops.topk_transform_512_cpu(
                scores, step.row_lens, table, slots, keys.shape[1], self.chosen[:T]
            )
            return self.chosen

    def compared(layer: Any, q: Any, kv: Any, positions: Any, output: Any) -> None:
        """vLLM's attention, from which ours may be off by roundings to bf16."""
        ours = torch.empty_like(output)
        v4.Attend(layer).attend(q, positions, ours)
        type(layer).forward_mqa(layer, q, kv, positions, output)
        off, most = (ours.float() - output.float()).abs(), output.float().abs().amax((1, 2))
        worst = float((off.amax((1, 2)) / most.clamp_min(1e-6)).max())
        assert worst <= 0.02, f"ratio {layer.compress_ratio}: attention is off by {worst:.3f}"

    class OwnKernels(v4.DeepseekV4ForCausalLM):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            module: Any
            for module in self.modules():
                if "forward_mqa" in vars(module):
                    module.forward_mqa = partial(compared, module)
                    if module.indexer is not None:
                        module.indexer.indexer_op = OwnChooser(module.indexer)

    return OwnKernels


def model_of(worker: Any) -> str:
    """Its class, and who attends."""
    model = worker.model_runner.get_model()
    layer = model.model.layers[0].attn
    return f"{type(model).__qualname__} {'forward_mqa' in vars(layer)}"


def engine(
    prompts: list[list[int]], topk: int, new: int, options: dict[str, Any], own: bool
) -> dict[str, Any]:
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if own:
        ModelRegistry.register_model("DeepseekV4ForCausalLM", with_own_kernels())
    llm = LLM(
        model=str(checkpoint(topk)), dtype="bfloat16", attention_backend="CUSTOM",
        skip_tokenizer_init=True, disable_log_stats=False, **{**ALWAYS, **options},
    )  # fmt: skip
    wanted = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=2
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, wanted, use_tqdm=False)
    margins = []
    for output in outputs:
        best = [
            sorted(each.logprob for each in step.values()) for step in output.outputs[0].logprobs
        ]
        margins.append([values[-1] - values[-2] for values in best])
    counted = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "margins": margins,
        "hits": sum(output.num_cached_tokens or 0 for output in outputs),
        "preemptions": int(counted["vllm:num_preemptions"]),
        "models": sorted(set(llm.collective_rpc(model_of))),
        "chunked": llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill,
    }


def equal(ours: dict[str, Any], theirs: list[list[int]]) -> str:
    """Refused where a token is another one and was not a tie."""
    same = ties = total = 0
    for mine, other, margins in zip(ours["tokens"], theirs, ours["margins"], strict=True):
        total += len(mine)
        first = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        same += len(mine) if first is None else first
        if first is not None:
            ties += 1
            assert margins[first] <= TIE, (
                f"token {first} of vLLM's own kernels is {other[first]}, ours is {mine[first]}, by "
                f"{margins[first]:.3f}"
            )
    assert same >= LEAST * total, f"{same} of {total} tokens before a tie: too few are compared"
    return f"own kernels the same {same} of {total}, then {ties} ties"


def preferred(tokens: list[list[int]], prompts: list[list[int]], topk: int) -> str:
    """Refused where the attached model would rather have had another."""
    given = ask("attached", prompts=prompts, tokens=tokens, topk=topk)
    regrets = [regret for each in given for regret in each]
    assert max(regrets) <= REGRET, f"attached would rather have another: {max(regrets):.3f}"
    best = sum(regret == 0 for regret in regrets)
    return f"attached the same {best} of {len(regrets)}, regret at most {max(regrets):.3f}"


def check(name: str) -> str:
    case = CASES[name]
    prompts = prompts_of(case)
    asked: dict[str, Any] = {"prompts": prompts, "topk": case.topk, "new": case.new}
    checkpoint(case.topk)
    ours = ask("engine", options=case.options, own=False, **asked)
    assert ours["models"] == ["DeepseekV4ForCausalLM True"], ours["models"]
    assert ours["chunked"] or "enable_chunked_prefill" not in case.options, "prompts are not cut"
    assert not case.seen or ours[case.seen] > 0, f"no {case.seen}"
    found = [preferred(ours["tokens"], prompts, case.topk)]
    if case.topk == 512:
        own = ask("engine", options=case.options, own=True, **asked)
        assert own["models"][0].endswith("OwnKernels True"), own["models"]
        found.append(equal(ours, own["tokens"]))
    return "; ".join([*found, *([f"{ours[case.seen]} {case.seen}"] if case.seen else [])])


CHECKS = {f"V4, {name}": partial(check, name) for name in MAIN}
ALL_CHECKS = {f"V4, {name}": partial(check, name) for name in CASES}


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in ("--make", "--attached", "--engine"):
        function: Any = {"make": make, "attached": attached, "engine": engine}[sys.argv[1][2:]]
        Path(sys.argv[2]).write_text(json.dumps(function(**json.loads(sys.stdin.read()))))
        return
    wanted = sys.argv[1:] or list(MAIN)
    for name in CASES if "--all" in wanted else wanted:
        began = time.perf_counter()
        print(f"ok   V4, {name}: {check(name)} ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
