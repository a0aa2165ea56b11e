"""Families of checkpoints: a table of settings and a table of names for each."""

from fenchel.model.families.albert import ALBERT
from fenchel.model.families.bert import BERT, BERT_BODY
from fenchel.model.families.bloom import BLOOM
from fenchel.model.families.family import Family, Match
from fenchel.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from fenchel.model.families.gpt2 import GPT2
from fenchel.model.families.gpt_neox import GPT_NEOX
from fenchel.model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from fenchel.model.families.registry import FAMILIES, family_for, family_of
from fenchel.model.families.t5 import T5

__all__ = [
    "ALBERT",
    "BERT",
    "BERT_BODY",
    "BLOOM",
    "FAMILIES",
    "GEMMA",
    "GEMMA2",
    "GEMMA3",
    "GPT2",
    "GPT_NEOX",
    "LLAMA",
    "MISTRAL",
    "QWEN2",
    "QWEN3",
    "T5",
    "Family",
    "Match",
    "family_for",
    "family_of",
]
