"""The law of the next token that each layer already holds, read off the stream.

    p_l,t = softmax(unembed(r_l(x_l,t)))

with x_l,t the stream after layer l at position t, and r_l the identity (logit lens) or the read-out
of a Jacobian lens (jacobian_lens.py). The last row of a result is the model's own law p_L. Against
it stand, per layer and position,

    KL(p_L || p_l) in nats,    the rank of the top token of p_L in p_l, from 1,

and the layer from which on that token is on top in every layer: where the answer appears. Means
over positions leave out the first, whose stream is unlike all others.

L layers, T tokens, M width of the stream, V vocabulary, K tokens that are kept of a law.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fenchel.interpretability.hooked_model import HookedModel, Model, RecordedPass, hooked
from fenchel.interpretability.jacobian_lens import SKIP, JacobianLens, fit_lens

Kind = Literal["logit", "jacobian"]
TOP = 10
"""Tokens that are kept of every law."""


class Agreement(NamedTuple):
    """A layer against the model's own law, mean over positions but the first."""

    layer: int
    top: float
    """Share of positions with the same token on top."""
    kl: float
    """KL(final || lens) in nats."""
    rank: float
    """Median rank of the final top token, from 1."""
    loss: float
    """Of the text's next tokens under the law of this layer, in nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lens:
    """The laws of some layers, the last layer of the model last."""

    kind: str
    """"logit", "jacobian" or "jacobian without offset"."""
    layers: tuple[int, ...]
    ids: tuple[int, ...]
    top: Tensor
    """The tokens with the largest probabilities, (L, T, K)."""
    probability: Tensor
    """Theirs, (L, T, K)."""
    kl: Tensor
    """(L, T)."""
    rank: Tensor
    """(L, T)."""
    loss: Tensor
    """-log of the probability of the text's own next token, (L, T - 1)."""

    def agreement(self) -> list[Agreement]:
        """Layer by layer."""
        rows = zip(self.layers, self.rank[:, 1:], self.kl[:, 1:], self.loss[:, 1:], strict=True)
        return [
            Agreement(
                layer,
                float((rank == 1).float().mean()),
                float(kl.mean()),
                float(rank.float().quantile(0.5)),
                float(loss.mean()) if len(loss) else float("nan"),
            )
            for layer, rank, kl, loss in rows
        ]

    def first(self) -> list[int]:
        """Per position the layer from which on the final top token is on top."""
        on_top_LT = (self.rank == 1).flip(0).cumprod(0).sum(0)
        return [self.layers[len(self.layers) - int(n)] for n in on_top_LT]

    def plain(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "kind": self.kind,
            "layers": list(self.layers),
            "agreement": [row._asdict() for row in self.agreement()],
            "first": self.first(),
            "top": self.top.tolist(),
            "probability": [
                [[round(p, 6) for p in law] for law in row] for row in self.probability.tolist()
            ],
            "kl": [[round(x, 6) for x in row] for row in self.kl.tolist()],
            "rank": self.rank.tolist(),
        }


