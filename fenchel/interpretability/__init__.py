"""What a model has computed where: lenses, ablation, patching, the parts of a score."""

from fenchel.interpretability.ablation import Ablation, ablate
from fenchel.interpretability.hooked_model import HookedModel, can_be_hooked, hooked
from fenchel.interpretability.intervention import Site
from fenchel.interpretability.jacobian_lens import JacobianLens, LensError, fit_lens, lens_errors
from fenchel.interpretability.lens_laws import Agreement, LayerLaw, Lens, last_laws, lens
from fenchel.interpretability.patching import Patch, patch
from fenchel.interpretability.score_parts import has_score_parts, score_parts

__all__ = [
    "Ablation",
    "Agreement",
    "HookedModel",
    "JacobianLens",
    "LayerLaw",
    "Lens",
    "LensError",
    "Patch",
    "Site",
    "ablate",
    "can_be_hooked",
    "fit_lens",
    "has_score_parts",
    "hooked",
    "last_laws",
    "lens",
    "lens_errors",
    "patch",
    "score_parts",
]
