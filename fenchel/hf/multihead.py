"""fenchel's attention in ``nn.MultiheadAttention`` and what contains it, such as encoder layers.

    q, k, v = rows of in_proj_weight times query, key, value          (B, H, T or S, D)
    weights = choice(beta q k^T / sqrt(D) + log u),    log u from attn_mask and key_padding_mask
    out     = out_proj(weights v)

The ``forward`` of each layer is replaced on the object and restored by ``detach``. Masks, biases of
keys and values (``bias_k``, ``add_zero_attn``), dropout, ``need_weights`` and both orders of the
axes mean what they mean in torch; ``is_causal`` is a hint beside a mask there, and the mask alone
decides here. A row whose keys are all masked gives zeros, where torch gives nan.

Encoder layers compute attention themselves in a fused kernel while they evaluate. A hook on the
layer turns that off, and ``use_nested_tensor`` of the encoder, which would feed it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from fenchel.attention import Dense, attend
from fenchel.attention.spec import ChoiceLike, as_choice
from fenchel.choice import Choice, Softmax
from fenchel.choice.by_name import FIELD, choice_from_record
from fenchel.hf.adapter import Attachment, CallObserver, QKVOverride


class MultiheadAttachment(Attachment):
    """fenchel's attention in every ``nn.MultiheadAttention`` of a module.

    >>> import torch
    >>> from fenchel.choice import Entmax
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    >>> with MultiheadAttachment(layer, Entmax(1.5)) as attachment:
    ...     y = layer(torch.randn(2, 5, 32))
    >>> attachment.calls
    {'self_attn': 1}
    """

    def __init__(self, model: nn.Module, choice: Choice, *, backend: str = "auto") -> None:
        """``choice`` is the map, ``backend`` that of ``attend``."""
        self.model, self.choice, self.backend = model, choice, backend
        self._calls: Counter[str] = Counter()
        self._masks: defaultdict[str, set[str]] = defaultdict(set)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
        for name, layer in layers.items():
            if type(layer).forward is not nn.MultiheadAttention.forward or "forward" in vars(layer):
                raise ValueError(
                    f"{name or type(layer).__name__} has a forward of its own, so no other "
                    "attention is put in its place; detach what is attached, or call attend in it."
                )
        encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
        self._layers = layers
        self._nested = [(m, m.use_nested_tensor) for m in encoders]
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._count, name))
            for name, layer in layers.items()
        ]
        for encoder, _ in self._nested:
            encoder.use_nested_tensor = False
        self._attach(choice)

    def _attach(self, choice: Choice) -> None:
        for layer in self._layers.values():
            layer.forward = partial(_forward, layer, choice, self.backend)  # type: ignore[method-assign]

    def _count(self, name: str, _layer: nn.Module, _given: Any) -> None:
        self._calls[name] += 1

    @contextmanager
    def eager(self) -> Iterator[None]:
        """The module with softmax, for as long as the context lasts."""
        self._attach(Softmax())
        try:
            yield
        finally:
            self._attach(self.choice)

    def detach(self) -> None:
        """Restore the layers."""
        for layer in self._layers.values():
            vars(layer).pop("forward", None)
        for hook in self._hooks:
            hook.remove()
        for encoder, nested in self._nested:
            encoder.use_nested_tensor = nested


def attach(
    model: Any,
    choice: ChoiceLike | None = None,
    *,
    observer: CallObserver | None = None,
    override: QKVOverride | None = None,
    backend: str = "auto",
) -> Attachment:
    """Switch a model to attention by ``choice``; leaving the result's context switches it back.

    ``model`` is a model of transformers, or a module of torch that contains
    ``nn.MultiheadAttention``, such as ``nn.TransformerEncoder``. A model of transformers may leave
    ``choice`` to its config; its calls go to ``observer``, and ``override`` may compute one in
    place of ``attend``. ``backend`` is that of ``attend``.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> x = torch.randn(1, 6, 16)
    >>> with attach(layer, "entmax"):
    ...     sparse = layer(x, x, x)[1]
    >>> torch.allclose(sparse.sum(-1), torch.ones(6))
    True
    """
    choice = None if choice is None else as_choice(choice)
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        modules = model.modules() if isinstance(model, nn.Module) else ()
        if not any(isinstance(m, nn.MultiheadAttention) for m in modules):
            raise ValueError(
                "attach needs a model of transformers or a module with nn.MultiheadAttention, got "
                f"{type(model).__name__}; in a layer of your own call fenchel.attend."
            )
        if choice is None or observer is not None or override is not None:
            raise ValueError(
                "name the map for a module of torch: attach(module, Entmax(1.5)); observer and "
                "override are for models of transformers."
            )
        return MultiheadAttachment(model, choice, backend=backend)
    if choice is None:
        record = getattr(model.config, FIELD, None)
        if record is None:
            raise ValueError(
                f"this {type(model).__name__} was not saved with a map of fenchel; name one."
            )
        choice = choice_from_record(record)
    return Attachment(model, choice, observer=observer, override=override, backend=backend)


def _forward(
    layer: nn.MultiheadAttention,
    choice: Choice,
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``nn.MultiheadAttention.forward`` with the weights of ``choice``."""
    if is_causal and attn_mask is None:
        raise ValueError("is_causal is a hint beside attn_mask; give the mask too.")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    elif not layer.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    matrices: Any = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    if layer.in_proj_weight is not None:
        matrices = layer.in_proj_weight.chunk(3)
    biases: Any = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = map(linear, (query, key, value), matrices, biases)
    log_prior = _log_prior(attn_mask, key_padding_mask, len(q), layer.num_heads, q.dtype)
    extra: list[tuple[Any, Any]] = []  # further keys and values, which no mask forbids
    if layer.bias_k is not None:
        extra.append((layer.bias_k, layer.bias_v))
    if layer.add_zero_attn:
        extra.append((0.0, 0.0))
    for pair in extra:
        k, v = (
            torch.cat([x, x.new_zeros(len(x), 1, x.shape[-1]) + one], 1)
            for x, one in zip((k, v), pair, strict=True)
        )
        log_prior = None if log_prior is None else pad(log_prior, (0, 1))
    prior = None if log_prior is None else Dense(log_prior)
    p = layer.dropout if layer.training else 0.0
    q, k, v = (x.view(*x.shape[:2], layer.num_heads, -1).transpose(1, 2) for x in (q, k, v))
    how: dict[str, Any] = {"choice": choice, "prior": prior, "dropout": p, "backend": backend}
    weights: Tensor | None = None
    if need_weights:
        out, weights = attend(q, k, v, return_weights=True, **how)
    else:
        out = attend(q, k, v, **how)
    out = layer.out_proj(out.transpose(1, 2).flatten(2))
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return out if layer.batch_first else out.transpose(0, 1), weights


def _log_prior(
    attn_mask: Tensor | None, padding: Tensor | None, B: int, H: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one log u, (B or 1, H or 1, T or 1, S); True is forbidden, floats are added."""
    parts = []
    if attn_mask is not None:
        shape = (B, H) if attn_mask.dim() == 3 else (1, 1)
        parts.append(_additive(attn_mask, dtype).reshape(*shape, *attn_mask.shape[-2:]))
    if padding is not None:
        parts.append(_additive(padding, dtype).reshape(-1, 1, 1, padding.shape[-1]))
    return sum(parts[1:], parts[0]) if parts else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
