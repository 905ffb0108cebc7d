"""attachment_of(model).memory(): what is held is what was allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from openmla.integrations.transformers import MemoryReport, attach, attachment_of
from openmla.integrations.transformers.memory import workspace_bytes
from tests.integrations.generation import prompts
from tests.integrations.models import make_model, make_v4, model_of
from tests.plan.groups import expanded_of


def allocated(attachment: Any) -> int:
    """Bytes of the storages behind all caches."""
    parts = [part.data for cache in attachment.caches.values() for part in cache.parts]
    return sum({part.data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_blocks_are_counted_as_they_are_allocated(family: str) -> None:
    model = make_v4() if family == "deepseek_v4" else model_of(family)
    attachment = attachment_of(attach(model))
    assert attachment.memory().held_bytes == attachment.memory().workspace_bytes == 0
    ids, mask = prompts((130, 7))
    out = model(ids, attention_mask=mask, use_cache=True)
    report = attachment.memory()
    assert report.block_bytes == allocated(attachment) > report.used_bytes > 0
    assert report.used_bytes == attachment.used_bytes()
    pool = attachment.pool
    assert (report.num_blocks, report.free_blocks) == (pool.num_blocks, pool.num_free)
    assert report.num_graphs == report.graph_bytes == report.decoded_bytes == 0
    assert (report.workspace_bytes > 0) == (family != "deepseek_v4")  # which expands nothing
    del out
    assert attachment.memory().used_bytes == 0
    assert attachment.memory().block_bytes == report.block_bytes  # kept for the next prompts


def test_a_workspace_is_what_a_plan_expands() -> None:
    """Rows, keys and values of all that is expanded at once; the most there was stays."""
    model = make_model("deepseek_v3")
    attachment = attachment_of(attach(model, block_size=4, workspace=16))
    config = attachment.config
    each = config.qk_nope_head_dim + config.v_head_dim + config.qk_head_dim
    row = 4 * (config.latent_dim + config.num_heads * each)
    ids, mask = prompts((24,))
    past = model(ids, attention_mask=mask, use_cache=True).past_key_values
    assert attachment.memory().workspace_bytes == 24 * row
    ids, mask = prompts((80,))
    more = torch.ones(1, 104, dtype=torch.int64)
    model(ids, attention_mask=more, past_key_values=past)
    plan = attachment.last_plan
    assert plan is not None and expanded_of(plan).route == "chunked"
    assert workspace_bytes(plan) == 80 * row  # of the context, 16 at a time
    model(ids[:, :1], past_key_values=past)
    assert attachment.memory().workspace_bytes == 80 * row


def test_in_words() -> None:
    report = MemoryReport(3 << 30, 1 << 30, 96, 64, 5 << 20, 846 << 20, 2, 310 << 20)
    assert report.held_bytes == (3 << 30) + (851 << 20)
    gathered = replace(report, gathered_bytes=5 << 20)
    assert gathered.held_bytes == report.held_bytes + (5 << 20)
    line = "gathered  5.0 MiB: a buffer for context from all ranks, kept"
    assert str(gathered).splitlines()[-2] == line
    assert str(report).splitlines() == [
        "blocks    3.00 GiB, 1.00 GiB in use: 32 of 96 blocks",
        "decoded   5.0 MiB: copies of kv_b_proj",
        "graphs    846.0 MiB, shared by 2 captured decode steps",
        "workspace 310.0 MiB at most, while a layer attends to a prompt",
    ]
    plain = MemoryReport(1 << 20, 0, 4, 4, 0, 0, 0, 0)
    assert str(plain) == "blocks    1.0 MiB, 0 B in use: 0 of 4 blocks"
    silent = MemoryReport(0, 0, 4, 4, 0, None, 1, 0)
    assert "graphs    unknown, shared by 1" in str(silent) and silent.held_bytes == 0
