"""fenchel/sensitivity/module_trace.py: a certificate is one of the module that was given."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from fenchel.attention import Causal, attend
from fenchel.choice import Entmax
from fenchel.model.norm import RMSNormPlusOne
from fenchel.sensitivity import Ball, certify, jacobian
from fenchel.sensitivity.certificate import token_function
from fenchel.sensitivity.module_trace import layer_of

M, H = 8, 2


class ResidualSequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class FiveGelu(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return 5.0 * super().forward(x)


class Block(nn.Module):
    """A pre-norm block of a batch (B, T, C), as nanoGPT has it."""

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        self.attention, self.seen = attention, torch.zeros(())
        self.norm1, self.norm2 = nn.LayerNorm(M), nn.RMSNorm(M)
        self.qkv, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M)
        self.up, self.down = nn.Linear(M, 4 * M), nn.Linear(2 * M, M)
        self.drop, self.gain = nn.Dropout(0.1), nn.Parameter(torch.randn(M))

    def mix(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (y.view(B, T, H, C // H).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))
        if self.attention == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.attention == "sink":
            y = attend(q, k, v, prior=Causal(), sink=self.gain[:H], beta=0.7)
        else:
            y = attend(q, k, v, choice=Entmax(1.5), prior=Causal())
        self.seen = y  # as a module that keeps something to look at
        return self.drop(self.out(y.transpose(1, 2).contiguous().view(B, T, C)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert x.shape[1] <= 16
        if mask is not None:
            raise ValueError("no masks")
        x = x + self.mix(self.norm1(x))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.gain * self.drop(self.down(functional.silu(gate) * up)) / 3.0


class InPlace(nn.Module):
    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.linear, self.view = nn.Linear(M, M), view

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        other = h.view(h.shape) if self.view else x
        h += x
        return functional.relu(h, inplace=True) + other  # type: ignore[no-any-return]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.abs().amax() > 1.0) else 2.0 * x


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape[-1], dtype=x.dtype)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.trace(lambda x: 3.0 * x, torch.ones(2, M, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class Weights(nn.Module):
    """Attention whose weights, which the layers do not follow, are used."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(M, H)

    def forward(self, x: Tensor) -> Tensor:
        y, p = self.attention(x, x, x)
        return y + p.sum()  # type: ignore[no-any-return]


