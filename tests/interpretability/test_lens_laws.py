"""fenchel/interpretability/lens_laws.py: laws read off the stream, and where the answer appears."""

import pytest
import torch
from torch.nn.functional import kl_div

from fenchel.interpretability import JacobianLens, fit_lens, lens
from fenchel.interpretability.lens_laws import Lens
from tests.interpretability.conftest import L, M, build, draw, every_shape


@every_shape
@torch.no_grad()
def test_the_law_of_a_layer_is_that_of_the_model_cut_after_it(shape: str) -> None:
    """The logit lens after layer l is the model of l layers with the same last norm and head."""
    model, ids = build(shape), draw(4)
    found = lens(model, ids, top=5)
    final = model(torch.tensor([ids]))[0].log_softmax(-1)
    for layer in range(1, L + 1):
        shared = {"distinct_layers": 1} if shape == "shared" else {}
        short = build(shape, layers=layer, **shared)
        state = model.state_dict()
        short.load_state_dict({name: state[name] for name in short.state_dict()})
        law = short(torch.tensor([ids]))[0].log_softmax(-1)
        best = law.topk(5, dim=-1)
        assert torch.equal(found.top[layer - 1], best.indices)
        torch.testing.assert_close(found.probability[layer - 1], best.values.exp())
        kl = kl_div(law, final, reduction="none", log_target=True).sum(-1)
        torch.testing.assert_close(found.kl[layer - 1], kl, rtol=1e-5, atol=1e-9)
        order = law.argsort(-1, descending=True)
        rank = (order == final.argmax(-1, keepdim=True)).int().argmax(-1) + 1
        assert torch.equal(found.rank[layer - 1], rank)
        nats = -law[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(found.loss[layer - 1], nats)
    row = found.agreement()[0]
    assert row.kl == pytest.approx(float(found.kl[0, 1:].mean()))
    assert row.top == pytest.approx(float((found.rank[0, 1:] == 1).double().mean()))


@torch.no_grad()
def test_a_lens_reads_the_streams_by_its_matrices() -> None:
    model, ids, eye = build(), draw(4), torch.eye(M)
    plain = lens(model, ids)
    identity = JacobianLens.from_matrices(model, {1: eye, 2: eye})
    same = lens(model, ids, "jacobian", fit=identity, offset=False)
    torch.testing.assert_close(same.kl, plain.kl)
    assert same.kind == "jacobian without offset"
    twice = JacobianLens.from_matrices(model, {2: 2.0 * eye})
    some = lens(model, ids, "jacobian", fit=twice, offset=False)
    assert some.layers == (2, 3)
    # the last norm takes out a common factor, so that only its epsilon sees it
    torch.testing.assert_close(some.kl, plain.kl[1:], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_without_a_fit_the_lens_is_that_of_the_text_itself() -> None:
    model, ids = build(), draw(4, 20)
    found = lens(model, ids, "jacobian")
    fitted = fit_lens(model, [ids], skip=5)
    torch.testing.assert_close(found.kl, lens(model, ids, "jacobian", fit=fitted).kl)
    assert not torch.allclose(found.kl, lens(model, ids, "jacobian", fit=fitted, offset=False).kl)


def test_the_answer_appears_where_it_stays_on_top() -> None:
    rank = torch.tensor([[1, 1, 4, 2], [3, 1, 2, 1], [1, 1, 1, 1]])
    nothing = torch.zeros(3, 4)
    found = Lens(
        kind="logit",
        layers=(2, 5, 7),
        ids=(0, 1, 2, 3),
        top=nothing,
        probability=nothing,
        kl=nothing,
        rank=rank,
        loss=nothing,
    )
    assert found.first() == [7, 2, 7, 5]


def test_bad_input_gets_a_sentence() -> None:
    model = build()
    with pytest.raises(ValueError, match="at least two tokens"):
        lens(model, [3])
    with pytest.raises(ValueError, match="should be 'logit' or 'jacobian'"):
        lens(model, [3, 4], "tuned")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only decoders"):
        lens(build(kind="encoder"), [3, 4])
    with pytest.raises(ValueError, match="needs no fit"):
        lens(model, [3, 4], fit=JacobianLens.from_matrices(model, {}))
    model.blocks[1].mlp.down.weight.detach().fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        lens(model, [3, 4])
