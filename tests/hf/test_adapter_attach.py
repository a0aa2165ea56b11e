"""fenchel/hf/adapter.py and proof.py on small models of transformers.

Each of the four ways in which a swap fails silently has its test here:
the mask lost, a term ignored, a layer that bypasses the registry, a reload that forgets.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from fenchel.attention import Causal, Dense, Window
from fenchel.choice import Capped, Choice, Entmax, Hard, Softmax, Sparsemax
from fenchel.choice.by_name import choice_from_record, choice_record
from fenchel.hf import adapter, attach, prove
from fenchel.hf.adapter import (
    AttentionFunction,
    classify_mask,
)

V = 60
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ENDS = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": 2}
HALF = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
OPT_SIZES = {"ffn_dim": 48, "word_embed_proj_dim": 32}
EXPERTS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), {"causal"}),
    "qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8)), {"causal"}),
    "olmo2": (lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED)), {"causal"}),
    "phi3": (lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED)), {"causal"}),
    "smollm3": (lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**GROUPED)), {"causal"}),
    "gpt_neox": (lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)), {"causal"}),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**ENDS, n_embd=32, n_layer=2, n_head=4)),
        {"causal"},
    ),
    "opt": (lambda: hf.OPTForCausalLM(hf.OPTConfig(**SIZES, **OPT_SIZES)), {"causal"}),
    "mistral": (
        lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)),
        {"window 4"},
    ),
    "gemma2, a soft cap": (
        lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**GROUPED, head_dim=8, attn_logit_softcapping=2.0, **HALF)
        ),
        {"window 4", "causal"},
    ),
    "gemma3": (
        lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED, head_dim=8, **HALF)),
        {"window 4", "causal"},
    ),
    "deepseek_v3, values narrower than keys": (
        lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SIZES, **LATENT)),
        {"causal"},
    ),
    "gpt_oss, sinks": (
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**GROUPED, **EXPERTS, **HALF)),
        {"window 4", "causal"},
    ),
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SIZES)), {"full"}),
    "t5, a position bias": (
        lambda: hf.T5Model(hf.T5Config(vocab_size=V, **T5_SIZES, pad_token_id=0)),
        {"full", "causal"},
    ),
}
BYPASSING = {
    "gpt_neo": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            **ENDS, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(**ENDS, hidden_size=32, n_layer=2, n_head=4)
    ),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**ENDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ),
}


def built(build: Callable[[], Any]) -> Any:
    """A model whose weights are large enough for attention to matter."""
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = build().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((0.3 if p.dim() > 1 else 0.1) * torch.randn(p.shape, generator=generator))
    return model


def some_inputs(*, padded: bool = True, seq2seq: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(3, V, (2, 11), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    return {**found, "decoder_input_ids": ids[:, :7]} if seq2seq else found


@pytest.fixture
def llama() -> Any:
    return built(FAMILIES["llama"][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_swap_is_proved_in_every_family_that_uses_the_registry(family: str) -> None:
    build, masks = FAMILIES[family]
    model = built(build)
    before = model.config._attn_implementation
    for padded in (False, True):
        inputs = some_inputs(padded=padded, seq2seq=family.startswith("t5"))
        proof = prove(model, Entmax(1.5), inputs)
        assert proof.softmax_difference <= proof.tolerance
        assert proof.change > 1e-3
        assert (proof.leak is None) == (family.split(",")[0] in ("bert", "t5"))
        assert proof.leak is None or proof.leak <= proof.tolerance
        assert proof.calls == len(proof.layers) == (6 if family.startswith("t5") else 2)
        if padded:
            assert {kind.removesuffix(" + padding") for kind in proof.masks} == masks
            assert any(kind.endswith(" + padding") for kind in proof.masks)
        else:  # where all see all there is nothing to say
            assert set(proof.masks) == {"none" if kind == "full" else kind for kind in masks}
    assert model.config._attn_implementation == before
    assert not hasattr(model.config, "fenchel")


def test_a_lost_mask_is_refused_and_not_taken_for_none(llama: Any) -> None:
    """Silent failure 1: the mask function is not there under the attention's name."""
    masks = hf.AttentionMaskInterface._global_mapping
    with attach(llama, Softmax()) as attached:
        del masks[attached.name]
        with pytest.raises(ValueError, match="its mask is None, so it would see the future"):
            llama(**some_inputs(padded=False))
        masks[attached.name] = None  # so that leaving finds what it put there


