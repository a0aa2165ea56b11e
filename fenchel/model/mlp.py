"""Feed-forward layers: an MLP, and a mixture of experts.

    plain      down( f(up(x)) )                  f = GELU (exact or by tanh), ReLU, ReLU^2
    gated      down( f(gate(x)) * up(x) )        f = SiLU (SwiGLU), GELU (GeGLU)
    clamped    down( f(min(g, 7)) * (1 + min(max(u, -7), 7)) )     f(g) = g sigmoid(1.702 g)

GELU(x) = x Phi(x) is the mean of x kept with probability Phi(x); its form by tanh differs by at
most 4.73e-4. Dropout comes after f, before ``down``. The clamped form is that of gpt-oss, with
g = gate(x) and u = up(x).

**Mixture of experts**: X MLPs, of which each token uses k.

    z = W_r x                           scores of the experts, (X,)
    p = choice.weights(z)               as a query chooses among keys
    y = sum over the k largest p_e of  w_e MLP_e(x),     w = a times those p_e over their sum,
                                                         or a p_e (``router_normalise`` off)

With ``router_bias`` the k largest p_e + b_e are taken, and their weights are those of p still; a is
``router_scale``. Softmax makes the experts compete; "sigmoid" weighs each by itself, as DeepSeek
V3, GLM-4.5 and Kimi do. A shared expert is one more MLP, which no router chooses:

    y = y + s MLP_shared(x),     s = 1, or sigmoid(W_s x) with ``shared_expert_gate``

With ``expert_norms`` (Gemma 4) x is the stream, without the norm of the block, and with four norms
n, the root mean square rms(x), a gain c of its entries and a factor f_e of every expert

    z = W_r (c x / rms(x)) M^-1/2,     y = n1(sum_e f_e w_e MLP_e(n2(x))) + n3(MLP_shared(n4(x)))

A sparse choice map may give fewer than k experts any weight; the others are then not computed.
Tokens are sorted by expert and gathered once, (N k, M); every expert computes its segment of these
rows, and the results are put back into the order of the tokens and added: N k rows of work, not
N X, and no tensor of experts by tokens. The experts of a parameter are taken apart by one
``unbind``, whose derivative is one ``stack``; taken one by one, each would have a derivative of the
size of all of them. The number of tokens per expert depends on the data, so a compiler breaks its
graph here. Some layers may have an MLP without a router (``dense_layers``).

Without a penalty a few experts take all tokens. The load-balancing loss is

    balance = X sum_e f_e P_e        f_e fraction of all choices that fell on e, P_e mean of p_e
                                     over the sum of p, which is 1 on the simplex,

with a derivative only through P: it lowers the scores of experts that are chosen too often. It is
1 when the choices or the weights are even, and X P_e, at most X, when all tokens choose one expert
e. It is not a distance from evenness: where the choices and the weights favour different experts it
is below 1 (for k = 1 never below 1/X), so 1 is where training leads and not a minimum. A trainer
adds a small multiple of it to its loss (``Transformer.balance``).

N tokens, M width of the stream, F width inside, X experts.

Shazeer et al. (2017), Outrageously large neural networks; Fedus, Zoph and Shazeer (2022), Switch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, split
from torch.nn.functional import dropout, gelu, linear, relu, rms_norm, silu
from torch.overrides import handle_torch_function, has_torch_function_unary

from fenchel.choice import by_name
from fenchel.model.config import ModelConfig
from fenchel.model.norm import norm
from fenchel.model.sigma_linear import linear_map

gelu_tanh = partial(gelu, approximate="tanh")
CLAMP, STEEPNESS = 7.0, 1.702
"""Constants of gpt-oss."""


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2; one function to a mode that replaces activations, as those of torch are.

    >>> relu_squared(torch.tensor([-1.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    if has_torch_function_unary(x):
        out: Tensor = handle_torch_function(relu_squared, (x,), x)
        return out
    return relu(x).square()


def clamped_silu(x: Tensor) -> Tensor:
    """g sigmoid(1.702 g) of g = min(x, 7)."""
    if has_torch_function_unary(x):
        out: Tensor = handle_torch_function(clamped_silu, (x,), x)
        return out
    g = x.clamp(max=CLAMP)
    return g * torch.sigmoid(STEEPNESS * g)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": silu,
    "geglu": gelu,
    "geglu_tanh": gelu_tanh,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu_squared,
    "swiglu_clamped": clamped_silu,
}


def _multiplier(up: Tensor, *, clamped: bool) -> Tensor:
    """What the activated gate multiplies."""
    return 1.0 + up.clamp(-CLAMP, CLAMP) if clamped else up


class Mlp(nn.Module):
    """An MLP, gated or plain."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        M, F, sigma = config.width, config.mlp_width, config.sigma_reparam
        self.activation, self.dropout = ACTIVATIONS[config.mlp], config.mlp_dropout
        self.clamped = config.mlp == "swiglu_clamped"
        self.gate = None
        if config.gated:
            self.gate = linear_map(M, F, bias=config.bias, sigma=sigma)
        self.up = linear_map(M, F, bias=config.bias, sigma=sigma)
        self.down = linear_map(F, M, bias=config.bias, sigma=sigma)

    def forward(self, x_BTM: Tensor) -> Tensor:
        """(B, T, M) -> (B, T, M)."""
        wide = self.up(x_BTM)
        f = self.activation
        if self.gate is None:
            wide = f(wide)
        else:
            wide = f(self.gate(x_BTM)) * _multiplier(wide, clamped=self.clamped)
        if self.dropout:
            wide = dropout(wide, self.dropout, self.training)
        narrow: Tensor = self.down(wide)
        return narrow


