"""Queries, keys, values and a prior to outputs, with the derivative written out."""

from fenchel.attention.attend import attend, serves
from fenchel.attention.derivative import Gradients, Move, attend_jvp, attend_vjp
from fenchel.attention.health import Health, health
from fenchel.attention.prior import Causal, Dense, Padding, Prior, Window
from fenchel.attention.rotary import NTK, Angles, Linear, Llama3, Yarn, angles, rotary, rotate
from fenchel.attention.self_attention import self_attention, self_attention_vjp

__all__ = [
    "NTK",
    "Angles",
    "Causal",
    "Dense",
    "Gradients",
    "Health",
    "Linear",
    "Llama3",
    "Move",
    "Padding",
    "Prior",
    "Window",
    "Yarn",
    "angles",
    "attend",
    "attend_jvp",
    "attend_vjp",
    "health",
    "rotary",
    "rotate",
    "self_attention",
    "self_attention_vjp",
    "serves",
]
