"""Ranks: a group of processes, and how a cache and heads are distributed over them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.ranks.collectives import Link, group_of, link_of
from openmla.ranks.layout import Shard
from openmla.ranks.merge import HEADS, SCHEDULES
from openmla.ranks.workspace import GatherWorkspace


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a cache, for make_plan(ranks=...) and attach(group=...).

    Make it once, with the same values on every rank.

    Attributes:
        group: a process group of torch.distributed, or a device mesh of one dimension.
        interleave: consecutive positions that are on one rank. It divides the block size.
        heads: "all": every rank projects all heads, and gets all of them back. "own": the ranks are
            a tensor-parallel group too. The config then has this rank's heads, queries are
            gathered, and each rank gets its own heads back.
        schedule: same as in merge_over_ranks().
        check: compare the plans of all ranks at each step, in one small all-gather that is read on
            the host. An error on one rank is then raised on all of them. Without it, ranks that
            differ wait until the group times out, or compute wrong results.
        shard: which positions this rank holds.
        link: the group as collectives use it.
        workspace: buffers for context that steps gather from all ranks. All plans over these ranks
            share it: run their layers on one stream per device.
    """

    group: Any
    interleave: int = 1
    heads: str = "all"
    schedule: str = "auto"
    check: bool = True
    shard: Shard = field(init=False, repr=False)  # this rank's share
    link: Link = field(init=False, repr=False, compare=False)
    workspace: GatherWorkspace = field(
        init=False, repr=False, compare=False, default_factory=GatherWorkspace
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", group_of(self.group))
        for name, known in (("heads", HEADS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"ranks: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}."
                )
        if not isinstance(self.check, bool):
            raise ConfigError(f"ranks: check must be True or False, got {self.check!r}.")
        object.__setattr__(self, "link", link_of(self.group))
        object.__setattr__(self, "shard", Shard(self.link.size, self.link.rank, self.interleave))

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return self: a copied model runs on the same processes."""
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "ranks: a process group cannot be pickled. Call detach(model) before saving the model."
        )


def with_all_heads(config: MLAConfig, ranks: Ranks) -> MLAConfig:
    """Return the config of attention on a rank, which uses the heads of all ranks."""
    if ranks.heads == "all":
        return config
    return replace(config, num_heads=config.num_heads * ranks.shard.size)
