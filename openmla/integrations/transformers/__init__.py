"""attach(): run the MLA layers of a loaded Hugging Face model on this package.

Only public doors of transformers are used. Every MLA attention module projects, normalises, rotates
and computes its output as before; in between it asks its cache to store the new latents and a named
attention function to attend. attach() registers that function ("openmla", with a mask function that
never builds a square mask), puts paged layers into the cache objects as they come by, and names the
function in the model's config. Each module's expand_kv is shadowed on the instance: where a paged
layer has stored latents, they stay latents. No class is patched and no parameter copied.

Sparse models (with an indexer) score every key in one matrix and expand every cached latent in
every step (transformers 5.17 caches them expanded). Their indexers are watched: see indexer.py.
DeepSeek V4's compressors are shadowed: see compressed.py.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from openmla.backends.choice import BackendChoice
from openmla.config.families import REFUSED, SUPPORTED
from openmla.errors import ConfigError
from openmla.integrations.transformers.attachment import Attachment
from openmla.integrations.transformers.check import Options, check_model, supported_text_config
from openmla.integrations.transformers.install import install_attachment, remove_attachment
from openmla.integrations.transformers.memory import MemoryReport
from openmla.integrations.transformers.paged_layer import PagedLayer
from openmla.integrations.transformers.scales import KvScale

__all__ = [
    "REFUSED",
    "SUPPORTED",
    "Attachment",
    "MemoryReport",
    "PagedLayer",
    "attach",
    "attachment_of",
    "detach",
    "supported_text_config",
]

Model = TypeVar("Model", bound=nn.Module)


def attach(
    model: Model,
    *,
    cache_format: str | None = None,
    kv_scale: KvScale | None = None,
    index_format: str = "index_fp32",
    block_size: int | None = None,
    num_blocks: int | None = None,
    backend: BackendChoice = "auto",
    workspace: int | None = None,
    capture: bool | None = None,
    absorbed_format: str | None = None,
    batch_invariant: bool = False,
    prefill_dtype: str | None = None,
    group: Any = None,
    query_dtype: str | None = None,
) -> Model:
    """Run a model's MLA layers here from now on; returns the model.

    `cache_format` is a key of FORMATS, by default the model's own precision. `kv_scale` is of fp8:
    a number for all layers, what calibrate() found, a safetensors file or folder with such scales,
    or "first" for what calibrate() would find in the first pass, which all later ones keep; by
    default those in the model's own checkpoint, else 1. `index_format` is that
    of a sparse model's indexer keys, which transformers does not round. `block_size` is by default
    64 tokens, 256 for V4. `num_blocks` fixes the size of the block pool that all caches of this
    model share; without it the pool grows by what is asked and a bounded step. `backend` is
    make_plan()'s. `workspace` is the context rows that prefill expands at once. With
    absorbed_format="fp8" decode multiplies by kv_b_proj in eight bits: an fp8 model's own, or a
    copy with one scale per head beside the model's weights, as memory() says with its error. Then
    generate(), pipeline() and bare forward passes work as before.

    With `capture` a decode step (one new token per row) is recorded as a CUDA graph when it first
    comes and replayed from then on. The last four numbers of rows have a graph each, which share
    their memory; they are recorded anew whenever the block pool has grown or the longest context
    has doubled. By default that is done on a GPU, unless modules inside have hooks, which a
    replayed step would not run. On a CPU, where it must be asked for, the step runs over the same
    fixed tensors instead.

    `batch_invariant` is make_plan()'s: what attention gives for a token does not depend on the
    batch. That is so of the attention alone: the model's linears, its norms and its experts are
    torch's, whose bits do, and the caller's to replace if whole outputs are to be equal.

    `query_dtype` is the same as in make_plan(): "fp8" quantizes the queries of decode, over a
    cache_format of fp8 or fp8_ds_mla; "fp8_static" does so with calibrated scales, over fp8.
    With prefill_dtype="fp8" queries and keys of prompts are e4m3, as make_plan() has it; without a
    group.

    `group`, a process group or device mesh of torch.distributed, or Ranks of one, shards the cache
    over its ranks by position: each holds 1 / W of every sequence, of block_size tokens a block.
    Every rank runs the whole model on the same tokens, from one thread at a time, and gets the same
    outputs; where tokens are sampled, give all ranks one seed. Steps are captured only if asked
    for then, with the collectives of NCCL in their graphs.

    V4's windows of raw rows grow to the longest pass there is, once: long prompts are best given in
    passes of a few thousand tokens.
    """
    options = Options(
        cache_format, kv_scale, index_format, block_size, num_blocks, backend, workspace, capture,
        absorbed_format, group, batch_invariant, query_dtype, prefill_dtype,
    )  # fmt: skip
    attachment = check_model(model, options)
    # a recorded step has the group's collectives in it: with a group, only where it is asked for
    install_attachment(model, attachment, capture if group is None else bool(capture))
    return model


def detach(model: Model) -> Model:
    """Undo attach(): the model attends by itself again; returns it. Caches made in between are
    lost."""
    remove_attachment(attachment_of(model))
    return model


def attachment_of(model: nn.Module) -> Attachment:
    """What attach() set up on a model: its pool, caches and options; its memory() is what they
    take, its explain() what the last pass did."""
    for module in model.modules():
        attachment = getattr(module, "openmla", None)
        if isinstance(attachment, Attachment):
            return attachment
    raise ConfigError("attach: the model is not attached.")
