"""fenchel/interpretability/jacobian_lens.py: no stream of the ball is read worse than certified."""

import pytest
import torch

from fenchel.interpretability import fit_lens
from fenchel.interpretability.jacobian_lens import lens_errors
from tests.interpretability.conftest import L, M, build, draw


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@torch.no_grad()
def test_no_stream_of_the_ball_is_read_worse_than_certified(shape: str) -> None:
    model, ids = build(shape), draw(3, 10)
    fit = fit_lens(model, [draw(4, 24)], skip=2)
    generator, blocks = torch.Generator().manual_seed(0), model.blocks
    stream = list[torch.Tensor]()
    handles = [block.register_forward_hook(lambda *a: stream.append(a[-1])) for block in blocks]
    model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    for share in (1e-4, 1e-2):
        rows = lens_errors(model, fit, ids, share, generator=generator)
        assert [row.layer for row in rows] == [1, 2]
        for row in rows:
            x, final = stream[row.layer - 1][0], stream[L - 1][0]
            assert row.measured == pytest.approx(
                float((final - fit.read(row.layer, x))[1:].norm()), rel=1e-6
            )
            assert row.mean == pytest.approx(float((final - fit.mean_out)[1:].norm()), rel=1e-6)
            assert row.vacuous == (row.certified >= row.mean)
            worst = 0.0
            for seed in range(20):
                g = torch.Generator().manual_seed(seed)
                move = torch.randn(10, M, generator=g, dtype=x.dtype)
                moved = x + row.radius * move / move.norm()

                def replaced(*a: torch.Tensor, y: torch.Tensor = moved) -> torch.Tensor:
                    return y[None].expand_as(a[-1])

                handle = blocks[row.layer - 1].register_forward_hook(replaced)
                out = list[torch.Tensor]()
                end = blocks[L - 1].register_forward_hook(lambda *a, out=out: out.append(a[-1]))
                model(torch.tensor([ids]))
                handle.remove()
                end.remove()
                worst = max(worst, float((out[0][0] - fit.read(row.layer, moved))[1:].norm()))
            assert worst <= row.certified
            assert row.certified > row.measured
    assert not lens_errors(model, fit, ids, 1e-6)[-1].vacuous


def test_what_cannot_be_certified_gets_a_sentence() -> None:
    model, ids = build(), draw(3, 10)
    fit = fit_lens(model, [draw(4, 24)], skip=2)
    with pytest.raises(ValueError, match="should be above 0 and below 1"):
        lens_errors(model, fit, ids, 2.0)
    experts = build("experts")
    fitted = fit_lens(experts, [draw(4, 24)], skip=2)
    with pytest.raises(ValueError, match="layer 2 chooses among experts"):
        lens_errors(experts, fitted, ids)
