"""Small random checkpoints of every family, made by transformers, with no number at its default.

Sizes all differ: a head is 16 wide where a family lets it differ from width / heads.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers.utils import logging as chatter

chatter.disable_progress_bar()

COMMON: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
QWEN3_MOE = {
    **GROUPED,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
NEAR, ALL = "sliding_attention", "full_attention"
LINEAR_LAYER = "linear_attention"
GEMMA4 = {
    **GROUPED,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 4,
    "vocab_size_per_layer_input": 70,
    "rope_parameters": {
        ALL: {"rope_type": "proportional", "rope_theta": 7000.0, "partial_rotary_factor": 0.5},
        NEAR: {"rope_type": "default", "rope_theta": 70.0},
    },
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 70, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4, **TOKENS}
BLOOM = {"vocab_size": 70, "hidden_size": 48, "n_layer": 3, "n_head": 4, **TOKENS}
ROBERTA = {**COMMON, "bos_token_id": 0, "pad_token_id": 1, "layer_norm_eps": 1e-3}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", COMMON),
    "bert with three types, relu": ("Bert", {**COMMON, "type_vocab_size": 3, "hidden_act": "relu"}),
    "roberta": ("Roberta", ROBERTA),
    "xlm-roberta": ("XLMRoberta", {**ROBERTA, "type_vocab_size": 1}),
    "mpnet": ("MPNet", {**ROBERTA, "layer_norm_eps": 1e-3}),
    "modernbert": (
        "ModernBert",
        {
            **COMMON,
            "local_attention": 6,
            "layer_types": [ALL, NEAR, NEAR],
            "norm_eps": 1e-3,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "rope_parameters": {
                ALL: {"rope_type": "default", "rope_theta": 7000.0},
                NEAR: {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": 70,
            "dim": 48,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 56,
            "max_position_embeddings": 64,
            "activation": "relu",
            **TOKENS,
        },
    ),
    "albert": (
        "Albert",
        {**COMMON, "num_hidden_layers": 4, "num_hidden_groups": 2, "embedding_size": 24},
    ),
    "albert, one group": ("Albert", {**COMMON, "embedding_size": 20, "hidden_act": "gelu"}),
}
T5 = {
    "vocab_size": 70,
    "d_model": 48,
    "d_kv": 10,
    "d_ff": 56,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "initializer_factor": 0.3,  # logits of order 1 also where nothing scales them
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", T5),
    "t5 v1.1": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "llama tied, with biases": (
        "Llama",
        {**COMMON, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3": ("Llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {**GROUPED, "rope_parameters": YARN}),
    "llama linear": ("Llama", {**GROUPED, "rope_parameters": LINEAR}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 5, "head_dim": 16}),
    "mistral without a window": ("Mistral", {**GROUPED, "sliding_window": None}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2 with windows": (
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {
            **GROUPED,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.6,
            "tie_word_embeddings": True,
        },
    ),
    "granite 4": (
        "GraniteMoeHybrid",
        {
            **GROUPED,
            "shared_intermediate_size": 40,
            "num_local_experts": 0,
            "layer_types": [ALL, ALL, ALL],
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.6,
        },
    ),
    "olmo2": ("Olmo2", {**GROUPED, "rope_parameters": YARN}),
    "olmo3": (
        "Olmo3",
        {
            **GROUPED,
            "sliding_window": 4,
            "layer_types": [NEAR, ALL, NEAR],
            "rope_parameters": {ALL: YARN, NEAR: {"rope_type": "default", "rope_theta": 700.0}},
        },
    ),
    "smollm3": ("SmolLM3", {**GROUPED, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}),
    "smollm3 with windows": (
        "SmolLM3",
        {
            **GROUPED,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            **GROUPED,
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "nanochat": (
        "NanoChat",
        {**GROUPED, "final_logit_softcapping": 9.0, "rope_parameters": {"rope_theta": 500.0}},
    ),
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe with windows, not normalised": (
        "Qwen3Moe",
        {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 4},
    ),
    "qwen3-moe with dense layers": (
        "Qwen3Moe",
        {
            **QWEN3_MOE,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **GROUPED,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            **GROUPED,
            "head_dim": 16,
            "layer_types": [LINEAR_LAYER, LINEAR_LAYER, ALL],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **QWEN3_MOE,
            "num_attention_heads": 6,
            "shared_expert_intermediate_size": 20,
            "layer_types": [LINEAR_LAYER, ALL, LINEAR_LAYER],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 12,
            "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3": (
        "Phi3",
        {
            **GROUPED,
            "sliding_window": 5,
            "rope_parameters": {"rope_theta": 7000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3 longrope": (
        "Phi3",
        {
            **GROUPED,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.5,
                "short_factor": [1.1, 0.7, 1.3],
                "long_factor": [3.0, 2.0, 0.5],
            },
        },
    ),
    "gpt2": ("GPT2", {**GPT2, "n_inner": 56}),
    "gpt2 untied": ("GPT2", {**GPT2, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {**COMMON, "num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {**GROUPED, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20},
    ),
    "gemma3": (
        "Gemma3",
        {**GROUPED, "head_dim": 16, "sliding_window": 4, "layer_types": [NEAR, ALL, NEAR]},
    ),
    "gemma4": (
        "Gemma4",
        {
            **GEMMA4,
            "layer_types": [NEAR, NEAR, ALL, NEAR, ALL],
            "hidden_size_per_layer_input": 10,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4, keys as values": (
        "Gemma4",
        {
            **GEMMA4,
            "layer_types": [NEAR, ALL, NEAR, NEAR, ALL],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma4 with experts": (
        "Gemma4",
        {
            **GEMMA4,
            "layer_types": [NEAR, ALL, NEAR, NEAR, ALL],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gpt-neox": ("GPTNeoX", {**COMMON, "num_attention_heads": 6}),
    "gpt-neox in sequence": (
        "GPTNeoX",
        {**COMMON, "use_parallel_residual": False, "hidden_act": "gelu_new", "rotary_pct": 0.5},
    ),
    "bloom": ("Bloom", BLOOM),
    "bloom, heads no power of two": ("Bloom", {**BLOOM, "n_head": 6}),
}
"""Name: the class in transformers, less its ending, and what is said to it."""


FAMILIES = {**DECODERS, **ENCODERS, **PAIRS}
HEADS = {
    "GPT2": "LMHeadModel",
    "Bert": "ForMaskedLM",
    **dict.fromkeys(("Roberta", "XLMRoberta", "MPNet", "DistilBert"), "ForMaskedLM"),
    **dict.fromkeys(("ModernBert", "Albert"), "ForMaskedLM"),
    "T5": "ForConditionalGeneration",
}
AUTO = {"ForMaskedLM": "AutoModelForMaskedLM", "ForConditionalGeneration": "AutoModelForSeq2SeqLM"}


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    """Every family in turn."""
    return str(request.param)


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> str:
    """Every decoder in turn."""
    return str(request.param)


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> str:
    """Every encoder in turn."""
    return str(request.param)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> str:
    """Every encoder with a decoder in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def foreign() -> Callable[[str], Any]:
    """A model of transformers in float32, every parameter drawn."""
    made: dict[str, Any] = {}

    def build(name: str) -> Any:
        if name not in made:
            kind, settings = FAMILIES[name]
            text = "Text" if kind in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else ""
            config = getattr(transformers, f"{kind}{text}Config")(**settings)
            config._attn_implementation = "eager"
            head = HEADS.get(kind, "ForCausalLM")
            with torch.random.fork_rng():
                torch.manual_seed(0)
                made[name] = stirred(getattr(transformers, f"{kind}{head}")(config))
        return made[name]

    return build


