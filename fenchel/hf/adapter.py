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

A transformers model with our attention in it, for as long as it is wanted.

    with attach(model, Entmax(1.5)) as attached:
        model(**inputs)
        attached.calls            {"model.layers.0.self_attn": 1, ...}
        attached.masks            {"model.layers.0.self_attn": {"causal"}, ...}
        model.save_pretrained(...)

A directory of transformers does not remember which attention a model had: saved with entmax, it
comes back as softmax without a word. So while it is attached, the model's config carries a field

    "fenchel": {"map": "entmax", "alpha": 1.5, "beta": 1.0}

that is saved with it, and ``attach(model)`` without a choice takes the map from there.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fenchel.attention.attend import attend
from fenchel.attention.bias import Sink, with_sink
from fenchel.attention.prior import Dense, Prior
from fenchel.choice import SETTINGS, Choice, Softmax, by_name

_SOFTMAX = Softmax()
IRRELEVANT_KEYWORDS = frozenset(
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


class CallObserver(Protocol):
    """Somebody who is told of every call."""

    def __call__(self, module: nn.Module, mask: Tensor | None, T: int, S: int) -> None:
        """A layer, the mask it was handed, and how many queries looked at how many keys."""


@dataclass(frozen=True)
class AttentionFunction:
    """An attention function as transformers calls it, with a choice map of ours inside."""

    choice: Choice
    observer: CallObserver | None = None

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
        _refuse_shape(module, attention_mask)
        T, S = query.shape[2], key.shape[2]
        if self.observer is not None:
            self.observer(module, attention_mask, T, S)
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if attention_mask is None and causal and T > 1:
            raise ValueError(
                f"{type(module).__name__} is causal and was handed no mask, so it would see the "
                "future; register the attention and its mask under one name with "
                "fenchel.hf.adapter."
            )
        prior = _prior(attention_mask, position_bias)
        dropout = dropout if module.training else 0.0
        wanted = output_attentions or getattr(
            getattr(module, "config", None), "output_attentions", False
        )
        if s_aux is not None:
            if s_aux.numel() != query.shape[1]:
                raise ValueError(
                    f"there should be one sink a head, {query.shape[1]}, got {tuple(s_aux.shape)}."
                )
            prior = Sink(s_aux.reshape(-1), prior)
            key, value = with_sink(key, value)
        p: Tensor | None = None
        how: dict[str, Any] = {"choice": self.choice, "prior": prior, "scale": scaling}
        how |= {"softcap": softcap, "dropout": dropout}
        if wanted:
            out, p = attend(query, key, value, **how, return_weights=True)
            p = p if s_aux is None else p[..., 1:]
        else:
            out = attend(query, key, value, **how)
        if head_mask is not None:
            kept = _of_heads(head_mask, query.shape[1])
            out, p = out * kept, p if p is None else p * kept
        return out.transpose(1, 2).contiguous(), p if wanted else None


def register(
    name: str = "fenchel", choice: Choice = _SOFTMAX, *, observer: CallObserver | None = None
) -> None:
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
    if name in {"eager", *attentions} and not isinstance(attentions.get(name), AttentionFunction):
        raise ValueError(f"{name!r} is transformers' own attention; choose another name.")
    attentions[name] = AttentionFunction(choice, observer)
    masks[name] = _mask


def unregister(name: str) -> None:
    """Take back what ``register`` put there."""
    attentions, masks, _ = _registries()
    if isinstance(attentions.get(name), AttentionFunction):
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


def _refuse_shape(module: nn.Module, mask: object) -> None:
    """A mask of fewer axes would broadcast, and mean something else."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"{type(module).__name__} hands its attention a mask of {came}, where (B, H, T, S) is "
            "meant; it is refused, since what it forbids is not known."
        )


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    unknown = sorted(k for k, v in others.items() if v is not None and k not in IRRELEVANT_KEYWORDS)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which this one "
            "does not know; leaving it out would change the model, so the call is refused."
        )


FIELD = "fenchel"
"""Where a config keeps the map."""
_numbers = count(1)  # every attachment has a name of its own, so that two do not share their counts


class Attachment:
    """Our attention in a model; on leaving (or ``detach``) the model is as it was."""

    def __init__(self, model: Any, choice: Choice) -> None:
        self.model, self.choice = model, choice
        self.name = f"fenchel-{next(_numbers)}"
        self._names = {id(module): name for name, module in model.named_modules()}
        self._before = _implementations(model)
        self._calls: Counter[str] = Counter()
        self._masks: defaultdict[str, set[str]] = defaultdict(set)
        self._record = getattr(model.config, FIELD, None)
        register(self.name, choice, observer=self._observe)
        try:
            _switch(model, self.name)
        except BaseException:
            self.detach()
            raise
        setattr(model.config, FIELD, choice_record(choice))

    @property
    def calls(self) -> dict[str, int]:
        """How often each layer attended by us."""
        return dict(self._calls)

    @property
    def masks(self) -> dict[str, set[str]]:
        """What kinds of mask each layer was handed: see ``mask_kind``."""
        return {name: set(kinds) for name, kinds in self._masks.items()}

    def detach(self) -> None:
        """Give the model its own attention back."""
        for config, implementation in self._before:
            config._attn_implementation_internal = implementation
        if self._record is not None:
            setattr(self.model.config, FIELD, self._record)
        elif hasattr(self.model.config, FIELD):
            delattr(self.model.config, FIELD)
        unregister(self.name)

    def _observe(self, module: nn.Module, mask: Tensor | None, T: int, S: int) -> None:
        name = self._names.get(id(module), type(module).__name__)
        self._calls[name] += 1
        self._masks[name].add(mask_kind(mask, T, S))

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(model: Any, choice: Choice | None = None) -> Attachment:
    """Let a transformers model attend by ``choice``, or by the map its config was saved with."""
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"attach needs a model of transformers, got {type(model).__name__}.")
    if choice is None:
        stored = getattr(model.config, FIELD, None)
        if stored is None:
            raise ValueError(
                f"this {type(model).__name__} was not saved with a map of ours; say which one."
            )
        choice = choice_from_record(stored)
    return Attachment(model, choice)


def choice_record(choice: Choice) -> dict[str, Any]:
    """A map in plain values, as a config keeps it."""
    found: dict[str, Any] = {"map": type(choice).__name__.lower()}
    names: list[str] = [one.name for one in fields(choice)] if is_dataclass(choice) else []
    for name in names:
        value = getattr(choice, name)
        found[name] = value.tolist() if isinstance(value, Tensor) else value
    return found


def choice_from_record(stored: object) -> Choice:
    """The map that a config tells of; a file from outside may say anything."""
    known = {"map", *SETTINGS}
    if not isinstance(stored, Mapping) or not isinstance(stored.get("map"), str):
        raise ValueError(f'the config\'s field "{FIELD}" should hold a map and its settings.')
    if strange := sorted(str(key)[:40] for key in stored.keys() - known):
        raise ValueError(f'the config\'s field "{FIELD}" holds {strange[0]!r}, unknown here.')
    settings = {key: stored[key] for key in SETTINGS if key in stored}
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f'the config\'s field "{FIELD}" should give {key} as a number.')
    return by_name(stored["map"], **{key: float(value) for key, value in settings.items()})


def mask_kind(mask: Tensor | None, T: int, S: int) -> str:
    """A mask in words: "none", "full", "causal", "window 4" or "other", with " + padding" if some.

    Padding is keys that no query of a sequence may see.
    """
    if mask is None:
        return "none"
    open_ = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    open_ = open_.any(1).expand(-1, T, S)  # (B, T, S)
    keys = torch.arange(S, device=mask.device)
    behind = keys[S - T :, None] - keys  # how many positions before the query a key stands
    real = open_.any(1, keepdim=True)
    padding = "" if bool(real.all()) else " + padding"
    reach = int(torch.where(open_, behind, 0).max()) + 1
    patterns = {
        "full": torch.ones_like(behind, dtype=torch.bool),
        "causal": behind >= 0,
        f"window {reach}": (behind >= 0) & (behind < reach),
    }
    for kind, pattern in patterns.items():
        if bool((open_ == (pattern & real)).all()):
            return kind + padding
    return "other"


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    """Every config in the model with the attention it names."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [(c, c._attn_implementation_internal) for c in configs.values() if _has(c)]


def _switch(model: Any, name: str) -> None:
    """Name our attention in every config, and see that it was taken."""
    deaf = [model] if not model._can_set_attn_implementation() else []
    if not deaf:  # a model that cannot would say so in a log and carry on
        model.set_attn_implementation(name)
        kept = (m for m in model.modules() if hasattr(m, "config") and _has(m.config))
        deaf = [m for m in kept if m.config._attn_implementation != name]
    if deaf:
        raise ValueError(
            f"{type(deaf[0]).__name__} does not use the attention registry of transformers: it "
            "computes its attention itself, and no other can be put in its place."
        )


def _has(config: Any) -> bool:
    return hasattr(config, "_attn_implementation_internal")
