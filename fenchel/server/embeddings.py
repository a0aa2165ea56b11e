"""Texts to vectors, by decoders and by encoders.

    e = m / |m|,    m = the mean over all tokens of the final stream

The final stream is the output of the last block after the last norm, (T, M): what transformers
calls last_hidden_state. The tokens are those of ``encode_whole``, the control tokens around a text
included. An encoder-decoder gives the output of its encoder. Decoders were not trained for this:
their vectors compare texts less well than those of a model that was.

A separate thread computes one text after another.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fenchel.model import Transformer


class Embedder:
    """The vectors of token ids, from a separate thread."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.width = model, model.config.width
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="fenchel-embeddings")
        """Where ``embed`` is to be called."""

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> list[float]:
        """The vector of one text, of length 1, in float32."""
        model = self.model
        ids_1T = torch.tensor([ids], device=model.lm_head_weight.device)
        if model.config.kind == "encoder-decoder":
            stream_1TM = model.encode(ids_1T)
        else:
            stream_1TM = model(ids_1T, return_stream=True)
        mean_M = stream_1TM[0].float().mean(0)
        vector: list[float] = (mean_M / mean_M.norm().clamp(min=1e-12)).tolist()
        return vector

    def close(self) -> None:
        """End the thread after what it computes now."""
        self.thread.shutdown(wait=True, cancel_futures=True)
