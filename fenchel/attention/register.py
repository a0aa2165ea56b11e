"""Our attention under a name that every transformers model with the attention registry understands.

A model of transformers asks its registry for a function by the name in its config, and a second
registry, by the same name, for the mask it should be handed. ``register`` puts both there at once:
with the first alone the causal mask silently becomes None. The function is called with

    query (B, H, T, D)   key (B, G, S, D)   value (B, G, S, E)   attention_mask (B, 1 or H, T, S)

and gives outputs (B, T, H, E) and the weights, or None where nobody asked for them. Whatever else a
model passes changes the attention or does not, and each name is in one of three lists:

    honoured     scaling, dropout, is_causal, softcap, s_aux, position_bias, head_mask,
                 output_attentions
    elsewhere    what the mask already holds (sliding_window) or no score depends on (use_cache)
    all others   refused in one sentence, since a term left out is another model

A soft cap c turns scores z into c tanh(z / c) before the prior; sinks s_aux (H,) stand as one more
key with a score of their own and no value; a position bias is a prior, added to that of the mask.

Written against transformers 5.22; nothing of it is imported before ``register`` is called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad

from fenchel.attention.attend import attend
from fenchel.attention.prior import Dense, Prior
from fenchel.attention.reference import log_prior, mix, score
from fenchel.choice import Choice, Softmax

_SOFTMAX = Softmax()
ELSEWHERE = frozenset(
    {
        "sliding_window",  # the mask that was asked for under our name holds it
        "position_ids",  # rotation and mask are done when we are called
        "cache_position",
        "past_key_values",  # key and value hold what it held
        "encoder_hidden_states",
        "use_cache",
        "deterministic",  # a switch of one fused kernel
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
    }
)
"""Keywords that change no score: what they ask for is done before or after attention."""


class Seen(Protocol):
    """Somebody who is told of every call."""

    def __call__(self, module: nn.Module, mask: Tensor | None, T: int, S: int) -> None:
        """A layer, the mask it was handed, and how many queries looked at how many keys."""


@dataclass(frozen=True)
class Swapped:
    """An attention function as transformers calls it, with a choice map of ours inside."""

    choice: Choice
    seen: Seen | None = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        *,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (B, T, H, E) and weights (B, H, T, S) or None."""
        _refuse_unknown(module, others)
        T, S = query.shape[2], key.shape[2]
        if self.seen is not None:
            self.seen(module, attention_mask, T, S)
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if attention_mask is None and causal and T > 1:
            raise ValueError(
                f"{type(module).__name__} is causal and was handed no mask, so it would see the "
                "future; register the attention and its mask under one name with "
                "fenchel.attention.register."
            )
        prior = _prior(attention_mask, position_bias)
        dropout = dropout if module.training else 0.0
        wanted = output_attentions or getattr(
            getattr(module, "config", None), "output_attentions", False
        )
        p: Tensor | None
        if softcap is not None or s_aux is not None:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            p = self._weigh(query, key, prior, scale, softcap, s_aux)
            out = mix(drop(p, dropout), value)
            p = p.to(query.dtype)
        elif wanted:
            out, p = attend(
                query,
                key,
                value,
                choice=self.choice,
                prior=prior,
                scale=scaling,
                dropout=dropout,
                return_weights=True,
            )
        else:
            p = None
            out = attend(
                query, key, value, choice=self.choice, prior=prior, scale=scaling, dropout=dropout
            )
        if head_mask is not None:
            kept = _of_heads(head_mask, query.shape[1])
            out, p = out * kept, p if p is None else p * kept
        return out.transpose(1, 2).contiguous(), p if wanted else None

    def _weigh(
        self,
        q: Tensor,
        k: Tensor,
        prior: Prior | None,
        scale: float,
        cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """p under a soft cap and beside sinks: (B, H, T, S)."""
        z = score(q, k, scale)
        if cap is not None:
            z = cap * torch.tanh(z / cap)
        log_u = log_prior(prior, z)
        if sinks is None:
            return self.choice.weights(z, log_u)
        B, H, T, S = z.shape
        if sinks.numel() != H:
            raise ValueError(f"there should be one sink a head, {H}, got {tuple(sinks.shape)}.")
        one_more = sinks.to(z.dtype).reshape(1, H, 1, 1).expand(B, H, T, 1)
        log_u = None if log_u is None else pad(log_u.expand(-1, -1, -1, S), (0, 1))
        return self.choice.weights(torch.cat([z, one_more], -1), log_u)[..., :S]


def register(name: str = "fenchel", choice: Choice = _SOFTMAX, *, seen: Seen | None = None) -> None:
    """Make ``attn_implementation=name`` mean attention by ``choice`` in every transformers model.

    The model that is to use it is told by ``model.set_attn_implementation(name)`` or when it is
    loaded; ``fenchel.attention.attach`` does both and can prove it.
    """
    attentions, masks, _ = _registries()
    if not name or any(c in name for c in "/|@"):
        raise ValueError(
            f"{name!r} cannot name an attention: transformers reads a slash, a bar or an at sign "
            "in it as the address of a kernel to download; use letters."
        )
    if name in {"eager", *attentions} and not isinstance(attentions.get(name), Swapped):
        raise ValueError(f"{name!r} is transformers' own attention; choose another name.")
    attentions[name] = Swapped(choice, seen)
    masks[name] = _mask


def unregister(name: str) -> None:
    """Take back what ``register`` put there."""
    attentions, masks, _ = _registries()
    if isinstance(attentions.get(name), Swapped):
        del attentions[name], masks[name]


def _mask(**settings: Any) -> Tensor | None:
    """The mask as bool (B, 1, T, S), True where a query may look; None where all may see all.

    transformers would leave out a plain causal mask and trust the kernel to know; we want it said.
    """
    _, _, bool_mask = _registries()
    mask: Tensor | None = bool_mask(**{**settings, "allow_is_causal_skip": False})
    return mask


def _registries() -> tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]:
    """The registries that all models share, and the function that makes masks of bool."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        raise ValueError(
            "models of transformers need transformers 5 or newer; pip install 'fenchel[hf]'."
        ) from None
    return AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping, sdpa_mask


def _prior(mask: Tensor | None, bias: Tensor | None) -> Prior | None:
    if mask is not None and mask.is_floating_point():
        # Their masks forbid by the lowest finite number, which is not nothing to every map.
        forbidden = mask <= torch.finfo(mask.dtype).min / 2
        mask = mask.masked_fill(forbidden, -torch.inf)
    parts = [Dense(x) for x in (mask, bias) if x is not None]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _of_heads(head_mask: Tensor, H: int) -> Tensor:
    """A weight a head, as (1, H, 1, 1)."""
    if head_mask.numel() != H:
        raise ValueError(
            f"a head mask of shape {tuple(head_mask.shape)} does not give one weight to each of "
            f"{H} heads; only such masks can be honoured."
        )
    return head_mask.reshape(1, H, 1, 1)


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    unknown = sorted(k for k, v in others.items() if v is not None and k not in ELSEWHERE)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which this one "
            "does not know; leaving it out would change the model, so the call is refused."
        )
