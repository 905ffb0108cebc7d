"""warmup(): reserves memory and compiles kernels before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.attention import (
    AbsorbedWeights,
    IndexInputs,
    Projected,
    RawProjections,
    Selection,
    attend_step,
    make_selection,
    select_step,
)
from openmla.backends.choice import BackendChoice, check_backend_choice
from openmla.cache import LayerCache, PagedCache
from openmla.config import MLAConfig
from openmla.errors import check_kind
from openmla.layers.sweep import Sweep, run_sweeps, sizes_up_to
from openmla.layers.warm_v4 import run_compressed_steps
from openmla.layers.weights import absorb
from openmla.outputs import get_output_format, make_output
from openmla.plan import Batch, Plan, Workspace, make_plan, reserve
from openmla.plan.checks import (
    check_dtype,
    check_eight_bit_products,
    check_planned_output,
    check_planned_queries,
    check_wide_queries,
)
from openmla.plan.options import Combination, PlanOptions, check_combination
from openmla.plan.problems import reads_keys_apart
from openmla.plan.types import remade
from openmla.ranks import Ranks


def warmup(
    config: MLAConfig,
    cache: LayerCache,
    *,
    max_requests: int,
    max_tokens: int,
    workspace_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: BackendChoice = "auto",
    output: str | None = None,
    absorbed: AbsorbedWeights | None = None,
    query_dtype: str | None = None,
    prefill_dtype: str | None = None,
    batch_invariant: bool = False,
    ranks: Ranks | None = None,
) -> Workspace:
    """Reserve the memory of steps of a bounded size and, on a GPU, compile their kernels.

    A GPU runs one step of every shape that has kernels of its own. No slot is written. Later steps
    compile nothing and allocate no expanded keys or values. The result serves all layers. DeepSeek
    V4 has kernels per compress ratio: warm up a cache of each ratio. Its result at ratio 4 holds
    the selection of max_tokens tokens and serves the layers of other ratios.

    Args:
        config: the model's dimensions.
        cache: the cache of a layer.
        max_requests: the most requests in a step.
        max_tokens: the most new tokens in a step.
        workspace_tokens: context rows that prefill gathers at once. Defaults to the rule of
            default_workspace_tokens().
        dtype: dtype of the queries.
        backend: same as in make_plan().
        output: same as in make_plan().
        absorbed: the absorbed weights of a layer, if they are fp8. By default the steps use a
            temporary layer of zeros in `dtype`.
        query_dtype: same as in make_plan().
        prefill_dtype: same as in make_plan().
        batch_invariant: same as in make_plan().
        ranks: same as in make_plan(). Every rank calls warmup() with its own cache.

    Returns:
        The workspace to pass to make_plan(), together with the same options.

    Raises:
        ConfigError: a size is not positive, or config, cache and options do not match.
        UnsupportedError: a named backend cannot run an op; the message says why.

    ```python
    import openmla
    import torch

    config = openmla.PRESETS["tiny-v3"]
    cache = openmla.allocate_cache(config, num_blocks=64, block_size=16, format="fp32")
    sizes = {"max_requests": 2, "max_tokens": 32}
    workspace = openmla.warmup(config, cache, **sizes, dtype=torch.float32)
    ```
    """
    check_backend_choice("warmup", backend)
    check_kind("warmup", "config", config, MLAConfig)
    config.check_one_kind("warmup")
    check_kind("warmup", "cache", cache, LayerCache)
    if output is not None:
        check_planned_output(config, output)
    check_dtype("warmup", dtype)
    options: dict[str, Any] = {
        "query_dtype": query_dtype,
        "prefill_dtype": prefill_dtype,
        "batch_invariant": batch_invariant,
    }
    asked = Combination(PlanOptions(**options), config, over_ranks=ranks is not None)
    check_combination("warmup", asked)
    check_planned_queries("warmup", config, cache, query_dtype)
    check_wide_queries("warmup", query_dtype, dtype)
    if prefill_dtype is not None:
        check_eight_bit_products("warmup", cache.parts[0].data.device, dtype)
    if config.compressor is not None:
        config.check_layer("warmup")
    workspace = reserve(
        config,
        cache,
        max_requests=max_requests,
        max_tokens=max_tokens,
        workspace_tokens=workspace_tokens,
        dtype=dtype,
        keys_apart=cache.latent is not None
        and prefill_dtype is None
        and reads_keys_apart(config, cache.latent.data.device, dtype, backend),
        prefill_dtype=prefill_dtype,
    )
    if not cache.parts[0].data.is_cuda:
        return workspace
    with torch.inference_mode():
        if config.compressor is not None:
            sizes = max_requests, max_tokens
            run_compressed_steps(config, cache, workspace, *sizes, dtype, backend, ranks)
            return workspace
        run_steps(
            config, cache, workspace, max_requests, max_tokens, dtype=dtype, backend=backend,
            output=output, absorbed=absorbed, ranks=ranks, **options,
        )  # fmt: skip
    return workspace


MOST_DRAFTS = 64  # new tokens of a request, with speculative decoding
MOST_ABSORBED = 1024  # tokens of a product with fp8 or batch-invariant absorbed weights


class StepShape(NamedTuple):
    """A step of equal requests: their number, the new tokens and length of each, and the form."""

    requests: int
    new: int
    length: int
    form: str
    widest: int = 0  # positions that the table has columns for, if larger than length

    def batch(self, latent: PagedCache, ranks: int = 1) -> Batch:
        """Make the batch. Across `ranks` ranks a block holds that many times its tokens."""
        BS = latent.block_size * ranks
        B, columns = self.requests, -(-max(self.length, self.widest) // BS)
        table = (torch.arange(columns, dtype=torch.int32) % latent.num_blocks).expand(B, -1)
        slots = torch.full((B * self.new,), -1, dtype=torch.int64)
        return Batch([self.new] * B, [self.length] * B, table.contiguous(), slots)


def step_sweeps(
    config: MLAConfig, cache: LayerCache, workspace: Workspace, max_requests: int, max_tokens: int,
    *, ranks: int = 1, absorbs_many: bool = False,
) -> Iterator[Sweep]:  # fmt: skip
    """Yield sweeps over the requests, the new tokens and the length of steps, and over the columns
    of the block table: with and without top-k selection, and prefill without context, with some,
    and with more than the workspace holds. `absorbs_many`: products with
    absorbed weights depend on the number of tokens."""
    assert cache.latent is not None
    BS = cache.latent.block_size * ranks
    far = min(cache.latent.num_blocks * BS, config.max_positions)
    chosen = config.indexer.topk if config.indexer is not None else 0
    longest = min(far, max(4096, 2 * chosen, 2 * workspace.num_rows))
    dense = min(chosen or longest, longest)  # maximum keys without top-k selection
    most = min(max_requests, max_tokens)

    def decode(B: int, length: int, widest: int = 0) -> StepShape:
        return StepShape(B, 1, length, "absorbed", widest)

    def prompt(new: int, context: int, form: str, reach: int = longest) -> StepShape:
        return StepShape(1, new, min(new + context, reach), form)

    def several(T: int, requests: int, length: int) -> StepShape | None:
        B = min(T, requests)
        return StepShape(B, T // B, length, "absorbed") if length >= T // B else None

    requests, tokens = sizes_up_to(most), sizes_up_to(min(max_tokens, longest))
    for length in sorted({1, min(BS + 1, longest), dense, longest}):
        yield Sweep(partial(decode, length=length), requests)
    yield Sweep(partial(decode, length=dense, widest=far), requests)
    yield Sweep(partial(decode, 1), sizes_up_to(far))
    yield Sweep(partial(decode, 1, dense), sizes_up_to(far, dense))  # wider tables
    # Few tokens of a request, as of drafts. "auto" absorbs those for which it is cheaper, and to
    # absorb a long prompt would take far more memory.
    drafts = sizes_up_to(min(MOST_ABSORBED if absorbs_many else MOST_DRAFTS, tokens[-1]))
    for context in sorted({0, dense, far}) if absorbs_many else (dense,):
        yield Sweep(partial(prompt, context=context, form="absorbed", reach=far), drafts)
    if config.indexer is not None:
        # Enough requests to exceed the workspace with their keys.
        many = min(max_requests, max_tokens, workspace.num_rows // dense + 1)
        yield Sweep(lambda B: StepShape(B, 1, dense, "expanded"), [many])
        # The number of tokens decides how selected rows are split, and whether they are decoded
        # first; indexers batch the tokens of a request.
        for B, length in product((1, max_requests), (longest, far)):
            yield Sweep(partial(several, requests=B, length=length), sizes_up_to(max_tokens))
    within = min(longest, config.window or longest)  # what may be expanded
    for context in (0, BS, longest):  # as in plans
        yield Sweep(partial(prompt, context=context, form="auto"), tokens)
        some = sizes_up_to(min(tokens[-1], within))
        yield Sweep(partial(prompt, context=context, form="expanded", reach=within), some)


def run_steps(
    config: MLAConfig,
    cache: LayerCache,
    workspace: Workspace,
    max_requests: int,
    max_tokens: int,
    dtype: torch.dtype,
    *,
    absorbed: AbsorbedWeights | None = None,
    ranks: Ranks | None = None,
    batch_invariant: bool = False,
    **options: Any,
) -> None:
    """Run steps of all shapes with kernels of their own. `options`: others of run_step()."""
    assert cache.latent is not None
    device = cache.latent.data.device
    sweeps = step_sweeps(
        config, cache, workspace, max_requests, max_tokens,
        ranks=1 if ranks is None else ranks.shard.size,
        absorbs_many=absorbed is not None or batch_invariant,
    )  # fmt: skip
    run = partial(
        run_step, config=config, cache=cache, workspace=workspace, dtype=dtype, ranks=ranks,
        absorbed=zero_weights(config, dtype, device) if absorbed is None else absorbed,
        angles=zero_angles(config, device), batch_invariant=batch_invariant, **options,
    )  # fmt: skip
    run_sweeps(sweeps, run, device, ranks)


def zero_weights(config: MLAConfig, dtype: torch.dtype, device: torch.device) -> AbsorbedWeights:
    rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return absorb(torch.zeros(rows, config.kv_lora_rank, dtype=dtype, device=device), config)


def zero_angles(config: MLAConfig, device: torch.device) -> Tensor | None:
    """Return a table of angles for the config's rope, if it has one."""
    if config.rope.kind in ("none", "external"):
        return None
    tables = 2 if config.rope.kind == "longrope" else 1
    sizes = tables * config.max_positions, config.qk_rope_head_dim
    return torch.zeros(sizes, dtype=torch.float32, device=device)


