"""Ranks: a group of processes and how a cache and heads are spread over them."""

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
    """Made once, with the same values on every rank of `group`: a process group of
    torch.distributed, or a device mesh of one dimension.

    `interleave` positions in a row are on one rank; it divides the block size. `heads`: "all" where
    every rank projects all heads, and gets them all back; "own" where ranks are a tensor-parallel
    group as well: a config then has this rank's heads, queries are gathered and each rank gets its
    own back. `schedule` is merge_over_ranks'.

    `check` has ranks compare what they plan for each step, in one small all-gather that is read on
    the host; an error on any of them is one on all. Without it, ranks that differ wait for the
    group's timeout, or compute nonsense.

    `workspace` holds context that steps gather from all ranks. All plans over these ranks share it:
    run their layers on one stream per device.
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
        """A copied model's ranks are the same processes."""
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "ranks: a group must stay in its process, got an attempt to pickle it. Call "
            "detach(model) before the model is saved."
        )


def with_all_heads(config: MLAConfig, ranks: Ranks) -> MLAConfig:
    """As a rank attends: with its own heads, which are all, or with everyone's."""
    if ranks.heads == "all":
        return config
    return replace(config, num_heads=config.num_heads * ranks.shard.size)
