"""Bridges to what people already run; what they bridge to is loaded when they are called."""

from __future__ import annotations

from typing import Any, TypeVar

from openmla.errors import UnsupportedError

__all__ = ["attach", "detach"]

Model = TypeVar("Model")


def attach(model: Model, **options: Any) -> Model:
    """Run a Hugging Face model's MLA layers here from now on; returns the model.

    Options: cache_format, index_format, block_size, num_blocks, backend, workspace, capture, group.
    What they mean is told by help(openmla.integrations.transformers.attach).
    """
    _need_transformers("attach")
    from openmla.integrations import transformers

    return transformers.attach(model, **options)  # type: ignore[type-var]


def detach(model: Model) -> Model:
    """Undo attach(): the model attends by itself again; returns it. Its caches are lost."""
    _need_transformers("detach")
    from openmla.integrations import transformers

    return transformers.detach(model)  # type: ignore[type-var]


def _need_transformers(what: str) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f'{what}: transformers must be installed, got: {error}. Run: pip install "openmla[hf]".'
        ) from error
