"""fenchel/optim/score/output_change.py: outputs recomputed from the weights by hooks of our own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fenchel.model import ModelConfig, Transformer
from fenchel.model.transformer import meta_model
from fenchel.optim import CombinedOptimiser, ScoreTrust, adamw, attention_pairs
from fenchel.optim.score.output_change import LEAST_GAIN, TOKENS, OutputProbes

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=24, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    for p in model.parameters():  # biases are zero in a fresh one
        p.data += 0.1 * torch.randn(p.shape)
    return model


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


class Ours(nn.Module):
    """A model of fenchel as the trainer calls it: hidden states, then the product with the head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model.logits(self.model(ids, return_hidden=True))
        return logits


Limited = Callable[..., tuple[nn.Module, ScoreTrust]]


@pytest.fixture
def limited(small: Any) -> Limited:
    """A model by name, and ScoreTrust around an AdamW that is far too fast for it."""

    def build(kind: str, change: float = 0.03, rate: float = 0.1) -> tuple[nn.Module, ScoreTrust]:
        foreign = {"gpt2": gpt2, "llama": llama}
        if kind in foreign:
            model = watched = foreign[kind]()
        else:
            settings: dict[str, Any] = {
                "ours": {},
                "untied": {"tied": False, "kv_heads": 2},
                "biased": {"bias": True, "norm": "layer", "positions": "learned", "mlp": "gelu"},
            }[kind]
            watched = small(**settings)
            model = Ours(watched)
        inner = torch.optim.AdamW(model.parameters(), lr=rate)
        trust = ScoreTrust(inner, attention_pairs(watched), 10.0, 1e6,
                           model=watched, output_change=change)  # fmt: skip
        return model, trust

    return build


KINDS = ["ours", "untied", "biased", "gpt2", "llama"]
every_kind = pytest.mark.parametrize("kind", KINDS)
Maps = dict[str, tuple[Any, Tensor]]


def linear_inputs(model: nn.Module, ids: Tensor) -> Maps:
    """The module and the float64 input of every linear map and embedding, and of the LM head."""
    found: Maps = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":

            def keep(module: nn.Module, args: Any, name: str = name) -> None:
                x = args[0]
                found[name] = module, x.double() if x.is_floating_point() else x

            handles.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        if isinstance(model, Ours):
            found["lm_head"] = None, model.model(ids, return_hidden=True).double()
        else:
            model(ids)
    for handle in handles:
        handle.remove()
    return found


def outputs(model: nn.Module, inputs: Maps) -> dict[str, Tensor]:
    """By the present weights, without the rows of queries and keys."""
    found = {}
    for name, (module, x) in inputs.items():
        if name.endswith(("q_proj", "k_proj")):
            continue
        weight = (model.model.lm_head_weight if module is None else module.weight).detach()
        if isinstance(module, nn.Embedding):
            y = weight.double()[x]
        else:
            y = x @ (weight.double() if type(module).__name__ == "Conv1D" else weight.double().T)
            if getattr(module, "bias", None) is not None:
                y = y + module.bias.detach().double()
        if name.endswith(("qkv", "c_attn")):
            values = 16 if y.shape[-1] == 64 else 32  # of two groups or four heads, 8 wide
            y = y[..., -values:]
        found[name] = y
    return found


def backward_pass(model: nn.Module, ids: Tensor) -> None:
    out = model(ids)
    logits = getattr(out, "logits", out)
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


@every_kind
def test_no_output_moves_by_more_than_its_share(kind: str, limited: Limited, tokens: Any) -> None:
    model, trust = limited(kind)
    reached = []
    for step in range(3):
        ids = tokens(step, 5)  # 120 tokens, all of which are in the sample
        assert ids.numel() <= TOKENS
        inputs = linear_inputs(model, ids)
        before = outputs(model, inputs)
        backward_pass(model, ids)
        trust.step()
        model.zero_grad()
        for name, y in outputs(model, inputs).items():
            moved = float((y - before[name]).square().mean().sqrt())
            size = float(before[name].square().mean().sqrt())
            x = inputs[name][1]
            if x.is_floating_point():
                size = max(size, LEAST_GAIN * float(x.square().mean().sqrt()))
            assert moved <= 0.03 * size * (1 + 1e-4), (name, moved / size)
            reached.append(moved / size)
    assert max(reached) > 0.03 * (1 - 1e-4)
    assert sum(r > 0.0299 for r in reached) > len(reached) / 2


