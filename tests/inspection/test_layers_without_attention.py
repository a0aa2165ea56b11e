"""Models in which some layers give no weights to keys: Qwen3.5, three gated DeltaNets to attention.

Their blocks are measured like all others; heads are those of the layers that attend.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fenchel.checkpoints.directory import open_directory
from fenchel.checkpoints.tokenizer import read_tokenizer
from fenchel.cli import main
from fenchel.inspection import inspect
from fenchel.inspection.foreign_model import open_foreign
from fenchel.inspection.our_model import open_known, record_pass
from fenchel.inspection.trace import InspectedModel
from fenchel.interpretability import ablate, lens, patch
from fenchel.interpretability.intervention import Site
from fenchel.model import ModelConfig, Transformer
from tests.model.families.conftest import (
    ALL,
    GEMMA4,
    GROUPED,
    LINEAR_LAYER,
    NEAR,
    distinctive,
    stirred,
)

TEXT = "w3 w7 w20 w9 w3 w44 w60"
HYBRID: dict[str, Any] = {
    **GROUPED,
    "num_attention_heads": 6,
    "head_dim": 8,
    "layer_types": [LINEAR_LAYER, ALL, LINEAR_LAYER],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
SHARING: dict[str, Any] = {
    **GEMMA4,
    "layer_types": [NEAR, ALL, NEAR, NEAR, ALL],
    "hidden_size_per_layer_input": 10,
    "num_kv_shared_layers": 2,
}


def write(folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}TextConfig")(**settings)
    stirred(getattr(transformers, f"{kind}ForCausalLM")(config)).save_pretrained(folder)
    distinctive(folder, template=False)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"), "Qwen3_5", HYBRID)


def opened(folder: Path, reader: Callable[..., InspectedModel]) -> InspectedModel:
    return reader(open_directory(folder), read_tokenizer(folder))


@pytest.mark.parametrize(("kind", "settings"), [("Qwen3_5", HYBRID), ("Gemma4", SHARING)])
def test_an_inspection_is_the_same_through_transformers(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path, kind, settings)
    mine, theirs = (
        inspect(opened(folder, reader), str(folder / "text.txt"), iterations=30)
        for reader in (open_known, open_foreign)
    )
    assert mine.subject["layers"] == theirs.subject["layers"] == len(mine.layers)
    assert [(h.layer, h.head) for h in mine.heads] == [(h.layer, h.head) for h in theirs.heads]
    for ours, other in zip(mine.heads, theirs.heads, strict=True):
        assert ours.entropy.mean == pytest.approx(other.entropy.mean, rel=1e-4)
        assert ours.sigma["qkv"].lower == pytest.approx(other.sigma["qkv"].lower, rel=1e-4)
    for one, two in zip(mine.layers, theirs.layers, strict=True):
        assert one.block.lower == pytest.approx(two.block.lower, rel=1e-3)
    assert mine.network is not None
    assert theirs.network is not None
    assert mine.network.stream.lower == pytest.approx(theirs.network.stream.lower, rel=1e-3)


@pytest.mark.parametrize("reader", [open_known, open_foreign])
def test_the_network_is_the_product_of_all_its_blocks(
    hybrid: Path, reader: Callable[..., InspectedModel]
) -> None:
    """The derivative of the last stream in the first one, column by column in float64."""
    model = opened(hybrid, reader)
    found = inspect(model, str(hybrid / "text.txt"), iterations=60)
    assert {head.layer for head in found.heads} == {2}
    assert [layer.layer for layer in found.layers] == [1, 2, 3]
    assert found.maps.layers == [2]
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float64)
    first: Any = theirs.model.layers[0]
    ids = torch.tensor([model.tokenizer.encode_whole(TEXT)])
    streams = theirs.model(ids, output_hidden_states=True).hidden_states
    theirs.model.norm = torch.nn.Identity()

    def last(x: torch.Tensor) -> torch.Tensor:
        handle = first.register_forward_pre_hook(lambda _, args: (x.view_as(args[0]), *args[1:]))
        try:
            out: torch.Tensor = theirs.model(ids).last_hidden_state
        finally:
            handle.remove()
        return out.flatten()

    J = torch.autograd.functional.jacobian(last, streams[0].detach().flatten())
    assert isinstance(J, torch.Tensor)
    norm = float(torch.linalg.matrix_norm(J, 2))
    assert found.network is not None
    assert found.network.stream.lower == pytest.approx(norm, rel=1e-3)


def test_heads_are_removed_and_patched_where_there_are_any(hybrid: Path) -> None:
    ids = [3, 7, 20, 9, 44]
    mine, theirs = (opened(hybrid, reader) for reader in (open_known, open_foreign))
    found, other = (ablate(model, ids, to="zero") for model in (mine, theirs))
    sizes = {str(e.site): e.exact for e in found.effects}
    assert sizes.keys() == {
        *(f"head 2.{n}" for n in range(1, 7)),
        *("attention 1", "attention 2", "attention 3", "mlp 1", "mlp 2", "mlp 3"),
    }
    for effect in other.effects:  # transformers does not tell which module stands for attention
        assert effect.exact == pytest.approx(sizes[str(effect.site)], abs=1e-4)
    moved = patch(mine, ids, [3, 8, 20, 9, 44], ["q", "k", "stream"])
    assert {str(e.site) for e in moved.effects if e.site.part == "k"} == {"key 2.1", "key 2.2"}
    again = patch(theirs, ids, [3, 8, 20, 9, 44], ["q", "k", "stream"])
    shares = {str(e.site): e.exact for e in again.effects}
    for effect in moved.effects:
        assert shares[str(effect.site)] == pytest.approx(effect.exact, abs=1e-3)
    assert lens(theirs, ids, kind="logit") is not None
    uniform = ablate(mine, ids, to="uniform")
    assert {e.site.layer for e in uniform.effects} == {2}


def test_keys_are_patched_in_layers_that_have_more_of_them(tmp_path: Path) -> None:
    """The full layers of a Gemma 4 may have fewer heads of keys than the others."""
    settings = {**SHARING, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    settings |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    model = opened(write(tmp_path, "Gemma4", settings), open_known)
    found = patch(model, [3, 7, 20, 9], [3, 8, 20, 9], ["k"])
    layers = [e.site.layer for e in found.effects]
    assert [layers.count(n) for n in range(1, 6)] == [2, 1, 2, 2, 1]


def test_what_has_no_heads_gets_one_sentence(
    hybrid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = opened(hybrid, open_known)
    with pytest.raises(ValueError, match="the chosen layers give no weights to keys; layers 2 "):
        inspect(model, str(hybrid / "text.txt"), layers=[1, 3])
    with pytest.raises(ValueError, match=r"head 1\.1: layer 1 gives no weights to keys"):
        ablate(model, [3, 4, 5], sites=[Site("head", 1, 1)])
    with pytest.raises(ValueError, match="layer 1 gives no weights to keys; it has no choice"):
        ablate(model, [3, 4, 5], sites=[Site("attention", 1)], to="uniform")
    argument = [str(hybrid), "--text", str(hybrid / "text.txt"), "--json"]
    assert main(["certify", *argument, "--radius", "0.01"]) == 0
    layers = json.loads(capsys.readouterr().out)["certificates"]["layers"]
    assert [one["refused"] is None for one in layers] == [False, True, False]
    assert layers[0]["refused"].startswith("layer 1 is a gated DeltaNet")
    only = ModelConfig(vocabulary=16, layers=2, heads=2, width=32, delta_layers=(1,))
    with pytest.raises(ValueError, match="every layer of this model is a gated DeltaNet"):
        record_pass(Transformer(only), torch.tensor([[1, 2]]))
