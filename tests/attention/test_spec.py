"""fenchel/attention/spec.py: the record of a call stands for the four keywords."""

import inspect
from dataclasses import fields

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec, Causal, attend
from fenchel.attention.spec import AttentionKeywords
from fenchel.choice import Entmax


def test_a_spec_is_the_keywords_of_attend(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    spec = AttentionSpec(choice=Entmax(1.3), prior=Causal(), scale=0.7, softcap=3.0)
    wanted = attend(*qkv, choice=Entmax(1.3), prior=Causal(), scale=0.7, softcap=3.0)
    assert torch.equal(attend(*qkv, **spec), wanted)


def test_the_record_the_keywords_and_attend_have_the_same_fields_and_defaults() -> None:
    names = [field.name for field in fields(AttentionSpec)]
    assert names == list(AttentionKeywords.__annotations__) == list(AttentionSpec().keys())
    parameters = inspect.signature(attend).parameters
    for field in fields(AttentionSpec):
        assert getattr(AttentionSpec(), field.name) == parameters[field.name].default
