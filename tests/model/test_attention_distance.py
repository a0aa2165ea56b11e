"""fenchel/model/attention.py: attention by distance is attention by products."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal, attend
from fenchel.choice import Choice, Entmax, Hard, Softmax, Sparsemax
from fenchel.model import l2_as_dot_product


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5), Sparsemax(), Hard()], ids=repr)
def test_near_keys_are_chosen(qkv: tuple[Tensor, Tensor, Tensor], choice: Choice) -> None:
    q, k, v = qkv
    far = torch.cdist(q, k.repeat_interleave(2, 1)).square()
    log_u = Causal().log(4, 7, dtype=q.dtype)
    exact = choice.weights(-0.3 * far, log_u) @ v.repeat_interleave(2, 1)
    ours = attend(*l2_as_dot_product(q, k), v, choice=choice, prior=Causal(), scale=0.6)
    torch.testing.assert_close(ours, exact)
