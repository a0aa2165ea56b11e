"""Interventions against module hooks: ours, and models that transformers builds by itself."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fenchel.checkpoints.directory import open_directory
from fenchel.checkpoints.tokenizer import read_tokenizer
from fenchel.data import train_tokenizer
from fenchel.inspection.foreign_model import ForeignModel, open_foreign
from fenchel.interpretability import Site, ablate, hooked, lens, patch
from fenchel.interpretability.ablation import head_counts
from fenchel.interpretability.intervention import Edit, EditedPass, effects, require_site
from fenchel.interpretability.patching import PATCHED
from tests.interpretability.conftest import T, build, draw, every_shape

H, G, D, WIDTH, VOCABULARY = 4, 2, 6, 24, 300
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES | {"num_key_value_heads": G}),
    "opt": (
        "OPTForCausalLM",
        SIZES | {"ffn_dim": 40, "word_embed_proj_dim": WIDTH, "init_std": 0.3},
    ),
}
"""Models of transformers whose projections of queries, keys and values are separate modules."""
Change = Callable[[Tensor], Tensor]


class Foreign:
    """A model of transformers opened by us, and the same model by itself, changed by hooks."""

    def __init__(self, family: str, folder: Path) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        name, sizes = FAMILIES[family]
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        kind(kind.config_class(**sizes)).save_pretrained(folder)
        words = ["the people of these States have peace and trade with every nation " * 4]
        train_tokenizer(words, VOCABULARY).save(str(folder / "tokenizer.json"))
        self.opened: ForeignModel = open_foreign(open_directory(folder), read_tokenizer(folder))
        self.own = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        inner = self.own.model
        self.blocks = inner.layers if family == "llama" else inner.decoder.layers
        self.groups = G if family == "llama" else H

    def modules(self, part: str, layer: int) -> nn.Module:
        """The module whose output, or input for "head", is a site; rotations come after q and k."""
        block = self.blocks[layer - 1]
        attention = block.self_attn
        out = getattr(attention, "o_proj", None) or attention.out_proj
        last_mlp = block.mlp if hasattr(block, "mlp") else block.fc2
        return {
            "q": attention.q_proj,
            "k": attention.k_proj,
            "v": attention.v_proj,
            "head": out,
            "attention": attention,
            "mlp": last_mlp,
            "stream": block,
        }[part]

    @contextmanager
    def changed(self, site: Site, change: Change) -> Iterator[None]:
        """Within, the own model has another value at a site."""
        module = self.modules(site.part, site.layer)

        def edit(x: Tensor) -> Tensor:
            x = x.clone()
            if site.head is not None:
                at = slice((site.head - 1) * D, site.head * D)
                x[..., at] = change(x[..., at])
            elif site.position is not None:
                x[:, site.position] = change(x[:, site.position])
            else:
                x = change(x)
            return x

        def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
            return (edit(args[0]), *args[1:])

        def after(_: nn.Module, __: Any, out: Any) -> Any:
            return (edit(out[0]), *out[1:]) if isinstance(out, tuple) else edit(out)

        handle = (
            module.register_forward_pre_hook(before)
            if site.part == "head"
            else module.register_forward_hook(after)
        )
        try:
            yield
        finally:
            handle.remove()

    def value(self, site: Site, ids: list[int]) -> Tensor:
        """The value of a site in a pass of the own model."""
        found: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            found.append(x.detach().clone())
            return x

        with self.changed(site, keep), torch.no_grad():
            self.own(torch.tensor([ids]))
        return found[0]

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        return self.own(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=FAMILIES)
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    return Foreign(request.param, tmp_path_factory.mktemp("models") / request.param)


def words(seed: int, count: int = T) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=g).tolist()


def loss_of(logits: Tensor, ids: list[int]) -> float:
    return float(nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])))


def test_every_site_of_a_transformers_model_is_patched_as_by_hooks(foreign: Foreign) -> None:
    clean, corrupt = words(1), words(1)
    corrupt[3:5] = words(2)[3:5]
    separate = hooked(foreign.opened).blocks[0].mlp is not None  # OPT has no module for its MLP
    parts = [part for part in PATCHED if part != "mlp" or separate]
    found = patch(foreign.opened, clean, corrupt, parts, answer=7, against=9)
    laws = [foreign.logits(ids)[-1] for ids in (clean, corrupt)]
    f_clean, f_corrupt = (float(law[7] - law[9]) for law in laws)
    assert found.clean == pytest.approx(f_clean, abs=1e-4)
    assert found.base == pytest.approx(f_corrupt, abs=1e-4)
    for effect in found.effects:
        value = foreign.value(effect.site, clean)
        with foreign.changed(effect.site, lambda _, value=value: value):
            law = foreign.logits(corrupt)[-1]
        share = (float(law[7] - law[9]) - f_corrupt) / (f_clean - f_corrupt)
        assert effect.exact == pytest.approx(share, abs=2e-3), effect.site
    sites = dict.fromkeys(("attention", "mlp"), 2)
    sites |= {"q": 2 * H, "head": 2 * H, "k": 2 * foreign.groups, "v": 2 * foreign.groups}
    sites["stream"] = 2 * (T - 3)
    assert {row.part: row.run for row in found.agreement} == {p: sites[p] for p in parts}


@pytest.mark.parametrize("to", ["zero", "mean"])
def test_every_part_of_a_transformers_model_is_removed_as_by_hooks(
    foreign: Foreign, to: str
) -> None:
    ids = words(5)

    def change(x: Tensor) -> Tensor:
        return torch.zeros_like(x) if to == "zero" else x.mean(1, keepdim=True).expand_as(x)

    base = loss_of(foreign.logits(ids), ids)
    found = ablate(foreign.opened, ids, to=to)
    assert found.base == pytest.approx(base, abs=1e-4)
    assert len(found.effects) >= 2 * H + 2
    for effect in found.effects:
        with foreign.changed(effect.site, change):
            loss = loss_of(foreign.logits(ids), ids)
        assert effect.exact == pytest.approx(loss - base, abs=2e-4), effect.site


def test_a_uniform_choice_is_that_of_queries_of_zero(foreign: Foreign) -> None:
    ids = words(5)
    found = {e.site: e.exact for e in ablate(foreign.opened, ids, to="uniform").effects}
    base = loss_of(foreign.logits(ids), ids)
    for site, exact in found.items():
        heads = [site.head] if site.head is not None else list(range(1, H + 1))
        with ExitStack() as stack:
            for head in heads:
                stack.enter_context(foreign.changed(Site("q", site.layer, head), torch.zeros_like))
            loss = loss_of(foreign.logits(ids), ids)
        assert exact == pytest.approx(loss - base, abs=2e-4), site


def test_the_lens_of_a_transformers_model(foreign: Foreign) -> None:
    """The stream after layer 1 through the last norm and head, and the model's own law."""
    ids = words(5)
    found = lens(foreign.opened, ids, top=4)
    stream = foreign.value(Site("stream", 1), ids)
    with foreign.changed(Site("stream", 2), lambda _: stream):
        law = foreign.logits(ids).softmax(-1)
    assert torch.equal(found.top[0], law.topk(4).indices)
    torch.testing.assert_close(found.probability[0], law.topk(4).values, rtol=1e-3, atol=1e-5)
    final = foreign.logits(ids).softmax(-1)
    assert torch.equal(found.top[1], final.topk(4).indices)
    fitted = lens(foreign.opened, ids, "jacobian")
    assert float(fitted.kl[0, 1:].mean()) < float(found.kl[0, 1:].mean())


