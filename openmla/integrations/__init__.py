"""Run Hugging Face models on openmla: attach(), detach(), calibrate(). They import transformers.

Annotations in this file are evaluated, so that help() shows types instead of strings.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from openmla.backends.choice import BackendChoice
from openmla.cache import LayerScales
from openmla.errors import ConfigError, UnsupportedError, check_kind
from openmla.integrations.options import AttachOptions
from openmla.integrations.scales import KvScale, Scales, expect_scales
from openmla.layers import MLAAttention
from openmla.layers.measure import HEADROOM, calibrate_layer, check_headroom

if TYPE_CHECKING:
    from openmla.integrations.transformers.attachment import Attachment

__all__ = ["Scales", "attach", "attachment_of", "calibrate", "detach", "expect_scales"]

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
    query_dtype: str | None = None,
    prefill_dtype: str | None = None,
    group: Any = None,
) -> Model:
    """Run the MLA layers of a loaded Hugging Face model on openmla.

    openmla replaces the attention computation and its KV cache. Projections, RoPE, norms and
    experts are still the model's own. generate(), pipeline() and forward passes work as before.

    Args:
        model: a model of transformers, loaded with from_pretrained(). It is changed in place.
        cache_format: format of the KV cache, a key of openmla.FORMATS. Defaults to the model's own
            precision.
        kv_scale: scale(s) for an fp8 cache. A float for all layers, the result of calibrate(), a
            path to saved scales or to a checkpoint with scales, or "first" to measure them in the
            first forward pass and keep them. Defaults to the checkpoint's scales, or 1.0.
        index_format: format of the indexer keys of a sparse model. The default does not round
            float32 keys; transformers does not quantize them.
        block_size: tokens per cache block. Defaults to 64, and to 256 for DeepSeek V4.
        num_blocks: blocks in the pool that all caches of this model share. By default the pool
            grows when blocks run out.
        backend: "auto", the name of a backend, or a name per op, same as in make_plan().
        workspace: context rows that prefill gathers and expands at once. The default is the rule of
            openmla.plan.default_workspace_tokens().
        capture: whether to capture decode steps (one new token per row) as CUDA graphs. There is
            one graph per batch size, and the four most recent are kept. A graph is recaptured when
            the block pool grows or the longest context doubles. The default captures models with a
            language head on a GPU, unless modules inside have hooks, which a replay would not run,
            and never with a `group`. On a CPU, True runs the same step over fixed tensors, without
            a graph.
        absorbed_format: "fp8" multiplies by fp8 weights of kv_b_proj in decode. They are an fp8
            model's own, or a copy that is kept besides the model's weights.
        batch_invariant: make the attention output of a token bitwise independent of the batch. The
            model's linears, norms and experts are still those of PyTorch and are not
            batch-invariant.
        query_dtype: same as in make_plan(). "fp8" needs cache_format="fp8" or "fp8_ds_mla";
            "fp8_static" needs "fp8" and calibrated scales.
        prefill_dtype: same as in make_plan().
        group: a process group, a device mesh of one dimension, or Ranks, to shard the cache by
            position: each of W ranks holds 1 / W of every sequence. Every rank runs the whole model
            on the same tokens, from one thread at a time. When sampling, give all ranks one seed.

    Returns:
        The model that was passed.

    Raises:
        UnsupportedError: the model's type is not supported, it uses remote code, or something else
            about the model or the device cannot run. The model is unchanged.
        ConfigError: the options contradict each other or the model, or the model is attached
            already. The model is unchanged.

    DeepSeek V4's buffer of recent rows grows to the longest pass so far. Run long prompts in passes
    of a few thousand tokens.

    ```python
    from pathlib import Path

    import openmla, torch
    from transformers import AutoModelForCausalLM

    demo = Path(openmla.__file__).parent / "demo"  # any folder with config.json and weights
    model = AutoModelForCausalLM.from_pretrained(demo)
    openmla.attach(model)
    prompt = torch.tensor([list(b"def merge(left, right):")])
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
    ```
    """
    options = AttachOptions(
        cache_format=cache_format,
        kv_scale=kv_scale,
        index_format=index_format,
        block_size=block_size,
        num_blocks=num_blocks,
        backend=backend,
        workspace=workspace,
        capture=capture,
        absorbed_format=absorbed_format,
        batch_invariant=batch_invariant,
        query_dtype=query_dtype,
        prefill_dtype=prefill_dtype,
        group=group,
    )
    _need_transformers("attach")
    from openmla.integrations.transformers.check import check_model
    from openmla.integrations.transformers.install import install_attachment

    attachment = check_model(model, options)
    # a captured step contains the group's collectives, so with a group capture must be requested
    install_attachment(model, attachment, capture if group is None else bool(capture))
    return model


def detach(model: Model) -> Model:
    """Undo attach(): the model runs its own attention again.

    Caches (past_key_values) made while the model was attached can no longer be used.

    Args:
        model: the attached model.

    Returns:
        The model that was passed.

    Raises:
        ConfigError: the model is not attached.

    ```python
    from pathlib import Path

    import openmla
    from transformers import AutoModelForCausalLM

    demo = Path(openmla.__file__).parent / "demo"
    model = openmla.attach(AutoModelForCausalLM.from_pretrained(demo))
    openmla.detach(model)
    ```
    """
    _need_transformers("detach")
    from openmla.integrations.transformers.install import remove_attachment

    remove_attachment(attachment_of(model))
    return model


def attachment_of(model: nn.Module) -> "Attachment":
    """Get what attach() set up on a model: its config, caches and block pool.

    Call explain() of the result to see what the last forward pass ran and why, and memory() to see
    how much memory the caches, workspaces and captured graphs take.

    Args:
        model: the attached model.

    Returns:
        The Attachment of the model.

    Raises:
        ConfigError: the model is not attached.

    ```python
    from pathlib import Path

    import openmla, torch
    from transformers import AutoModelForCausalLM

    demo = Path(openmla.__file__).parent / "demo"
    model = openmla.attach(AutoModelForCausalLM.from_pretrained(demo))
    with torch.inference_mode():
        model(torch.tensor([list(b"import sys")]))
    print(openmla.attachment_of(model).explain())
    print(openmla.attachment_of(model).memory())
    ```
    """
    check_kind("attach", "model", model, nn.Module)
    _need_transformers("attach")
    from openmla.integrations.transformers.attachment import Attachment

    for module in model.modules():
        attachment = getattr(module, "openmla", None)
        if isinstance(attachment, Attachment):
            return attachment
    raise ConfigError("attach: the model is not attached. Call openmla.attach(model) first.")


def calibrate(
    model_or_layer: Any, batches: Iterable[Any], *, headroom: float = HEADROOM
) -> Scales | LayerScales:
    """Measure the scales of an fp8 cache on sample batches.

    A scale is headroom times the largest magnitude seen, rounded up to a power of two, over 448
    (the largest e4m3 value).

    Args:
        model_or_layer: a Hugging Face model that is not attached, or an MLAAttention. A model is
            attached with an unquantized cache while its batches run, and detached afterwards.
        batches: for a model, token tensors [B, S], or dicts of forward() arguments as tokenizers
            return them; for a layer, tuples of the arguments of its forward().
        headroom: safety margin; the scales cover this many times the largest value seen.

    Returns:
        For a model Scales, to pass to attach(cache_format="fp8", kv_scale=...) or to save; for a
        layer LayerScales, to pass to allocate_cache(format="fp8", kv_scale=...).

    Raises:
        ConfigError: there is no token to measure, or a value is not finite.
        UnsupportedError: attach() does not support the model.

    ```python
    from pathlib import Path

    import openmla, torch
    from transformers import AutoModelForCausalLM

    demo = Path(openmla.__file__).parent / "demo"
    model = AutoModelForCausalLM.from_pretrained(demo)
    scales = openmla.calibrate(model, [torch.tensor([list(b"import sys")])])
    openmla.attach(model, cache_format="fp8", kv_scale=scales)
    ```
    """
    room = check_headroom(headroom)
    if isinstance(model_or_layer, MLAAttention):
        return calibrate_layer(model_or_layer, batches, room)
    _need_transformers("calibrate")
    from openmla.integrations.transformers.scales import calibrate_model

    return calibrate_model(model_or_layer, batches, room)


def _need_transformers(where: str) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f'{where}: transformers cannot be imported: {error}. Run pip install "openmla[hf]".'
        ) from error