def test_a_term_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent failure 2: an attention that takes any keyword and drops the sinks."""
    model = built(FAMILIES["gpt_oss, sinks"][0])
    whole = AttentionFunction.__call__

    def dropping(self: AttentionFunction, *given: Any, s_aux: Any = None, **others: Any) -> Any:
        del s_aux
        return whole(self, *given, **others)

    prove(model, Entmax(1.5), some_inputs())
    monkeypatch.setattr(AttentionFunction, "__call__", dropping)
    with pytest.raises(ValueError, match="something in its attention that is not done here"):
        prove(model, Entmax(1.5), some_inputs())


def test_a_map_that_ignores_the_causal_mask_is_refused(llama: Any) -> None:
    """Our softmax is fused and the other maps are not: each keeps the mask by itself."""

    class Peeking(Entmax):
        def weights(self, z: Tensor, log_prior: Tensor | None = None, dim: int = -1) -> Tensor:
            del log_prior
            return super().weights(z, None, dim)

    prove(llama, Entmax(1.5), some_inputs(padded=False))
    with pytest.raises(ValueError, match="when the last token changes: the mask is not kept"):
        prove(llama, Peeking(1.5), some_inputs(padded=False))


def test_an_unknown_keyword_of_a_model_raises(llama: Any) -> None:
    """Silent failure 2 again: what a model hands through reaches us and is not dropped."""
    with attach(llama, Softmax()), pytest.raises(ValueError, match="passes tree_mask to its att"):
        llama(**some_inputs(), tree_mask=torch.ones(1))


@pytest.mark.parametrize("family", BYPASSING)
def test_a_family_that_bypasses_the_registry_is_refused(
    family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Silent failure 3: transformers only writes a line into its log."""
    model = built(BYPASSING[family])
    before, registered = model.config._attn_implementation, set(hf.AttentionInterface())
    with pytest.raises(ValueError, match="does not use the attention registry"):
        attach(model, Entmax(1.5))
    assert model.config._attn_implementation == before
    assert set(hf.AttentionInterface()) == registered
    assert capfd.readouterr().err == ""


def test_one_layer_that_attends_by_itself_is_noticed(llama: Any) -> None:
    """Silent failure 3 again: the family uses the registry, one layer does not."""
    own = llama.model.layers[1].self_attn
    own.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    with pytest.raises(ValueError, match=r"1 of the 2 .* \(model.layers.1.self_attn, LlamaAtt"):
        prove(llama, Entmax(1.5), some_inputs())


def test_a_reload_has_no_map_and_attach_restores_it(llama: Any, tmp_path: Path) -> None:
    """Silent failure 4: saved with entmax, loaded as softmax."""
    inputs = some_inputs()
    with torch.no_grad(), attach(llama, Entmax(1.25, beta=2.0)):
        sparse = llama(**inputs).logits
        llama.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert (again(**inputs).logits - sparse).abs().max() > 0.1  # what plain transformers gives
        with attach(again) as attached:
            assert attached.choice == Entmax(1.25, beta=2.0)
            keep = inputs["attention_mask"].bool()
            torch.testing.assert_close(again(**inputs).logits[keep], sparse[keep])
    assert again.config.fenchel == {"map": "entmax", "alpha": 1.25, "beta": 2.0}
    with pytest.raises(ValueError, match="was not saved with a map of fenchel"):
        attach(llama)


