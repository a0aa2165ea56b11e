"""fenchel/attention/flex.py: our priors as FlexAttention evaluates them, and once compiled."""

from importlib import import_module

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from fenchel.attention import (
    ALiBi,
    AttentionSpec,
    Causal,
    Dense,
    Global,
    Padding,
    Prior,
    RelativeBias,
    Sink,
    Strided,
    Window,
    attend,
    backend_support,
)
from fenchel.choice import Softmax

flex = import_module("fenchel.attention.flex")
generator = torch.Generator().manual_seed(0)
PRIORS = {
    "none": None,
    "causal": Causal(),
    "padding": Padding(torch.tensor([5, 0])),
    "alibi": ALiBi(6) + Causal(),
    "relative": RelativeBias(torch.randn(32, 6, generator=generator), both_sides=True),
    "dense": Dense(torch.randn(6, 4, 7, generator=generator)),
    "mask": Dense(torch.rand(2, 1, 4, 7, generator=generator) > 0.4),
    "sink": Sink(torch.randn(6, generator=generator), Window(2)),
    "pattern": (Window(1) | Strided(3) | Global(1)) + Causal(),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_point_by_point_it_is_the_reference(
    qkv, prior: Prior | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda _: flex_attention)  # compiling takes long
    q, k, v = qkv
    for choice in (Softmax(), Softmax(1.7), Softmax(torch.tensor(0.6, dtype=torch.float64))):
        ours = attend(q, k, v, choice=choice, prior=prior, backend="flex")
        exact = attend(q, k, v, choice=choice, prior=prior, backend="reference")
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-6)
        ours = attend(q, k, v, choice=choice, prior=prior, softcap=0.8, backend="flex")
        exact = attend(q, k, v, choice=choice, prior=prior, softcap=0.8, backend="reference")
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_compiled_it_is_the_reference_and_new_lengths_compile_nothing(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_EXACT", [])
    torch.compiler.reset()
    # As many heads as no axis of the mask has blocks.
    spec = AttentionSpec(prior=ALiBi(5) + Causal(), softcap=softcap)
    graphs = []
    for T, S in ((130, 260), (140, 300), (150, 410), (260, 500)):
        q, k = (torch.randn(1, 5, n, 8, generator=generator) for n in (T, S))
        ours = attend(q, k, k, **spec, backend="flex")
        torch.testing.assert_close(ours, attend(q, k, k, **spec, backend="reference"))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1]  # one for the first lengths, one for all others


def test_masks_of_priors_without_tensors_are_made_once() -> None:
    q = torch.zeros(1, 2, 8, 8)
    first = flex._mask(Causal() + Window(3), 1, 2, 8, 8, q.device)
    assert flex._mask(Causal() + Window(3), 1, 2, 8, 8, q.device) is first
    assert flex._mask(Causal() + Window(2), 1, 2, 8, 8, q.device) is not first
    padded = Padding(torch.tensor([3]))
    assert flex._mask(padded, 1, 2, 8, 8, q.device) is not flex._mask(padded, 1, 2, 8, 8, q.device)
    assert flex._mask(ALiBi(2), 1, 2, 8, 8, q.device) is None


def test_a_mask_made_in_inference_mode_serves_training_too() -> None:
    with torch.inference_mode():
        mask = flex._mask(Window(5), 1, 2, 9, 12, torch.device("cpu"))
    assert not mask.kv_indices.is_inference()
    assert not flex._scalar(12, torch.device("cpu")).is_inference()


def test_an_unsupported_call_is_refused(qkv) -> None:
    q, k, v = qkv
    assert "backward on a CPU" in (backend_support(q.requires_grad_(), k, v)["flex"] or "")
    assert "dropout" in (backend_support(q.detach(), k, v, dropout=0.1)["flex"] or "")
    with pytest.raises(ValueError, match="FlexAttention cannot carry tangents"):
        torch.func.jvp(lambda q: attend(q, k, v, backend="flex"), (q.detach(),), (q.detach(),))
