"""fenchel/evaluate/score.py: the mean KL between two models on documents."""

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from fenchel.data import DocumentIds, PackedBatches
from fenchel.evaluate import document_kl
from fenchel.evaluate.score import changed_laws
from fenchel.model import ModelConfig, Transformer

DOCUMENTS = PackedBatches(
    DocumentIds(np.arange(20) % 11, np.array([0, 7, 12, 20])), batch=1, context=12, seed=0
)


def model(seed: int) -> Transformer:
    config = ModelConfig(
        vocabulary=11, context=12, width=16, heads=2, layers=1, initial="normal", initial_std=0.5
    )
    return Transformer(config, generator=torch.Generator().manual_seed(seed))


def test_the_divergence_is_that_of_torch_over_every_scored_token() -> None:
    new, old = model(0), model(1)
    each = []
    with torch.no_grad():
        for start, end in ((0, 7), (7, 12), (12, 20)):  # every document alone
            ids = torch.arange(start, end)[None] % 11
            laws = (Categorical(logits=m(ids[:, :-1])[0].double()) for m in (new, old))
            each += kl_divergence(*laws).tolist()
    assert document_kl(new, old, DOCUMENTS) == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert document_kl(new, new, DOCUMENTS) == 0.0
    found = changed_laws(new, old, DOCUMENTS, count=4, limit=100)
    assert [law.kl for law in found] == pytest.approx(sorted(each)[:-5:-1], rel=1e-4)
    for law in found:
        assert len(law.base) == len(law.tuned) == 3
        assert law.base != law.tuned
        assert law.tuned[0][1] >= law.tuned[1][1] >= law.tuned[2][1]