@pytest.mark.parametrize("choice", [Softmax(2.0), Entmax(1.3), Sparsemax(), Hard()], ids=repr)
def test_a_map_is_read_back_as_it_was_written(choice: Choice) -> None:
    assert choice_from_record(choice_record(choice)) == choice


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (["entmax"], "a map and its settings"),
        ({"alpha": 1.5}, "a map and its settings"),
        ({"map": "entmax", "alpha": "1.5"}, "alpha as a number"),
        ({"map": "entmax", "beta": True}, "beta as a number"),
        ({"map": "entmax", "code": "x"}, "'code', unknown here"),
        ({"map": "entmix"}, "did you mean 'entmax'"),
        (choice_record(Capped(0.5)), "'cap', unknown here"),
    ],
)
def test_an_invalid_field_of_a_config_is_refused(stored: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        choice_from_record(stored)
    assert says in str(error.value)


def test_text_is_continued_as_before_with_a_cache_and_padding(llama: Any) -> None:
    inputs = some_inputs()
    ask = {"max_new_tokens": 6, "do_sample": False}
    llama.set_attn_implementation("eager")
    before = llama.generate(**inputs, **ask)
    with attach(llama, Softmax()) as attached:
        assert torch.equal(llama.generate(**inputs, **ask), before)
        steps = before.shape[1] - inputs["input_ids"].shape[1]
        assert attached.calls == {f"model.layers.{i}.self_attn": steps for i in (0, 1)}
    with attach(llama, Entmax(2.0)):
        assert not torch.equal(llama.generate(**inputs, **ask), before)


def test_the_weights_a_model_gives_are_ours(llama: Any) -> None:
    with torch.no_grad(), attach(llama, Entmax(1.5)):
        weights = llama(**some_inputs(padded=False), output_attentions=True).attentions
    for p in weights:
        torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, 11))
        assert (p.tril() == p).all()
        assert (p.tril() == 0).sum() > (torch.ones(11, 11).triu(1) == 1).sum() * 8  # sparse


def test_it_can_be_trained(llama: Any) -> None:
    inputs = some_inputs(padded=False)
    with attach(llama.train(), Entmax(1.5)):
        llama(**inputs, labels=inputs["input_ids"]).loss.backward()
    slope = llama.model.layers[0].self_attn.q_proj.weight.grad
    assert slope.isfinite().all()
    assert slope.abs().max() > 0


def test_two_models_do_not_share_their_counts(llama: Any) -> None:
    other = built(FAMILIES["gpt2"][0])
    with attach(llama, Softmax()) as one, attach(other, Entmax(1.5)) as two:
        llama(**some_inputs())
        assert two.calls == {}
        other(**some_inputs())
        other(**some_inputs())
    assert set(one.calls.values()) == {1}
    assert two.calls == {"transformer.h.0.attn": 2, "transformer.h.1.attn": 2}


def test_an_error_inside_gives_the_model_back(llama: Any) -> None:
    before, registered = llama.config._attn_implementation, set(hf.AttentionInterface())
    with pytest.raises(RuntimeError, match="mine"), attach(llama, Entmax(1.5)):
        raise RuntimeError("mine")
    assert llama.config._attn_implementation == before
    assert set(hf.AttentionInterface()) == registered
    llama.train()
    with pytest.raises(ValueError, match="changed nothing"):
        prove(llama, Entmax(1.5), {"input_ids": torch.tensor([[5]])})  # one key: nothing to choose
    assert llama.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_swap_is_proved_in_every_precision(dtype: torch.dtype, llama: Any) -> None:
    padded = dtype != torch.float64  # where eager attention itself gives nan for padded rows
    proof = prove(llama.to(dtype), Entmax(1.5), some_inputs(padded=padded))
    assert proof.softmax_difference <= proof.tolerance < proof.change


def test_what_has_no_attention_is_refused() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    mamba = built(lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=V, **sizes)))
    with pytest.raises(ValueError, match="MambaForCausalLM has no attention layer to swap"):
        prove(mamba, Entmax(1.5), some_inputs(padded=False))


