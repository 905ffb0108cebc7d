"""attach(model, group=...): the tokens of one process, each rank with its share of the cache."""

from __future__ import annotations

from copy import deepcopy
from io import BytesIO
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from openmla import ConfigError, UnsupportedError, attach, detach
from openmla.integrations.transformers import attachment_of
from openmla.parallel import Ranks
from tests.integrations.models import VOCAB, make_dots3, make_model, make_sparse, make_v4
from tests.parallel.processes import Processes

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
}


def prompts(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of unlike lengths, padded on the left; half of each repeats, which drafts like."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    ids[:, length // 2 :] = ids[:, : length - length // 2]
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row + 2] = 0
    return ids, mask


def generated(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    asked: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, **options}
    found: torch.Tensor = model.generate(ids, attention_mask=mask, **asked)
    return found


def same_tokens(rank: int, kind: str, family: str, **options: Any) -> None:
    model = (make_model if kind == "dense" else make_sparse)(family)
    ids, mask = prompts(3, 37)
    for name, way in WAYS.items():
        rows = 1 if name == "drafts" else 3
        attach(model, block_size=4, **options)
        alone = generated(model, ids[:rows], mask[:rows], **way)
        detach(model)
        ranks = Ranks(dist.group.WORLD, interleave=2)
        attach(model, block_size=4, group=ranks, workspace=16, **options)
        shared = generated(model, ids[:rows], mask[:rows], **way)
        assert torch.equal(alone, shared), name
        attachment = attachment_of(model)
        assert "of 2, positions in runs of 2" in attachment.explain()
        memory = attachment.memory()
        assert memory.free_blocks == memory.num_blocks, "requests must be freed"
        detach(model)


def options_of_one_process(rank: int) -> None:
    """Options that one process takes: the same tokens with a group."""
    fp8 = {"cache_format": "fp8", "query_dtype": "fp8"}
    for options in ({"batch_invariant": True}, fp8, {"prefill_dtype": "fp8"}):
        model = make_model("deepseek_v3")
        ids, mask = prompts(3, 37)
        attach(model, block_size=4, **options)
        alone = generated(model, ids, mask)
        detach(model)
        attach(model, block_size=4, group=dist.group.WORLD, workspace=16, **options)
        assert torch.equal(alone, generated(model, ids, mask)), options
        plan = attachment_of(model).last_plan
        assert plan is not None and plan.batch_invariant == ("batch_invariant" in options)
        detach(model)


def test_options_of_one_process(two_ranks: Processes) -> None:
    two_ranks.run(options_of_one_process)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("dense", "deepseek_v3"),
        ("sparse", "deepseek_v32"),
        pytest.param("dense", "mistral4", marks=pytest.mark.slow),
        pytest.param("dense", "minicpm3-longrope", marks=pytest.mark.slow),
        pytest.param("sparse", "glm_moe_dsa", marks=pytest.mark.slow),  # layers share a choice
        pytest.param("sparse", "hy_v4", marks=pytest.mark.slow),  # sinks
    ],
)
def test_the_tokens_of_one_process(two_ranks: Processes, kind: str, family: str) -> None:
    two_ranks.run(same_tokens, kind, family)


def in_eight_bits(rank: int) -> None:
    """w_uk and w_uv rounded to e4m3. Not for sparse prompts, which one process expands by unrounded
    weights: test_layers.py has those absorbed on both sides."""
    same_tokens(rank, "dense", "deepseek_v3", absorbed_format="fp8")


@pytest.mark.slow
def test_eight_bit_weights(two_ranks: Processes) -> None:
    two_ranks.run(in_eight_bits)


def same_v4_tokens(rank: int) -> None:
    """Prompts over several blocks, of both ranks; one is shorter than an entry."""
    model = make_v4()
    ids, mask = prompts(3, 290)
    mask[2, :287] = 0
    for name, way in WAYS.items():
        if name not in ("greedy", "beams"):  # transformers refuses drafts for V4
            continue
        found = []
        for group in (None, dist.group.WORLD):
            attach(model, block_size=128, group=group)
            found.append(generated(model, ids, mask, **way))
            attachment = attachment_of(model)
            memory = attachment.memory()
            assert memory.free_blocks == memory.num_blocks, "requests must be freed"
            if group is not None:
                assert "of 2, entries in whole blocks" in attachment.explain()
                held = [cache.compressed for cache in attachment.caches.values()]
                tokens = {
                    cache.ratio: part.block_size * cache.ratio
                    for cache, part in zip(attachment.caches.values(), held, strict=True)
                    if part is not None
                }
                assert tokens == {4: 128, 128: 256}
            detach(model)
        assert torch.equal(*found), name


def test_the_tokens_of_one_process_by_v4(two_ranks: Processes) -> None:
    two_ranks.run(same_v4_tokens)


