"""`openmla bisect`: which component of a model's attention is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from openmla.bisect import Dump, Verdict, check_prompt, read_dump, record, reference_of
from openmla.bisect.reference import Reference, check_config
from openmla.bisect.report import draw, sentence, table
from openmla.cache import check_formats
from openmla.cli.checkpoint import check_backend, check_tokens, checked_device, open_checkpoint
from openmla.cli.generate import warn_of_context
from openmla.cli.models import (
    check_attention,
    demo_prompt,
    load_model,
    load_tokenizer,
    read_config,
    run_once,
)
from openmla.cli.pictures import check_plot
from openmla.cli.prompts import read_prompt
from openmla.cli.terminal import filled, note, progress, warn
from openmla.errors import ConfigError
from openmla.plan.explanation import counted

OUTSIDE = 1  # exit status if a component is outside its budget
MANY_TOKENS = 2048
USUAL_TOKENS = 256  # tokens of the demo's default prompt


def run_bisect(options: argparse.Namespace) -> int:
    """Check everything, load, compare component by component, and name the first that is wrong."""
    device = checked_device(options.device)
    check_plot("bisect", options.plot)
    dump = _read_against(options)
    prompt = read_prompt(options.prompt, options.model, "bisect")
    checkpoint = open_checkpoint(
        options.model, allow_pickle=options.allow_pickle, revision=options.revision
    )
    check_config(checkpoint.config)
    config = read_config(checkpoint.folder)
    check_attention(options.attention, config)
    check_formats(checkpoint.config, options.cache_format or "bf16", options.index_format)
    check_backend(options.backend, device, options.cache_format)
    tokenizer = load_tokenizer(checkpoint.folder)
    tokens = tokenizer.encode(prompt)
    check_tokens(tokens, getattr(config.get_text_config(), "vocab_size", None))
    if prompt == demo_prompt():
        tokens = tokens[:USUAL_TOKENS]
    warn_of_context(len(tokens), 0, checkpoint.config)
    if len(tokens) > MANY_TOKENS:
        warn(
            f"{len(tokens):,} tokens take long, because time grows with their square. A few "
            "hundred are enough"
        )
    ids = torch.tensor(tokens)
    if dump is not None:
        check_prompt(dump, ids)
    dense = options.attention == "dense" or (options.attention is None and options.model == "demo")
    model = load_model(checkpoint, device, options.dtype, dense=dense)
    reference = reference_of(model)
    subject = "openmla's own step" if dump is None else Path(options.against).name
    if dump is None:
        run_once(model, checkpoint.folder)
        dump = _own(model, ids.to(device), options)
    verdicts = _judged(reference, dump)
    found = f"{counted(len(ids), 'token')}, {counted(len(dump.layers), 'layer')}"
    print(f"{subject}: {found}, compared with float64\n")
    print(table(verdicts))
    print("\n".join(["", *filled(sentence(verdicts, subject))]))
    if options.plot:
        draw(
            verdicts,
            Path(options.plot),
            f"{checkpoint.folder.name}: {subject} compared with float64",
        )
    if not any(verdict.judged for verdict in verdicts):
        return 2
    return OUTSIDE if any(verdict.wrong for verdict in verdicts) else 0


def _read_against(options: argparse.Namespace) -> Dump | None:
    """The given dump, or None. Raises if options for making a dump are given as well."""
    if options.against is None:
        return None
    for name in ("cache_format", "kv_scale", "save"):
        if getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"bisect: {option} does not apply to --against. Leave it out.")
    return read_dump(options.against)


def _own(model: Any, ids: torch.Tensor, options: argparse.Namespace) -> Dump:
    note(f"running {counted(len(ids), 'token')}, the last ones one by one")
    dump = record(
        model,
        ids,
        cache_format=options.cache_format,
        kv_scale=options.kv_scale,
        index_format=options.index_format,
        backend=options.backend,
    )
    if options.save:
        dump.save(options.save)
        note(f"wrote {Path(options.save).name}")
    return dump


def _judged(reference: Reference, dump: Dump) -> list[Verdict]:
    """Verdicts layer by layer, with progress."""
    verdicts: list[Verdict] = []
    with progress(len(dump.layers)) as advance:
        for verdict in reference.judge(dump):
            advance(f"layer {verdict.layer}", dump.layers.index(verdict.layer))
            verdicts.append(verdict)
    return verdicts
