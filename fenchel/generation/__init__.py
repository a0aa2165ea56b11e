"""Prompts to continuations: KV cache, steps, decoder, scheduler, sampling, text."""

from fenchel.generation.attention_trace import TraceAttention, TraceSettings
from fenchel.generation.conversation import Answer, Conversation
from fenchel.generation.decoder import Decoder
from fenchel.generation.generate import (
    GenerationSettings,
    generate,
    prompt_ids,
    stream,
    stream_text,
    updates,
)
from fenchel.generation.kv_cache import KVCache
from fenchel.generation.prompt_lookup import PromptLookup
from fenchel.generation.sampling import (
    LogProbabilities,
    Penalties,
    RowSampling,
    Sampling,
    draw,
    log_probabilities,
)
from fenchel.generation.scheduler import Request, Scheduler, Token, Update
from fenchel.generation.steering import Emphasis, HeadChoice, Steering
from fenchel.generation.text_stream import Detokenizer, StopStrings, TextStream

__all__ = [
    "Answer",
    "Conversation",
    "Decoder",
    "Detokenizer",
    "Emphasis",
    "GenerationSettings",
    "HeadChoice",
    "KVCache",
    "LogProbabilities",
    "Penalties",
    "PromptLookup",
    "Request",
    "RowSampling",
    "Sampling",
    "Scheduler",
    "Steering",
    "StopStrings",
    "TextStream",
    "Token",
    "TraceAttention",
    "TraceSettings",
    "Update",
    "draw",
    "generate",
    "log_probabilities",
    "prompt_ids",
    "stream",
    "stream_text",
    "updates",
]
