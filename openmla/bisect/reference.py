"""Reference: the config and weights that the layers of a dump are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openmla.bisect.compressed import compressed_components
from openmla.bisect.dense import dense_components
from openmla.bisect.dump import NAME, OF_ALL, Dump
from openmla.bisect.indexer import indexer_components
from openmla.bisect.judge import Verdict, judge_layer
from openmla.bisect.layer import Component, Layer
from openmla.config import MLAConfig
from openmla.config.families import FAMILIES
from openmla.errors import ConfigError, ShapeError, UnsupportedError

BEFORE_ATTENTION = "lse"  # the indexer's components come before this one


def check_config(config: MLAConfig) -> None:
    """Raise unless the components of such a model are supported."""
    family = FAMILIES[config.model_type]
    beyond = {
        "gates its output": family.unknown_gate or config.output_gate is not None,
        "gates its norms": config.norm_gate != 0,
        "scales its queries or latents": (config.q_factor, config.latent_factor) != (1, 1),
        "scales its queries by position": config.llama4_beta != 0 or config.log_scale,
        "has layers that differ in shape": bool(config.kinds),
        f"has rope of type {config.rope.kind!r}": config.rope.kind not in ("default", "yarn"),
    }
    for what, found in beyond.items():
        if found:
            raise UnsupportedError(
                f"bisect: {config.model_type} {what}, which bisect does not support yet."
            )


class Reference(NamedTuple):
    """The reference model; the weights are those of its attention modules."""

    config: MLAConfig
    modules: list[nn.Module]

    def check(self) -> None:
        """Raise unless every component of the model is supported."""
        check_config(self.config)
        for module in self.modules:
            for name, weight in module.named_parameters():
                if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                    raise UnsupportedError(
                        f"bisect: quantized weights are not supported, got {weight.dtype} for "
                        f"{name}."
                    )

    def components(self, layer: int) -> Mapping[str, Component]:
        """The components of one layer, in the order in which it computes them."""
        config = self.config
        if config.compressor is not None:
            return compressed_components(config, layer)
        dense = dict(dense_components(config))
        if config.indexer is None or config.indexer.is_shared(layer):
            return dense
        behind = list(dense)[list(dense).index(BEFORE_ATTENTION) :]
        attention = {name: dense.pop(name) for name in behind}
        return {**dense, **indexer_components(config), **attention}

    def judge(self, dump: Dump) -> Iterator[Verdict]:
        """Judge every component of every layer in the dump, layer by layer."""
        num_tokens = self.check_dump(dump)
        fresh_from = dump.tensors.get("fresh_from")
        shared = None
        for number in dump.layers:
            module = self.modules[number]
            layer = Layer(
                number,
                self.config,
                {name: weight.detach().cpu() for name, weight in module.named_parameters()},
                _epsilons(module),
                {name: tensor.cpu() for name, tensor in dump.layer(number).items()},
                dump.settings,
                self.components(number),
                num_tokens,
                None if fresh_from is None else fresh_from.cpu().long(),
                shared,
            ).checked()
            yield from judge_layer(layer)
            shared = layer.tensors["chosen"].long() if layer.has("chosen") else shared

    def check_dump(self, dump: Dump) -> int:
        """Return the dump's number of tokens. Raise if the dump is not of this model."""
        said = dump.settings.model_type
        read_as = FAMILIES[said].reads_as or said if said in FAMILIES else said
        if said and read_as != self.config.model_type:
            raise ConfigError(
                f"bisect: model_type of the dump must be {self.config.model_type} like the model, "
                f"got {said}."
            )
        if not dump.layers:
            raise ConfigError(
                "bisect: the dump has no tensors named layers.{i}.{component}. Add at least 1."
            )
        known = {*self.components(0), "hidden_in", "kv_scale", "rope_ratio"}
        for number in dump.layers:
            if number >= len(self.modules):
                raise ConfigError(
                    f"bisect: layers of the dump must be in 0..{len(self.modules) - 1} for this "
                    f"model, got layer {number}."
                )
            known |= set(self.components(number))
        for name in dump.tensors:
            match = NAME.fullmatch(name)
            if name not in OF_ALL and (match is None or match[2] not in known):
                raise ConfigError(
                    f"bisect: tensors of the dump must be named layers.{{i}} and one of "
                    f"{', '.join(sorted(known))}, got {name!r}."
                )
        return _num_tokens(dump)


def _num_tokens(dump: Dump) -> int:
    """The number of tokens, from `tokens` or else from the first tensor with a row per token."""
    per_token = ("hidden_in", "q_a", "q", "kv_a", "kv_c", "q_pe", "k_pe", "out", "output", "kv")
    found = dump.tensors.get("tokens")
    found = None if found is None else found.flatten()
    if found is None:
        names = (f"layers.{dump.layers[0]}.{name}" for name in per_token)
        found = next((dump.tensors[name] for name in names if name in dump.tensors), None)
    if found is None or found.dim() == 0 or found.shape[0] == 0:
        raise ShapeError(
            "bisect: the dump has neither tokens nor hidden_in, which have one row per token. Add "
            "one of them."
        )
    fresh_from = dump.tensors.get("fresh_from")
    if fresh_from is not None and fresh_from.shape != found.shape[:1]:
        raise ShapeError(
            f"bisect: fresh_from must be [{found.shape[0]}], got {list(fresh_from.shape)}."
        )
    return found.shape[0]


def _epsilons(module: nn.Module) -> dict[str, float]:
    """Epsilons of all norms inside, by name, for transformers' RMSNorm and torch's LayerNorm."""
    found: dict[str, float] = {}
    for name, part in module.named_modules():
        eps: Any = getattr(part, "variance_epsilon", getattr(part, "eps", None))
        if isinstance(eps, float):
            found[name] = eps
    return found


def check_prompt(dump: Dump, tokens: Tensor) -> None:
    """Check that the dump is of the given prompt."""
    found = dump.tensors.get("tokens")
    if found is None:
        return
    if found.flatten().tolist() != tokens.tolist():
        raise ConfigError(
            f"bisect: tokens of the dump must be the {len(tokens)} tokens of the prompt, got "
            f"{found.numel()} other tokens or another order. Record the dump with this prompt."
        )
