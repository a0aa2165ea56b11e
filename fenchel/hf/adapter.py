"""fenchel's attention as an attention function of transformers.

A model of transformers finds its attention function in a registry, by the name in its config,
and in a second registry, by the same name, the function that makes the mask. ``register`` fills
both at once: with only the first, the causal mask silently becomes None. The function is called
with

    query (B, H, T, D)   key (B, G, S, D)   value (B, G, S, E)   attention_mask (B, 1 or H, T, S)

and returns outputs (B, T, H, E) and the weights, or None if they are not requested. Every other
keyword that a model passes is on one of three lists:

    honoured      scaling, dropout, is_causal, softcap, s_aux, position_bias, head_mask,
                  output_attentions
    irrelevant    what the mask already holds (sliding_window) or no score depends on (use_cache)
    all others    refused in one sentence, since a model without one of its terms is another model

A soft cap c turns scores s into c tanh(s / c) before the prior; sinks s_aux (H,) are one more key
with its own score and no value; a position bias is a prior, added to that of the mask.

``register`` serves models of the caller's choice under a public name. ``attach`` switches one model
and switches it back, under a private name that ``register`` refuses, so the two never collide:

    with attach(model, Entmax(1.5)) as attachment:
        model(**inputs)
        attachment.calls            {"model.layers.0.self_attn": 1, ...}
        attachment.masks            {"model.layers.0.self_attn": {"causal"}, ...}
        model.save_pretrained(...)

A directory of transformers does not record which attention a model had: saved with entmax, it
silently comes back with softmax. While a model is attached its config therefore carries the field

    "fenchel": {"map": "entmax", "alpha": 1.5, "beta": 1.0}

which is saved with it. ``attach(model)`` without a choice takes the map from there, and so does
fenchel's own loader.

Written against transformers 5.22; nothing of it is imported before ``register`` is called.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fenchel.attention import Causal, Dense, Prior, Window, attend
from fenchel.attention.bias import add_sink
from fenchel.attention.spec import SOFTMAX, AttentionCall, AttentionSpec
from fenchel.choice import Choice
from fenchel.choice.by_name import FIELD, choice_record

IRRELEVANT_KEYWORDS = frozenset(
    {
        "sliding_window",  # the mask made under our name holds it
        "position_ids",  # rotation and mask are done before the call
        "cache_position",
        "past_key_values",  # key and value hold its contents
        "encoder_hidden_states",
        "use_cache",
        "deterministic",  # a switch of one fused kernel
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
    }
)
"""Keywords that change no score: they take effect before or after attention."""
_PRIVATE = "_fenchel"


class CallObserver(Protocol):
    """Receives every attention call that is computed."""

    def __call__(self, module: nn.Module, call: AttentionCall, mask: str) -> None:
        """The layer, its call, and the kind of its mask (``classify_mask``)."""


class QKVOverride(Protocol):
    """Computes attention in place of ``attend``."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor | None:
        """The output (B, H, T, E); None leaves the call to ``attend``."""


@dataclass(frozen=True)
class AttentionFunction:
    """An attention function with the signature of transformers that calls ``attend``.

    With an observer, every mask is classified on the host and a mask that has a name (causal,
    window) is passed to ``attend`` as that prior; without one it is passed on entry by entry.
    """

    choice: Choice
    observer: CallObserver | None = None
    override: QKVOverride | None = None
    backend: str = "auto"

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
        if self.override is not None:
            output = self.override(query, key, value)
            if output is not None:
                return output.transpose(1, 2).contiguous(), None
        _refuse_unknown(module, others)
        _refuse_shape(module, attention_mask)
        H, T, S = query.shape[1], query.shape[2], key.shape[2]
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if attention_mask is None and causal and T > 1:
            raise ValueError(
                f"{type(module).__name__} is causal and its mask is None, so it would see the "
                "future; register the attention and its mask under one name with "
                "fenchel.hf.register."
            )
        kind = ""
        prior: Prior | None
        if self.observer is None:
            prior = None if attention_mask is None else Dense(_log_mask(attention_mask))
        else:
            kind, prior = classify_mask(attention_mask, T, S)
        if position_bias is not None:
            prior = Dense(position_bias) if prior is None else prior + Dense(position_bias)
        if s_aux is not None and s_aux.numel() != H:
            raise ValueError(
                f"there should be one sink per head, {H}, got shape {tuple(s_aux.shape)}."
            )
        sink = None if s_aux is None else s_aux.reshape(-1)
        spec = AttentionSpec(self.choice, prior, scaling, softcap)
        if self.observer is not None:
            k, v, whole = key, value, spec
            if sink is not None:
                k, v, prior = add_sink(key, value, sink, prior)
                whole = replace(spec, prior=prior)
            self.observer(module, AttentionCall(query, k, v, whole), kind)
        config = getattr(module, "config", None)
        with_weights = bool(output_attentions or getattr(config, "output_attentions", False))
        settings: dict[str, Any] = {
            **spec,
            "sink": sink,
            "dropout": dropout if module.training else 0.0,
            "backend": self.backend,
        }
        weights: Tensor | None = None
        if with_weights:
            output, weights = attend(query, key, value, **settings, return_weights=True)
        else:
            output = attend(query, key, value, **settings)
        if head_mask is not None:
            per_head = _per_head(head_mask, H)
            output = output * per_head
            weights = weights if weights is None else weights * per_head
        return output.transpose(1, 2).contiguous(), weights


