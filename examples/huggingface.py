"""A Hugging Face MLA model before and after attach(): same tokens, different speed.

A random model of DeepSeek-V3's shape replaces a checkpoint, so nothing is downloaded.
"""

from __future__ import annotations

import time

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import openmla


def main(prompt_tokens: int = 2000) -> None:
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
    model = DeepseekV3ForCausalLM(config).eval()
    prompt = torch.randint(1, 1024, (1, prompt_tokens))

    def timed() -> tuple[torch.Tensor, float]:
        start = time.perf_counter()
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False)
        return out, time.perf_counter() - start

    before, plain = timed()
    model = openmla.attach(model)
    after, attached = timed()
    same = "the same" if torch.equal(before, after) else "DIFFERENT"
    print(f"20 tokens after a prompt of {prompt_tokens}:")
    print(f"  {plain:.1f} s alone, {attached:.1f} s attached, tokens {same}")


if __name__ == "__main__":
    main()