def stirred(model: Any) -> Any:
    """With every number moved, so that no gain is one and no bias zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what transformers wrote is kept."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def written(shelf: Path, tmp_path: Path, foreign: Callable[[str], Any]) -> Callable[..., Path]:
    """The directory that transformers writes for a family; a copy, to be changed at will."""

    def write(name: str, **how: Any) -> Path:
        kept = shelf / f"{name} {how}"
        if not kept.exists():
            foreign(name).save_pretrained(kept, **how)
        return Path(shutil.copytree(kept, tmp_path / "theirs"))

    return write


@contextmanager
def silence() -> Iterator[list[str]]:
    """What transformers has to complain about, which should be nothing."""
    complaints: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints.append(record.getMessage())

    logger, listener = logging.getLogger("transformers"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield complaints
    finally:
        logger.removeHandler(listener)


@pytest.fixture
def reload() -> Callable[..., Any]:
    """A directory as transformers reads it; anything it complains of is an error."""

    def read(path: Path, name: str, **how: Any) -> Any:
        head = HEADS.get(FAMILIES[name][0], "ForCausalLM")
        auto = getattr(transformers, AUTO.get(head, "AutoModelForCausalLM"))
        with silence() as complaints, warnings.catch_warnings():
            warnings.simplefilter("error")
            model, info = auto.from_pretrained(
                path, output_loading_info=True, attn_implementation="eager", **how
            )
        assert not complaints
        assert not any(info.values()), info
        return model.eval()

    return read


IDS = {"bos_token_id": 11, "eos_token_id": 12, "pad_token_id": 14}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
TEMPLATE = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"


def add(path: Path, name: str, **settings: Any) -> None:
    file = path / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **settings}))


def special_ids(path: Path) -> dict[str, int]:
    """Unusual ids; the id of padding decides the positions of a RoBERTa."""
    kind = json.loads((path / "config.json").read_text())["model_type"]
    return IDS | ({"pad_token_id": 1} if "roberta" in kind else {})


def distinctive(path: Path, *, template: bool) -> None:
    """A tokenizer whose special tokens have unusual names and ids, and settings that name them."""
    ids, words = special_ids(path), [f"w{i}" for i in range(69)]
    words[11], words[12], words[ids["pad_token_id"]] = "<start>", "<stop>", "<fill>"
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*words, "?"])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<start>", "<stop>", "<fill>"])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<start> $A", special_tokens=[("<start>", 11)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<start>", "eos_token": "<stop>", "pad_token": "<fill>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    (path / "tokenizer_config.json").write_text(json.dumps(names | kind))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    add(path, "config.json", **ids)
    add(path, "generation_config.json", **ids, **SAMPLING)