def run_step(
    shape: StepShape,
    config: MLAConfig,
    cache: LayerCache,
    workspace: Workspace | None,
    dtype: torch.dtype,
    backend: BackendChoice,
    output: str | None = None,
    absorbed: AbsorbedWeights | None = None,
    *,
    angles: Tensor | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> None:
    """Run a step over the current contents of the cache's first blocks, with finished and with raw
    rows. Every slot is -1, and weights and angles that are not given are 0."""
    assert cache.latent is not None
    device, H = cache.latent.data.device, config.num_heads
    batch = shape.batch(cache.latent, 1 if ranks is None else ranks.shard.size)
    T = batch.num_tokens
    engine_chooses = config.indexer is not None and cache.index is None
    plan = make_plan(
        batch,
        config,
        cache,
        dtype=dtype,
        backend=backend,
        form="chosen" if engine_chooses else shape.form,
        workspace=workspace,
        output=output,
        ranks=ranks,
        **options,
    )

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    P, R, C = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    if absorbed is None:
        absorbed = zero_weights(config, dtype, device)
    if angles is None:
        angles = zero_angles(config, device)
    q, kv = zeros(T, H, P + R), zeros(T, C + R)
    projected = Projected(q[:, :, :P], q[:, :, P:], kv[:, :C], kv[:, C:])
    positions = zeros(T, dtype=torch.int64)
    raw = RawProjections(
        q, kv, zeros(C), positions, angles, config.rope.pairing, config.latent_eps,
        factor=config.latent_factor,
    )  # fmt: skip
    selection = None
    if config.indexer is not None and engine_chooses:
        nothing = zeros(T, config.indexer.topk, dtype=torch.int32) - 1
        selection = make_selection(nothing, cache, plan)
    elif config.indexer is not None:
        HI, DI = config.indexer.num_heads, config.indexer.head_dim
        weights = zeros(T, HI, dtype=torch.promote_types(dtype, torch.float32))
        index = IndexInputs(zeros(T, HI, DI), weights, zeros(T, DI))
        selection = select_step(index, cache, plan)
    for unfinished in (None,) if config.is_external else (None, raw):
        attend_step(projected, absorbed, cache, plan, selection=selection, raw=unfinished)
    if plan.group("expanded") is not None:  # separated new rows are copied
        attend_step(projected, absorbed, cache, listed(plan), selection=selection)
    if output is not None:
        quantize_steps(projected, absorbed, cache, plan, output, selection)


def quantize_steps(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
    output: str,
    selection: Selection | None,
) -> None:
    """Run the step with quantized buffers: with contiguous tokens, and with tokens listed one by
    one, as for requests that are not adjacent, which uses other kernels."""
    T, device = plan.num_tokens, projected.q_nope.device
    columns = plan.config.num_heads * plan.config.v_head_dim
    scale = 1.0 if get_output_format(output).global_scale else None
    buffers = make_output(output, T, columns, global_scale=scale, device=device)
    for each in (plan, listed(plan)):
        attend_step(projected, absorbed, cache, each, selection=selection, out=buffers)


def listed(plan: Plan) -> Plan:
    """Return the same plan with its tokens listed one by one."""
    rows = torch.arange(plan.num_tokens, device=plan.slot_mapping.device)
    groups = []
    for group in plan.groups:
        across = group.across
        if across is not None:
            across = remade(across, {"rows": rows[across.rows]})
        groups.append(remade(group, {"rows": rows[group.rows], "across": across}))
    return remade(plan, {"groups": tuple(groups)})
