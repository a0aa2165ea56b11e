"""Queries, keys, values and a prior to outputs, with the derivative written out."""

from fenchel.attention.attend import attend, serves
from fenchel.attention.derivative import Gradients, Move, attend_jvp, attend_vjp
from fenchel.attention.distance import by_distance
from fenchel.attention.habits import Habits, habits
from fenchel.attention.health import Health, health
from fenchel.attention.linear import (
    LinearState,
    RandomFeatures,
    linear_attend,
    linear_step,
    random_features,
)
from fenchel.attention.pattern import Global, Strided
from fenchel.attention.position import ALiBi, RelativeBias
from fenchel.attention.prior import Causal, Dense, Padding, Prior, Window
from fenchel.attention.rotary import NTK, Angles, Linear, Llama3, Yarn, angles, rotary, rotate
from fenchel.attention.self_attention import self_attention, self_attention_vjp
from fenchel.attention.sink import Sink, with_sink
from fenchel.attention.trace import Trace, trace
from fenchel.attention.weights import attention_weights

__all__ = [
    "NTK",
    "ALiBi",
    "Angles",
    "Causal",
    "Dense",
    "Global",
    "Gradients",
    "Habits",
    "Health",
    "Linear",
    "LinearState",
    "Llama3",
    "Move",
    "Padding",
    "Prior",
    "RandomFeatures",
    "RelativeBias",
    "Sink",
    "Strided",
    "Trace",
    "Window",
    "Yarn",
    "angles",
    "attend",
    "attend_jvp",
    "attend_vjp",
    "attention_weights",
    "by_distance",
    "habits",
    "health",
    "linear_attend",
    "linear_step",
    "random_features",
    "rotary",
    "rotate",
    "self_attention",
    "self_attention_vjp",
    "serves",
    "trace",
    "with_sink",
]
