"""Tiny models of each kind on disk: bytes are their tokens, all weights random."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

KINDS = ("dense", "sparse", "v4")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by kind. V4's rows are wide enough for its packed format."""
    pytest.importorskip("transformers")
    from tests.integrations.models import make_model, make_sparse, make_v4

    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    with torch.no_grad():
        dense = make_model("deepseek_v3")
        dense.resize_token_embeddings(256)
        sparse = make_sparse("deepseek_v32", vocab_size=256)
        v4 = make_v4(vocab_size=256, head_dim=128, num_hidden_layers=3, compress_ratios=[0, 4, 128])
        for kind, model in zip(KINDS, (dense, sparse, v4), strict=True):
            model.save_pretrained(folders[kind])
    return folders
