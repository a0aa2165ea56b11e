"""fenchel/inspection/our_model.py and loader.py: families we read, without transformers."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.autograd.functional import jacobian

from fenchel.attention import Causal, Window, attend
from fenchel.attention.spec import AttentionCall
from fenchel.data import TextTokenizer, train_tokenizer
from fenchel.inspection import open_model, recorder
from fenchel.inspection.heads import heads
from fenchel.inspection.linearisation import derivative
from fenchel.inspection.our_model import OurModel
from fenchel.inspection.trace import ForwardTrace
from fenchel.inspection_result import Method
from fenchel.model import ModelConfig, Transformer
from fenchel.model import attention as model_attention
from fenchel.sensitivity import spectral_norm

FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen3", "gemma", "gemma2", "neox", "bloom"),
    *("bert", "albert", "modernbert", "nanochat", "ministral3", "qwen3_moe"),
)

Save = Callable[[str], Path]
Eager = Callable[[str], Any]


def read(folder: Path, ids: Tensor) -> ForwardTrace:
    subject = open_model(folder)
    assert isinstance(subject, OurModel)
    return subject.trace(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_checkpoint(family: str, save: Save, eager: Eager) -> None:
    subject = open_model(save(family))
    assert isinstance(subject, OurModel)
    facts = subject.facts()
    assert facts["parameters"] == eager(family).parameters
    assert facts["family"] == ("gpt_neox" if family == "neox" else family)
    assert facts["stored"] == "float32"
    assert facts["context"] == (2048 if family == "bloom" else 48)


def test_a_model_without_its_head_reads_nothing_out(save: Save, eager: Eager, ids: Tensor) -> None:
    trace = read(save("bert_body"), ids)
    torch.testing.assert_close(
        trace.blocks[-1].output, eager("bert_body").streams[-1], rtol=1e-5, atol=1e-5
    )
    assert trace.lm_head is None


def test_a_gpt2_is_inspected_where_there_is_no_transformers(
    save: Save, text: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from fenchel.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["inspect", str(save("gpt2")), "--text", str(text), "--max-tokens", "9"]
    out = ["--out", str(tmp_path / "page.html")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, *out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "most sensitive of" in done.stdout
    assert (tmp_path / "page.html").is_file()


def test_priors_are_those_of_the_family(save: Save, ids: Tensor) -> None:
    call = read(save("mistral"), ids).blocks[0].attention
    assert (call.q.shape[1], call.k.shape[1]) == (4, 2)
    assert call.spec.prior == Window(6, 0)
    assert isinstance(read(save("gpt2"), ids).blocks[0].attention.spec.prior, Causal)
    assert read(save("bert"), ids).blocks[0].attention.spec.prior is None


@pytest.mark.parametrize("family", ["gpt2", "gemma", "neox", "bert", "albert"])
def test_norms_and_branches_are_found_inside_the_blocks(
    family: str, save: Save, ids: Tensor
) -> None:
    block = read(save(family), ids).blocks[0]
    assert [norm.name for norm in block.norms] == ["attention_norm", "mlp_norm"]
    assert block.attention_branch is not None
    assert block.mlp_branch is not None
    assert not torch.equal(block.mlp_branch.f(block.mlp_branch.x), block.mlp_branch.x)


def test_the_gain_of_a_norm_is_what_it_multiplies_by(save: Save, ids: Tensor) -> None:
    subject = open_model(save("gemma"))
    block: Any = subject.model.get_submodule("blocks.0")
    with torch.no_grad():
        block.attention_norm.weight.normal_(generator=torch.Generator().manual_seed(0))
    norm = subject.trace(ids).blocks[0].norms[0]
    assert norm.weight is not None
    torch.testing.assert_close(norm.weight, 1.0 + block.attention_norm.weight)
    llama = open_model(save("llama"))
    plain = llama.trace(ids).blocks[0].norms[0].weight
    torch.testing.assert_close(plain, torch.ones(24))


def test_a_text_is_framed_by_the_template_of_its_tokenizer(save: Save) -> None:
    subject = open_model(save("gpt2"))
    end = subject.tokenizer.end_id
    bare = subject.tokenizer.encode("peace")
    framed = Tokenizer.from_str(subject.tokenizer.to_str())
    framed.post_processor = TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", end)]
    )
    subject = replace(subject, tokenizer=TextTokenizer(framed))
    assert subject.prompt("peace") == [end, *bare, end]


MAPS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "entmax": {"choice": "entmax", "entmax_alpha": 1.5},
    "alpha per head": {"choice": "entmax", "entmax_alpha_learned": True},
    "sparsemax": {"choice": "sparsemax"},
    "distance": {"scores": "l2"},
    "distance, entmax": {"scores": "l2", "choice": "entmax"},
    "grouped": {"kv_heads": 1, "windows": (3, 0), "qk_norm": True},
    "alibi": {"positions": "alibi", "mlp": "gelu", "norm": "layer"},
    "capped": {"softcap": 0.7, "kv_heads": 1},
    "capped, entmax": {"softcap": 0.7, "choice": "entmax"},
    "buckets": {"positions": "buckets", "kind": "encoder", "mlp": "relu"},
    "shared": {"distinct_layers": 1, "norm_place": "post", "kind": "encoder"},
    "sinks": {"sinks": True, "windows": (3, 0)},
    "sinks of the token": {"sinks": True, "sink_score": "token", "temperature": "log"},
    "shared keys": {"shared_kv_layers": 1, "per_layer_width": 3, "value_norm": True},
    "gates": {"gate": "head", "sinks": True},
    "gates, sparse": {"gate": "element", "gate_activation": "softplus", "choice": "sparsemax"},
}


@pytest.fixture(params=MAPS)
def run(request: pytest.FixtureRequest) -> OurModel:
    """A fresh model of ours in float64."""
    config = ModelConfig(
        vocabulary=280, context=12, width=8, layers=2, heads=2, initial="normal", initial_std=0.5
    )
    model = Transformer(
        replace(config, **MAPS[request.param]), generator=torch.Generator().manual_seed(0)
    )
    for name, p in model.named_parameters():
        if name.endswith("alpha_logit"):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    return OurModel(
        name="run",
        family="fenchel",
        model=model.double().eval().requires_grad_(False),
        tokenizer=train_tokenizer(["peace and trade"], 280),
        context=12,
        stored="float64",
        reads_out=True,
    )


def test_what_is_held_has_the_derivatives_of_the_block_and_its_attention(
    run: OurModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([[3, 99, 7, 250, 8]])
    held = run.trace(ids).blocks
    monkeypatch.setattr(recorder, "freeze", lambda calls: [None] * len(calls))  # not frozen
    for block, plain in zip(held, run.trace(ids).blocks, strict=True):
        assert block.attention_branch is not None
        assert plain.attention_branch is not None
        pairs = (
            (block.linearised, plain.forward, block.input),
            (block.attention_branch.f, plain.attention_branch.f, block.attention_branch.x),
        )
        for near, f, x in pairs:
            wanted = jacobian(f, x).reshape(x.numel(), x.numel())
            J = derivative(near, x)
            torch.testing.assert_close(J.dense(), wanted, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(J.T.dense(), wanted.mT, rtol=1e-8, atol=1e-10)
            true = float(torch.linalg.matrix_norm(wanted, 2))
            draw = torch.Generator().manual_seed(0)
            found = spectral_norm(J, tol=1e-9, iterations=x.numel(), generator=draw)
            assert float(found.lower) == pytest.approx(true, rel=1e-6)


def test_a_derivative_does_not_call_attention_again(
    run: OurModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = run.trace(torch.tensor([[3, 99, 7, 250]])).blocks

    def asked(*_: Any, **__: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(model_attention, "attend", asked)
    for block in blocks:
        torch.testing.assert_close(block.linearised(block.input), block.output)
        assert block.attention_branch is not None
        block.attention_branch.f(block.attention_branch.x)
        with pytest.raises(AssertionError):
            block.forward(block.input)


def test_the_tensor_of_an_override_replaces_the_attention_output() -> None:
    model = Transformer(ModelConfig(vocabulary=30, context=8, width=12, layers=2, heads=2))
    ids = torch.arange(6)[None]

    def zero(_layer: int, call: AttentionCall) -> Tensor:
        return torch.zeros_like(call.q)

    def own(_layer: int, call: AttentionCall) -> Tensor:
        return model_attention.attend(call.q, call.k, call.v, **call.spec)

    for p in model.parameters():  # fresh branches end in zeros, where nothing would show
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    plain = model(ids)
    torch.testing.assert_close(model(ids, attention_override=own), plain)
    assert not torch.allclose(model(ids, attention_override=zero), plain)


@pytest.mark.parametrize("kind", ["head", "element"])
def test_the_mass_that_is_not_taken_is_that_of_the_sink_and_of_the_gate(kind: str) -> None:
    config = ModelConfig(
        vocabulary=280, context=12, width=8, layers=1, heads=2, initial="normal", initial_std=0.5,
        sinks=True, gate=kind,
    )  # fmt: skip
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    model.requires_grad_(False)
    model.blocks[0].attention.sink.copy_(torch.tensor([0.5, -1.0]))
    subject = OurModel(
        name="run",
        family="fenchel",
        model=model,
        tokenizer=train_tokenizer(["peace and trade"], 280),
        context=12,
        stored="float32",
        reads_out=True,
    )
    block = subject.trace(torch.tensor([[3, 99, 7, 250, 8]])).blocks[0]
    assert block.attention_branch is not None
    gate = torch.sigmoid(block.attention_branch.x @ model.blocks[0].attention.output_gate.weight.T)
    by_head = gate[0].view(5, 2, -1).mean(-1).T
    p = attend(*block.attention[:3], **block.attention.spec, return_weights=True)[1][0]
    wanted = 1 - by_head * p[..., 1:].sum(-1)
    method = Method(
        dtype="float32", device="cpu", algorithm="", tolerance=0.1, iterations=5, failure=1e-3,
        seed=0,
    )  # fmt: skip
    found = heads(block.attention, 1, [0, 1], method, torch.Generator(), block.gate)
    assert [head.not_taken for head in found] == pytest.approx(wanted.mean(-1).tolist(), rel=1e-5)
