"""Steps as an engine asks for them, of dense, sparse and V4 layers alike, and what they must give.

All requests of a setting read the same sequence, each as far as it has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla import Batch, Plan, make_plan
from tests.layers import v4
from tests.layers.families import make_peer
from tests.layers.serving import Server, relative_error, sequence

KINDS = ("deepseek_v3", "deepseek_v32", 0, 4, 128)  # families, V4's compress ratios
NAMES = "abcdefgh"


class Setting(NamedTuple):
    """A layer with its caches, the sequence, and the layer's output for all of it."""

    server: Any
    hidden: Tensor  # [S, width]
    truth: Tensor  # [S, width]
    device: str


def make_setting(kind: str | int, device: str) -> Setting:
    if isinstance(kind, int):
        layer, hidden, dense = v4.known(32, kind)
        server: Any = v4.Server(
            layer, dict.fromkeys(NAMES, hidden), max_requests=len(NAMES), device=device
        )
        return Setting(server, hidden, dense.out, device)
    peer, hidden = make_peer(kind), sequence(100)
    truth = peer.full(hidden)
    server = Server(peer.ours, dict.fromkeys(NAMES, hidden), device=device)
    return Setting(server, hidden, truth, device)


def describe(
    setting: Setting,
    wanted: Sequence[tuple[str, int]],
    *,
    slack: int = 0,  # blocks are taken for so many tokens more, as for drafts of unknown number
    drafted: str = "",  # requests that have this slack
    window_columns: int = 0,
    **more: Any,
) -> Batch:
    """The next tokens of some requests."""
    pool, device = setting.server.pool, setting.device
    before = {name: pool.seq_len(name) for name, _ in wanted}
    room = {name: n + slack * (name in drafted) for name, n in wanted}
    taken = {name: n for name, n in room.items() if n}
    copies = pool.take(taken)
    names, query_lens = [name for name, _ in wanted], [n for _, n in wanted]
    true_lens = [before[name] + n for name, n in wanted]
    fields: dict[str, Any] = {"query_lens": query_lens}
    fields["seq_lens"] = [before[name] + room[name] for name in names]
    if drafted:
        fields["device_seq_lens"] = torch.tensor(true_lens, dtype=torch.int32, device=device)
        fields["exact"] = [name not in drafted for name in names]
    if hasattr(pool, "tables"):
        setting.server.cache.copy_blocks(*copies)
        fields |= pool.tables(names, window_columns=window_columns)._asdict()
    else:
        spans = [(name, before[name], before[name] + n) for name, n in wanted]
        rows = sum(query_lens) + more.get("padding", 0)
        fields["block_table"] = pool.block_table(names)
        fields["slot_mapping"] = pool.slot_mapping(spans, num_rows=rows)
    return Batch(**fields, **more)


def plan_of(setting: Setting, batch: Batch, **options: Any) -> Plan:
    config, cache = setting.server.layer.config, setting.server.cache
    return make_plan(batch, config, cache, dtype=torch.float32, **options)


def tokens_of(setting: Setting, batch: Batch) -> tuple[Tensor, Tensor]:
    """[n, width] and [n]: hidden states and positions of the requests' tokens."""
    lens = batch.seq_lens if batch.device_seq_lens is None else batch.device_seq_lens.tolist()
    spans = [torch.arange(S - n, S) for n, S in zip(batch.query_lens, lens, strict=True)]
    places = torch.cat([*spans, torch.arange(0)])
    return setting.hidden[places].to(setting.device), places.to(setting.device)


def assert_true(setting: Setting, out: Tensor, positions: Tensor) -> None:
    """Outputs of tokens at these positions, and nothing for what comes after them."""
    n = len(positions)
    wanted = setting.truth[positions.cpu()].double()
    assert not n or relative_error(out[:n].cpu().double(), wanted) < 1e-5
    assert not out[n:].any()


def cut_to(setting: Setting, batch: Batch, wanted: Sequence[tuple[str, int]]) -> None:
    """Drafts are decided on: requests are as long as the device said."""
    assert batch.device_seq_lens is not None
    for (name, _), length in zip(wanted, batch.device_seq_lens.tolist(), strict=True):
        if length:
            setting.server.pool.truncate(name, length)


def bytes_of(setting: Setting) -> list[Tensor]:
    return [part.data.view(torch.uint8).clone() for part in setting.server.cache.parts]