@every_kind
def test_a_step_within_the_limits_keeps_its_bits(kind: str, limited: Limited, tokens: Any) -> None:
    model, trust = limited(kind, change=1e3, rate=1e-3)
    other = copy.deepcopy(model)
    bare = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for step in range(2):
        for one, optimiser in ((model, trust), (other, bare)):
            backward_pass(one, tokens(step))
            optimiser.step()
            one.zero_grad()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    shares = [float(change.share) for change in trust.output_stats().values()]
    assert set(shares) == {1.0}


@pytest.mark.parametrize("kind", ["biased", "llama", "massive"])
def test_no_output_of_a_norm_moves_by_more_than_its_share(
    kind: str, limited: Limited, tokens: Any
) -> None:
    """Also where one entry is far larger than the others, a massive activation."""
    model, trust = limited("biased" if kind == "massive" else kind)
    if kind == "massive":
        with torch.no_grad():
            next(m for m in model.modules() if isinstance(m, nn.Embedding)).weight[:, 3] += 30.0
    norms = {n: m for n, m in model.named_modules() if "Norm" in type(m).__name__}
    inputs: dict[str, Tensor] = {}
    for name, module in norms.items():
        module.register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0]}))
    ids = tokens(0, 5)
    assert ids.numel() <= TOKENS
    backward_pass(model, ids)
    given = {name: x.detach() for name, x in inputs.items()}
    with torch.no_grad():
        before = {name: module(given[name]).double() for name, module in norms.items()}
        trust.step()
        for name, module in norms.items():
            moved = (module(given[name]).double() - before[name]).square().mean().sqrt()
            share = float(moved / before[name].square().mean().sqrt())
            assert share == pytest.approx(0.03, rel=1e-3), name


@pytest.mark.parametrize("values", ["drawn", "nan", "none"])
@pytest.mark.parametrize("plus", [0.0, 1.0])
def test_a_gain_of_one_and_the_weight_is_known(small: Any, plus: float, values: str) -> None:
    """Whatever the parameters hold: those of several processes are received later."""
    model = small(norm_plus_one=bool(plus))
    if values == "nan":
        for p in model.parameters():
            p.data.fill_(torch.nan)
    if values == "none":
        model = meta_model(model.config)
    probes = OutputProbes(model)
    norms = [layer for layer in probes.layers if layer.kind == "norm"]
    assert len(norms) == 5
    assert {layer.plus for layer in norms} == {plus}


def test_a_zero_output_leaves_zero_and_stays_small(tokens: Any) -> None:
    config = ModelConfig(vocabulary=31, context=24, width=32, layers=1, heads=4)
    model = Ours(Transformer(config, generator=torch.Generator().manual_seed(0)))
    out = model.model.blocks[0].attention.out
    assert not out.weight.any()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    pairs = attention_pairs(model.model)
    trust = ScoreTrust(inner, pairs, model=model.model, output_change=0.03)
    ids = tokens(0, 5)
    inputs = linear_inputs(model, ids)
    backward_pass(model, ids)
    trust.step()
    x = inputs["model.blocks.0.attention.out"][1]
    y = x @ out.weight.detach().double().T
    share = float(y.square().mean().sqrt() / x.square().mean().sqrt())
    assert share == pytest.approx(0.03 * LEAST_GAIN, rel=1e-4)


