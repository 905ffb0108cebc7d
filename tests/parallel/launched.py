"""Run by torchrun: tiny models attached to the group it made, and without one."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from openmla import attach, detach
from tests.integrations.models import MAKERS, VOCAB


@torch.inference_mode()
def main() -> int:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    same = True
    for kind, make in MAKERS.items():
        model = make()
        length, BS = (290, 128) if kind == "v4" else (60, 16)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, VOCAB, (2, length), generator=generator)
        tokens = []
        for group in (None, dist.group.WORLD, mesh):
            attach(model, block_size=BS, group=group)
            mask = torch.ones_like(ids)
            tokens.append(
                model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
            )
            detach(model)
        same &= all(torch.equal(each, tokens[0]) for each in tokens[1:])
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {kind} {same}", flush=True)
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
