"""Another attention map in a Llama of transformers, and the proof that it is in use.

    pip install 'fenchel[hf]'
    python examples/attach_to_a_llama.py [DIRECTORY]

DIRECTORY is a Hugging Face checkpoint; without one a small Llama with random weights is made.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fenchel import Entmax, attach


def main(directory: str | None = None) -> float:
    """Attach entmax; return the largest difference of a logit from softmax."""
    torch.manual_seed(0)
    if directory is None:
        shape = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(shape)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory)
    model.eval()
    ids = torch.randint(model.config.vocab_size, (1, 32))
    with torch.no_grad():
        before = model(ids).logits
        attached = attach(model, Entmax(1.5))
        after = model(ids).logits
        attached.detach()
        assert torch.equal(model(ids).logits, before)  # as it was
    difference = (after - before).abs().max().item()
    layers = model.config.num_hidden_layers
    print(f"entmax in {layers} layers; a logit moves by up to {difference:.3g}")
    return difference


if __name__ == "__main__":
    main(*sys.argv[1:2])
