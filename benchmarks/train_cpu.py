"""A training step and decoding against transformers' models of the same shape, on a CPU.

Both sides: float32, two threads, one process, in turn (harness.py); the same shape, the same
batch; fused AdamW over the same number of parameters, so that only the model differs. Theirs
has sdpa attention, no dropout, and in decoding its default cache and ``generate``.
Llama is compared with our rms / rotary / swiglu model, GPT-2 with our layer / learned / gelu /
bias one.

    train     tokens per second of forward, loss, backward and optimiser
    decode    tokens per second of greedy decoding, 128 tokens from a prompt of 32
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.harness import Timings, record, time_interleaved
from fenchel.generation import generate
from fenchel.model import ModelConfig, Transformer
from fenchel.train.loss import lm_head_loss, sparse_embedding_gradient

THREADS = 2
PROMPT, NEW = 32, 128
AS_GPT2 = {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True}


@dataclass(frozen=True)
class Shape:
    """A model and a batch of it."""

    name: str
    model: ModelConfig
    batch: int
    rounds: int


SHAPES = [
    Shape("demo", ModelConfig(vocabulary=4096, context=128, width=128, layers=4, heads=2), 32, 25),
    Shape("larger", ModelConfig(vocabulary=8192, context=256, width=384, layers=6, heads=6), 8, 11),
]


def llama(c: ModelConfig) -> nn.Module:
    """transformers' Llama of the shape of ``c``."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which others do without

    config = LlamaConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.width,
        intermediate_size=c.mlp_width,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.groups,
        max_position_embeddings=c.context,
        tie_word_embeddings=c.tied,
        rms_norm_eps=c.epsilon,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def gpt2(c: ModelConfig) -> nn.Module:
    """transformers' GPT-2 of the shape of ``c``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=c.vocabulary,
        n_positions=c.context,
        n_embd=c.width,
        n_layer=c.layers,
        n_head=c.heads,
        n_inner=c.mlp_width,
        activation_function={"gelu": "gelu", "gelu_tanh": "gelu_new"}[c.mlp],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=c.epsilon,
        tie_word_embeddings=c.tied,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config)


PAIRS: list[tuple[str, Callable[[ModelConfig], nn.Module], dict[str, Any]]] = [
    ("llama", llama, {}),
    ("gpt2", gpt2, AS_GPT2),
]


def train_rows(shape: Shape) -> Iterator[dict[str, Any]]:
    """A training step of ours against each peer."""
    ids = draw(shape.model.vocabulary, shape.batch, shape.model.context + 1)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    for peer, build, settings in PAIRS:
        ours, theirs = pair(shape.model, build, settings)
        contenders = {
            "ours": step(ours, our_loss(ours, inputs, targets)),
            peer: step(theirs, their_loss(theirs, inputs, targets)),
        }
        timings = time_interleaved(contenders, rounds=shape.rounds)
        yield row("train", shape.name, peer, timings, targets.numel())


def decode_rows(shape: Shape, batch: int) -> Iterator[dict[str, Any]]:
    """Greedy decoding of ours against each peer."""
    prompts = draw(shape.model.vocabulary, batch, PROMPT)
    longer = replace(shape.model, context=max(shape.model.context, PROMPT + NEW))
    for peer, build, settings in PAIRS:
        ours, theirs = (model.eval() for model in pair(longer, build, settings))
        contenders = {"ours": our_text(ours, prompts), peer: their_text(theirs, prompts)}
        assert all(text().shape == (batch, PROMPT + NEW) for text in contenders.values())
        timings = time_interleaved(contenders, rounds=7, warmup=1)
        yield row(f"decode {batch}", shape.name, peer, timings, batch * NEW)


def pair(
    config: ModelConfig, build: Callable[[ModelConfig], nn.Module], settings: dict[str, Any]
) -> tuple[Transformer, nn.Module]:
    """Ours and theirs, with equally many parameters."""
    config = replace(config, **settings)
    ours, theirs = Transformer(config), build(config)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert sizes[0] == sizes[1], sizes
    return ours, theirs


def our_loss(model: Transformer, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    """Mean loss of ours, as a step of ``fenchel train`` computes it."""
    weight, count = model.lm_head_weight, targets.numel()

    def loss() -> Tensor:
        with sparse_embedding_gradient(model.tied_embedding):
            stream = model(inputs, return_hidden=True)
        return lm_head_loss(stream, weight, targets) / count

    return loss


def their_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    """Mean loss of theirs from its logits, which is cheaper than giving it labels."""

    def loss() -> Tensor:
        logits = model(inputs, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss


def our_text(model: Transformer, prompts: Tensor) -> Callable[[], Tensor]:
    """Greedy decoding of ours."""
    return lambda: generate(model, prompts, max_new_tokens=NEW, temperature=0.0)


def their_text(model: Any, prompts: Tensor, **settings: Any) -> Callable[[], Tensor]:
    """Greedy decoding of theirs."""
    plain = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    present = torch.ones_like(prompts)
    return lambda: model.generate(prompts, attention_mask=present, **plain, **settings)


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """One training step as a function that can be called repeatedly."""
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def once() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad()

    return once


def draw(vocabulary: int, *shape: int) -> Tensor:
    """Random ids."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def row(what: str, shape: str, peer: str, timings: Timings, tokens: int) -> dict[str, Any]:
    """One line of the table."""
    low, high = timings.spread("ours", peer)
    line = {
        "what": what,
        "shape": shape,
        "peer": peer,
        "ours_tokens_per_second": round(tokens / timings.median("ours")),
        "peer_tokens_per_second": round(tokens / timings.median(peer)),
        "ratio": round(timings.ratio("ours", peer), 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }
    print(
        f"{what:9s} {shape:7s} {peer:6s} {line['ours_tokens_per_second']:8,d} tokens/s against "
        f"{line['peer_tokens_per_second']:8,d}: {line['ratio']:.2f}x ({low:.2f} to {high:.2f})"
    )
    return line


def main() -> None:
    """Time every shape against both peers, print the table, write results/train_cpu.json."""
    torch.set_num_threads(THREADS)
    rows = [line for shape in SHAPES for line in train_rows(shape)]
    for shape in SHAPES:
        for batch in (1, 8):
            rows += decode_rows(shape, batch)
    record("train_cpu", rows, ("transformers",))


if __name__ == "__main__":
    main()
