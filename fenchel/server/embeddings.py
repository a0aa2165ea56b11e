"""Texts to vectors, by decoders and by encoders.

    e = m / |m|,    m = the mean over all tokens of the final stream

The final stream is the output of the last block after the last norm, (T, M): what transformers
calls last_hidden_state. The tokens are those of ``encode_whole``, the control tokens around a text
included. An encoder-decoder gives the output of its encoder. Decoders were not trained for this:
their vectors compare texts less well than those of a model that was.
"""

from collections.abc import Sequence

import torch

from fenchel.model import Transformer


@torch.inference_mode()
def embed(model: Transformer, ids: Sequence[int]) -> list[float]:
    """The vector of one text, of length 1, in float32."""
    ids_1T = torch.tensor([ids], device=model.lm_head_weight.device)
    if model.config.kind == "encoder-decoder":
        stream_1TM = model.encode(ids_1T)
    else:
        stream_1TM = model(ids_1T, return_stream=True)
    mean_M = stream_1TM[0].float().mean(0)
    vector: list[float] = (mean_M / mean_M.norm().clamp(min=1e-12)).tolist()
    return vector
