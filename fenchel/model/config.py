"""ModelConfig: the settings of a model.

The defaults are a small Llama-shaped decoder. docs/maths/model.md lists which setting creates which
parameter. Settings that differ between layers are patterns: (4096, 0) is 4096, 0, 4096, 0, ... over
the layers, and an empty pattern is the default for all of them.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fenchel.choice import by_name
from fenchel.choice.by_name import maps_with
from fenchel.config import Use, read_with, require_read

LARGEST = 2**24
"""The largest size accepted: a product of two stays far below the limit of a tensor."""
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
_KINDS = {
    "kind": ("decoder", "encoder", "encoder-decoder"),
    "norm": ("rms", "layer"),
    "norm_parameters": ("all", "gain", "none"),
    "norm_place": ("pre", "post", "both", "after"),
    "qk_norm_width": ("head", "all"),
    "positions": ("rotary", "learned", "sinusoidal", "alibi", "buckets", "none"),
    "rotary_layout": ("half", "pairs"),
    "rotary_scaling": (None, "linear", "ntk", "yarn", "llama3", "longrope"),
    "mlp": (*GATED, "gelu", "gelu_tanh", "relu", "relu2"),
    "scores": ("dot", "l2"),
    "gate": ("none", "head", "element"),
    "gate_activation": ("sigmoid", "softplus"),
    "initial": ("zero", "normal", "xavier"),
}
_SIZES = ("vocabulary", "context", "width", "layers", "heads")
_SIZES_OR_NONE = (
    "kv_heads",
    "head_size",
    "hidden",
    "encoder_layers",
    "distinct_layers",
    "embedding_width",
    "rotary_trained_context",
)
_COUNTS = ("token_types", "experts")  # 0 is none
_POSITIVE = ("beta", "embedding_scale", "logit_scale", "initial_std", "initial_qk", "rotary_factor")
_POSITIVE_OR_NONE = (
    "score_scale",
    "softcap",
    "logit_softcap",
    "rotary_slow",
    "rotary_fast",
    "rotary_attention",
    "query_growth",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All settings of a Transformer; none of its training.

    >>> config = ModelConfig(vocabulary=256, width=128, heads=4, kv_heads=2)
    >>> config.head_width, config.groups, config.mlp_width
    (32, 2, 352)
    """

    vocabulary: int
    """Rows of the embedding, V; at least as many as the tokenizer has ids."""
    context: int = 128
    """The longest sequence, T."""
    width: int = 128
    """Width of the residual stream, M."""
    layers: int = 4
    """Blocks, one after another; those of the decoder where there is an encoder too."""
    heads: int = 2
    """Attention heads, H; divides ``width`` unless ``head_size`` is given."""
    kv_heads: int | None = None
    """Heads of keys and values, G; divides ``heads``. None is one per head."""
    hidden: int | None = None
    """Width inside the MLP. None is 4 x width, or 8/3 x width when the MLP is gated."""
    norm: str = "rms"
    """"rms" or "layer": the norm before each branch."""
    positions: str = "rotary"
    """"rotary" rotates queries and keys, "learned" and "sinusoidal" add a table to the embedding,
    "alibi" and "buckets" (T5) are priors over distances, "none" ignores order."""
    rotary_base: float = 10000.0
    """The slowest pair rotates once in about 2 pi x this many positions."""
    mlp: str = "swiglu"
    """Gated: "swiglu", "geglu", "geglu_tanh", "swiglu_clamped" (gpt-oss). Plain: "gelu" (exact),
    "gelu_tanh", "relu", "relu2" (its square)."""
    choice: str = "softmax"
    """How a query chooses among keys: a name in fenchel.choice.MAPS, such as "entmax"."""
    entmax_alpha: float = 1.5
    """Exponent of entmax."""
    beta: float = 1.0
    """Inverse temperature of the choice among keys."""
    tied: bool = True
    """Use the embedding as the matrix of the LM head."""
    bias: bool = False
    """Whether linear maps inside a block, and that of ``lm_head_transform``, have a bias."""
    dropout: float = 0.0
    """Probability of dropping a branch's output, an attention weight or an embedding."""
    epsilon: float = 1e-5
    """Added under the square root of every norm."""

    kind: str = "decoder"
    """"decoder" is causal, "encoder" is not, "encoder-decoder" has one of each."""
    encoder_layers: int | None = None
    """Blocks of the encoder of an encoder-decoder. None is as many as ``layers``."""
    distinct_layers: int | None = None
    """Blocks with their own parameters, each used for equally many consecutive layers (ALBERT).
    None is one per layer."""
    head_size: int | None = None
    """Width per head. None is width / heads."""
    embedding_width: int | None = None
    """Width of the embedding, mapped to ``width`` by a linear map (ALBERT). None is ``width``."""
    token_types: int = 0
    """Number of token types (segments; 2 in BERT), each with its own embedding."""
    embedding_scale: float = 1.0
    """Factor on the embedding: sqrt(width) in Gemma and the original Transformer."""
    embedding_norm: bool = False
    """A norm after the embedding, positions included (BLOOM, BERT)."""

    norm_place: str = "pre"
    """"pre" x + f(n(x)), "post" n(x + f(x)), "both" x + n(f(n(x))), "after" x + n(f(x))."""
    first_norm: bool = True
    """The norm before the first attention; off where a norm after the embedding serves
    (ModernBERT)."""
    norm_parameters: str = "all"
    """"all" a gain, and a bias in norm="layer"; "gain" no bias (ModernBERT); "none" neither
    (nanochat)."""
    norm_plus_one: bool = False
    """The gain of an RMS norm is 1 + weight (Gemma), so that weight decay pulls it to 1."""
    final_norm: bool = True
    """A norm after the last block. Off where norms come after the branches (BERT)."""
    qk_norm: bool = False
    """Normalise queries and keys per head, before their rotation. A run with
    optim.optimiser="score" does so unless this is set."""
    qk_norm_width: str = "head"
    """"head" normalises each head by itself, "all" the queries of all heads together (OLMo 2)."""
    residual_scale: float | str = 1.0
    """Factor on each branch; "depth" is (2 layers)^-1/2, which bounds the stream."""
    parallel: bool = False
    """Both branches have the same input: x + attention(n(x)) + mlp(n'(x))."""

    rotary_layout: str = "half"
    """Which entries form a pair: "half" i with i + W/2, "pairs" 2i with 2i + 1."""
    rotary_fraction: float = 1.0
    """Fraction of each head that is rotated; the rest has no position."""
    rotary_layers: tuple[int, ...] = ()
    """Pattern of layers that rotate: 1 does, 0 does not (SmolLM3). Empty is all of them."""
    rotary_local_base: float | None = None
    """Base in layers with a window, unscaled (Gemma 3). None is ``rotary_base`` everywhere."""
    rotary_scaling: str | None = None
    """Frequency scaling for contexts longer than in training: "linear", "ntk", "yarn", "llama3",
    "longrope"."""
    rotary_factor: float = 1.0
    """The factor by which ``rotary_scaling`` extends the context."""
    rotary_trained_context: int | None = None
    """The context of training, for "yarn", "llama3" and "longrope". None is ``context``."""
    rotary_slow: float | None = None
    """Rotations within the trained context below which frequencies are divided. None is 1."""
    rotary_fast: float | None = None
    """Rotations above which frequencies stay. None is 32 for "yarn", 4 for "llama3"."""
    rotary_attention: float | None = None
    """Factor on cos and sin. None is 0.1 log(rotary_factor) + 1 under "yarn", 1 under
    "longrope"."""
    rotary_truncate: bool = True
    """Round the ends of the ramp of "yarn" outward to whole pairs."""
    rotary_short: tuple[float, ...] = ()
    """Under "longrope" the divisor of each frequency in contexts up to the trained one."""
    rotary_long: tuple[float, ...] = ()
    """The same in longer contexts."""
    query_growth: float | None = None
    """g of the factor 1 + g log(1 + floor(m / rotary_trained_context)) on the rotated query at
    position m (Ministral 3). None is a factor of 1."""
    relative_bias: bool = False
    """The relative bias of positions="buckets" beside a learned table (MPNet)."""
    buckets: int = 32
    """Rows of the relative bias; a multiple of 4."""
    bucket_distance: int = 128
    """Distances from here on share the last bucket."""

    windows: tuple[int, ...] = ()
    """Pattern of window sizes: how many keys a query sees, its own included; 0 is all."""
    layer_choices: tuple[str, ...] = ()
    """Pattern of choice maps, in place of ``choice``."""
    scores: str = "dot"
    """"dot" products, or "l2": -|q - k|^2 with one matrix for q and k, which is Lipschitz."""
    score_scale: float | None = None
    """Factor on q.k. None is head_width^-1/2; 1 in T5."""
    softcap: float | None = None
    """Scores s become c tanh(s / c) before any prior (Gemma 2: 50)."""
    sinks: bool = False
    """A learned score per head for a key with value 0, so that weights may sum to less than 1."""
    gate: str = "none"
    """A factor on the outputs of attention before their projection, computed from the layer's
    input: one per "head", which is a sink whose score follows the scores, or per "element"."""
    gate_activation: str = "sigmoid"
    """What makes the factor of a linear map: "sigmoid" (Qwen3-Next), "softplus" (Laguna)."""
    qkv_bias: bool | None = None
    """A bias for queries, keys and values. None is ``bias``; Qwen2 has only this one."""
    sigma_reparam: bool = False
    """Linear maps inside a block are gain W / sigma(W), sigma the largest singular value."""

    experts: int = 0
    """Experts among which each token is routed. 0 is one MLP without a router."""
    experts_per_token: int = 2
    """Experts per token."""
    router: str = "softmax"
    """Choice map of the router, as in ``choice``."""
    router_normalise: bool = True
    """Divide the weights of the chosen experts by their sum."""

    attention_dropout: float | None = None
    """Probability of dropping an attention weight. None is ``dropout``."""
    mlp_dropout: float = 0.0
    """Probability of dropping an entry inside the MLP, after the activation."""

    lm_head: bool = True
    """Whether the model predicts tokens. Without, it has hidden states only (BERT's body)."""
    logit_scale: float = 1.0
    """Factor on the input of the LM head: width^-1/2 in a tied T5."""
    logit_softcap: float | None = None
    """Logits z become c tanh(z / c) (Gemma 2: 30)."""
    lm_head_bias: bool = False
    """Whether the LM head has a bias."""
    lm_head_transform: bool = False
    """A linear map, an activation and a norm before the LM head (BERT's masked-language head)."""
    pooler: bool = False
    """A linear map with tanh on the first position, a vector per sequence (BERT)."""

    initial: str = "zero"
    """"zero" N(0, 1/inputs) and branches that start at 0; "normal" N(0, initial_std^2);
    "xavier" variance 2 / (inputs + outputs)."""
    initial_std: float = 0.02
    """Standard deviation of a fresh embedding, and of everything under "normal"."""
    initial_qk: float = 1.0
    """Factor on the standard deviation of fresh queries and keys; smaller is more even."""
    initial_depth: bool = False
    """Scale the fresh last map of every branch by (2 layers)^-1/2 (not under "zero")."""

    USES: ClassVar = (
        Use(
            ("entmax_alpha",),
            'choice, layer_choices or router "entmax"',
            lambda c: any(name in maps_with("alpha") for name in c.choice_names),
        ),
        Use(
            ("beta",),
            "a choice or layer_choices with a temperature",
            lambda c: any(name in maps_with("beta") for name in c.layer_choices or (c.choice,)),
        ),
        Use(("choice",), "no layer_choices", lambda c: not c.layer_choices),
        read_with(
            "rotary_base rotary_layout rotary_fraction rotary_layers rotary_scaling "
            "rotary_local_base",
            "positions",
            "rotary",
        ),
        Use(("rotary_local_base",), "windows", lambda c: any(c.windows)),
        Use(
            ("rotary_factor",),
            "rotary_scaling",
            lambda c: c.rotary_scaling not in (None, "longrope"),
        ),
        read_with("rotary_trained_context", "rotary_scaling", "yarn", "llama3", "longrope"),
        read_with("rotary_slow rotary_fast", "rotary_scaling", "yarn", "llama3"),
        read_with("rotary_attention", "rotary_scaling", "yarn", "longrope"),
        read_with("rotary_truncate", "rotary_scaling", "yarn"),
        read_with("rotary_short rotary_long", "rotary_scaling", "longrope"),
        Use(
            ("query_growth",),
            "rotary_trained_context",
            lambda c: c.rotary_trained_context is not None,
        ),
        read_with("relative_bias", "positions", "learned"),
        Use(
            ("buckets", "bucket_distance"),
            'positions="buckets" or relative_bias',
            lambda c: c.has_buckets,
        ),
        read_with("encoder_layers", "kind", "encoder-decoder"),
        read_with("gate_activation", "gate", "head", "element"),
        read_with("norm_plus_one", "norm", "rms"),
        Use(("qk_norm_width",), "qk_norm", lambda c: c.qk_norm),
        Use(
            ("experts_per_token", "router", "router_normalise"),
            "experts",
            lambda c: c.experts > 0,
        ),
        read_with("first_norm", "norm_place", "pre", "both"),
        Use(
            ("tied", "lm_head_bias", "lm_head_transform", "logit_scale", "logit_softcap"),
            "lm_head",
            lambda c: c.lm_head,
        ),
        read_with("initial_depth", "initial", "normal", "xavier"),
    )

    def __post_init__(self) -> None:
        self._require_sizes()
        for name, kinds in _KINDS.items():
            if getattr(self, name) not in kinds:
                raise ValueError(f"{name}={getattr(self, name)!r} should be one of {kinds}.")
        self._require_patterns()
        self._require_division()
        self._require_ranges()
        self._require_use()

    def _require_sizes(self) -> None:
        for name in (*_SIZES, *_SIZES_OR_NONE, "buckets", "bucket_distance", "experts_per_token"):
            if (size := getattr(self, name)) is None and name in _SIZES_OR_NONE:
                continue
            _require_whole(name, size, 1)
        for name in _COUNTS:
            _require_whole(name, getattr(self, name), 0)

    def _require_patterns(self) -> None:
        for name in ("windows", "layer_choices", "rotary_layers", "rotary_short", "rotary_long"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("windows", "layer_choices", "rotary_layers"):
            if len(getattr(self, name)) > self.layers:
                raise ValueError(
                    f"the pattern {name}={getattr(self, name)} is longer than layers={self.layers}."
                )
        for window in self.windows:
            _require_whole("a window", window, 0)
        if not {0, 1}.issuperset(self.rotary_layers):
            raise ValueError(f"rotary_layers={self.rotary_layers} should hold 0 and 1 only.")
        for name in (self.choice, self.router, *self.layer_choices):
            by_name(str(name), alpha=self.entmax_alpha)  # raises with the names there are
        patterns = (self.windows, self.layer_choices, self.rotary_layers)
        if self.distinct_layers is not None and max(map(len, patterns)) > 1:
            raise ValueError(
                "distinct_layers shares blocks between layers; windows, layer_choices and "
                "rotary_layers should then hold one entry at most."
            )

    def _require_division(self) -> None:
        if self.head_size is None and self.width % self.heads:
            near = self.heads * max(1, round(self.width / self.heads))
            raise ValueError(
                f"width={self.width} does not split over heads={self.heads}; try width={near}."
            )
        if self.heads % self.groups:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"try kv_heads=1 or kv_heads={self.heads}."
            )
        if self.distinct_layers is not None and self.layers % self.distinct_layers:
            raise ValueError(
                f"distinct_layers={self.distinct_layers} does not divide layers={self.layers}."
            )
        if self.buckets % 4:
            raise ValueError(f"buckets={self.buckets} should be a multiple of 4.")

    def _require_ranges(self) -> None:
        for name in ("dropout", "attention_dropout", "mlp_dropout"):
            p = getattr(self, name)
            if p is not None and not 0.0 <= p < 1.0:
                raise ValueError(f"{name}={p} should be in [0, 1).")
        if not 0.0 < self.epsilon < 1.0:
            raise ValueError(f"epsilon={self.epsilon} should be above 0 and below 1.")
        for name in ("rotary_base", "rotary_local_base"):
            base = getattr(self, name)
            if base is not None and not 1.0 < base < math.inf:
                raise ValueError(f"{name}={base} should be a finite number above 1.")
        for name in (*_POSITIVE, *_POSITIVE_OR_NONE):
            x = getattr(self, name)
            if not (x is None and name in _POSITIVE_OR_NONE) and not 0.0 < x < math.inf:
                raise ValueError(f"{name}={x!r} should be a finite number above 0.")
        x = self.residual_scale
        if x != "depth" and (isinstance(x, str) or not 0.0 < x < math.inf):
            raise ValueError(f'residual_scale={x!r} should be a number above 0, or "depth".')
        if not 0.0 < self.rotary_fraction <= 1.0:
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} should be above 0, at most 1."
            )
        if self.positions == "rotary" and (self.rotary_width < 2 or self.rotary_width % 2):
            raise ValueError(
                f"rotary positions need pairs; {self.rotary_width} entries per head are not even; "
                f"change width={self.width} or heads={self.heads}."
            )
        for name in ("rotary_short", "rotary_long") if self.rotary_scaling == "longrope" else ():
            divisors, pairs = getattr(self, name), self.rotary_width // 2
            if len(divisors) != pairs or not all(0.0 < x < math.inf for x in divisors):
                raise ValueError(
                    f"{name} should hold {pairs} numbers above 0, one for each pair of a head."
                )
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than experts={self.experts}."
            )

    def _require_use(self) -> None:
        """Raise for a setting that would have no effect, by itself or with another."""
        require_read(self)
        if self.scores == "l2" and (self.groups != self.heads or self.has_qkv_bias or self.qk_norm):
            raise ValueError(
                'scores="l2" has one matrix for queries and keys; it needs kv_heads=None, '
                "qk_norm=False and no bias."
            )
        if self.scores == "l2" and (self.softcap is not None or self.sinks):
            raise ValueError(
                'scores="l2" leaves scores open to a shift: set softcap=None, sinks=False.'
            )
        if self.experts and self.sigma_reparam:
            raise ValueError("experts are plain linear maps: set sigma_reparam=False.")
        if self.norm == "rms" and self.norm_parameters == "gain":
            raise ValueError('norm="rms" has no bias; norm_parameters should be "all" or "none".')
        if self.norm_plus_one and self.norm_parameters == "none":
            raise ValueError('norm_plus_one=True needs a gain; set norm_parameters="all".')
        if self.distinct_layers is not None and not self.first_norm:
            raise ValueError("distinct_layers shares blocks between layers; set first_norm=True.")
        if self.parallel and (self.norm_place == "post" or self.kind == "encoder-decoder"):
            raise ValueError('parallel=True needs norm_place="pre", "both" or "after", no encoder.')

    @property
    def head_width(self) -> int:
        """Width of queries, keys and values per head, D."""
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def groups(self) -> int:
        """Heads of keys and values, G."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def gate_width(self) -> int:
        """Factors of the output gate per token: 0 without one, H per head, H D per element."""
        return {"none": 0, "head": 1, "element": self.head_width}[self.gate] * self.heads

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return self.mlp in GATED

    @property
    def has_buckets(self) -> bool:
        """Whether distances have a learned bias by buckets."""
        return self.positions == "buckets" or self.relative_bias

    @property
    def has_position_bias(self) -> bool:
        """Whether scores have a prior over distances: ALiBi's or that of buckets."""
        return self.positions == "alibi" or self.has_buckets

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP; for a gated one rounded up to a multiple of 32."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 96) * 32 if self.gated else 4 * self.width

    @property
    def block_count(self) -> int:
        """Blocks with their own parameters: ``distinct_layers``, or one per layer."""
        return self.layers if self.distinct_layers is None else self.distinct_layers

    @property
    def rotary_width(self) -> int:
        """Entries per head that are rotated by position, W."""
        return int(self.head_width * self.rotary_fraction)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def branch_scale(self) -> float:
        """``residual_scale`` as a number."""
        if isinstance(self.residual_scale, str):
            return 1.0 / math.sqrt(2 * self.layers)
        return self.residual_scale

    def with_context(self, context: int, rotary_scaling: str | None = None) -> "ModelConfig":
        """The settings of the same weights for another context, in training or longer.

        Only a learned table of positions ends at its last row; all other positions are functions of
        the position or the distance, defined everywhere. ``rotary_scaling`` divides the rotary
        frequencies by as much as the context grows.

        >>> ModelConfig(vocabulary=16, context=128).with_context(512, "ntk").rotary_factor
        4.0
        """
        if self.positions == "learned" and context > self.context:
            raise ValueError(
                f'positions="learned" is a table of {self.context} positions without a row for '
                f"later ones; context={context} should be {self.context} at most."
            )
        changes: dict[str, Any] = {"context": context}
        if rotary_scaling is not None:
            if self.positions != "rotary" or self.rotary_scaling is not None:
                raise ValueError(
                    f"rotary_scaling={rotary_scaling!r} needs rotary positions that are not scaled "
                    f"yet; this model has positions={self.positions!r} and "
                    f"rotary_scaling={self.rotary_scaling!r}."
                )
            changes["rotary_scaling"] = rotary_scaling
            changes["rotary_factor"] = max(1.0, context / self.context)
        if (rotary_scaling or self.rotary_scaling) in ("yarn", "llama3", "longrope"):
            changes["rotary_trained_context"] = self.rotary_trained_context or self.context
        return replace(self, **changes)

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, its own included; None is all."""
        return (self.windows[layer % len(self.windows)] or None) if self.windows else None

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys of this layer are rotated by position."""
        pattern = self.rotary_layers or (1,)
        return self.positions == "rotary" and bool(pattern[layer % len(pattern)])

    @property
    def choice_names(self) -> tuple[str, ...]:
        """The names of all choice maps in use: those of the layers and that of the router."""
        router = (self.router,) if self.experts else ()
        return (*(self.layer_choices or (self.choice,)), *router)

    def choice_of(self, layer: int) -> str:
        """The name of the choice map of this layer."""
        choices = self.layer_choices or (self.choice,)
        return choices[layer % len(choices)]


def _require_whole(name: str, size: Any, least: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= LARGEST:
        raise ValueError(f"{name}={size!r} should be a whole number, {least} to {LARGEST}.")
