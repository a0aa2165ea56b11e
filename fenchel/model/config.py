"""The settings of a model. A setting is written here once and read everywhere."""

import math
from dataclasses import dataclass

from fenchel.choice import named

LARGEST = 2**24
"""No size is larger: products of two stay far from what a tensor can hold."""
_KINDS = {
    "norm": ("rms", "layer"),
    "positions": ("rotary", "learned", "none"),
    "mlp": ("swiglu", "gelu"),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All that is needed to build a Transformer, and nothing about training it."""

    vocabulary: int
    """Rows of the embedding, V; at least as many as the tokenizer has ids."""
    context: int = 128
    """The longest sequence the model reads, T."""
    width: int = 128
    """Width of the residual stream, M."""
    layers: int = 4
    """Blocks, one after another."""
    heads: int = 2
    """Attention heads, H. Divides ``width``."""
    kv_heads: int | None = None
    """Heads of keys and values, G; divides ``heads``. None is one for each head."""
    hidden: int | None = None
    """Width inside the MLP. None is 4 x width, or 8/3 x width when the MLP is gated."""
    norm: str = "rms"
    """"rms" or "layer": what normalises the stream before each branch."""
    positions: str = "rotary"
    """"rotary" turns queries and keys, "learned" adds a table, "none" leaves order out."""
    rotary_base: float = 10000.0
    """Slowest rotation is about one turn in 2 pi x this many positions."""
    mlp: str = "swiglu"
    """"swiglu" (gated) or "gelu"."""
    choice: str = "softmax"
    """How a query chooses among keys: "softmax", "entmax", "sparsemax" or "hard"."""
    alpha: float = 1.5
    """Exponent of entmax; no other choice reads it."""
    tied: bool = True
    """Read out with the embedding itself instead of a second table."""
    bias: bool = False
    """Give every linear map inside a block a bias."""
    dropout: float = 0.0
    """Probability of dropping a branch's output, an attention weight or an embedding."""
    epsilon: float = 1e-5
    """Added under the root of every norm."""

    def __post_init__(self) -> None:
        self._require_sizes()
        for name, kinds in _KINDS.items():
            if getattr(self, name) not in kinds:
                raise ValueError(f"{name}={getattr(self, name)!r} should be one of {kinds}.")
        if self.width % self.heads:
            near = self.heads * max(1, round(self.width / self.heads))
            raise ValueError(
                f"width={self.width} does not split over heads={self.heads}; try width={near}."
            )
        if self.heads % self.groups:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"try kv_heads=1 or kv_heads={self.heads}."
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"rotary positions turn pairs, and a head of width {self.head_width} is odd; "
                f"change width={self.width} or heads={self.heads}."
            )
        self._require_ranges()

    def _require_sizes(self) -> None:
        for name in ("vocabulary", "context", "width", "layers", "heads", "kv_heads", "hidden"):
            size = getattr(self, name)
            if size is None and name in ("kv_heads", "hidden"):
                continue
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST:
                raise ValueError(f"{name}={size!r} should be a whole number, 1 to {LARGEST}.")

    def _require_ranges(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} should be in [0, 1).")
        if not 0.0 < self.epsilon < 1.0:
            raise ValueError(f"epsilon={self.epsilon} should be above 0 and below 1.")
        if not 1.0 < self.rotary_base < math.inf:
            raise ValueError(f"rotary_base={self.rotary_base} should be a finite number above 1.")
        named(self.choice, alpha=self.alpha)  # says itself what it takes

    @property
    def head_width(self) -> int:
        """Width of a query, a key and a value, D."""
        return self.width // self.heads

    @property
    def groups(self) -> int:
        """Heads of keys and values, G."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP; the gated one is rounded up to a multiple of 32."""
        if self.hidden is not None:
            return self.hidden
        return 4 * self.width if self.mlp == "gelu" else -(-8 * self.width // 96) * 32
