"""fenchel/optim/score/pairs.py: the scores rebuilt from a pair are those the model computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BartModel,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from fenchel.optim import (
    CombinedOptimiser,
    HeadProjection,
    Muon,
    QueryKeyPair,
    ScoreDescent,
    ScoreTrust,
    attention_pairs,
)

SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=31, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=12, sliding_window=64),
    "phi3": Phi3Config(**SIZES, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0),
    "opt": OPTConfig(
        vocab_size=31, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0, pad_token_id=0,
    ),
}  # fmt: skip
families = pytest.mark.parametrize("family", CONFIGS)


def hugging_face(family: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        CONFIGS[family], attn_implementation="eager"
    )
    with torch.no_grad():
        for p in model.parameters():  # biases and gains too: all of them must matter
            p.add_(0.1 * torch.randn_like(p))
    return model


@families
def test_scores_from_a_pair_are_those_of_the_model(
    family: str, tokens: Any, inputs: Any, scores_of: Any
) -> None:
    model = hugging_face(family)
    ids = tokens(0, 3)
    pairs = attention_pairs(model)
    assert len(pairs) == 2
    read = inputs(model, pairs, ids)
    weights = model(ids, output_attentions=True).attentions
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    for pair, given, wanted in zip(pairs, read, weights, strict=True):
        S = scores_of(pair, *given).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(S.softmax(-1), wanted.detach(), rtol=1e-4, atol=1e-6)


@families
def test_score_descent_sees_the_same_scores_and_moves_them_by_lr(
    family: str, tokens: Any, inputs: Any, scores_of: Any, backward: Any
) -> None:
    model = hugging_face(family)
    pairs = attention_pairs(model)
    score = ScoreDescent(pairs, lr=0.1)
    ids = tokens(0, 8)
    read = inputs(model, pairs, ids)
    before = [scores_of(pair, *given) for pair, given in zip(pairs, read, strict=True)]
    backward(model, ids)
    score.step()
    for pair, given, start in zip(pairs, read, before, strict=True):
        moved = scores_of(pair, *given) - start
        rms = (moved.square().sum(dim=(0, 2, 3)) / (8 * 300)).sqrt()
        torch.testing.assert_close(rms, torch.full_like(rms, 0.1), rtol=0.01, atol=0)
        stats = score.score_stats()[pair.name]
        torch.testing.assert_close(stats.rms_change, rms, rtol=1e-3, atol=0)
        after = scores_of(pair, *given)
        mask = torch.ones(24, 24, dtype=torch.bool).tril()
        p = after.masked_fill(~mask, -torch.inf).softmax(-1)
        entropy = torch.special.entr(p).sum(-1).mean(dim=(0, 2))
        torch.testing.assert_close(stats.entropy, entropy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stats.max_score, after.abs().amax(dim=(0, 2, 3)))
        rms = (after.square().sum(dim=(0, 2, 3)) / (8 * 300)).sqrt()
        torch.testing.assert_close(stats.rms_score, rms, rtol=1e-4, atol=0)
        torch.testing.assert_close(
            stats.max_change, moved.abs().amax(dim=(0, 2, 3)), rtol=1e-3, atol=1e-5
        )


def test_pairs_of_an_encoder_are_not_causal(tokens: Any, inputs: Any) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    model = AutoModelForMaskedLM.from_config(BertConfig(**sizes), attn_implementation="eager")
    pairs, ids = attention_pairs(model.eval()), tokens(0, 3)
    assert not any(pair.causal for pair in pairs)
    weights = model(ids, output_attentions=True).attentions
    for pair, (x, _), wanted in zip(pairs, inputs(model, pairs, ids), weights, strict=True):
        x1 = torch.cat((x, torch.ones_like(x[..., :1])), -1)  # the column of the bias
        q, k = (torch.einsum("btm,hdm->bhtd", x1, rows.values()) for rows in (pair.query, pair.key))
        torch.testing.assert_close((pair.scale * q @ k.mT).softmax(-1), wanted.detach())


def test_of_an_encoder_and_decoder_the_self_attention_is_paired() -> None:
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
             {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
    config = BartConfig(vocab_size=31, d_model=32, max_position_embeddings=64, **sizes)
    pairs = attention_pairs(BartModel(config))
    assert [(pair.name, pair.causal) for pair in pairs] == [
        ("encoder.layers.0.self_attn", False),
        ("decoder.layers.0.self_attn", True),
    ]


INNER: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "small adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=50.0),
    "muon": lambda model: CombinedOptimiser(
        Muon([p for p in model.parameters() if p.ndim == 2], lr=0.3),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.3),
    ),
}


@pytest.mark.parametrize("frozen", [None, "q_norm", "proj.weight"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "ours"])
def test_trust_limits_the_gains_of_a_norm_of_queries_and_keys_too(
    family: str, inner: str, frozen: str | None, small: Any, tokens: Any, inputs: Any,
    scores_of: Any, backward: Any,
) -> None:  # fmt: skip
    model = small(qk_norm=True, kv_heads=2) if family == "ours" else hugging_face(family)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen is None or frozen not in name.replace("qkv", "proj"))
    pairs, lr = attention_pairs(model), 0.05
    trust = ScoreTrust(INNER[inner](model), pairs, lr=lr)
    for step in range(2):
        ids = tokens(step, 8)
        backward(model, ids)
        read = inputs(model, pairs, ids)
        before = [scores_of(pair, *given) for pair, given in zip(pairs, read, strict=True)]
        trust.step()
        for pair, given, start in zip(pairs, read, before, strict=True):
            moved = scores_of(pair, *given) - start
            rms = (moved.square().sum(dim=(0, 2, 3)) / (8 * 300)).sqrt()
            assert rms.max() <= 1.001 * lr
            stats = trust.score_stats()[pair.name]
            torch.testing.assert_close(stats.rms_change, rms, rtol=1e-3, atol=1e-6)
            if stats.capped.any():
                assert rms.max() > 0.99 * lr  # no shorter than it must be
        trust.zero_grad()


@pytest.mark.parametrize("frozen", [None, "k_norm", "_norm"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "ours"])
def test_the_gains_keep_the_scores_of_descent_in_the_ball(
    family: str, frozen: str | None, small: Any, tokens: Any, inputs: Any, scores_of: Any,
    backward: Any,
) -> None:  # fmt: skip
    """The gains are made three times as large; the head that is furthest out returns to its bound,
    with the heads beside it. Without gains to scale there is no ball.
    """
    model = small(qk_norm=True, kv_heads=2) if family == "ours" else hugging_face(family)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen is None or frozen not in name)
    pairs, lr, ids = attention_pairs(model), 1e-4, tokens(0, 8)
    score = ScoreDescent(pairs, lr=lr, radius=1e-2)
    plus = 1.0 if family == "gemma3" else 0.0

    def rms(pair: QueryKeyPair) -> Tensor:
        S = scores_of(pair, *read[pairs.index(pair)])
        found: Tensor = (S.square().sum(dim=(0, 2, 3)) / (8 * 300)).sqrt()
        return found

    for step in range(3):
        backward(model, ids)
        read = inputs(model, pairs, ids)
        before = [rms(pair) for pair in pairs]
        score.step()
        for pair, start in zip(pairs, before, strict=True):
            after = rms(pair)
            if step == 0 or frozen == "_norm":
                assert "score_bound" not in score.state[pair.query.weight] or step == 0
                torch.testing.assert_close(after, start, rtol=0, atol=1.1 * lr)
            else:
                bound = score.state[pair.query.weight]["score_bound"]
                torch.testing.assert_close(
                    (after / bound).max(), torch.tensor(1.0), rtol=1e-3, atol=0
                )
                shrunk = after / start
                torch.testing.assert_close(shrunk, shrunk.max().expand(4), rtol=2e-3, atol=0)
                assert score.score_stats()[pair.name].capped.all()
            with torch.no_grad():
                for p in pair.gains.values():
                    p.copy_(3.0 * (p + plus) - plus)
        model.zero_grad()


def test_scores_that_the_gains_brought_back_move_by_lr(
    small: Any, tokens: Any, inputs: Any, scores_of: Any, backward: Any
) -> None:
    """From the scaled scores, as without a push."""
    model, lr, ids = small(qk_norm=True), 0.05, tokens(0, 8)
    pairs = attention_pairs(model)
    score = ScoreDescent(pairs, lr=lr, radius=1e-2)
    for step in range(2):
        backward(model, ids)
        read = inputs(model, pairs, ids)
        before = [scores_of(pair, *given) for pair, given in zip(pairs, read, strict=True)]
        gains = [pair.gains["q_norm.weight"].detach().clone() for pair in pairs]
        score.step()
        for pair, given, start, gain in zip(pairs, read, before, gains, strict=True):
            # queries and keys take the root of c each
            c = float((pair.gains["q_norm.weight"] / gain).mean()) ** 2
            moved = scores_of(pair, *given) - c * start
            rms = (moved.square().sum(dim=(0, 2, 3)) / (8 * 300)).sqrt()
            torch.testing.assert_close(rms, torch.full((4,), lr), rtol=0.02, atol=0)
            assert c == 1.0 if step == 0 else c < 0.3
            with torch.no_grad():
                for p in pair.gains.values():
                    p.mul_(2.0)
        model.zero_grad()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "ours"])
def test_inside_the_ball_gains_keep_their_bits(
    family: str, small: Any, tokens: Any, backward: Any
) -> None:
    model = small(qk_norm=True) if family == "ours" else hugging_face(family)
    pairs = attention_pairs(model)
    gains = [p for pair in pairs for p in pair.gains.values()]
    with torch.no_grad():
        for p in gains:
            p.add_(torch.linspace(-0.3, 0.3, len(p)))
    before = [p.detach().clone() for p in gains]
    score = ScoreDescent(pairs, lr=0.2)
    for step in range(3):
        backward(model, tokens(step))
        score.step()
        model.zero_grad()
    assert all(map(torch.equal, before, gains))


@families
def test_micro_batches_of_different_lengths_are_measured_together(
    family: str, tokens: Any, inputs: Any, scores_of: Any, backward: Any
) -> None:
    model = hugging_face(family)
    pairs, lr = attention_pairs(model), 0.05
    trust = ScoreTrust(torch.optim.AdamW(model.parameters(), lr=0.1), pairs, lr=lr)
    parts = [tokens(n, 4, length) for n, length in enumerate((24, 11, 24))]
    given = [inputs(model, pairs, part) for part in parts]
    before = [[scores_of(p, *x) for p, x in zip(pairs, g, strict=True)] for g in given]
    for part in parts:
        backward(model, part)
    trust.step()
    for layer, pair in enumerate(pairs):
        moved = [scores_of(pair, *g[layer]) - b[layer] for g, b in zip(given, before, strict=True)]
        squares = torch.stack([dS.square().sum(dim=(0, 2, 3)) for dS in moved]).sum(0)
        rms = (squares / (4 * (300 + 66 + 300))).sqrt()
        assert rms.max() <= 1.001 * lr
        torch.testing.assert_close(
            trust.score_stats()[pair.name].rms_change, rms, rtol=1e-3, atol=0
        )


@families
def test_padding_is_no_part_of_the_scores(family: str, tokens: Any) -> None:
    """The same step, whatever stands in the padded places of half of the sequences."""
    steps = []
    for junk in (0, 7):
        model = hugging_face(family)
        pairs = attention_pairs(model)
        score = ScoreDescent(pairs, lr=0.1)
        ids, real = tokens(0, 4), torch.ones(4, 24, dtype=torch.long)
        ids[2:, :10], real[2:, :10] = junk, 0
        positions = (real.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=real, position_ids=positions).logits
        logits.log_softmax(-1)[:, 10:, 3].mean().backward()
        score.step()
        steps.append([stats.rms_score for stats in score.score_stats().values()])
    for one, two in zip(*steps, strict=True):
        torch.testing.assert_close(one, two)


@families
def test_rows_read_what_they_write_and_leave_the_rest_alone(family: str) -> None:
    model = hugging_face(family)
    pair = attention_pairs(model)[1]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for rows in (pair.query, pair.key):
        rows.write(rows.values())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
    pair.query.write(pair.query.values() + 1.0)
    changed = sum(int((p != before[n]).sum()) for n, p in model.named_parameters())
    assert changed == pair.query.values().numel()


def test_our_models_give_the_rows_of_queries_and_of_keys(small: Any) -> None:
    model = small(kv_heads=2, bias=True)
    pair = attention_pairs(model)[1]
    qkv = model.blocks[1].attention.qkv
    assert pair.name == "blocks.1.attention"
    assert pair.scale == 8**-0.5
    torch.testing.assert_close(pair.query.values()[3, :, :-1], qkv.weight[24:32].detach())
    torch.testing.assert_close(pair.key.values()[1, :, :-1], qkv.weight[40:48].detach())
    qkv.bias.data.copy_(torch.arange(64))
    assert pair.query.values()[3, :, -1].tolist() == list(range(24, 32))
    assert pair.key.values()[1, :, -1].tolist() == list(range(40, 48))


class Latent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(4, 8)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.head_dim = nn.Identity(), nn.Linear(4, 4), 2


class WideNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.head_dim = nn.Linear(4, 4), nn.Linear(4, 4), 2
        self.q_norm = self.k_norm = nn.RMSNorm(4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(3, 3), "no query and key weights were found in Linear"),
        (Latent(), "latent vector"),
        (Adapted(), "its q_proj is not a plain linear map \\(Identity\\)"),
        (WideNorm(), "not over the 2 entries of one head"),
    ],
)
def test_a_model_without_pairs_raises_one_sentence(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attention_pairs(model)


def test_rows_mixed_head_by_head_are_refused() -> None:
    config = GPTNeoXConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="mixes the rows"):
        attention_pairs(AutoModelForCausalLM.from_config(config))


def test_half_a_frozen_pair_is_refused_and_a_made_one_is_taken() -> None:
    module, free = nn.Linear(6, 4), nn.Parameter(torch.zeros(4, 6))
    frozen = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    pair = QueryKeyPair(
        "by hand", module, HeadProjection(free, 0, 4, 2), HeadProjection(free, 0, 2, 1), scale=1.0
    )
    assert pair.parameters == [free]
    with pytest.raises(ValueError, match="freeze all of them or none"):
        QueryKeyPair(
            "half",
            module,
            HeadProjection(free, 0, 4, 2),
            HeadProjection(frozen, 0, 4, 2),
            scale=1.0,
        )
    with pytest.raises(ValueError, match="3 heads of queries and 2 of keys"):
        QueryKeyPair(
            "odd", module, HeadProjection(free, 0, 3, 3), HeadProjection(free, 0, 4, 2), scale=1.0
        )


def test_a_pair_prints_one_line_without_its_weights() -> None:
    layer = nn.MultiheadAttention(32, 4)
    (pair,) = attention_pairs(layer)
    shown = repr(pair)
    assert "4 heads: rows 0-32 of (96, 32), bias" in shown
    assert "tensor(" not in shown
    assert len(shown) < 250