class Interpreted(nn.Module):
    """A module that treats a traced tensor in another way than a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x if type(x) is Tensor else x


def hooked(hook: Callable[..., Any]) -> nn.Module:
    module = nn.Sequential(nn.Linear(M, M), nn.Tanh())
    module[0].register_forward_hook(hook)
    return module


def pre_hooked() -> nn.Module:
    module = nn.Linear(M, M)
    module.register_forward_pre_hook(lambda _, x: (3.0 * x[0],))
    return module


def assigned() -> nn.Module:
    module = nn.Linear(M, M)
    module.forward = lambda x: 4.0 * x  # type: ignore[method-assign]
    return module


def encoder(**settings: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(M, H, 12, **settings)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


KNOWN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(M, 3),
    "chain": lambda: nn.Sequential(nn.LayerNorm(M), nn.Linear(M, 5), nn.GELU("tanh")),
    "activations": lambda: nn.Sequential(
        nn.SiLU(), nn.Mish(), nn.ReLU(), nn.ELU(), nn.Softplus(), nn.LeakyReLU(), nn.Sigmoid()
    ),
    "residual subclass": lambda: ResidualSequential(nn.Linear(M, M)),
    "activation subclass": FiveGelu,
    "hook": lambda: hooked(lambda *seen: 7.0 * seen[-1]),
    "pre-hook": pre_hooked,
    "assigned forward": assigned,
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(M, M)),
    "spectral parametrisation": lambda: parametrizations.spectral_norm(nn.Linear(M, M)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(M, M)),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(M, M)),
    "weight parametrisation": lambda: parametrizations.weight_norm(nn.Linear(M, M)),
    "compiled": lambda: compiled(ResidualSequential(nn.Linear(M, M))),
    "block": Block,
    "block with attend": lambda: Block("attend"),
    "block with a sink": lambda: Block("sink"),
    "two blocks": lambda: nn.Sequential(Block(), Block()),
    "in place": lambda: InPlace(view=False),
    "attention": lambda: nn.MultiheadAttention(M, H),
    "attention of a batch": lambda: nn.MultiheadAttention(M, H, batch_first=True, bias=False),
    "encoder layer": lambda: encoder(),
    "encoder layer, norms first": lambda: encoder(
        norm_first=True, activation="gelu", batch_first=True
    ),
    "encoder": lambda: nn.TransformerEncoder(encoder(batch_first=True), 2),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convolution": (lambda: nn.Sequential(nn.Linear(M, M), nn.Conv1d(5, 5, 1)), "1 Conv1d calls"),
    "branch": (Branches, "Branches calls abs"),
    "in place under a view": (lambda: InPlace(view=True), "in place"),
    "noise": (Noise, "differs"),
    "scripted": (Scripted, "Scripted|differs"),
    "weights": (Weights, "differs"),
    "another function for subclasses": (Interpreted, "differs"),
    "a hook outside torch": (lambda: hooked(lambda *seen: seen[-1].detach()), "0 Linear calls"),
    "keys of their own": (lambda: nn.MultiheadAttention(M, H, add_bias_kv=True), "bias_k"),
    "a key of zeros": (lambda: nn.MultiheadAttention(M, H, add_zero_attn=True), "add_zero_attn"),
    "a soft maximum": (lambda: nn.Sequential(nn.Linear(M, M), nn.Softmax(-1)), "1 Softmax calls"),
    "two axes": (lambda: nn.LayerNorm((5, M)), "over 2 axes"),
    "a norm written out": (lambda: RMSNormPlusOne(M, eps=1e-5), "calls linalg_vector_norm"),
    "other slope": (lambda: nn.LeakyReLU(0.2), "slope 0.2"),
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KNOWN)
def test_the_layer_of_a_module_is_the_module(name: str, draw: Callable[..., Tensor]) -> None:
    module, X = build(KNOWN[name]), draw(5, M)
    call, x = token_function(module, X)
    layer = layer_of(module, call, x)
    ball = Ball.of(0.05, "fro", 5)
    found = certify(module, X, 0.05, failure=0.0, steps=0, restarts=0)
    for trial in range(3):
        Y = x + ball.within(trial * draw(5, M))
        with torch.no_grad():
            torch.testing.assert_close(layer(Y), call(Y))
        J = jacobian(call, Y).dense()
        torch.testing.assert_close(layer.jacobian(Y).dense(), J, rtol=1e-6, atol=1e-9)
        assert torch.linalg.matrix_norm(J, 2) <= found.upper * (1 + 1e-12)
    assert math.isfinite(found.upper)
    assert found.lower <= found.upper


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_is_not_understood_is_refused_by_name(
    name: str, draw: Callable[..., Tensor]
) -> None:
    make, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=rf"no upper bound is known.*({sentence}).*Known are"):
        certify(build(make), draw(5, M), 0.05, steps=0, restarts=0)


def test_dropout_is_refused_while_it_is_active(draw: Callable[..., Tensor]) -> None:
    for module in (Block().double(), encoder().double()):
        with pytest.raises(ValueError, match=r"call f.eval\(\) first"):
            certify(module, draw(5, M), 0.1)
    assert certify(encoder(dropout=0.0).double(), draw(5, M), 0.1, steps=0, restarts=0).upper > 0


def test_functional_dropout_is_refused_too(draw: Callable[..., Tensor]) -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5)

    with pytest.raises(ValueError, match=r"Dropping drops a share of 0.5.*f.eval"):
        certify(Dropping(), draw(5, M), 0.1)


def test_a_patched_function_of_torch_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    gelu = functional.gelu
    monkeypatch.setattr(functional, "gelu", lambda x, **_: 3.0 * gelu(x))
    found = certify(nn.GELU(), torch.zeros(2, M).double(), 1e-4, steps=0, restarts=0)
    assert found.lower == pytest.approx(1.5, rel=1e-3)  # three times the slope 1/2 of GELU at 0


def test_one_sequence_may_come_as_a_batch_of_one(draw: Callable[..., Tensor]) -> None:
    module, X = build(Block), draw(5, M)
    found = [certify(module, Y, 0.01, steps=2, restarts=0) for Y in (X, X[None])]
    assert found[0].upper == pytest.approx(found[1].upper, rel=1e-3)
    assert found[1].witness.shape == (1, 5, M)
    found[1].replay(module)
    with pytest.raises(ValueError, match=r"\(N, M\) or \(1, N, M\)"):
        certify(module, draw(2, 5, M), 0.01)
    with pytest.raises(ValueError, match="5 sequences of 1 tokens"):
        certify(build(lambda: nn.MultiheadAttention(M, H)), X[None], 0.01)
    with pytest.raises(ValueError, match="takes neither"):
        certify(build(lambda: nn.Linear(3, 3)), X, 0.01)


def test_a_trace_leaves_nothing_in_the_module(draw: Callable[..., Tensor]) -> None:
    module = build(Block)
    assert isinstance(module, Block)
    before = module.seen
    call, x = token_function(module, draw(5, M))
    kept = module.seen
    assert kept is not before
    layer_of(module, call, x)
    assert module.seen is kept


def test_masks_are_constants_of_an_encoder(draw: Callable[..., Tensor]) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = encoder(batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.layer(x, src_mask=mask, is_causal=True)  # type: ignore[no-any-return]

    module, X = build(Masked), draw(5, M)
    call, x = token_function(module, X[None])
    torch.testing.assert_close(layer_of(module, call, x)(x), call(x).detach())
