"""What a model has computed where: lenses on its stream, ablation, patching between prompts."""

from fenchel.interpretability.ablation import Ablation, ablate
from fenchel.interpretability.hooked_model import HookedModel, hooked
from fenchel.interpretability.intervention import Site
from fenchel.interpretability.jacobian_lens import JacobianLens, fit_lens
from fenchel.interpretability.lens_laws import Agreement, Lens, lens
from fenchel.interpretability.patching import Patch, patch

__all__ = [
    "Ablation",
    "Agreement",
    "HookedModel",
    "JacobianLens",
    "Lens",
    "Patch",
    "Site",
    "ablate",
    "fit_lens",
    "hooked",
    "lens",
    "patch",
]