class MixtureOfExperts(nn.Module):
    """A router and X experts: gate, up (X, F, M) and down (X, M, F), their biases (X, F), (X, M).

    The biases, and that of the router, are there where linear maps of the block have one. A shared
    expert is an ``Mlp`` beside them.
    """

    balance: Tensor | None
    """The load-balancing loss of the last training batch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        X, M, F = config.experts, config.width, config.mlp_width
        self.per_token = config.experts_per_token
        self.choice = by_name(config.router, alpha=config.entmax_alpha)
        self.normalise, self.scale = config.router_normalise, config.router_scale
        self.activation, self.dropout = ACTIVATIONS[config.mlp], config.mlp_dropout
        self.clamped = config.mlp == "swiglu_clamped"
        self.router = nn.Linear(M, X, bias=config.bias)
        self.gate = nn.Parameter(torch.empty(X, F, M)) if config.gated else None
        self.up = nn.Parameter(torch.empty(X, F, M))
        self.down = nn.Parameter(torch.empty(X, M, F))
        self.gate_bias = self.up_bias = self.down_bias = None
        if config.bias:
            self.gate_bias = nn.Parameter(torch.zeros(X, F)) if config.gated else None
            self.up_bias = nn.Parameter(torch.zeros(X, F))
            self.down_bias = nn.Parameter(torch.zeros(X, M))
        self.router_bias = None
        if config.router_bias:  # no gradient reaches it: the k largest are no function of it
            self.router_bias = nn.Parameter(torch.zeros(X), requires_grad=False)
        self.shared = self.shared_gate = None
        if (width := config.shared_expert) is not None:
            self.shared = Mlp(replace(config, hidden=width))
            self.shared_gate = nn.Linear(M, 1, bias=False) if config.shared_expert_gate else None
        self.router_gain = self.expert_scale = None
        self.experts_norm = self.experts_post_norm = None
        self.shared_norm = self.shared_post_norm = None
        if config.expert_norms:
            self.router_gain, self.epsilon = nn.Parameter(torch.ones(M)), config.epsilon
            self.expert_scale = nn.Parameter(torch.ones(X))
            self.experts_norm, self.experts_post_norm = norm(config), norm(config)
            self.shared_norm, self.shared_post_norm = norm(config), norm(config)
        self.balance = None

    def forward(self, x_BTM: Tensor) -> Tensor:
        """(B, T, M) -> (B, T, M)."""
        z_NX = self.router(self._router_input(x_BTM).flatten(0, -2))
        p_NX = self.choice.weights(z_NX.to(torch.promote_types(z_NX.dtype, torch.float32)))
        b_X = self.router_bias
        expert_Nk = (p_NX if b_X is None else p_NX + b_X).topk(self.per_token, dim=-1).indices
        p_Nk = p_NX.gather(-1, expert_Nk)
        w_Nk = p_Nk / p_Nk.sum(-1, keepdim=True) if self.normalise else p_Nk
        w_Nk = w_Nk if self.scale == 1.0 else self.scale * w_Nk
        w_Nk = w_Nk if self.expert_scale is None else self.expert_scale[expert_Nk] * w_Nk
        if self.training:
            self.balance = balance(p_NX, expert_Nk)
        x_NM = _through(self.experts_norm, x_BTM).flatten(0, -2)
        y_BTM = self._experts(x_NM, w_Nk.to(x_NM.dtype), expert_Nk).view_as(x_BTM)
        y_BTM = _through(self.experts_post_norm, y_BTM)
        if self.shared is None:
            return y_BTM
        s_BTM: Tensor = self.shared(_through(self.shared_norm, x_BTM))
        if self.shared_gate is not None:
            s_BTM = torch.sigmoid(self.shared_gate(x_BTM)) * s_BTM
        return y_BTM + _through(self.shared_post_norm, s_BTM)

    def _router_input(self, x_BTM: Tensor) -> Tensor:
        if self.router_gain is None:
            return x_BTM
        M = x_BTM.shape[-1]
        y_BTM: Tensor = rms_norm(x_BTM, (M,), None, self.epsilon) * self.router_gain * M**-0.5
        return y_BTM

    def _experts(self, x_NM: Tensor, w_Nk: Tensor, expert_Nk: Tensor) -> Tensor:
        """The experts of every token, each on its segment of the tokens sorted by expert."""
        X, k = len(self.up), self.per_token
        chosen = expert_Nk.masked_fill(w_Nk == 0.0, X).flatten()  # without weight: behind the last
        order = chosen.argsort(stable=True)
        *sizes, idle = chosen.bincount(minlength=X + 1).tolist()
        *segments, rest = split(x_NM[order // k], [*sizes, idle])
        parts = (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        experts = zip(*(_unbound(part, X) for part in parts), strict=True)
        mixed = [
            self._expert(rows, *weights)
            for rows, weights in zip(segments, experts, strict=True)
            if len(rows)
        ]
        y_RM = torch.cat([*mixed, torch.zeros_like(rest)])
        y_NkM = y_RM[order.argsort()].view(*w_Nk.shape, -1)
        return (w_Nk.unsqueeze(-1) * y_NkM).sum(1)

    def _expert(
        self,
        x_nM: Tensor,
        gate: Tensor | None,
        up: Tensor,
        down: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        wide, f = linear(x_nM, up, up_bias), self.activation
        if gate is None:
            wide = f(wide)
        else:
            gated = f(linear(x_nM, gate, gate_bias))
            wide = gated * _multiplier(wide, clamped=self.clamped)
        if self.dropout:
            wide = dropout(wide, self.dropout, self.training)
        return linear(wide, down, down_bias)


def _through(module: nn.Module | None, x: Tensor) -> Tensor:
    """The output of a module; x itself where there is none."""
    y: Tensor = x if module is None else module(x)
    return y


def _unbound(parameter: Tensor | None, X: int) -> Sequence[Any]:
    """One entry per expert."""
    return [None] * X if parameter is None else parameter.unbind()


def balance(p_NX: Tensor, expert_Nk: Tensor) -> Tensor:
    """X sum_e f_e P_e: 1 where f or P is even, X P_e where all tokens choose expert e.

    >>> balance(torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [1]])).item()
    1.0
    """
    X = p_NX.shape[-1]
    share_NX = p_NX / p_NX.sum(-1, keepdim=True)
    counted = expert_Nk[p_NX.gather(-1, expert_Nk) > 0]
    f_X = counted.bincount(minlength=X).to(p_NX.dtype) / max(1, len(counted))
    return X * (f_X @ share_NX.mean(0))