def register(name: str = "fenchel", choice: Choice = SOFTMAX) -> None:
    """Make ``attn_implementation=name`` mean attention by ``choice`` in every transformers model.

    A model uses it after ``model.set_attn_implementation(name)``, or if it is loaded with that
    name; ``attach`` does both for one model, and ``prove`` shows that nothing else changed.
    """
    if not name or any(c in name for c in "/|@"):
        raise ValueError(
            f"{name!r} cannot name an attention: transformers reads a slash, a bar or an at sign "
            "in it as the address of a kernel to download; use letters."
        )
    if name.startswith(_PRIVATE):
        raise ValueError(
            f"{name!r}: names that begin with {_PRIVATE} are fenchel's own; use another."
        )
    attentions = _registries().attentions
    if name in {"eager", *attentions} and not isinstance(attentions.get(name), AttentionFunction):
        raise ValueError(f"{name!r} is transformers' own attention; choose another name.")
    _register(name, AttentionFunction(choice))


def unregister(name: str) -> None:
    """Remove what ``register`` added under ``name``."""
    attentions, masks, _ = _registries()
    if isinstance(attentions.get(name), AttentionFunction):
        del attentions[name]
        masks.pop(name, None)


class _Registries(NamedTuple):
    """The registries that all models of transformers share, and its maker of boolean masks."""

    attentions: dict[str, Any]
    masks: dict[str, Any]
    boolean_mask: Callable[..., Any]


def _registries() -> _Registries:
    with needs_transformers():
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    attentions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    return _Registries(attentions, masks, sdpa_mask)


@contextmanager
def needs_transformers() -> Iterator[None]:
    """Context manager: an import of transformers that fails names the package to install."""
    try:
        yield
    except ImportError:
        raise ValueError(
            "models of transformers need transformers 5 or newer; pip install 'fenchel[hf]'."
        ) from None


def _register(name: str, function: AttentionFunction) -> None:
    attentions, masks, _ = _registries()
    attentions[name] = function
    masks[name] = _mask


def _mask(**settings: Any) -> Tensor | None:
    """The mask as bool (B, 1, T, S), True where a query may attend; None where all may.

    transformers would leave out a plain causal mask and rely on the kernel; here it is explicit.
    """
    mask: Tensor | None = _registries().boolean_mask(**{**settings, "allow_is_causal_skip": False})
    return mask


def _allowed(mask: Tensor) -> Tensor:
    """Where a mask allows attention; floats of transformers forbid by their lowest number."""
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask


def _log_mask(mask: Tensor) -> Tensor:
    """The mask with -inf where it forbids: to some maps the lowest finite number still counts."""
    return mask.masked_fill(~_allowed(mask), -torch.inf) if mask.is_floating_point() else mask


class MaskClass(NamedTuple):
    """The kind of a mask and the prior that it amounts to."""

    kind: str
    prior: Prior | None


def classify_mask(mask: Tensor | None, T: int, S: int) -> MaskClass:
    """The kind of a mask and its prior, by name where it has one.

    Kinds are "none", "full", "causal", "window 4" and "other", and " + padding" where no query of
    a sequence may attend to some key.
    """
    if mask is None:
        return MaskClass("none", None)
    dense = Dense(_log_mask(mask))
    per_head = _allowed(mask).expand(-1, -1, T, S)
    allowed = per_head.any(1)  # (B, T, S)
    real = allowed.any(1, keepdim=True)
    padding = "" if bool(real.all()) else " + padding"
    for kind, pattern, prior in _patterns(allowed):
        if bool((allowed == (pattern & real)).all()):
            named = not padding and _is_mask_alone(mask, per_head, allowed)
            return MaskClass(kind + padding, prior if named else dense)
    return MaskClass("other", dense)


