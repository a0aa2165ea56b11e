"""Small models whose attention affects the output, and their scores.

The output matrices of a fresh fenchel block are zero, so its queries and keys have no gradient;
``small`` draws them at random.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fenchel.attention import Angles, Causal, angles, rotate
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import QueryKeyPair

Small = Callable[..., Transformer]


class NormedAttention(nn.Module):
    """A layer that declares fenchel.optim's QueryKeyLayer, with a norm of queries and keys."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width = heads, groups, width // heads
        self.scale, self.mask, self.rotary_layout = None, Causal(), "half"
        self.local, self.l2 = False, False
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.head_width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_width), nn.RMSNorm(self.head_width)

    def forward(self, x: Tensor, rotation: Angles) -> Tensor:
        H, G, D = self.heads, self.groups, self.head_width
        q, k, v = self.qkv(x).split([H * D, G * D, G * D], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)


class Normed(nn.Module):
    """Two such layers on embedded tokens."""

    def __init__(self, vocabulary: int = 31, width: int = 32, groups: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(NormedAttention(width, 4, groups) for _ in range(2))
        self.read = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rotation = angles(torch.arange(ids.shape[1]), x.shape[-1] // 4, dtype=x.dtype)
        for layer in self.layers:
            x = x + layer(nn.functional.rms_norm(x, x.shape[-1:]), rotation)
        read: Tensor = self.read(x)
        return read


@pytest.fixture(scope="session")
def small() -> Small:
    def build(seed: int = 0, *, normed: bool = False, **settings: object) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        model: nn.Module
        if normed:
            model = Normed()
        else:
            given = {"vocabulary": 31, "context": 24, "width": 32, "layers": 2, "heads": 4}
            model = Transformer(ModelConfig(**{**given, **settings}))  # type: ignore[arg-type]
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    p.normal_(0.0, p.shape[1] ** -0.5, generator=generator)
            model.embed.weight.normal_(0.0, 1.0, generator=generator)  # type: ignore[union-attr,operator]
        return model

    return build  # type: ignore[return-value]


@pytest.fixture(scope="session")
def tokens() -> Callable[[int], Tensor]:
    """Batches of a language with something to learn: each token depends on one three back."""

    def draw(seed: int, sequences: int = 16, length: int = 24) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(31, (sequences, length), generator=generator)
        for t in range(3, length):
            keep = torch.rand(sequences, generator=generator) < 0.7
            ids[:, t] = torch.where(keep, (ids[:, t - 3] * 5 + 1) % 31, ids[:, t])
        return ids

    return draw


@pytest.fixture(scope="session")
def backward() -> Callable[[nn.Module, Tensor], float]:
    """One forward and backward pass; the loss."""

    def run(model: nn.Module, ids: Tensor) -> float:
        out = model(ids)
        logits = getattr(out, "logits", out)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return float(loss.detach())

    return run


@pytest.fixture(scope="session")
def inputs() -> Callable[
    [nn.Module, list[QueryKeyPair], Tensor], list[tuple[Tensor, Angles | None]]
]:
    """What each attention layer reads, and its rotation, by a hook of the tests' own."""

    def read(
        model: nn.Module, pairs: list[QueryKeyPair], ids: Tensor
    ) -> list[tuple[Tensor, Angles | None]]:
        found: list[tuple[Tensor, Angles | None]] = []

        def keep(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            values = [*args, *kwargs.values()]
            values += [v.rotary[0] for v in values if hasattr(v, "rotary")]
            x = next(v for v in values if isinstance(v, Tensor) and v.ndim == 3)
            rotation = next((v for v in values if isinstance(v, Angles)), None)
            pair = kwargs.get("position_embeddings")
            if isinstance(pair, tuple):
                cos, sin = (part.unsqueeze(1) for part in pair)
                sign = torch.ones(sin.shape[-1])
                sign[: sin.shape[-1] // 2] = -1.0
                rotation = Angles(cos, sin * sign)
            found.append((x, rotation))

        hooks = [p.module.register_forward_pre_hook(keep, with_kwargs=True) for p in pairs]
        with torch.no_grad():
            model(ids)
        for hook in hooks:
            hook.remove()
        return found

    return read


@pytest.fixture(scope="session")
def scores_of() -> Callable[[QueryKeyPair, Tensor, Angles | None], Tensor]:
    """All the scores of a layer, (B, H, T, T), zero where a query may not attend."""

    def scores(pair: QueryKeyPair, x: Tensor, rotation: Angles | None) -> Tensor:
        heads = []
        for rows, norm in ((pair.query, pair.q_norm), (pair.key, pair.k_norm)):
            W = rows.values().to(x.dtype)
            bias = 0.0
            if rows.bias is not None:
                W, bias = W[..., :-1], W[..., -1][None, :, None]
            y = torch.einsum("btm,hdm->bhtd", x, W) + bias
            y = y if norm is None else norm(y)
            heads.append(y if rotation is None else rotate(y, rotation))
        q, k = heads
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return (pair.scale * q @ k.mT).tril().detach()

    return scores
