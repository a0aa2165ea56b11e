"""Published attention as four parts of one problem: prior, temperature, regulariser, feasible set.

    p = argmax over p in C of <p, beta z + log u> - Omega(p),        o = sum_j p_j v_j

``VARIANTS`` has a row per kind of attention: which of the four parts it changes, the call that is
it here, and the map from scores to weights where it is one, for ``fenchel.choice.membership``: a
row whose ``verdict`` is "member" passes, one that is "outside" shows a cycle. docs/attentions.md is
made of this table (``page``), and tests/test_attentions.py runs every call and every map.

Two maps of the field are not in the family, ``stick_breaking`` and ``softpick``: Tan et al. (2024),
Scaling stick-breaking attention. Zuhri, Fuadi and Aji (2025), Softpick.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fenchel.choice import Capped, Entmax, Hard, Sigmoid, Softmax, Sparsemax

Map = Callable[[Tensor], Tensor]
_SHANNON, _TSALLIS = "Shannon", "Tsallis alpha"
_SIMPLEX, _BELOW = "simplex", "sum p <= 1"


class Variant(NamedTuple):
    """One kind of attention."""

    name: str
    used_by: str
    prior: str = ""
    """u, where it is not given by the caller."""
    temperature: str = "1"
    regulariser: str = _SHANNON
    feasible: str = _SIMPLEX
    code: str = ""
    """The call for q, k, v (B, H, T, D), a score r, positions and an input x; empty: not built."""
    map: Map | None = None
    """Scores (..., K) to weights (..., K)."""
    verdict: Literal["member", "scores", "after", "outside"] = "member"
    note: str = ""
    """What it changes instead, or why it is outside."""


def stick_breaking(z: Tensor) -> Tensor:
    """p_j = sigmoid(z_j) times the product of 1 - sigmoid(z_k) over k < j.

    >>> stick_breaking(torch.zeros(3))
    tensor([0.5000, 0.2500, 0.1250])
    """
    left = torch.nn.functional.logsigmoid(-z).cumsum(-1).roll(1, -1)
    left[..., 0] = 0.0
    return torch.sigmoid(z) * left.exp()


def softpick(z: Tensor) -> Tensor:
    """max(e^z - 1, 0) / sum |e^z - 1|, 0 where all z are 0.

    >>> softpick(torch.tensor([0.0, -1.0, 1.0]))
    tensor([0.0000, 0.0000, 0.7311])
    """
    rise = torch.expm1(z)
    total = rise.abs().sum(-1, keepdim=True)
    return rise.clamp(min=0.0) / torch.where(total > 0, total, 1.0)


def _sinkhorn(z: Tensor) -> Tensor:
    """Entropic transport with equal margins, for a square matrix of scores as one vector."""
    n = round(z.shape[-1] ** 0.5)
    log_p = 0.2 * z.reshape(*z.shape[:-1], n, n)  # colder, the iteration takes longer
    for _ in range(400):
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        log_p = log_p - log_p.logsumexp(-2, keepdim=True)
    return log_p.exp().flatten(-2)


def _with_sink(z: Tensor) -> Tensor:
    sink = torch.full_like(z[..., :1], 0.5)
    return torch.softmax(torch.cat([sink, z], -1), -1)[..., 1:]


def _best_two(z: Tensor) -> Tensor:
    least = z.topk(2, -1).values[..., -1:]
    return torch.softmax(z.masked_fill(z < least, -torch.inf), -1)


def _cog(z: Tensor) -> Tensor:
    return z.sign() * torch.softmax(z.abs(), -1)


VARIANTS: tuple[Variant, ...] = (
    Variant(
        "softmax", "nearly all", "a mask", code="attend(q, k, v, prior=Causal())",
        map=Softmax().weights,
    ),
    Variant(
        "sliding window", "Mistral, Gemma, gpt-oss, OLMo 3", "0 outside a window",
        code="attend(q, k, v, prior=Window(3))",
    ),
    Variant(
        "ALiBi", "BLOOM, Falcon, MPT", "e^(-m |i - j|)",
        code="attend(q, k, v, prior=ALiBi(4) + Causal())",
    ),
    Variant(
        "relative bias", "T5", "learned, by bucket of distances",
        code="attend(q, k, v, prior=RelativeBias(torch.zeros(32, 4)))",
    ),
    Variant(
        "forget gate", "FoX", "learned from the input: the product of the gates between",
        code="attend(q, k, v, prior=Forget(logsigmoid(torch.randn(1, 4, 6))))",
    ),
    Variant(
        "top-k, indexer", "DeepSeek V3.2, GLM-5, MiniMax M3", "0 off the k best keys",
        feasible="simplex, k non-zero", code="attend(q, k, v, prior=top_k(q, k, 2).prior)",
        map=_best_two,
    ),
    Variant(
        "sink", "gpt-oss, MiMo V2, Granite-SWA, DeepSeek V4", "e^(r_h) on a key of value 0",
        feasible=_BELOW, code="attend(q, k, v, prior=Causal(), sink=torch.zeros(4))",
        map=_with_sink,
    ),
    Variant(
        "off by one", "Miller 2023", "1 on a key of value 0", feasible=_BELOW,
        code="attend(q, k, v, sink=0.0)",
    ),
    Variant(
        "sink from the token", "Inkling 2", "e^(r_t) on a key of value 0", feasible=_BELOW,
        code="attend(q, k, v, sink=r)",
    ),
    Variant(
        "output gate per head", "Step 3.7, LFM3",
        "e^r on a key of value 0, r = log Z - logit g", feasible=_BELOW,
        code='ModelConfig(vocabulary=16, gate="head")',
    ),
    Variant(
        "Scalable-Softmax", "Nakanishi 2025", temperature="s_h log n",
        code="attend(q, k, v, prior=Causal(), beta=log_length(positions, s=torch.ones(4)))",
    ),
    Variant(
        "stepped temperature", "Llama 4, Ministral 3, Mistral 4",
        temperature="1 + a log(1 + floor(m / f))",
        code="attend(q, k, v, prior=Causal(), beta=stepped_length(positions, 0.1, 4))",
    ),
    Variant(
        "logarithmic temperature", "Inkling", temperature="1 + a log max(1, n / n0)",
        code="attend(q, k, v, prior=Causal(), beta=ratio_length(positions, 0.1, 4.0))",
    ),
    Variant(
        "entmax", "adaptively sparse transformers, AdaSplash", regulariser=_TSALLIS,
        code="attend(q, k, v, choice=Entmax(1.5))", map=Entmax(1.5).weights,
    ),
    Variant(
        "alpha learned per head", "adaptively sparse transformers", regulariser="Tsallis alpha_h",
        code='ModelConfig(vocabulary=16, choice="entmax", entmax_alpha_learned=True)',
    ),
    Variant(
        "ASEntmax", "Vasylenko et al. 2025", temperature="delta + b (log n)^gamma",
        regulariser=_TSALLIS,
        code="attend(q, k, v, choice=Entmax(1.5), beta=adaptive_length(positions, 0.3))",
    ),
    Variant(
        "ASEntmax with delta = 0, gamma = 1, b learned per head", "entmax with Scalable-Softmax",
        temperature="b_h log n", regulariser=_TSALLIS,
        code='ModelConfig(vocabulary=16, choice="entmax", temperature="log")',
    ),
    Variant(
        "sparsemax", "Martins and Astudillo 2016", regulariser="|p|^2 / 2",
        code="attend(q, k, v, choice=Sparsemax())", map=Sparsemax().weights,
    ),
    Variant(
        "hard attention", "the limit of large beta", temperature="infinite", regulariser="0",
        code="attend(q, k, v, choice=Hard())", map=Hard().weights,
    ),
    Variant(
        "capped weights", "", feasible="simplex, p <= c",
        code="attend(q, k, v, choice=Capped(0.5))", map=Capped(0.5).weights,
    ),
    Variant(
        "sigmoid attention", "Ramapuram et al. 2025; routers of DeepSeek V3, GLM, Kimi",
        "odds 1 / n", regulariser="binary entropy of every key", feasible="box 0 <= p <= 1",
        code="attend(q, k, v, choice=Sigmoid(log_odds=-1.8), prior=Causal())",
        map=Sigmoid().weights,
    ),
    Variant(
        "Cog attention", "Lv et al. 2024", regulariser="Shannon of |p|",
        feasible="sum |p| <= 1: the gradient of log sum exp |z|", map=_cog,
    ),
    Variant(
        "Sinkhorn, doubly stochastic", "Sinkformer, ESPFormer; residual mixing of DeepSeek V4",
        feasible="transport polytope, all rows together", map=_sinkhorn,
    ),
    Variant(
        "soft cap", "Gemma 2", code="attend(q, k, v, softcap=50.0)", verdict="scores",
        note="scores c tanh(s / c)",
    ),
    Variant(
        "QK-norm", "Qwen3, OLMo 2, Gemma 3", code="ModelConfig(vocabulary=16, qk_norm=True)",
        verdict="scores", note="scores of normalised queries and keys",
    ),
    Variant(
        "distances", "Kim et al. 2021", code='ModelConfig(vocabulary=16, scores="l2")',
        verdict="scores", note="scores -|q - k|^2",
    ),
    Variant(
        "rotary positions", "nearly all", code="attend(rotary(q, positions), k, v)",
        verdict="scores", note="scores of queries and keys turned by position",
    ),
    Variant(
        "linear attention", "Katharopoulos et al. 2020, Performer",
        code="linear_attend(q, k, v, causal=True)", verdict="scores",
        note="scores log <phi(q), phi(k)>, for which no pair of a query and a key is visited",
    ),
    Variant(
        "grouped and latent keys (GQA, MLA)", "Llama, DeepSeek V3, Kimi",
        code="attend(q, k[:, :2], v[:, :2])", verdict="scores",
        note="how keys and values are computed and stored; MLA is not built",
    ),
    Variant(
        "output gate per element", "Qwen3-Next, Qwen3.5, Trinity",
        code='ModelConfig(vocabulary=16, gate="element")', verdict="after",
        note="a factor on every coordinate of o, after the choice",
    ),
    Variant(
        "output gate by softplus", "Laguna",
        code='ModelConfig(vocabulary=16, gate="head", gate_activation="softplus")',
        verdict="after", note="a factor on o that may exceed 1, which no sink is",
    ),
    Variant(
        "differential attention", "DIFF transformer, V2",
        code="differential_attend(q, k[:, :2], v[:, :2], 0.3)", verdict="after",
        note="the difference of two choices; its derivative is the difference of theirs",
    ),
    Variant(
        "exclusive self-attention", "XSA", verdict="after",
        note="removes from o the part along the token's own value",
    ),
    Variant(
        "stick-breaking", "Tan et al. 2024", map=stick_breaking, verdict="outside",
        note="dp_1/dz_2 = 0 and dp_2/dz_1 < 0",
    ),
    Variant(
        "softpick", "Zuhri et al. 2025", map=softpick, verdict="outside",
        note="dp_i/dz_j = -(e^z_i - 1) e^z_j / D^2 where both are positive, not symmetric",
    ),
    Variant(
        "delta rule (gated DeltaNet, KDA)", "Qwen3.5, Kimi Linear, OLMo hybrid", verdict="outside",
        note="no weights over keys: a linear map, fitted to keys and values one after another "
        "(`delta_rule`)",
    ),
)  # fmt: skip
"""What published models and papers do by November 2026."""


def page() -> str:
    """docs/attentions.md."""
    of = {
        verdict: [row for row in VARIANTS if row.verdict == verdict]
        for verdict in ("member", "scores", "after", "outside")
    }
    parts = ("attention", "used by", "prior u", "beta", "Omega", "feasible set", "here")
    others = ("attention", "used by", "what it is", "here")
    return "\n".join(
        (
            "# Every attention as one problem",
            "",
            "$$ p = \\arg\\max_{p \\in C} \\langle p, \\beta z + \\log u \\rangle - \\Omega(p), "
            "\\qquad o = \\sum_j p_j v_j $$",
            "",
            "A kind of attention is a prior $u$ over the keys, an inverse temperature $\\beta$, a "
            "regulariser $\\Omega$ and a feasible set $C$. A map from scores to weights is of this "
            "form exactly if it is the gradient of a convex function, which "
            "`fenchel.choice.membership` tests: a map outside shows a closed cycle of scores along "
            "which it gains ([choice maps](maths/choice.md)). This page is written by "
            "`python docs/reference.py` from `docs/attentions.py`; a test runs every "
            "call and every map. An empty last column is not built here.",
            "",
            "## In the family",
            "",
            *_table(parts, [(*row[:6], _code(row)) for row in of["member"]]),
            "",
            "## Other scores, the same choice",
            "",
            *_table(others, [(*row[:2], row.note, _code(row)) for row in of["scores"]]),
            "",
            "## Behind the choice",
            "",
            *_table(others, [(*row[:2], row.note, _code(row)) for row in of["after"]]),
            "",
            "## Not in the family",
            "",
            *_table(others[:3], [(*row[:2], row.note) for row in of["outside"]]),
            "",
        )
    )


def _code(row: Variant) -> str:
    return f"`{row.code}`" if row.code else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return [f"| {' | '.join(line)} |" for line in cells]
