"""Tables of errors: a row is what the message says, and the call that raises it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openmla import OpenMLAError


def check_raises(
    says: str,
    call: Callable[[], object],
    *unchanged: Tensor,
    error: type[OpenMLAError] = OpenMLAError,
) -> None:
    """The call raises one line that begins with `says` and leaves tensors alone.

    `says` names where, the argument, the value and what to do; " ... " stands for any words.
    """
    before = [_bytes_of(tensor) for tensor in unchanged]
    pattern = ".*?".join(map(re.escape, says.split(" ... ")))
    with pytest.raises(error, match=f"^{pattern}") as caught:
        call()
    message = str(caught.value)
    assert re.match(r"[\w. ]+: ", message) and message[-1] in ".?" and "\n" not in message
    assert [_bytes_of(tensor) for tensor in unchanged] == before, "written before it raised"


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