def test_what_is_not_called_is_measured_for_white_inputs() -> None:
    """nn.MultiheadAttention multiplies by its weights itself; of one of them rows are left."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True, norm_first=True)
    inner = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0)
    trust = ScoreTrust(inner, attention_pairs(layer, causal=False), 10.0, 1e6,
                       model=layer, output_change=0.03)  # fmt: skip
    attention = layer.self_attn
    before = attention.in_proj_weight.detach().clone(), attention.out_proj.weight.detach().clone()
    layer(torch.randn(4, 12, 32)).square().sum().backward()
    trust.step()
    values = attention.in_proj_weight.detach()[64:] - before[0][64:]
    assert float(values.norm() / before[0][64:].norm()) == pytest.approx(0.03, rel=1e-3)
    start = before[1].square().sum()  # its bias was zero, and moves with it
    moved = (attention.out_proj.weight.detach() - before[1]).square().sum()
    moved = moved + attention.out_proj.bias.detach().square().sum()
    assert float((moved / start).sqrt()) == pytest.approx(0.03, rel=1e-3)


def test_experts_are_limited(small: Any, tokens: Any) -> None:
    model = small(experts=3, experts_per_token=2)
    for p in model.parameters():
        if p.ndim == 3:
            p.data.normal_(0.0, 0.2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    trust = ScoreTrust(inner, attention_pairs(model), model=model, output_change=0.03)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim == 3}
    backward_pass(Ours(model), tokens(0))
    trust.step()
    for name, p in model.named_parameters():
        if name in before:
            share = float((p.detach() - before[name]).norm() / before[name].norm())
            assert share == pytest.approx(0.03, rel=1e-3), name


def test_the_sample_is_of_the_last_pass_that_builds_a_gradient(
    limited: Limited, tokens: Any
) -> None:
    ends = []
    for other in (False, True):
        model, trust = limited("ours")
        if other:  # a resumed run has no sample of an earlier step
            backward_pass(model, tokens(7))
            trust.outputs.before()  # type: ignore[union-attr]
            model.zero_grad()
            trust.pair_probes.close()
        backward_pass(model, tokens(0))
        if other:
            with torch.no_grad():
                model(tokens(5))
        trust.outputs.limit(trust.outputs.before(), 1.0)  # type: ignore[union-attr]
        ends.append({name: c.relative for name, c in trust.output_stats().items()})
    assert ends[0] == ends[1]


def test_positions_of_the_sample_differ_between_sequences(small: Any) -> None:
    model = small()
    probes = OutputProbes(model)
    embed = next(layer for layer in probes.layers if layer.name == "embed")
    ids = torch.arange(24).repeat(128, 1)
    model(ids)
    sample = probes.samples[embed].take()
    assert sample is not None
    assert len(sample) == TOKENS
    assert len(set(sample.tolist())) == 24
    assert probes.samples[embed].take() is None


def test_a_schedule_scales_the_limit_and_state_is_that_of_the_optimiser(
    limited: Limited, tokens: Any
) -> None:
    model, trust = limited("ours")
    assert trust.param_groups[0]["output_change"] == 0.03
    schedule = torch.optim.lr_scheduler.LambdaLR(trust, lambda t: 0.5**t)
    for step in range(3):
        backward_pass(model, tokens(step))
        trust.step()
        model.zero_grad()
        stats = trust.output_stats().values()
        most = max(float(change.relative * change.share) for change in stats)
        assert most == pytest.approx(0.03 * 0.5**step, rel=1e-5)
        schedule.step()
    names = {name for state in trust.state_dict()["state"].values() for name in state}
    assert names == {"step", "exp_avg", "exp_avg_sq", "score_bound"}


def test_a_compiled_model_is_sampled_too(limited: Limited, tokens: Any) -> None:
    ends = []
    for compiled in (False, True):
        torch.compiler.reset()
        model, trust = limited("untied")
        run = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(2):
            backward_pass(run, tokens(step))
            trust.step()
            model.zero_grad()
        ends.append({name: float(c.relative) for name, c in trust.output_stats().items()})
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)


def test_frozen_parameters_have_no_hook_and_closed_hooks_are_gone(small: Any, tokens: Any) -> None:
    model = small()
    model.blocks[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    inner = CombinedOptimiser(adamw(trained, lr=0.1))
    pairs = attention_pairs(model)[1:]
    trust = ScoreTrust(inner, pairs, model=model, output_change=0.03)
    assert trust.outputs is not None
    assert not [layer for layer in trust.outputs.layers if layer.name.startswith("blocks.0")]
    trust.close()
    backward_pass(Ours(model), tokens(0))
    assert all(sample.take() is None for sample in trust.outputs.samples.values())


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_a_wrong_setting_is_refused(wrong: float, small: Any) -> None:
    model = small()
    inner, pairs = torch.optim.AdamW(model.parameters()), attention_pairs(model)
    with pytest.raises(ValueError, match=f"output_change={wrong} should be"):
        ScoreTrust(inner, pairs, model=model, output_change=wrong)
    with pytest.raises(ValueError, match="both or none"):
        ScoreTrust(inner, pairs, output_change=0.1)
