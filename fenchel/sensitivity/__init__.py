"""How far an output can move: exact at a point, bounded over a ball, shown by a witness."""

from fenchel.sensitivity import bounds, layers, witness
from fenchel.sensitivity.attention_jacobian import (
    attention_jacobian,
    self_attention_jacobian,
)
from fenchel.sensitivity.autodiff import jacobian
from fenchel.sensitivity.certificate import Certificate, certify
from fenchel.sensitivity.finite_difference import difference_jacobian, remainder
from fenchel.sensitivity.golub_kahan import Bracket, spectral_norm
from fenchel.sensitivity.lipschitz_cone import Cone, cone
from fenchel.sensitivity.norms import influence, token_norm
from fenchel.sensitivity.operator import Matrix, Operator, identity
from fenchel.sensitivity.perturbation import Ball
from fenchel.sensitivity.spectrum import SingularValues, singular_values
from fenchel.sensitivity.witness import Witness

__all__ = [
    "Ball",
    "Bracket",
    "Certificate",
    "Cone",
    "Matrix",
    "Operator",
    "SingularValues",
    "Witness",
    "attention_jacobian",
    "bounds",
    "certify",
    "cone",
    "difference_jacobian",
    "identity",
    "influence",
    "jacobian",
    "layers",
    "remainder",
    "self_attention_jacobian",
    "singular_values",
    "spectral_norm",
    "token_norm",
    "witness",
]
