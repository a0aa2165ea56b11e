"""Queries, keys, values and a prior to outputs, with the derivative written out."""

from fenchel.attention.attend import attend, backend_support, selected_backend
from fenchel.attention.bias import ALiBi, RelativeBias, Sink, with_sink
from fenchel.attention.delta_rule import DeltaOutput, delta_rule, delta_rule_by_step
from fenchel.attention.derivative import (
    Gradients,
    Move,
    attend_jvp,
    attend_vjp,
    attend_with_tangent,
    self_attention,
    self_attention_vjp,
)
from fenchel.attention.differential import differential_attend
from fenchel.attention.forget import Forget
from fenchel.attention.linear import (
    LinearState,
    RandomFeatures,
    linear_attend,
    linear_step,
    random_features,
)
from fenchel.attention.mask import Causal, Global, Padding, Segments, Strided, Window
from fenchel.attention.prior import Dense, Prior
from fenchel.attention.rotary import (
    Angles,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    ProportionalScaling,
    YarnScaling,
    angles,
    rotary,
    rotate,
)
from fenchel.attention.spec import AttentionCall, AttentionSpec
from fenchel.attention.statistics import (
    HeadHealth,
    HeadPatterns,
    Health,
    Trace,
    attention_weights,
    entropy,
    head_entropy,
    head_patterns,
    health,
    health_per_head,
    scale_warning,
    trace,
)
from fenchel.attention.temperature import (
    adaptive_length,
    log_length,
    ratio_length,
    stepped_length,
)
from fenchel.attention.top_k import TopK, top_k

__all__ = [
    "ALiBi",
    "Angles",
    "AttentionCall",
    "AttentionSpec",
    "Causal",
    "DeltaOutput",
    "Dense",
    "Forget",
    "Global",
    "Gradients",
    "HeadHealth",
    "HeadPatterns",
    "Health",
    "LinearScaling",
    "LinearState",
    "Llama3Scaling",
    "LongRopeScaling",
    "Move",
    "NTKScaling",
    "Padding",
    "Prior",
    "ProportionalScaling",
    "RandomFeatures",
    "RelativeBias",
    "Segments",
    "Sink",
    "Strided",
    "TopK",
    "Trace",
    "Window",
    "YarnScaling",
    "adaptive_length",
    "angles",
    "attend",
    "attend_jvp",
    "attend_vjp",
    "attend_with_tangent",
    "attention_weights",
    "backend_support",
    "delta_rule",
    "delta_rule_by_step",
    "differential_attend",
    "entropy",
    "head_entropy",
    "head_patterns",
    "health",
    "health_per_head",
    "linear_attend",
    "linear_step",
    "log_length",
    "random_features",
    "ratio_length",
    "rotary",
    "rotate",
    "scale_warning",
    "selected_backend",
    "self_attention",
    "self_attention_vjp",
    "stepped_length",
    "top_k",
    "trace",
    "with_sink",
]
