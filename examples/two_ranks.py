"""One model on two processes, each with half of the cache: the same tokens as with one process.

    python examples/two_ranks.py                                 # starts two processes itself
    torchrun --nproc-per-node 2 examples/two_ranks.py            # or is started by torchrun

Every process runs the whole model on the same tokens; positions of a sequence are assigned round
robin. A random model of DeepSeek-V3's shape replaces a checkpoint. The process group uses gloo on
CPUs; under torchrun, with a GPU per process, it uses NCCL.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import openmla
from openmla.integrations.transformers import attachment_of

PROMPT, NEW = 300, 20


def make_model(device: str) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=128,
        eos_token_id=None,
        pad_token_id=0,
    )
    return DeepseekV3ForCausalLM(config).eval().to(device)


def cached_bytes(model: DeepseekV3ForCausalLM, prompt: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Generated tokens, and the largest size of the cache meanwhile."""
    past = model(prompt, use_cache=True).past_key_values
    held = attachment_of(model).memory().used_bytes
    del past
    mask = torch.ones_like(prompt)
    tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return tokens, held


@torch.inference_mode()
def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"
    model = make_model(device)
    prompt = torch.arange(1, PROMPT + 1, device=device)[None]
    openmla.attach(model, block_size=16)
    alone, whole = cached_bytes(model, prompt)
    openmla.detach(model)
    openmla.attach(model, block_size=16, group=dist.group.WORLD)
    shared, share = cached_bytes(model, prompt)
    same = "the same" if torch.equal(alone, shared) else "DIFFERENT"
    for turn in range(size):
        dist.barrier()
        if turn == rank:
            line = f"{NEW} tokens after {PROMPT}, tokens {same} as alone"
            print(f"rank {rank} of {size}: {line}; cache {share} of {whole} bytes", flush=True)


def start(rank: int, size: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    main()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # torchrun
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        main()
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            spawn(start, (2, folder), nprocs=2)