def test_what_is_not_a_model_of_transformers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a module with nn\.MultiheadAttention, got Linear"):
        attach(torch.nn.Linear(2, 2), Softmax())


def test_softmax_itself_needs_no_effect_and_a_wrong_one_is_noticed(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = prove(llama, Softmax(), some_inputs())
    assert proof.change == proof.softmax_difference
    monkeypatch.setattr(import_module("fenchel.hf.verification"), "SOFTMAX", Softmax(1.01))
    with pytest.raises(ValueError, match="is refused"):
        prove(llama, Entmax(1.5), some_inputs())


def opened(rows: str) -> Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows.split()])[None, None]


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (None, "none"),
        (opened("xxx xxx xxx"), "full"),
        (opened("x.. xx. xxx"), "causal"),
        (opened("x... xx.. .xx. ..xx"), "window 2"),
        (opened("... .x. .xx"), "causal + padding"),
        (opened("xx. xx. xx."), "full + padding"),
        (opened("xx. xxx xxx"), "other"),
        (opened("xx. xxx"), "causal"),  # two queries after a cache of one
        (torch.where(opened("x.. xx. xxx"), 0.0, torch.finfo(torch.float32).min), "causal"),
    ],
)
def test_a_mask_has_its_kind_in_words(mask: Tensor | None, kind: str) -> None:
    T, S = (3, 3) if mask is None else mask.shape[2:]
    assert classify_mask(mask, T, S).kind == kind


def test_a_mask_becomes_its_prior_or_is_kept_densely() -> None:
    places = torch.arange(5)
    causal = (places[:, None] >= places)[None, None]
    near = causal & (places[:, None] - places < 3)
    full = torch.ones_like(causal)
    assert classify_mask(None, 5, 5) == ("none", None)
    assert classify_mask(full, 5, 5) == ("full", None)
    assert classify_mask(causal, 5, 5) == ("causal", Causal())
    assert classify_mask(near, 5, 5) == ("window 3", Window(2, 0))
    holes = causal.clone()
    holes[..., 3, 1] = False
    kind, prior = classify_mask(holes, 5, 5)
    assert kind == "other"
    assert isinstance(prior, Dense)
    added = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    assert classify_mask(added, 5, 5) == ("causal", Causal())
    kind, biased = classify_mask(added + 0.5 * causal, 5, 5)
    assert kind == "causal"
    assert isinstance(biased, Dense)
    assert float(biased.log_prior[0, 0, 0, 1]) == -torch.inf
    assert float(biased.log_prior[0, 0, 1, 0]) == 0.5
    padded = causal & (places > 0)
    kind, prior = classify_mask(padded, 5, 5)
    assert kind == "causal + padding"
    assert isinstance(prior, Dense)
    differing = torch.cat([causal, near], 1)  # the heads together allow what is causal
    kind, prior = classify_mask(differing, 5, 5)
    assert kind == "causal"
    assert isinstance(prior, Dense)


WINDOWED: dict[str, Callable[[], Any]] = {
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=512)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**GROUPED, head_dim=8, sliding_window=512)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**GROUPED, head_dim=8, **{**HALF, "sliding_window": 512})
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(
            **GROUPED, head_dim=8, use_sliding_window=True, sliding_window=512, max_window_layers=1
        )
    ),
    "starcoder2": lambda: hf.Starcoder2ForCausalLM(
        hf.Starcoder2Config(**GROUPED, sliding_window=512)
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_wider_than_the_inputs_is_exercised(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = WINDOWED[name]()
    inputs = {"input_ids": torch.randint(V, (2, 16))}
    proof = prove(model, Sparsemax(), inputs)
    assert "window 4" in proof.masks
    assert proof.narrowed == 512
    assert model.config.sliding_window == 512
    lost = adapter.MaskClass("causal", Causal())
    monkeypatch.setattr(adapter, "classify_mask", lambda *_: lost)
    with pytest.raises(ValueError, match="so the swap is refused"):
        prove(model, Sparsemax(), inputs)
    assert model.config.sliding_window == 512
