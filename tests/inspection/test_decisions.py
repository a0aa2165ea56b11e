"""fenchel/inspection/decisions.py: decisions of models, attacked within their certified radii."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel.data import train_tokenizer
from fenchel.inspection import certify_text_substitutions, decisions, open_model
from fenchel.inspection.decisions import (
    certify_decision,
    certify_text_decisions,
    length,
    network_of,
)
from fenchel.model import Transformer
from fenchel.sensitivity.decision import DecisionBound, DecisionNetwork, OutOfTime
from tests.inspection.test_certificates import model_of

IDS = torch.tensor([1, 7, 30, 2])
COVERED: dict[str, dict[str, Any]] = {
    "default": {"mlp": "swiglu"},
    "grouped rotary": {"heads": 4, "kv_heads": 2, "head_size": 4},
    "learned, layer norm": {"positions": "learned", "norm": "layer", "bias": True, "mlp": "gelu"},
    "alibi": {"positions": "alibi"},
    "tanh GELU": {"mlp": "gelu_tanh"},
    "window": {"windows": (3,)},
    "entmax": {"choice": "entmax"},
}


def logits_of(model: Transformer, change: Tensor) -> Tensor:
    """The model's own logits of the last position with a change of its first block's input."""
    n = len(change)
    handle = model.blocks[0].register_forward_pre_hook(
        lambda _module, given: (given[0] + change.to(given[0])[None], *given[1:])
    )
    try:
        with torch.no_grad():
            logits: Tensor = model(IDS[None, :n])[0, -1]
            return logits
    finally:
        handle.remove()


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize(
    ("norm", "dtype"), [("all", "float64"), ("token", "float32"), ("one", "float32")]
)
def test_no_attack_changes_the_models_own_decision_within_the_radius(
    name: str, norm: str, dtype: str
) -> None:
    model = model_of(**COVERED[name]).to(getattr(torch, dtype))
    found = certify_decision(model, IDS, norm=norm, positions=[1, 3])
    assert bool((found.certified > 0).all())
    assert bool((found.certified <= found.attacked).all())
    generator = torch.Generator().manual_seed(0)
    for index, one in enumerate(found.positions):
        t = one.position
        kept, size = found.replay(index)
        assert kept != one.kept
        assert size <= one.attacked
        assert one.witness is not None
        X = found.embeddings[: t + 1]
        own = logits_of(model, 1.0001 * one.witness)
        assert int(own.argmax()) != one.kept[0]  # the witness works on the model itself
        inside = [one.witness, *torch.randn(6, t + 1, X.shape[1], generator=generator).double()]
        for move in inside:
            if norm == "one":
                move = torch.cat((0.0 * move[:-1], move[-1:]))
            move = move * (one.certified / length(move, norm))
            assert int(logits_of(model, move).argmax()) == one.kept[0]


def test_the_network_written_out_is_the_model() -> None:
    for settings in COVERED.values():
        model = model_of(**settings)
        network, X = network_of(model, IDS)
        torch.testing.assert_close(network(X), model(IDS[None])[0], atol=1e-9, rtol=1e-9)


def test_a_budget_ends_the_setup_with_an_answer() -> None:
    model, stages = model_of(), []
    found = fenchel.certify_decision(
        model, IDS, norm="all", budget=1e-9, progress=lambda *counts: stages.append(counts)
    )
    whole = fenchel.certify_decision(model, IDS, norm="all")
    assert not found.complete
    assert whole.complete
    assert stages[0] == ("setup", 0, 0)
    for cut, one in zip(found.positions, whole.positions, strict=True):
        assert not cut.searched
        assert not cut.attempted
        assert (cut.certified, cut.attacked, cut.ratio) == (0.0, math.inf, 0.0)
        assert (cut.kept, cut.margin) == (one.kept, one.margin)
        assert one.searched
        assert one.attempted


def test_a_budget_certifies_short_prefixes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With enough of it the radii are those of one setup, up to a step of their grid."""
    model, lengths = model_of(), []
    whole = certify_decision(model, IDS, norm="all")

    def setup(network: DecisionNetwork, X: Tensor, **given: Any) -> DecisionBound:
        lengths.append(len(X))
        if len(X) > 2:
            raise OutOfTime
        return DecisionBound(network, X, **given)

    monkeypatch.setattr(decisions, "_SHORTEST", 1)
    in_turn = certify_decision(model, IDS, norm="all", budget=1e3)
    assert in_turn.complete
    torch.testing.assert_close(in_turn.certified, whole.certified, rtol=0.05, atol=0.0)
    monkeypatch.setattr(decisions, "DecisionBound", setup)
    cut = certify_decision(model, IDS, norm="all", budget=1e3)
    assert lengths == [1, 2, 4]
    assert [one.searched for one in cut.positions] == [True, True, False, False]
    assert not cut.complete


def test_kept_tokens_stay_a_set() -> None:
    found = certify_decision(model_of(), IDS[None], norm="one", keep=2, positions=[3])
    (one,) = found.positions
    assert len(one.kept) == 2
    assert 0.0 < one.certified <= one.attacked
    assert set(found.replay(0)[0]) != set(one.kept)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "post norm": ({"norm_place": "post"}, "norm_place='post'"),
    "alpha learned": ({"choice": "entmax", "entmax_alpha_learned": True}, "Entmax and learns"),
    "sparsemax": ({"choice": "sparsemax"}, "chooses by"),
    "normalised queries": ({"qk_norm": True}, "normalises queries"),
    "parallel": ({"parallel": True}, "parallel"),
    "relu": ({"mlp": "relu"}, "activation 'relu'"),
    "encoder": ({"kind": "encoder"}, "kind 'encoder'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_by_name(name: str) -> None:
    settings, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        certify_decision(model_of(**settings), IDS, norm="all")


def test_a_classifier_is_refused_by_its_name(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=300, intermediate_size=8, max_position_embeddings=8, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    train_tokenizer(["peace and trade"], 280).save(tmp_path / "tokenizer.json")
    model = open_model(tmp_path)
    for certify in (
        partial(certify_text_decisions, model),
        partial(certify_text_substitutions, model, synonyms={}),
    ):
        with pytest.raises(ValueError, match="is a BertForSequenceClassification, whose class"):
            certify(source="sotu")


def test_wrong_arguments_are_refused() -> None:
    model = model_of()
    for given, sentence in (
        ({"norm": "fro"}, "norm all, token, one"),
        ({"norm": "all", "keep": 0}, "keep is 1 to 39"),
        ({"norm": "all", "positions": [9]}, "positions are 0 to 3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            certify_decision(model, IDS, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one sequence"):
        certify_decision(model, IDS.view(2, 2), norm="all")