def test_blocks_without_one_stream_or_without_gradients_get_a_sentence(tmp_path: Path) -> None:
    """Gemma 3n has two streams beside each other; HRM runs its first cycles without gradients."""
    import transformers

    ids = words(5)
    shapes: dict[str, dict[str, Any]] = {
        "Gemma3nForCausalLM": {
            "head_dim": 8,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "intermediate_size": [40, 40],
            "activation_sparsity_pattern": None,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "HrmTextForCausalLM": {},
    }
    for name, reason in (
        ("Gemma3nForCausalLM", "and not one stream"),
        ("HrmTextForCausalLM", "layer 1 of this model runs without gradients"),
    ):
        kind = getattr(transformers, name)
        config = kind.config_class(**{**SIZES, **shapes[name]})
        kind(config).save_pretrained(tmp_path / name)
        texts = ["the people of these States have peace " * 4]
        train_tokenizer(texts, VOCABULARY).save(str(tmp_path / name / "tokenizer.json"))
        found = open_foreign(open_directory(tmp_path / name), read_tokenizer(tmp_path / name))
        for look in (lambda one: ablate(one, ids), lambda one: lens(one, ids, "jacobian")):
            with pytest.raises(ValueError, match=reason):
                look(found)


def test_an_id_that_the_model_does_not_have_gets_a_sentence(foreign: Foreign) -> None:
    with pytest.raises(ValueError, match="gives the id 300 and the model has 300"):
        lens(foreign.opened, [3, VOCABULARY])
    with pytest.raises(ValueError, match="60"):
        lens(build(), [3, 60])


@every_shape
@torch.no_grad()
def test_a_pass_without_edits_is_the_pass_of_the_model(shape: str) -> None:
    model, ids = build(shape), draw(1)
    plain = model(torch.tensor([ids]))
    torch.testing.assert_close(hooked(model).logits(torch.tensor([ids]), EditedPass([])), plain)


@every_shape
@torch.no_grad()
def test_every_part_of_our_models_is_changed_as_by_hooks(shape: str) -> None:
    """Attention, MLP and stream by hooks on the modules; heads by the columns of W_o."""
    model, ids = build(shape), draw(1)
    shared = shape == "shared"
    base = model(torch.tensor([ids]))[0]

    def logits(edit: Edit) -> Tensor:
        return hooked(model).logits(torch.tensor([ids]), EditedPass([edit]))[0]

    def by_hook(module: nn.Module, layer: int, change: Change, *, before: bool = False) -> Tensor:
        count = 0

        def hook(_: nn.Module, args: Any, out: Any = None) -> Any:
            nonlocal count
            count += 1
            mine = not shared or count == layer
            x = args[0] if before else out
            new = change(x) if mine else x
            return (new, *args[1:]) if before else new

        register = module.register_forward_pre_hook if before else module.register_forward_hook
        handle = register(hook)
        try:
            return model(torch.tensor([ids]))[0]
        finally:
            handle.remove()

    for layer in (1, 2, 3):
        block = model.blocks[0 if shared else layer - 1]
        for part, module in (("attention", block.attention), ("mlp", block.mlp), ("stream", block)):
            edit = Edit(Site(part, layer), torch.zeros_like)
            torch.testing.assert_close(logits(edit), by_hook(module, layer, torch.zeros_like))
        width = block.attention.head_width

        def no_head(x: Tensor, width: int = width) -> Tensor:
            return torch.cat((0 * x[..., :width], x[..., width:]), -1)

        wanted = by_hook(block.attention.out, layer, no_head, before=True)
        found = logits(Edit(Site("head", layer, 1), torch.zeros_like))
        torch.testing.assert_close(found, wanted)
        assert float((found - base).abs().max()) > 1e-4
        at = Edit(Site("stream", layer, None, 3), lambda x: x + 1.0)

        def one(x: Tensor) -> Tensor:
            x = x.clone()
            x[:, 3] += 1.0
            return x

        torch.testing.assert_close(logits(at), by_hook(block, layer, one))


@pytest.mark.parametrize("part", ["q", "k", "v", "head", "choice"])
def test_an_estimate_recomputes_the_choice_and_linearises_the_rest(part: str) -> None:
    """With all blocks after the layer linear, an estimate is exact however large the change."""
    model, ids = build("qwen3", layers=1, final_norm=False), draw(1)
    model.blocks[0].mlp.down.weight.detach().zero_()
    subject = hooked(model)
    big: Change = lambda x: 3.0 * x + 2.0  # noqa: E731
    if part == "choice":
        edits = [Edit(Site("head", 1, 3), spec=lambda s: replace(s, scale=4.0))]
    else:
        edits = [Edit(Site(part, 1, 2), big)]
    found = effects(subject, ids, edits, lambda z: z[:, -1, 7] - z[:, 3, 11])
    assert found.effects[0].exact is not None
    assert abs(found.effects[0].exact) > 1e-3
    assert found.effects[0].estimate == pytest.approx(found.effects[0].exact, rel=1e-6)


@every_shape
def test_estimates_are_exact_for_small_changes(shape: str) -> None:
    model, ids, h = build(shape), draw(1), 1e-5
    parts = ("q", "k", "v", "head", "attention", "mlp", "stream")
    sites = [Site(p, n, 1 if p in ("q", "k", "v", "head") else None) for p in parts for n in (1, 2)]
    edits = [Edit(site, lambda x: x * (1.0 + h)) for site in sites]
    found = effects(hooked(model), ids, edits, lambda z: z.square().mean((1, 2)))
    for effect in found.effects:
        assert effect.exact is not None
        assert effect.estimate == pytest.approx(effect.exact, rel=1e-2, abs=1e-11), effect.site


def test_the_largest_estimates_are_run_and_come_first() -> None:
    model, ids = build(), draw(1)
    whole = ablate(model, ids, to="zero")
    assert all(effect.exact is not None for effect in whole.effects)
    some = ablate(model, ids, to="zero", exact=2)
    run = [effect for effect in some.effects if effect.exact is not None]
    assert len(run) == 6
    assert some.effects[:6] == run
    exact = {effect.site: effect.exact for effect in whole.effects}
    heads = [e for e in whole.effects if e.site.part == "head"]
    largest = sorted(heads, key=lambda e: -(abs(e.estimate) + e.spread))[:2]
    assert {e.site for e in run if e.site.part == "head"} == {e.site for e in largest}
    for effect in run:
        assert effect.exact == pytest.approx(exact[effect.site], abs=1e-9)
    by_part = {row.part: row for row in some.agreement}
    assert (by_part["head"].sites, by_part["head"].run) == (6, 2)
    assert by_part["head"].spearman is None


def test_the_spread_is_that_of_single_positions() -> None:
    """Removing a part at one position at a time gives the contributions that a loss may cancel."""
    model, ids = build(), draw(1)
    places = [Edit(Site("stream", 2, None, t), torch.zeros_like) for t in range(T)]
    whole = [Edit(Site("stream", 2), torch.zeros_like)]
    found = effects(hooked(model), ids, [*places, *whole], lambda z: z.square().mean((1, 2)))
    by_site = {e.site: e for e in found.effects}
    single = torch.tensor([by_site[e.site].estimate for e in places])
    together = by_site[whole[0].site]
    assert together.estimate == pytest.approx(float(single.sum()), rel=1e-5)
    assert together.spread == pytest.approx(float(single.norm()), rel=1e-5)


def test_a_stationary_loss_is_ranked_by_its_positions_too() -> None:
    """One change cancels over two positions and another, much smaller, does not."""
    model, ids = build(final_norm=False), draw(1)
    cancels = Edit(Site("stream", 3), lambda x: x + 1.0)
    small = Edit(Site("stream", 3, None, 0), lambda x: x + 0.1)

    def run(stationary: bool) -> Site:
        found = effects(
            hooked(model),
            ids,
            [cancels, small],
            lambda z: z[:, 0, 5] - z[:, 1, 5],
            stationary=stationary,
            exact=1,
        )
        return found.effects[0].site

    assert run(stationary=False) == small.site
    assert run(stationary=True) == cancels.site


def test_a_site_that_is_not_there_gets_a_sentence() -> None:
    subject = hooked(build("qwen3"))
    heads = head_counts(subject, [1, 2, 3])
    assert heads == dict.fromkeys((1, 2, 3), (4, 2))
    for site, sentence in (
        (Site("r", 1), "no part 'r'"),
        (Site("q", 4, 1), "no layer 4; the model has 1 to 3"),
        (Site("q", 1, 5), "there is no query 1.5; a layer has 4"),
        (Site("k", 1, 3), "there is no key 1.3; a layer has 2"),
        (Site("mlp", 1, 1), "there is no mlp 1.1"),
        (Site("stream", 1, None, 12), "no position 12 in a text of 12"),
    ):
        with pytest.raises(ValueError, match=sentence):
            require_site(subject, site, heads, 12)
    with pytest.raises(ValueError, match="no site"):
        effects(subject, draw(1), [], lambda z: z[:, 0, 0])
