"""Transformers whose attention can be derived, measured and steered.

The most used names of the packages are attributes of ``fenchel`` itself, and so are the packages.
Each is imported at its first use, so that ``import fenchel`` takes no time and loads no torch:

    >>> import torch, fenchel
    >>> fenchel.Sparsemax().weights(torch.tensor([1.0, 0.8, -3.0]))
    tensor([0.6000, 0.4000, 0.0000])
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    >>> fenchel.attend(q, k, v, choice=fenchel.Entmax(1.5), prior=fenchel.Causal()).shape
    torch.Size([1, 2, 5, 8])
    >>> fenchel.sensitivity.bounds.norm_layer  # doctest: +ELLIPSIS
    <function norm_layer at ...>
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Type checkers and editors read the imports; at run time __getattr__ reads the table below them.
# tests/test_public_names.py compares the two.
if TYPE_CHECKING:
    from fenchel import attention as attention
    from fenchel import checkpoints as checkpoints
    from fenchel import choice as choice
    from fenchel import data as data
    from fenchel import evaluate as evaluate
    from fenchel import generation as generation
    from fenchel import hf as hf
    from fenchel import inspection as inspection
    from fenchel import interpretability as interpretability
    from fenchel import model as model
    from fenchel import optim as optim
    from fenchel import pipeline as pipeline
    from fenchel import report as report
    from fenchel import sensitivity as sensitivity
    from fenchel import steering as steering
    from fenchel import train as train
    from fenchel.attention import ALiBi as ALiBi
    from fenchel.attention import AttentionSpec as AttentionSpec
    from fenchel.attention import Causal as Causal
    from fenchel.attention import Dense as Dense
    from fenchel.attention import Global as Global
    from fenchel.attention import Padding as Padding
    from fenchel.attention import Prior as Prior
    from fenchel.attention import RelativeBias as RelativeBias
    from fenchel.attention import Segments as Segments
    from fenchel.attention import Sink as Sink
    from fenchel.attention import Window as Window
    from fenchel.attention import attend as attend
    from fenchel.attention import attend_jvp as attend_jvp
    from fenchel.attention import rotary as rotary
    from fenchel.checkpoints import load as load
    from fenchel.checkpoints import save as save
    from fenchel.choice import Capped as Capped
    from fenchel.choice import Entmax as Entmax
    from fenchel.choice import Hard as Hard
    from fenchel.choice import Sigmoid as Sigmoid
    from fenchel.choice import Softmax as Softmax
    from fenchel.choice import Sparsemax as Sparsemax
    from fenchel.choice import kkt as kkt
    from fenchel.generation import generate as generate
    from fenchel.hf import attach as attach
    from fenchel.inspection import certify_decision as certify_decision
    from fenchel.inspection import certify_substitutions as certify_substitutions
    from fenchel.inspection import inspect as inspect
    from fenchel.interpretability import ablate as ablate
    from fenchel.interpretability import lens as lens
    from fenchel.interpretability import patch as patch
    from fenchel.model import ModelConfig as ModelConfig
    from fenchel.model import Transformer as Transformer
    from fenchel.optim import Muon as Muon
    from fenchel.optim import ScoreDescent as ScoreDescent
    from fenchel.optim import ScoreTrust as ScoreTrust
    from fenchel.optim import attention_pairs as attention_pairs
    from fenchel.sensitivity import attention_jacobian as attention_jacobian
    from fenchel.sensitivity import certify as certify
    from fenchel.sensitivity import jacobian as jacobian
    from fenchel.sensitivity import self_attention_jacobian as self_attention_jacobian
    from fenchel.sensitivity import singular_values as singular_values
    from fenchel.sensitivity import spectral_norm as spectral_norm

_NAMES = {
    "attention": "ALiBi AttentionSpec Causal Dense Global Padding Prior RelativeBias Segments Sink "
    "Window attend attend_jvp rotary",
    "checkpoints": "load save",
    "choice": "Capped Entmax Hard Sigmoid Softmax Sparsemax kkt",
    "generation": "generate",
    "hf": "attach",
    "inspection": "certify_decision certify_substitutions inspect",
    "interpretability": "ablate lens patch",
    "model": "ModelConfig Transformer",
    "optim": "Muon ScoreDescent ScoreTrust attention_pairs",
    "sensitivity": "attention_jacobian certify jacobian self_attention_jacobian singular_values "
    "spectral_norm",
}
_PACKAGE_OF = {name: package for package, names in _NAMES.items() for name in names.split()}
_PACKAGES = frozenset(
    "attention checkpoints choice data evaluate generation hf inspection interpretability model "
    "optim pipeline report sensitivity steering train".split()
)

__all__ = ["__version__", *_PACKAGE_OF]

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name, or a package, at its first use."""
        from importlib import import_module

        if name in _PACKAGES:
            return import_module(f"fenchel.{name}")
        if name not in _PACKAGE_OF:
            sentence = f"module 'fenchel' has no attribute {name!r}"
            if not name.startswith("_"):  # which tools look for
                from fenchel.config import did_you_mean

                known = [*_PACKAGE_OF, *_PACKAGES]
                by_case = {one.lower(): one for one in known}
                near = by_case.get(name.lower())
                hint = f"did you mean {near!r}?" if near else did_you_mean(name, known)
                sentence = f"{sentence}; {hint}"
            raise AttributeError(sentence)
        value = getattr(import_module(f"fenchel.{_PACKAGE_OF[name]}"), name)
        globals()[name] = value  # the next use is an ordinary attribute
        return value

    def __dir__() -> list[str]:
        """The public names, the packages, and the attributes of every module."""
        own = (name for name in globals() if name.startswith("__"))
        return sorted({*own, *__all__, *_PACKAGES})
