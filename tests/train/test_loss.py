"""fenchel/train/loss.py: what makes the loss of the next token."""

import math

import torch
from torch.func import grad
from torch.nn.functional import one_hot

from fenchel.choice import Softmax
from fenchel.train.loss import total_loss


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator)


TARGETS = torch.tensor([[0, 8, 3], [3, 1, 1]])


def test_a_uniform_model_loses_log_v_at_every_target() -> None:
    loss = total_loss(torch.zeros(2, 3, 9), TARGETS)
    torch.testing.assert_close(loss, torch.tensor(6 * math.log(9)))


def test_it_is_the_fenchel_young_loss_of_softmax() -> None:
    logits = draw(2, 3, 9)
    loss = Softmax().loss(logits.flatten(0, 1), TARGETS.flatten()).sum()
    torch.testing.assert_close(total_loss(logits, TARGETS), loss)


def test_the_gradient_is_the_choice_less_the_smoothed_truth() -> None:
    logits, a = draw(2, 3, 9), 0.1
    slope = grad(lambda z: total_loss(z, TARGETS, smoothing=a))(logits)
    truth = (1 - a) * one_hot(TARGETS, 9) + a / 9
    torch.testing.assert_close(slope, Softmax().weights(logits) - truth)


def test_parts_add_up_to_the_whole_whatever_their_sizes() -> None:
    logits = draw(2, 3, 9)
    parts = total_loss(logits[:, :1], TARGETS[:, :1]) + total_loss(logits[:, 1:], TARGETS[:, 1:])
    torch.testing.assert_close(parts, total_loss(logits, TARGETS))


def test_logits_of_half_precision_are_summed_in_float32() -> None:
    logits = draw(2, 3, 9).bfloat16()
    loss = total_loss(logits, TARGETS)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, total_loss(logits.float(), TARGETS), rtol=0, atol=0)
