"""One block: look at other positions, then think at each one.

    x = x + attention(norm(x))
    x = x + mlp(norm(x))

B sequences, T positions, S positions seen so far, M width of the stream, H heads, G heads of
keys and values, D width of a head. Both branches start at zero (their last map is), so a fresh
block is the identity and a deep stack of them trains from the first step.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, silu

from fenchel.attention import Angles, Causal, attend, rotate
from fenchel.choice import named
from fenchel.model.config import ModelConfig
from fenchel.model.norm import norm

CAUSAL = Causal()

Observer = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called in each layer with its number and the q (B, H, T, D), k and v (B, G, S, D) it uses."""


class Cache(Protocol):
    """Keys and values of the positions already read; see fenchel.generate.cache."""

    @property
    def length(self) -> int:
        """How many positions are held."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, G, T, D) and give back all that is held, (B, G, S, D)."""

    def advance(self, positions: int) -> None:
        """Count positions that every layer has appended."""


class Attention(nn.Module):
    """Every position asks, all earlier ones answer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width = config.heads, config.groups, config.head_width
        self.layer, self.dropout = layer, config.dropout
        self.choice = named(config.choice, alpha=config.alpha)
        rows = (self.heads + 2 * self.groups) * self.head_width
        self.qkv = nn.Linear(config.width, rows, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(
        self,
        x_BTM: Tensor,
        angles: Angles | None,
        cache: Cache | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """(B, T, M) -> (B, T, M)."""
        B, T, _ = x_BTM.shape
        H, G, D = self.heads, self.groups, self.head_width
        # Cut before the heads are turned to the front: the gradients then join in the order in
        # which they lie in memory.
        qk, v = self.qkv(x_BTM).split([(H + G) * D, G * D], dim=-1)
        qk = qk.view(B, T, H + G, D).transpose(1, 2)
        v_BGTD = v.view(B, T, G, D).transpose(1, 2)
        if angles is not None:
            qk = rotate(qk, angles)
        q_BHTD, k_BGTD = qk.split([H, G], dim=1)
        if cache is not None:
            k_BGTD, v_BGTD = cache.append(self.layer, k_BGTD, v_BGTD)
        if observe is not None:
            observe(self.layer, q_BHTD, k_BGTD, v_BGTD)
        p = self.dropout if self.training else 0.0
        mixed_BHTD = attend(q_BHTD, k_BGTD, v_BGTD, choice=self.choice, prior=CAUSAL, dropout=p)
        mixed: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """The same map at every position: widen, bend, narrow."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = None
        if config.mlp == "swiglu":
            self.gate = nn.Linear(config.width, config.mlp_width, bias=config.bias)
        self.up = nn.Linear(config.width, config.mlp_width, bias=config.bias)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.bias)

    def forward(self, x_BTM: Tensor) -> Tensor:
        """(B, T, M) -> (B, T, M)."""
        wide = self.up(x_BTM)
        wide = gelu(wide) if self.gate is None else silu(self.gate(x_BTM)) * wide
        narrow: Tensor = self.down(wide)
        return narrow


class Block(nn.Module):
    """Attention, then the MLP, each on a normalised stream and added back to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = norm(config)
        self.mlp = Mlp(config)
        self.dropout = config.dropout

    def forward(
        self,
        x_BTM: Tensor,
        angles: Angles | None,
        cache: Cache | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """(B, T, M) -> (B, T, M)."""
        seen = self.attention(self.attention_norm(x_BTM), angles, cache, observe)
        x_BTM = x_BTM + self._drop(seen)
        return x_BTM + self._drop(self.mlp(self.mlp_norm(x_BTM)))

    def _drop(self, branch: Tensor) -> Tensor:
        return dropout(branch, self.dropout, self.training) if self.dropout else branch