@torch.no_grad()
def lens(
    model: Model,
    ids: Sequence[int],
    kind: Kind = "logit",
    *,
    fit: JacobianLens | None = None,
    offset: bool = True,
    top: int = TOP,
) -> Lens:
    """The law of the next token after every layer, at every position of a text.

    ``fit`` is the lens of kind "jacobian"; without it one is fitted to the text itself.
    ``offset=False`` reads it as J x, without its means.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocabulary=16, layers=3, width=32))
    >>> found = lens(model, [3, 1, 4, 1, 5])
    >>> found.top.shape, found.kl[-1].max().item()
    (torch.Size([3, 5, 10]), 0.0)
    """
    subject = hooked(model)
    if kind not in ("logit", "jacobian"):
        raise ValueError(f"kind={kind!r} should be 'logit' or 'jacobian'.")
    if kind == "logit" and fit is not None:
        raise ValueError("the logit lens needs no fit; ask for kind='jacobian'.")
    streams_LTM = _streams(subject, ids)
    if kind == "jacobian" and fit is None:
        fit = fit_lens(subject, [ids], skip=min(SKIP, len(ids) // 4))
    last = subject.layers
    layers = (*range(1, last), last) if fit is None else (*fit.layers, last)

    def read(layer: int) -> Tensor:
        x_TM = streams_LTM[layer - 1]
        return x_TM if fit is None or layer == last else fit.read(layer, x_TM, offset=offset)

    final_TV = _log_law(subject, streams_LTM[-1])
    answer_T1 = final_TV.argmax(-1, keepdim=True)
    next_T1 = torch.tensor(list(ids[1:]), device=final_TV.device)[:, None]
    rows = []
    for layer in layers:
        law_TV = final_TV if layer == last else _log_law(subject, read(layer))
        best = law_TV.topk(min(top, law_TV.shape[-1]), dim=-1)
        gap_TV = (final_TV - law_TV).nan_to_num(0.0)  # -inf less -inf
        rows.append(
            (
                best.indices,
                best.values.exp(),
                (final_TV.exp() * gap_TV).sum(-1).clamp(min=0.0),
                (law_TV > law_TV.gather(-1, answer_T1)).sum(-1) + 1,
                -law_TV[:-1].gather(-1, next_T1)[:, 0],
            )
        )
    named = kind if kind == "logit" or offset else f"{kind} without offset"
    names = ("top", "probability", "kl", "rank", "loss")
    columns = (torch.stack(column).cpu() for column in zip(*rows, strict=True))
    tensors = dict(zip(names, columns, strict=True))
    return Lens(kind=named, layers=layers, ids=tuple(ids), **tensors)


class LayerLaw(NamedTuple):
    """The law of the next token that a layer holds at one position."""

    layer: int
    tokens: list[int]
    """Those with the largest probabilities."""
    probabilities: list[float]
    next: float | None
    """The probability of the token that came next, where one was named."""


@torch.no_grad()
def last_laws(
    model: Model,
    ids: Sequence[int],
    next_id: int | None = None,
    *,
    fit: JacobianLens | None = None,
    top: int = 5,
) -> list[LayerLaw]:
    """The law of the next token after the last of ``ids``, layer by layer; the model's own is last.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocabulary=16, layers=3, width=32))
    >>> [law.layer for law in last_laws(model, [3, 1, 4])]
    [1, 2, 3]
    """
    subject, recorded = hooked(model), RecordedPass()
    subject.logits(subject.batch(ids), recorded)
    layers = range(1, subject.layers) if fit is None else fit.layers
    found = []
    for layer in (*layers, subject.layers):
        x_1M = recorded.streams[layer][0, -1:]
        if fit is not None and layer < subject.layers:
            x_1M = fit.read(layer, x_1M)
        law_V = _log_law(subject, x_1M)[0].exp()
        best = law_V.topk(min(top, len(law_V)))
        p = None if next_id is None else float(law_V[next_id])
        found.append(LayerLaw(layer, best.indices.tolist(), best.values.tolist(), p))
    return found


def _streams(model: HookedModel, ids: Sequence[int]) -> Tensor:
    """The streams after every layer, (L, T, M)."""
    if len(ids) < 2:
        raise ValueError(f"a text of at least two tokens is needed, got {len(ids)}.")
    recorded = RecordedPass()
    model.logits(model.batch(ids), recorded)
    streams_LTM = torch.stack([recorded.streams[n][0] for n in range(1, model.layers + 1)])
    if not bool(streams_LTM.isfinite().all()):
        raise ValueError("the stream is not finite on this text, so that there are no laws.")
    return streams_LTM


def _log_law(model: HookedModel, x_TM: Tensor) -> Tensor:
    """(T, M) -> (T, V), in float32 at least."""
    logits_TV = model.unembed(x_TM)
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return logits_TV.to(wide).log_softmax(-1)
