"""fenchel/steering/direction.py and ``Transformer.steered``: a direction is a bias of a block."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import fenchel
from fenchel.generation import GenerationSettings, Sampling, Scheduler, Steering, generate
from fenchel.generation.cpu_step import why_not_packed
from fenchel.model import ModelConfig, Transformer
from fenchel.steering import (
    Direction,
    difference_of_means,
    divergence,
    singular_directions,
    word_direction,
)
from fenchel.steering.direction import after_block
from fenchel.steering.strength import log_laws

M, L, V = 16, 3, 60
IDS = torch.tensor([[5, 9, 31, 2, 44, 17, 8, 3]])
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 1},
    "gpt2": {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    "parallel": {"parallel": True, "bias": True},
    "scaled": {"residual_scale": 0.5},
    "entmax": {"choice": "entmax"},
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def build(shape: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Transformer:
    usual = {"vocabulary": V, "context": 48, "width": M, "layers": L, "heads": 2}
    config = ModelConfig(**{**usual, **SHAPES[shape], **more})  # type: ignore[arg-type]
    model = Transformer(config, generator=torch.Generator().manual_seed(3)).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(0.3) if name.endswith("bias") else p.mul_(1.5)
    return model


def vector(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(M, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_hooks(model: Transformer, vectors: dict[int, Tensor], ids: Tensor) -> Tensor:
    """The logits with vectors added to the outputs of blocks."""
    handles = [
        model.blocks[layer - 1].register_forward_hook(lambda _, __, x, v=v: x + v)
        for layer, v in vectors.items()
    ]
    try:
        return model(ids)
    finally:
        for handle in handles:
            handle.remove()


@every_shape
@torch.no_grad()
def test_a_steered_model_adds_to_the_stream_after_its_blocks(shape: str) -> None:
    model, vectors = build(shape), {1: vector(1), L: vector(2)}
    before = model(IDS)
    steered = model.steered(vectors)
    torch.testing.assert_close(steered(IDS), by_hooks(model, vectors, IDS), rtol=0, atol=2e-5)
    assert float((steered(IDS) - before).abs().max()) > 0.1
    assert torch.equal(model(IDS), before)
    shared = {p.data_ptr() for p in model.parameters()}
    own = [name for name, p in steered.named_parameters() if p.data_ptr() not in shared]
    assert own == ["blocks.0.mlp.down.bias", f"blocks.{L - 1}.mlp.down.bias"]
    assert torch.equal(model.steered({2: torch.zeros(M)})(IDS), before)


@every_shape
def test_every_step_kind_decodes_a_steered_model(shape: str) -> None:
    model = build(shape)
    steered = model.steered({2: 2.0 * vector(1)})
    greedy: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0}
    plain = generate(model, IDS, **greedy)
    ids = IDS
    for _ in range(8):
        logits = by_hooks(model, {2: 2.0 * vector(1)}, ids)
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    assert not torch.equal(plain, ids)
    kinds = ["auto", "model"]
    kinds += ["cpu"] if shape not in ("entmax", "parallel", "scaled") else []
    kinds += ["packed"] if "cpu" in kinds and why_not_packed(steered) is None else []
    for step in kinds:
        assert torch.equal(generate(steered, IDS, step=step, **greedy), ids)
        # Neither decodes with the keys of the other, though decoders are kept between calls.
        assert torch.equal(generate(model, IDS, step=step, **greedy), plain)


def test_a_scheduler_serves_a_steered_model_as_generate_does() -> None:
    model = build().steered({1: vector(4)})
    settings = GenerationSettings(max_new_tokens=6, sampling=Sampling(temperature=0.0))
    scheduler, found = Scheduler(settings.decoder(model, rows=2)), list[int]()
    scheduler.submit(
        settings.request(IDS[0].tolist()), lambda update: found.extend(t.id for t in update.tokens)
    )
    while scheduler.busy:
        scheduler.turn()
    alone = generate(model, IDS, max_new_tokens=6, temperature=0.0)
    assert found == alone[0, IDS.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"norm_place": "post"}, "norm_place is 'post'"),
        ({"norm_place": "both"}, "norm_place is 'both'"),
        ({"experts": 2}, "experts"),
        ({"distinct_layers": 1}, "share a block"),
        ({"sigma_reparam": True}, "reparametrises"),
    ],
)
def test_a_block_whose_last_bias_is_not_the_stream_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    model = build(**settings)
    with pytest.raises(ValueError, match=reason):
        model.steered({1: vector()})
    if model.config.distinct_layers is not None:
        with pytest.raises(ValueError, match=reason):
            difference_of_means(model, [[1, 2]], [[3, 4]], layer=1)
        with pytest.raises(ValueError, match=reason):
            Direction(vectors={1: vector()}).hook_into(model)
        return
    # The stream itself can be steered all the same.
    direction = difference_of_means(model, [[1, 2]], [[3, 4]], layer=1)
    ids = IDS[0].tolist()
    with after_block(model, 1) as stream, torch.no_grad():
        stream.add = direction.vectors[1]
        wanted = model(IDS)[0].log_softmax(-1)
    torch.testing.assert_close(log_laws(model, ids, Steering(direction.scaled)), wanted)
    assert divergence(model, direction, ids).mean > 0
    direction.hook_into(model)
    with torch.no_grad():
        torch.testing.assert_close(model.with_context(64)(IDS)[0].log_softmax(-1), wanted)


def test_a_vector_of_another_width_or_layer_is_refused() -> None:
    for vectors in ({0: vector()}, {L + 1: vector()}, {1: torch.zeros(M + 1)}):
        with pytest.raises(ValueError, match=r"should be of \(16,\) after layer 1 to 3"):
            build().steered(vectors)
    with pytest.raises(ValueError, match="no layer 4"):
        difference_of_means(build(), [[1, 2]], [[3, 4]], layer=4)


@torch.no_grad()
def test_the_difference_of_means_is_that_of_the_streams() -> None:
    """The stream after layer 2 is the output of the model of two layers without its last norm."""
    model = build()
    shallow = build(layers=2, final_norm=False)
    shallow.load_state_dict(
        {name: model.state_dict()[name] for name in shallow.state_dict()}, strict=True
    )
    toward, away = [[5, 9, 31], [2, 44, 17, 8]], [[3, 3, 7, 9, 11]]
    means = [
        torch.stack(
            [shallow(torch.tensor([ids]), return_stream=True)[0, 1:].mean(0) for ids in texts]
        ).mean(0)
        for texts in (toward, away)
    ]
    found = difference_of_means(model, toward, away, layer=2)
    torch.testing.assert_close(found.vectors[2], means[0] - means[1])
    with pytest.raises(ValueError, match="needs two tokens"):
        difference_of_means(model, toward, [[4]], layer=2)


def test_a_direction_of_words_is_the_gradient_of_their_logits() -> None:
    model, words, against = build(dtype=torch.float64), [7, 21], [40]

    def gain(v_M: Tensor) -> float:
        with torch.no_grad():
            z = model.steered({2: v_M})(IDS)[0, 1:]
            return float(z[:, words].mean() - z[:, against].mean())

    h, basis = 1e-5, torch.eye(M, dtype=torch.float64)
    gradient = torch.tensor([(gain(h * e) - gain(-h * e)) / (2 * h) for e in basis])
    found = word_direction(model, IDS[0].tolist(), words, against, layer=2).vectors[2]
    cosine = torch.nn.functional.cosine_similarity(found.double(), gradient.double(), dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-6)
    assert gain(1e-3 * found.double()) > gain(torch.zeros(M, dtype=torch.float64))


@pytest.mark.parametrize("shape", ["llama", "gpt2", "entmax"])
def test_singular_directions_are_those_of_the_dense_derivative(shape: str) -> None:
    model, first, last = build(shape, torch.float64, initial="xavier"), 1, 3

    def after(v_M: Tensor) -> Tensor:
        found = list[Tensor]()
        with after_block(model, first) as stream:
            stream.add = v_M
            hook = model.blocks[last - 1].register_forward_hook(lambda *a: found.append(a[-1]))
            model(IDS)
            hook.remove()
        return found[0][0, 1:].flatten()

    J = torch.autograd.functional.jacobian(after, torch.zeros(M, dtype=torch.float64))
    _, values, right = torch.linalg.svd(J)
    draw = torch.Generator().manual_seed(0)
    found = singular_directions(model, IDS[0].tolist(), (first, last), 3, generator=draw)
    assert found.values == pytest.approx(values[:3].tolist(), rel=1e-4)
    for direction, wanted in zip(found.directions, right, strict=False):
        v = direction.vectors[first].double()
        cosine = torch.nn.functional.cosine_similarity(v, wanted, dim=0)
        assert abs(float(cosine)) == pytest.approx(1.0, abs=1e-4)
        assert float(v[v.abs().argmax()]) > 0.0
    for layers in ((2, 2), (3, 1)):
        with pytest.raises(ValueError, match="should come before"):
            singular_directions(model, [1, 2], layers)


def test_a_file_holds_the_direction_of_its_model_in_any_dtype(tmp_path: Path) -> None:
    model = build()
    made = difference_of_means(model, [[5, 9, 31]], [[2, 44]], layer=2).at(-1.25)
    made.save(tmp_path / "d.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        found = Direction.load(tmp_path / "d.safetensors", build().to(dtype))
        assert (found.strength, found.about) == (-1.25, made.about)
        assert torch.equal(found.vectors[2], made.vectors[2])
    with pytest.raises(ValueError, match="exists and is not overwritten"):
        made.save(tmp_path / "d.safetensors")


def spoil(path: Path, how: str) -> Transformer:
    """A file that is not a direction for the model that is returned."""
    model = build()
    made = difference_of_means(model, [[5, 9, 31]], [[2, 44]], layer=2)
    tensors = {"direction.2": made.vectors[2]}
    about = {
        "kind": "steering direction",
        "operation": "add",
        "site": "after block",
        "count_from": "1",
        "strength": "1.0",
        "weights": made.weights,
    }
    match how:
        case "width":
            tensors = {"direction.2": torch.zeros(M + 2)}
        case "weights":
            model = build("gpt2")
        case "nan":
            tensors["direction.2"][3] = torch.nan
        case "layer":
            tensors = {"direction.9": tensors["direction.2"]}
        case "names":
            tensors = {"jacobian.2": tensors["direction.2"]}
        case "dtype":
            tensors = {"direction.2": tensors["direction.2"].half()}
        case "operation":
            about["operation"] = "project"
        case "strength":
            about["strength"] = "much"
        case "endless":
            about["strength"] = "inf"
        case "pickle":
            torch.save(tensors, path)
            return model
    save_file(tensors, path, about)
    if how == "link":
        path.rename(path.with_name("moved"))
        path.symlink_to(path.with_name("moved"))
    return model


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("width", "made for a model of width 18 and this one has 16"),
        ("weights", "made with other weights"),
        ("nan", "nan or inf"),
        ("layer", "steers layer 9 and the model has 3"),
        ("names", "no steering direction"),
        ("dtype", "float32"),
        ("operation", "added after blocks"),
        ("strength", "no strength"),
        ("endless", "a strength of inf is not finite"),
        ("pickle", "not a safetensors file"),
        ("link", "not a plain file"),
    ],
)
def test_a_file_of_another_model_or_form_is_refused(
    how: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "d.safetensors"
    model = spoil(path, how)
    with pytest.raises((ValueError, OSError), match=sentence):
        Direction.load(path, model)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@torch.no_grad()
def test_a_steered_model_is_saved_with_the_direction_as_a_bias(shape: str, tmp_path: Path) -> None:
    """Llama has none unless its config says so; those of the other maps are then zero."""
    steered = build(shape).steered({1: vector(1)})
    fenchel.save(steered, None, tmp_path / shape)
    read = fenchel.checkpoints.load_model(tmp_path / shape)
    torch.testing.assert_close(read(IDS), steered(IDS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / shape).eval()
    assert theirs.config.model_type == shape
    torch.testing.assert_close(theirs(IDS).logits, steered(IDS), rtol=0, atol=2e-5)


def test_a_family_without_biases_cannot_hold_a_direction(tmp_path: Path) -> None:
    model = build(qk_norm=True)
    fenchel.save(model, None, tmp_path / "plain")
    with pytest.raises(ValueError, match="a direction is saved as a bias, and no Hugging Face"):
        fenchel.save(model.steered({1: vector(1)}), None, tmp_path / "steered")
    assert not (tmp_path / "steered").exists()
