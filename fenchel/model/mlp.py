"""The same map at every position: widen, bend, narrow.

    plain    down( f(up(x)) )                  f = GELU (exact or by tanh), ReLU
    gated    down( f(gate(x)) * up(x) )        f = SiLU (SwiGLU), GELU (GeGLU)

GELU(x) = x Phi(x) is what is left on average of an x that survives with probability Phi(x); its
form by tanh differs from it by at most 4.73e-4. Dropout stands after f, before ``down``.

M width of the stream, F width inside.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, relu, silu

from fenchel.model.config import ModelConfig
from fenchel.model.sigma import linear_map

gelu_tanh = partial(gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": silu,
    "geglu": gelu,
    "geglu_tanh": gelu_tanh,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
}


class Mlp(nn.Module):
    """One MLP, read by every token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        M, F, sigma = config.width, config.mlp_width, config.sigma_reparam
        self.activation, self.dropout = ACTIVATIONS[config.mlp], config.mlp_dropout
        self.gate = None
        if config.gated:
            self.gate = linear_map(M, F, bias=config.bias, sigma=sigma)
        self.up = linear_map(M, F, bias=config.bias, sigma=sigma)
        self.down = linear_map(F, M, bias=config.bias, sigma=sigma)

    def forward(self, x_BTM: Tensor) -> Tensor:
        """(B, T, M) -> (B, T, M)."""
        wide = self.up(x_BTM)
        f = self.activation
        wide = f(wide) if self.gate is None else f(self.gate(x_BTM)) * wide
        if self.dropout:
            wide = dropout(wide, self.dropout, self.training)
        narrow: Tensor = self.down(wide)
        return narrow
