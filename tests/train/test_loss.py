"""fenchel/train/loss.py: what makes the loss of the next token."""

import math

import pytest
import torch
from torch.func import grad
from torch.nn.functional import cross_entropy, one_hot

from fenchel.choice import Choice, Entmax, Hard, Softmax, Sparsemax
from fenchel.train.loss import count_targets, per_sequence, target_losses, total_loss


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator)


TARGETS = torch.tensor([[0, 8, 3], [3, 1, 1]])


def test_a_uniform_model_loses_log_v_at_every_target() -> None:
    loss = total_loss(torch.zeros(2, 3, 9), TARGETS)
    torch.testing.assert_close(loss, torch.tensor(6 * math.log(9)))
    guess = total_loss(torch.zeros(1, 1, 50257), torch.tensor([[7]]))
    assert round(guess.item(), 1) == 10.8


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


@pytest.mark.parametrize("a", [0.0, 0.1])
@pytest.mark.parametrize("choice", [Entmax(1.25), Entmax(1.5), Sparsemax(), Hard()], ids=str)
def test_with_another_map_the_gradient_is_its_choice_less_the_truth(
    choice: Choice, a: float
) -> None:
    logits = 2.0 * draw(2, 3, 9).double()
    loss, slope = torch.func.grad_and_value(
        lambda z: total_loss(z, TARGETS, smoothing=a, choice=choice)
    )(logits)[::-1]
    truth = (1 - a) * one_hot(TARGETS, 9).double() + a / 9
    torch.testing.assert_close(slope, choice.weights(logits) - truth)
    value = choice.value(logits) - (truth * logits).sum(-1)
    torch.testing.assert_close(loss, (value + choice.regulariser(truth)).sum())
    assert loss > 0


def test_a_sparse_loss_ends_where_the_target_is_a_margin_ahead() -> None:
    logits, target = torch.tensor([[[2.0, 0.0, 0.0]]]), torch.tensor([[0]])
    assert total_loss(logits, target, choice=Entmax(1.5)) == 0.0
    assert total_loss(logits - 0.1 * one_hot(target, 3), target, choice=Entmax(1.5)) > 0.0
    assert total_loss(logits, target) > 0.0


@pytest.mark.parametrize("a", [0.0, 0.1])
def test_softmax_as_a_map_is_cross_entropy_less_the_entropy_of_the_truth(a: float) -> None:
    logits = draw(2, 3, 9)
    plain = cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
    if a:
        plain = total_loss(logits, TARGETS, smoothing=a)
    y = (1 - a) * one_hot(torch.tensor(0), 9) + a / 9
    entropy = -torch.special.xlogy(y, y).sum()
    ours = total_loss(logits, TARGETS, smoothing=a, choice=Softmax())
    torch.testing.assert_close(ours, plain - 6 * entropy)


@pytest.mark.parametrize("a", [0.0, 0.1])
@pytest.mark.parametrize("choice", [None, Entmax(1.5)], ids=str)
def test_a_target_of_minus_100_is_left_out(choice: Choice | None, a: float) -> None:
    logits, some = draw(2, 3, 9), TARGETS.clone()
    some[:, 1] = -100
    slope = grad(lambda z: total_loss(z, some, smoothing=a, choice=choice))(logits)
    assert slope[:, 1].count_nonzero() == 0
    rest = total_loss(logits[:, ::2], TARGETS[:, ::2], smoothing=a, choice=choice)
    torch.testing.assert_close(total_loss(logits, some, smoothing=a, choice=choice), rest)


@pytest.mark.parametrize(
    ("p", "nats"),
    [(0.99, 0.01005), (0.9, 0.105), (0.5, 0.693), (0.1, 2.303), (0.01, 4.6), (0.0001, 9.21)],
)
def test_the_worked_losses_of_a_target_that_was_given_p(p: float, nats: float) -> None:
    logits = torch.tensor([[[math.log(p), math.log1p(-p)]]])
    digits = len(str(nats).partition(".")[2])
    assert round(total_loss(logits, torch.tensor([[0]])).item(), digits) == nats


@pytest.mark.parametrize("a", [0.0, 0.1])
@pytest.mark.parametrize("choice", [None, Softmax(), Entmax(1.5), Sparsemax()], ids=str)
def test_the_loss_of_each_target_and_the_mean_of_each_sequence(
    choice: Choice | None, a: float
) -> None:
    logits, some = draw(2, 3, 9), TARGETS.clone()
    some[0, 1:] = -100
    call = {"smoothing": a, "choice": choice}
    losses = target_losses(logits, some, **call)
    assert losses.shape == some.shape
    assert (losses[0, 1:] == 0).all()
    torch.testing.assert_close(losses.sum(), total_loss(logits, some, **call))
    alone = [total_loss(logits[:1, :1], some[:1, :1], **call)]
    alone += [total_loss(logits[1:], some[1:], **call) / 3]
    torch.testing.assert_close(per_sequence(losses, some), torch.stack(alone))
    assert count_targets(some) == 4
    nothing = torch.full_like(some, -100)
    assert per_sequence(target_losses(logits, nothing, **call), nothing).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("choice", [None, Softmax(), Entmax(1.5)], ids=str)
def test_class_weights_multiply_the_loss_of_their_targets(choice: Choice | None) -> None:
    logits, some, w = draw(2, 3, 9), TARGETS.clone(), torch.arange(1.0, 10.0)
    some[0, 2] = -100
    ours = total_loss(logits, some, choice=choice, class_weights_V=w)
    plain = target_losses(logits, some, choice=choice)
    torch.testing.assert_close(ours, (w[some.clamp(min=0)] * plain).sum())
    if choice is None:
        theirs = cross_entropy(logits.flatten(0, 1), some.flatten(), weight=w, reduction="sum")
        torch.testing.assert_close(ours, theirs)
