"""ModelConfig: the settings of a model.

The defaults are a small Llama-shaped decoder. docs/maths/model.md lists which setting creates which
parameter. Settings that differ between layers are patterns: (4096, 0) is 4096, 0, 4096, 0, ... over
the layers, and an empty pattern is the default for all of them.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fenchel.choice import MAPS, by_name
from fenchel.choice.by_name import maps_with
from fenchel.config import Use, read_with, require_read

LARGEST = 2**24
"""The largest size accepted: a product of two stays far below the limit of a tensor."""
LEARNED_ALPHA = 1.05, 2.0
"""The range of a learned exponent: weights lose digits below it, and bounds above it."""
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
_KINDS = {
    "kind": ("decoder", "encoder", "encoder-decoder"),
    "norm": ("rms", "layer"),
    "norm_parameters": ("all", "gain", "none"),
    "norm_place": ("pre", "post", "both", "after"),
    "qk_norm_width": ("head", "all"),
    "positions": ("rotary", "learned", "sinusoidal", "alibi", "buckets", "none"),
    "rotary_layout": ("half", "pairs"),
    "rotary_scaling": (None, "linear", "ntk", "yarn", "llama3", "longrope", "proportional"),
    "mlp": (*GATED, "gelu", "gelu_tanh", "relu", "relu2"),
    "scores": ("dot", "l2"),
    "temperature": ("none", "log", "stepped"),
    "temperature_layers": ("all", "unrotated"),
    "sink_score": ("head", "zero", "token"),
    "gate": ("none", "head", "element"),
    "gate_activation": ("sigmoid", "softplus"),
    "initial": ("zero", "normal", "xavier"),
}
_SIZES = ("vocabulary", "context", "width", "layers", "heads")
_SIZES_OR_NONE = (
    "kv_heads head_size hidden encoder_layers distinct_layers embedding_width "
    "rotary_trained_context full_head_size full_kv_heads shared_hidden dense_hidden shared_expert "
    "temperature_floor"
).split()
_COUNTS = ("token_types", "experts", "shared_kv_layers", "per_layer_width")  # 0 is none
_PATTERNS = ("windows", "layer_choices", "rotary_layers", "delta_layers", "dense_layers")
_DELTA = (
    *("delta_key_heads", "delta_value_heads", "delta_key_width", "delta_value_width"),
    "delta_kernel",
)
_POSITIVE = (
    "beta embedding_scale logit_scale router_scale initial_std initial_qk rotary_factor".split()
)
_POSITIVE_OR_NONE = (
    "score_scale softcap logit_softcap rotary_slow rotary_fast rotary_attention temperature_growth"
).split()


def _read_by(name: str, setting: str, which: str) -> Use:
    """A field that is read where some layer chooses by a map with that setting."""
    return Use(
        (name,),
        f"a choice or layer_choices {which}",
        lambda c: any(one in maps_with(setting) for one in c.layer_choices or (c.choice,)),
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
    entmax_alpha_learned: bool = False
    """Every head of a layer with entmax learns its own exponent, between 1.05 and 2 and
    ``entmax_alpha`` at first."""
    beta: float = 1.0
    """Inverse temperature of the choice among keys."""
    log_odds: float = 0.0
    """Log odds of a key under the sigmoid map before its score; -log(keys) keeps the sum of the
    weights near 1."""
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
    full_head_size: int | None = None
    """Width per head in layers without a window (Gemma 4). None is as in those with one."""
    full_kv_heads: int | None = None
    """Heads of keys and values in layers without a window. None is as in those with one."""
    embedding_width: int | None = None
    """Width of the embedding, mapped to ``width`` by a linear map (ALBERT). None is ``width``."""
    per_layer_width: int = 0
    """P of a further embedding of every token, P entries for each layer, which a third branch of
    the layer reads (Gemma 4). 0 is none."""
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
    value_norm: bool = False
    """Normalise values per head, without a gain (Gemma 4)."""
    layer_scale: bool = False
    """Every block ends with a stored factor on the stream, which training does not move
    (Gemma 4)."""
    residual_scale: float | str = 1.0
    """Factor on each branch; "depth" is (2 layers)^-1/2, which bounds the stream."""
    parallel: bool = False
    """Both branches have the same input: x + attention(n(x)) + mlp(n'(x))."""

    rotary_layout: str = "half"
    """Which entries form a pair: "half" i with i + W/2, "pairs" 2i with 2i + 1."""
    rotary_fraction: float = 1.0
    """Fraction of each head that is rotated; the rest has no position. Under
    rotary_scaling="proportional" the fraction of pairs, those of the highest frequencies."""
    rotary_layers: tuple[int, ...] = ()
    """Pattern of layers that rotate: 1 does, 0 does not (SmolLM3). Empty is all of them."""
    rotary_local_base: float | None = None
    """Base in layers with a window, unscaled (Gemma 3). None is ``rotary_base`` everywhere."""
    rotary_scaling: str | None = None
    """Frequency scaling for contexts longer than in training: "linear", "ntk", "yarn", "llama3",
    "longrope"; "proportional" leaves the lowest frequencies out (``rotary_fraction``, Gemma 4)."""
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
    relative_bias: bool = False
    """The relative bias of positions="buckets" beside a learned table (MPNet)."""
    buckets: int = 32
    """Rows of the relative bias; a multiple of 4."""
    bucket_distance: int = 128
    """Distances from here on share the last bucket."""

    windows: tuple[int, ...] = ()
    """Pattern of window sizes: how many keys a query sees, its own included; 0 is all."""
    delta_layers: tuple[int, ...] = ()
    """Pattern of layers: 1 for gated DeltaNet in place of attention (Qwen3.5: 1, 1, 1, 0)."""
    delta_key_heads: int = 2
    """Heads of queries and keys of a DeltaNet layer."""
    delta_value_heads: int = 4
    """Heads of values, a multiple of those of keys."""
    delta_key_width: int = 32
    """Width of a query and a key there."""
    delta_value_width: int = 32
    """Width of a value there."""
    delta_kernel: int = 4
    """Positions that the causal filter of a DeltaNet layer reads."""
    shared_kv_layers: int = 0
    """So many of the last layers have no keys and values: they attend to those of the last layer
    before them all with the same window (Gemma 4)."""
    shared_hidden: int | None = None
    """Width inside the MLP of those layers. None is as in the others."""
    keys_as_values: bool = False
    """Layers without a window have no matrix of values: a value is the key before its norm and
    rotation (Gemma 4)."""
    layer_choices: tuple[str, ...] = ()
    """Pattern of choice maps, in place of ``choice``."""
    scores: str = "dot"
    """"dot" products, or "l2": -|q - k|^2 with one matrix for q and k, which is Lipschitz."""
    score_scale: float | None = None
    """Factor on q.k. None is head_width^-1/2; 1 in T5."""
    softcap: float | None = None
    """Scores s become c tanh(s / c) before any prior (Gemma 2: 50)."""
    temperature: str = "none"
    """A factor on the query at position m, an inverse temperature that grows with the length:
    "log" is s log(m + 1), s learned per head (Scalable-Softmax); "stepped" is
    1 + a log(1 + floor((m + o) / f)) (Llama 4, Ministral 3)."""
    temperature_growth: float | None = None
    """a of "stepped". None is 0.1."""
    temperature_floor: int | None = None
    """f of "stepped". None is the trained context."""
    temperature_offset: int = 0
    """o of "stepped": 0 in Ministral 3, 1 in Llama 4."""
    temperature_layers: str = "all"
    """Layers with the factor: "all", or those that do not rotate, "unrotated" (Llama 4)."""
    sinks: bool = False
    """A score r for one more key with value 0, so that weights may sum to less than 1."""
    sink_score: str = "head"
    """The score of a sink: "head" is learned per head, "zero" is 0 (softmax off by one), "token"
    is a linear map of the layer's input per head."""
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
    dense_layers: tuple[int, ...] = ()
    """Pattern of layers without experts: 1 has one MLP, 0 has experts. Empty is experts in all."""
    dense_hidden: int | None = None
    """Width inside the MLP of layers without experts. None is that of an expert."""
    experts_per_token: int = 2
    """Experts per token."""
    router: str = "softmax"
    """Choice map of the router, as in ``choice``."""
    router_normalise: bool = True
    """Divide the weights of the chosen experts by their sum."""
    router_bias: bool = False
    """A number per expert that is added to its weight where experts are chosen, and nowhere else
    (DeepSeek V3). It is read from a checkpoint and does not learn."""
    router_scale: float = 1.0
    """Factor on the weights of the chosen experts (DeepSeek V3: 2.5)."""
    shared_expert: int | None = None
    """Width inside one more MLP, which every token uses beside its experts (DeepSeek V3, Qwen3.5).
    None is no such MLP."""
    shared_expert_gate: bool = False
    """A factor on the output of that MLP, the sigmoid of a linear map of the token (Qwen3.5)."""
    expert_norms: bool = False
    """That MLP and the experts have norms of their own, before and after; the router reads the
    stream by a further one, and every expert has a factor (Gemma 4)."""

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
    initial_distances: bool = False
    """Heads begin at one distance each: the fresh relative bias of head h is largest h + 1 tokens
    back, in every layer."""
    initial_depth: bool = False
    """Scale the fresh last map of every branch by (2 layers)^-1/2 (not under "zero")."""

    USES: ClassVar = (
        Use(
            ("entmax_alpha",),
            'choice, layer_choices or router "entmax"',
            lambda c: any(name in maps_with("alpha") for name in c.choice_names),
        ),
        _read_by("entmax_alpha_learned", "alpha", '"entmax"'),
        _read_by("beta", "beta", "with a temperature"),
        _read_by("log_odds", "log_odds", '"sigmoid"'),
        Use(("choice",), "no layer_choices", lambda c: not c.layer_choices),
        read_with(
            "rotary_base rotary_layout rotary_fraction rotary_layers rotary_scaling "
            "rotary_local_base",
            "positions",
            "rotary",
        ),
        Use(
            ("rotary_local_base", "full_head_size", "full_kv_heads"),
            "windows",
            lambda c: any(c.windows),
        ),
        Use(("shared_hidden",), "shared_kv_layers", lambda c: c.shared_kv_layers > 0),
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
        read_with("temperature", "kind", "decoder"),
        read_with("temperature_layers", "temperature", "log", "stepped"),
        read_with(
            "temperature_growth temperature_floor temperature_offset", "temperature", "stepped"
        ),
        Use(("sink_score",), "sinks", lambda c: c.sinks),
        read_with("relative_bias", "positions", "learned"),
        Use(
            ("buckets", "bucket_distance", "initial_distances"),
            'positions="buckets" or relative_bias',
            lambda c: c.has_buckets,
        ),
        read_with("encoder_layers", "kind", "encoder-decoder"),
        read_with("gate_activation", "gate", "head", "element"),
        read_with("norm_plus_one", "norm", "rms"),
        Use(("qk_norm_width",), "qk_norm", lambda c: c.qk_norm),
        Use(_DELTA, "delta_layers", lambda c: c.has_delta),
        Use(
            (
                *("experts_per_token", "router", "router_normalise", "router_bias", "router_scale"),
                *("dense_layers", "shared_expert"),
            ),
            "experts",
            lambda c: c.experts > 0,
        ),
        Use(("dense_hidden",), "dense_layers", lambda c: any(c.dense_layers)),
        Use(("shared_expert_gate",), "shared_expert", lambda c: c.shared_expert is not None),
        Use(
            ("expert_norms",),
            'a shared_expert, norm="rms" and norm_place="both"',
            lambda c: (
                (c.shared_expert, c.norm, c.norm_place) == (c.shared_expert or 0, "rms", "both")
            ),
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
        self._require_shared_layers()
        self._require_ranges()
        self._require_use()

    def _require_sizes(self) -> None:
        if self.temperature_offset not in (0, 1):
            raise ValueError(f"temperature_offset={self.temperature_offset} should be 0 or 1.")
        others = ("buckets", "bucket_distance", "experts_per_token", *_DELTA)
        for name in (*_SIZES, *_SIZES_OR_NONE, *others):
            if (size := getattr(self, name)) is None and name in _SIZES_OR_NONE:
                continue
            _require_whole(name, size, 1)
        for name in _COUNTS:
            _require_whole(name, getattr(self, name), 0)

    def _require_patterns(self) -> None:
        for name in (*_PATTERNS, "rotary_short", "rotary_long"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in _PATTERNS:
            if len(getattr(self, name)) > self.layers:
                raise ValueError(
                    f"the pattern {name}={getattr(self, name)} is longer than layers={self.layers}."
                )
        for window in self.windows:
            _require_whole("a window", window, 0)
        for name in ("rotary_layers", "delta_layers", "dense_layers"):
            if not {0, 1}.issuperset(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} should hold 0 and 1 only.")
        for name in (self.choice, self.router, *self.layer_choices):
            by_name(str(name), alpha=self.entmax_alpha)  # raises with the names there are
        longest = max(len(getattr(self, name)) for name in _PATTERNS)
        if self.distinct_layers is not None and (longest > 1 or self.has_delta):
            raise ValueError(
                f"distinct_layers shares blocks between layers; {', '.join(_PATTERNS)} should then "
                "hold one entry at most, and delta_layers none."
            )

    def _require_division(self) -> None:
        if self.head_size is None and self.width % self.heads:
            near = self.heads * max(1, round(self.width / self.heads))
            raise ValueError(
                f"width={self.width} does not split over heads={self.heads}; try width={near}."
            )
        for name in ("kv_heads", "full_kv_heads"):
            if (groups := getattr(self, name)) is not None and self.heads % groups:
                raise ValueError(
                    f"{name}={groups} does not divide heads={self.heads}; "
                    f"try {name}=1 or {name}={self.heads}."
                )
        if self.distinct_layers is not None and self.layers % self.distinct_layers:
            raise ValueError(
                f"distinct_layers={self.distinct_layers} does not divide layers={self.layers}."
            )
        if self.delta_value_heads % self.delta_key_heads:
            raise ValueError(
                f"delta_key_heads={self.delta_key_heads} does not divide "
                f"delta_value_heads={self.delta_value_heads}."
            )
        if self.buckets % 4:
            raise ValueError(f"buckets={self.buckets} should be a multiple of 4.")

    def _require_shared_layers(self) -> None:
        """Every layer without keys has a layer to take them from, and blocks of their own."""
        if self.shared_kv_layers and self.has_delta:
            raise ValueError(
                "shared_kv_layers attends to keys of earlier layers, and delta_layers have none; "
                "set one of them."
            )
        if self.shared_kv_layers and None in map(self.kv_source, range(self.layers)):
            raise ValueError(
                f"shared_kv_layers={self.shared_kv_layers} of {self.layers} layers leave none with "
                f"keys and the same window for some of them; windows={self.windows}."
            )
        if self.distinct_layers is not None and (self.shared_kv_layers or self.per_layer_width):
            raise ValueError(
                "distinct_layers shares blocks between layers; set shared_kv_layers=0 and "
                "per_layer_width=0."
            )
        if self.kind != "decoder" and (self.shared_kv_layers or self.per_layer_width):
            raise ValueError('shared_kv_layers and per_layer_width need kind="decoder".')
        if self.full_head_size is not None:
            full = (n for n in range(self.layers) if self.window(n) is None)
            self.at_layer(next(full, 0))  # raises for heads that cannot be

    def _require_ranges(self) -> None:
        for name in ("dropout", "attention_dropout", "mlp_dropout"):
            p = getattr(self, name)
            if p is not None and not 0.0 <= p < 1.0:
                raise ValueError(f"{name}={p} should be in [0, 1).")
        if not 0.0 < self.epsilon <= 1.0:
            raise ValueError(f"epsilon={self.epsilon} should be above 0 and at most 1.")
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
        if not abs(self.log_odds) < math.inf:
            raise ValueError(f"log_odds={self.log_odds} should be a finite number.")
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
        low, high = LEARNED_ALPHA
        if self.entmax_alpha_learned and not low < self.entmax_alpha < high:
            raise ValueError(
                f"entmax_alpha_learned starts at entmax_alpha={self.entmax_alpha}, which should be "
                f"above {low} and below {high}."
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
        if self.scores == "l2" and (
            self.value_norm or self.keys_as_values or self.shared_kv_layers
        ):
            raise ValueError(
                'scores="l2" makes values of its queries: set value_norm=False, '
                "keys_as_values=False, shared_kv_layers=0."
            )
        if self.scores == "l2" and (self.softcap is not None or self.sinks):
            raise ValueError(
                'scores="l2" leaves scores open to a shift: set softcap=None, sinks=False.'
            )
        if (self.scores == "l2" or self.sinks) and any(
            MAPS[name].feasible == "box" for name in self.layer_choices or (self.choice,)
        ):
            raise ValueError(
                'a choice "sigmoid" weighs every key by itself: set scores="dot", sinks=False.'
            )
        if self.has_delta and self.kind != "decoder":
            raise ValueError(f"delta_layers read from left to right; kind={self.kind!r} does not.")
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

    def learns_alpha(self, layer: int) -> bool:
        """Whether the heads of this layer learn their exponents of entmax."""
        return self.entmax_alpha_learned and self.choice_of(layer) in maps_with("alpha")

    @property
    def temperature_step(self) -> int:
        """f of temperature="stepped"."""
        return self.temperature_floor or self.rotary_trained_context or self.context

    def tempered(self, layer: int) -> bool:
        """Whether queries of this layer have a factor of their position."""
        everywhere = self.temperature_layers == "all"
        return self.temperature != "none" and (everywhere or not self.rotates(layer))

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
        if self.rotary_scaling == "proportional":
            return self.head_width
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
        if self.temperature == "stepped":
            changes["temperature_floor"] = self.temperature_step
        return replace(self, **changes)

    def at_layer(self, layer: int) -> "ModelConfig":
        """The settings with the sizes of this layer, where layers differ.

        >>> config = ModelConfig(vocabulary=16, windows=(8, 0), head_size=32, full_head_size=64)
        >>> [config.at_layer(layer).head_width for layer in range(2)]
        [32, 64]
        """
        own: dict[str, Any] = {}
        if self.window(layer) is None:
            own |= {"head_size": self.full_head_size, "kv_heads": self.full_kv_heads}
        if self.kv_source(layer) != layer:
            own["hidden"] = self.shared_hidden
        if self.experts and not self.has_experts(layer):
            own["hidden"] = self.dense_hidden
        own = {name: size for name, size in own.items() if size is not None}
        if not own:
            return self
        for name in ("full_head_size", "full_kv_heads", "shared_hidden", "dense_hidden"):
            own[name] = None
        return replace(self, **own)

    def kv_source(self, layer: int) -> int | None:
        """The layer whose keys and values this one attends to: itself unless they are shared.

        >>> config = ModelConfig(vocabulary=16, layers=6, windows=(8, 0), shared_kv_layers=3)
        >>> [config.kv_source(layer) for layer in range(6)]
        [0, 1, 2, 1, 2, 1]
        """
        own = self.layers - self.shared_kv_layers
        if not self.shared_kv_layers or layer < own:
            return layer
        alike = (n for n in reversed(range(own)) if self.window(n) == self.window(layer))
        return next(alike, None)

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, its own included; None is all."""
        return (self.windows[layer % len(self.windows)] or None) if self.windows else None

    def is_delta(self, layer: int) -> bool:
        """Whether this layer is a gated DeltaNet in place of attention."""
        return bool(self.delta_layers) and bool(self.delta_layers[layer % len(self.delta_layers)])

    @property
    def has_delta(self) -> bool:
        """Whether any layer is a gated DeltaNet."""
        return any(self.is_delta(layer) for layer in range(self.layers))

    @property
    def delta_keys(self) -> int:
        """Rows of the keys of all heads of a DeltaNet layer."""
        return self.delta_key_heads * self.delta_key_width

    @property
    def delta_values(self) -> int:
        """Rows of the values of all its heads."""
        return self.delta_value_heads * self.delta_value_width

    def has_experts(self, layer: int) -> bool:
        """Whether tokens of this layer are routed among experts."""
        pattern = self.dense_layers or (0,)
        return self.experts > 0 and not pattern[layer % len(pattern)]

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
