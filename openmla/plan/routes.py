"""Chooses the form of each request: as requested, as required, or the cheaper one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from openmla.cache import PagedCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.plan.batch import Batch
from openmla.plan.forms import choose_absorbed, choose_sparse_absorbed
from openmla.plan.options import PlanOptions
from openmla.plan.problems import cache_kind, sparse_efficiencies
from openmla.ranks import Ranks

Routes = Mapping[str, Sequence[int]]  # by form


def find_routes(
    batch: Batch,
    config: MLAConfig,
    latent: PagedCache,
    options: PlanOptions,
    run_length: int,
    *,
    masks: bool = True,  # prefill that selects keys may be expanded and masked
    ranks: Ranks | None = None,
) -> Routes:
    """The requests of each form. In a uniform step all absorbed ones select, even short ones."""
    form = options.form
    absorbed = _find_absorbed(batch, config, latent, options, run_length)
    # a part of the keys does not tell how many there are
    everyone = form == "chosen" or not batch.causal
    choosing = choosing_requests(batch, config, everyone=everyone)
    if config.indexer is None and all(absorbed):
        return {"absorbed": list(range(len(absorbed))), "expanded": []}
    routes: dict[str, Sequence[int]] = {"absorbed": [], "expanded": []}
    if len(choosing) < len(absorbed):
        others = [(b, taken) for b, taken in enumerate(absorbed) if b not in choosing]
        routes["absorbed"] = [b for b, taken in others if taken]
        routes["expanded"] = [b for b, taken in others if not taken]
    short: Sequence[int] = ()
    # without tokens nothing is selected
    asking = bool(choosing) or any(batch.query_lens[b] for b in routes["absorbed"])
    if options.uniform and config.indexer is not None and asking:
        short, routes["absorbed"] = routes["absorbed"], []
    if choosing or short:
        chosen, masked = sorted(choosing), []  # type: list[int], list[int]
        if masks:
            chosen, masked = sparse_routes(batch, config, latent, options, choosing, ranks)
        routes |= {"chosen": sorted((*chosen, *short)), "masked": masked}
    return routes


def _find_absorbed(
    batch: Batch, config: MLAConfig, latent: PagedCache, options: PlanOptions, run_length: int
) -> list[bool]:
    """Per request: whether it is absorbed. A request without new tokens has nothing to expand, and
    one whose length only the device knows cannot be cut into chunks."""
    bounded, form, dtype = batch.bounded, options.form, options.dtype
    assert dtype is not None
    if form == "expanded" and bounded:
        raise ConfigError(
            "plan: form must not be 'expanded' for requests whose length only the device knows, "
            f"got request {min(bounded)}. Set exact=True for it in the batch, or use form='auto'."
        )
    if form == "auto" and max(batch.query_lens, default=0) <= 1:  # decode, at every step
        return [True] * len(batch.query_lens)
    # keys before the window would have to be masked while they are attended to
    beyond = [0 < config.window < S for S in batch.seq_lens]
    if form == "expanded" and any(beyond):
        raise ConfigError(
            f"plan: form must not be 'expanded' for requests longer than the window of "
            f"{config.window} tokens, got {max(batch.seq_lens)} tokens. Use form='auto'."
        )
    if form != "auto":
        return [form != "expanded" or n == 0 for n in batch.query_lens]
    if len(bounded) == len(batch.query_lens):
        return [True] * len(batch.query_lens)
    cheaper = choose_absorbed(
        config,
        batch.query_lens,
        batch.seq_lens,
        format=latent.format,
        itemsize=dtype.itemsize,
        device=latent.data.device.type,
        run_length=run_length,
    )
    forced = bounded | {b for b, longer in enumerate(beyond) if longer}
    return [b in forced or absorbed for b, absorbed in enumerate(cheaper)] if forced else cheaper


def choosing_requests(batch: Batch, config: MLAConfig, *, everyone: bool = False) -> set[int]:
    """Requests with more keys than a token may attend to, whose indexer selects. `everyone`: all
    requests that have tokens."""
    if config.indexer is None:
        return set()
    least = -1 if everyone else config.indexer.topk
    if min(batch.seq_lens, default=0) > least and min(batch.query_lens, default=0) > 0:
        return set(range(len(batch.seq_lens)))  # decode of long contexts, at every step
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    return {b for b, (n, S) in enumerate(lens) if n > 0 and least < S}


def sparse_routes(
    batch: Batch,
    config: MLAConfig,
    latent: PagedCache,
    options: PlanOptions,
    choosing: set[int],
    ranks: Ranks | None = None,
) -> tuple[list[int], list[int]]:
    """Those requests by route: absorbed over gathered rows, or expanded and masked."""
    form, dtype = options.form, options.dtype
    assert dtype is not None
    if form != "expanded" and max(batch.query_lens, default=0) <= 1:  # decode, at every step
        return sorted(choosing), []
    absorbed: list[int] = []
    masked: list[int] = []
    bounded, efficiencies = batch.bounded, None
    for b in sorted(choosing):
        n, S = batch.query_lens[b], batch.seq_lens[b]
        if S == 0:  # a part of the keys: nothing to expand
            gather = True
        elif form == "auto" and b not in bounded and n > 1:
            if efficiencies is None:
                asked = options.query_dtype, options.prefill_dtype
                queries, heads = (torch.float8_e4m3fn if each else dtype for each in asked)
                efficiencies = sparse_efficiencies(config, cache_kind([latent]), queries, heads)
            gather = choose_sparse_absorbed(
                config,
                n,
                S,
                format=latent.format,
                dtype=dtype,
                device=latent.data.device.type,
                efficiencies=efficiencies,
                ranks=ranks,
            )
        else:
            gather = form != "expanded"
        (absorbed if gather else masked).append(b)
    return absorbed, masked