def _patterns(allowed: Tensor) -> Iterator[tuple[str, Tensor, Prior | None]]:
    """Kind, entries (T, S) and prior of each mask that has a name, the cheapest first."""
    T, S = allowed.shape[-2:]
    yield "full", torch.ones(T, S, dtype=torch.bool, device=allowed.device), None
    keys = torch.arange(S, device=allowed.device, dtype=torch.int32)
    distance = keys[S - T :, None] - keys  # from a query back to a key
    yield "causal", distance >= 0, Causal()
    width = int(torch.where(allowed, distance, 0).max()) + 1
    yield f"window {width}", (distance >= 0) & (distance < width), Window(width - 1, 0)


def _is_mask_alone(mask: Tensor, per_head: Tensor, allowed: Tensor) -> bool:
    """Whether a mask only forbids keys, the same ones in all heads."""
    if not bool((per_head == allowed[:, None]).all()):
        return False
    return mask.dtype == torch.bool or bool(((mask == 0) | ~_allowed(mask)).all())


def _per_head(head_mask: Tensor, H: int) -> Tensor:
    """One weight per head, as (1, H, 1, 1)."""
    if head_mask.numel() != H:
        raise ValueError(
            f"a head mask of shape {tuple(head_mask.shape)} does not give one weight to each of "
            f"{H} heads; only such masks can be honoured."
        )
    return head_mask.reshape(1, H, 1, 1)


def _refuse_shape(module: nn.Module, mask: object) -> None:
    """Refuse a mask of fewer axes: it would broadcast to another meaning."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"{type(module).__name__} passes a mask of {shape} to its attention, where "
            "(B, H, T, S) is expected; it is refused, since what it forbids is not known."
        )


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    unknown = sorted(k for k, v in others.items() if v is not None and k not in IRRELEVANT_KEYWORDS)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which is not "
            "known here; leaving it out would change the model, so the call is refused."
        )


_numbers = count(1)


class Attachment:
    """fenchel's attention in a model; leaving it (or ``detach``) restores the model.

    Each attachment registers its own private name, so that two never share their counts and
    a name that a user registered is never replaced.
    """

    def __init__(
        self,
        model: Any,
        choice: Choice,
        *,
        observer: CallObserver | None = None,
        override: QKVOverride | None = None,
        backend: str = "auto",
    ) -> None:
        self.model, self.choice = model, choice
        self.name = f"{_PRIVATE}-{next(_numbers)}"
        self._observer = observer
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self._implementations = _implementations(model)
        self._calls: Counter[str] = Counter()
        self._masks: defaultdict[str, set[str]] = defaultdict(set)
        self._field = getattr(model.config, FIELD, None)
        _register(self.name, AttentionFunction(choice, self._observe, override, backend))
        try:
            _switch(model, self.name)
        except BaseException:
            self.detach()
            raise
        setattr(model.config, FIELD, choice_record(choice))

    @property
    def calls(self) -> dict[str, int]:
        """How often each layer called fenchel's attention."""
        return dict(self._calls)

    @property
    def masks(self) -> dict[str, set[str]]:
        """The kinds of mask that each layer passed: see ``classify_mask``."""
        return {name: set(kinds) for name, kinds in self._masks.items()}

    @contextmanager
    def eager(self) -> Iterator[None]:
        """The model with its own plain attention, for as long as the context lasts."""
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(self.name)

    def detach(self) -> None:
        """Restore the model's own attention."""
        for config, implementation in self._implementations:
            config._attn_implementation_internal = implementation
        if self._field is not None:
            setattr(self.model.config, FIELD, self._field)
        elif hasattr(self.model.config, FIELD):
            delattr(self.model.config, FIELD)
        unregister(self.name)

    def _observe(self, module: nn.Module, call: AttentionCall, mask: str) -> None:
        name = self._module_names.get(id(module), type(module).__name__)
        self._calls[name] += 1
        self._masks[name].add(mask)
        if self._observer is not None:
            self._observer(module, call, mask)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    """Every config in the model with the attention it names."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [(c, c._attn_implementation_internal) for c in configs.values() if _names_attention(c)]


def _switch(model: Any, name: str) -> None:
    """Name the attention in every config, and verify that each config has it."""
    unswitched = [] if model._can_set_attn_implementation() else [model]
    if not unswitched:  # a model that cannot would log a message and carry on
        model.set_attn_implementation(name)
        modules = (
            m for m in model.modules() if hasattr(m, "config") and _names_attention(m.config)
        )
        unswitched = [m for m in modules if m.config._attn_implementation != name]
    if unswitched:
        raise ValueError(
            f"{type(unswitched[0]).__name__} does not use the attention registry of transformers: "
            "it computes its attention itself, and no other can be put in its place."
        )


def _names_attention(config: Any) -> bool:
    return hasattr(config, "_attn_implementation_internal")
