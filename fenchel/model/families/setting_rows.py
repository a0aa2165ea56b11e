"""Rows of a family's table of settings: config.json to ModelConfig and back, one or few keys each.

A row reads what it writes. A value of ModelConfig that a row cannot write comes back different,
which is how ``Family.cannot_express`` detects it. ``ours`` names a field of ModelConfig, ``theirs``
a key of config.json.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader

Settings = dict[str, Any]
PLAIN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
"""Activations of an MLP without a gate, theirs to ours."""
GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu": "geglu",
}
"""Activations of a gated MLP, theirs to ours."""


class Setting(NamedTuple):
    """A row: keys of config.json to fields of ModelConfig, and the inverse."""

    read: Callable[[ConfigReader], Settings]
    write: Callable[[ModelConfig], Settings]


def size(
    ours: str, *theirs: str, default: int | None = None, written: str | None = None
) -> Setting:
    """An integer, required unless it has a default; written under the first of its names.

    A file that has several of the names should give them one value. ``written`` names the property
    of ModelConfig to write where ``ours`` may be None.
    """

    def read(c: ConfigReader) -> Settings:
        given = [name for name in theirs if c.has(name)]
        value = c.integer(given[0] if given else theirs[0], default)
        for other in given[1:]:
            c.only(other, (value,))
        return {ours: value}

    return Setting(read, lambda m: {theirs[0]: getattr(m, written or ours)})


def size_or_none(ours: str, theirs: str, written: str) -> Setting:
    """An integer or null; the property ``written`` is what is written."""
    return Setting(
        lambda c: {ours: c.integer_or_none(theirs)}, lambda m: {theirs: getattr(m, written)}
    )


def number(ours: str, theirs: str, default: float) -> Setting:
    """A finite number."""
    return Setting(
        lambda c: {ours: c.number(theirs, default)}, lambda m: {theirs: getattr(m, ours)}
    )


def number_or_none(ours: str, theirs: str, default: float | None) -> Setting:
    """A finite number or null, such as a soft cap."""
    return Setting(
        lambda c: {ours: c.number_or_none(theirs, default)}, lambda m: {theirs: getattr(m, ours)}
    )


def flag(ours: str, theirs: str, default: bool) -> Setting:
    """True or false."""
    return Setting(lambda c: {ours: c.flag(theirs, default)}, lambda m: {theirs: getattr(m, ours)})


def word(ours: str, theirs: str, words: Mapping[str, str], default: str | None = None) -> Setting:
    """A string; ``words`` maps theirs to ours, and the first of several equal ones is written."""
    back = {mine: yours for yours, mine in reversed(list(words.items()))}
    return Setting(
        lambda c: {ours: c.word(theirs, words, default)},
        lambda m: {theirs: back.get(getattr(m, ours), next(iter(words)))},
    )


def attention_dropout(theirs: str, default: float) -> Setting:
    """Dropout of attention weights; that of the branches where ModelConfig has None."""

    def write(m: ModelConfig) -> Settings:
        return {theirs: m.dropout if m.attention_dropout is None else m.attention_dropout}

    return Setting(lambda c: {"attention_dropout": c.number(theirs, default)}, write)


def constant(**ours: Any) -> Setting:
    """Fields of ModelConfig that every model of the family has, without a key in config.json."""
    return Setting(lambda _: ours, lambda _: {})


def only(theirs: str, *allowed: Any) -> Setting:
    """A key whose other variants fenchel does not have: all values but ``allowed`` are refused."""

    def read(c: ConfigReader) -> Settings:
        c.only(theirs, allowed)
        return {}

    return Setting(read, lambda _: {})


def unread(*theirs: str) -> Setting:
    """Keys that do not affect what the model computes."""

    def read(c: ConfigReader) -> Settings:
        c.ignore(theirs)
        return {}

    return Setting(read, lambda _: {})


CONTEXT = size("context", "max_position_embeddings")
SIZES = (
    size("vocabulary", "vocab_size"),
    size("width", "hidden_size"),
    size("layers", "num_hidden_layers"),
    size("heads", "num_attention_heads"),
    size("hidden", "intermediate_size", written="mlp_width"),
)
"""The sizes under their usual names."""
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _model_name_or_path
    _name_or_path architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout cls_token_id
    cross_attention_hidden_size decoder_start_token_id directionality dtype eos_token_id
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
    initializer_factor initializer_range is_encoder_decoder is_llama_config
    keys_to_ignore_at_inference label2id mask_token_id max_length model_type num_labels
    output_attentions output_hidden_states output_past pad_token_id prefix pretraining_tp
    problem_type return_dict
    sep_token_id task_specific_params tokenizer_class torch_dtype torchscript transformers_version
    unk_token_id use_bfloat16 use_cache
    """.split()
)
"""Keys of any family that do not affect what its model computes."""
