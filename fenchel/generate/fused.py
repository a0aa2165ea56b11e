"""One token of a few sequences through a plain decoder on a GPU, in five kernels a layer.

    qkv   = norm(x) W_qkv^T                             kernels/product.py
    o     = attend(turned q, keys with turned k)        kernels/newest.py, which also writes k and v
    x     = x + o W_o^T                                 kernels/product.py
    wide  = f(norm(x) W_gate^T) * (norm(x) W_up^T)
    x     = x + wide W_down^T
    z     = norm(x) read^T,  token = argmax z           kernels/greedy.py

With one token a step lasts as long as it takes to read the weights once, if nothing else is in the
way: each kernel reads one or two matrices whole and makes what it needs of the stream by itself.
Where we are in the text lies in device memory, so that the step can be recorded once for all tokens
(fenchel/generate/fixed.py). 22 layers of width 2048 with 32,000 words are 2.07 GB in bfloat16.

B sequences, M width of the stream, H heads, G heads of keys, D width of a head, F width of the MLP.
"""

from importlib.util import find_spec

import torch
from torch import Tensor, nn

from fenchel.generate.plain import Norm as NormModule
from fenchel.generate.plain import layer_of, norm_of, unusual
from fenchel.generate.slots import FixedCache
from fenchel.kernels.normed import Norm
from fenchel.model import Transformer
from fenchel.model.turning import Turning

MOST = 8
"""Sequences up to which reading weights is most of the work; for more, products are torch's."""
KINDS = (torch.bfloat16, torch.float16, torch.float32)


def why_not(model: Transformer, *, batch: int) -> str | None:
    """The first reason why a model's step cannot be made of these kernels, or None."""
    table = model.read_weight
    if batch > MOST:
        return f"{batch} sequences are more than {MOST}"
    if table.device.type != "cuda" or table.dtype not in KINDS:
        return f"it is in {table.dtype} on {table.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not all(p.is_contiguous() for p in model.parameters()):
        return "a parameter does not lie in one piece"
    return unusual(model)


class Fused:
    """Reads the token of each sequence that stands in ``token_B``, and writes the next there."""

    def __init__(self, model: Transformer, cache: FixedCache, token_B: Tensor) -> None:
        c, table, S = model.config, model.read_weight, cache.positions
        self.cache, self.token_B = cache, token_B
        self.embed, self.read_weight = model.embed.weight, table
        self.place = None if model.place is None else model.place.weight
        self.activation, self.norm = c.mlp, _norm(norm_of(model.norm))
        self.scale = c.head_width**-0.5 if c.score_scale is None else c.score_scale
        self.turn: tuple[Tensor, Tensor] | None = None
        if c.positions == "rotary":
            cos, sin = Turning(c).between(0, S, table)
            self.turn = cos.to(table.dtype).contiguous(), sin.to(table.dtype).contiguous()
        self.layers = [layer_of(block) for block in model.blocks]
        self.norms = [(_norm(layer.before), _norm(layer.between)) for layer in self.layers]
        B, H, G, D = len(token_B), c.heads, c.groups, c.head_width
        new = table.new_empty
        self.x, self.qkv, self.o = new(B, c.width), new(B, (H + 2 * G) * D), new(B, H * D)
        self.wide, self.logits = new(B, c.mlp_width), new(B, c.vocabulary)

    def step(self, said_BP: Tensor) -> Tensor:
        """Logits behind the token, (B, V); the likeliest is the next, also in ``said_BP``.

        The logits are good until the next step.
        """
        from fenchel.kernels.greedy import choose
        from fenchel.kernels.newest import Place, attend_newest
        from fenchel.kernels.product import gated, onto, product

        cache, x, turn = self.cache, self.x, self.turn
        place = Place(cache.token, cache.fill_B)
        torch.index_select(self.embed, 0, self.token_B, out=x)
        if self.place is not None:
            x.add_(self.place[cache.token - cache.fill_B])
        for number, (layer, (before, between)) in enumerate(
            zip(self.layers, self.norms, strict=True)
        ):
            keys, values = cache.keys[number], cache.values[number]
            product(x, layer.qkv.weight, layer.qkv.bias, self.qkv, norm=before)
            attend_newest(self.qkv, keys, values, place, self.o, turn=turn, scale=self.scale)
            onto(x, self.o, layer.out.weight, layer.out.bias)
            gate = None if layer.gate is None else (layer.gate.weight, layer.gate.bias)
            up, f = (layer.up.weight, layer.up.bias), self.activation
            gated(x, gate, up, self.wide, activation=f, norm=between)
            onto(x, self.wide, layer.down.weight, layer.down.bias)
        cache.token.add_(1)
        product(x, self.read_weight, None, self.logits, norm=self.norm)
        choose(self.logits, cache.token, self.token_B, said_BP)
        return self.logits


def _norm(module: NormModule) -> Norm:
    if isinstance(module, nn.LayerNorm):
        return Norm(module.weight, module.bias, module.eps, centred=True)
    return Norm(module.weight, None, module.eps, centred=False)
