"""apply_sink: an attention sink, a logit per head that joins the softmax and has no value."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.errors import ShapeError


def apply_sink(
    out: Tensor,  # [T, H, V]
    lse: Tensor,  # [T, H] f32, of the very keys that out is over
    sink: Tensor,  # [H] f32
) -> Tensor:  # [T, H, V]
    """Apply an attention sink: return out * sigmoid(lse - sink).

    Apply it once, after the last merge of partial results. The output of a token that sees no key
    stays 0.

    Args:
        out: [T, H, V] attention output.
        lse: [T, H] logsumexp over exactly the keys of `out`, natural logarithm.
        sink: [H] logit of the sink per head.

    Returns:
        [T, H, V] in the dtype of `out`.

    Raises:
        ShapeError: the shapes do not match.

    ```python
    import openmla, torch

    out, lse = torch.ones(1, 2, 4), torch.zeros(1, 2)
    sink = torch.tensor([0.0, -torch.inf])  # no sink for the second head
    print(openmla.apply_sink(out, lse, sink)[0, :, 0])  # 0.5 and 1.0
    ```
    """
    if out.dim() != 3 or lse.shape != out.shape[:2]:
        raise ShapeError(
            f"sink: lse must be [T, H] and out [T, H, V], got {tuple(lse.shape)} and "
            f"{tuple(out.shape)}."
        )
    if sink.shape != out.shape[1:2]:
        raise ShapeError(
            f"sink: sink must be [H] = {tuple(out.shape[1:2])}, got {tuple(sink.shape)}."
        )
    kept = (lse - sink.to(lse.dtype)).sigmoid().masked_fill(lse == -torch.inf, 0)
    return (out * kept[..., None]).to(out.dtype)