def over_fixed_tensors(rank: int) -> None:
    """capture=True: on a CPU the step runs over the tensors a graph would read."""
    makers = (
        lambda: make_model("deepseek_v3"),
        lambda: make_sparse("deepseek_v32"),
        make_v4,
    )
    for make, length, BS in zip(makers, (37, 37, 290), (4, 4, 128), strict=True):
        model = make()
        ids, mask = prompts(3, length)
        for name in ("greedy", "beams") if make is makers[0] else ("greedy",):
            found = []
            over: dict[str, Any] = {"group": dist.group.WORLD, "capture": True}
            for options in ({}, over):
                attach(model, block_size=BS, **options)
                found.append(generated(model, ids, mask, **WAYS[name]))
                if options:
                    captured = attachment_of(model).captured
                    assert captured is not None and 1 <= captured.recordings <= 3
                detach(model)
            assert torch.equal(*found), name


def test_captured_steps(two_ranks: Processes) -> None:
    two_ranks.run(over_fixed_tensors)


def v4_in_passes(rank: int) -> None:
    """A prompt in passes, a cache copied, both cropped and continued: logits of one process."""
    from transformers import DynamicCache

    ids = prompts(2, 400)[0]
    found = []
    for group in (None, dist.group.WORLD):
        model = attach(make_v4(), block_size=128, group=group)
        cache = DynamicCache(config=model.config)
        logits = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in ids.split((200, 197, 3), dim=1)
        ]
        twin = deepcopy(cache)
        for each, first in ((cache, 5), (twin, 50)):
            each.crop(395)
            logits.append(model(ids[:, first : first + 9], past_key_values=each).logits)
        found.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_v4_in_chunks_copied_and_cropped(two_ranks: Processes) -> None:
    two_ranks.run(v4_in_passes)


def in_passes(rank: int) -> None:
    """A prompt in three passes, a cache copied, cropped and continued: logits of one process."""
    from transformers import DynamicCache

    ids = prompts(2, 40)[0]
    found = []
    for group in (None, dist.group.WORLD):
        model = attach(make_model("deepseek_v3"), block_size=4, group=group, cache_format="bf16")
        cache = DynamicCache(config=model.config)
        logits = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in ids.split((20, 17, 3), dim=1)
        ]
        cache.crop(33)
        logits.append(model(ids[:, 5:7], past_key_values=cache, use_cache=True).logits)
        found.append(torch.cat(logits, dim=1))
        held = attachment_of(model).caches[0].latent
        assert held is not None and held.block_size == 4
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-2)
    assert (found[0] - found[1]).square().mean().sqrt() < 2e-3 * found[0].square().mean().sqrt()


def test_chunked_prompts_and_crops(two_ranks: Processes) -> None:
    two_ranks.run(in_passes)


def refused(rank: int) -> None:
    group = dist.group.WORLD
    for model, options, kind, sentence in (
        (make_v4(), {"group": Ranks(group, 64)}, ConfigError, "which keeps the tokens of an entry"),
        (
            make_model("deepseek_v3"),
            {"group": Ranks(group, 3)},
            ConfigError,
            "divide the block size",
        ),
        (
            make_model("deepseek_v3"),
            {"group": Ranks(group, heads="own")},
            ConfigError,
            "heads=.all",
        ),
        (make_model("deepseek_v3"), {"group": 2}, ConfigError, "group must be a process group"),
    ):
        with pytest.raises(kind, match=sentence):
            attach(model, **{"group": group, **options})  # type: ignore[arg-type]
        assert not any(hasattr(module, "openmla") for module in model.modules())
    model = attach(make_model("deepseek_v3"), group=group)
    ids = prompts(1, 8)[0]
    mask = torch.ones((1, 9), dtype=torch.long)
    past = model(ids, use_cache=True).past_key_values
    mask[0, 3] = 0
    with pytest.raises(UnsupportedError, match="must be 1 for cached tokens with a group"):
        model(ids[:, :1], attention_mask=mask, past_key_values=past)


def refused_windows(rank: int) -> None:
    model = make_dots3()
    with pytest.raises(ConfigError, match="ranks must be None for layers with a window of 12"):
        attach(model, group=dist.group.WORLD)
    assert not any(hasattr(module, "openmla") for module in model.modules())


def copied(rank: int) -> None:
    """A copied model has the same ranks; what is saved would have none."""
    ids, mask = prompts(1, 20)
    model = attach(make_model("deepseek_v3"), group=dist.group.WORLD)
    before = generated(model, ids, mask)
    assert torch.equal(before, generated(deepcopy(model), ids, mask))
    with pytest.raises(ConfigError, match=r"detach\(model\) before saving"):
        torch.save(model, BytesIO())


def test_copies(two_ranks: Processes) -> None:
    two_ranks.run(copied)


def test_attach_over_ranks_raises_for_what_it_cannot_shard(two_ranks: Processes) -> None:
    two_ranks.run(refused)


def test_attach_over_ranks_raises_for_windows(two_ranks: Processes) -> None:
    if "dots3_note_text" not in pytest.importorskip("transformers").CONFIG_MAPPING:
        pytest.skip("this transformers has no dots3_note_text")
    two_ranks.run(refused_windows)
