"""Small random checkpoints of every family, made by transformers, with no number at its default.

Sizes all differ: a head is 16 wide where a family lets it differ from width / heads.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

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
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "llama tied, with biases": (
        "Llama",
        {**COMMON, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3": ("Llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {**GROUPED, "rope_parameters": YARN}),
    "llama linear": (
        "Llama",
        {
            **GROUPED,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
}
"""Name: the class in transformers, less its ending, and what is said to it."""


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> str:
    """Every decoder in turn, by name."""
    return str(request.param)


@pytest.fixture(scope="session")
def foreign() -> Callable[[str], Any]:
    """A model of transformers in float32, every parameter drawn."""
    made: dict[str, Any] = {}

    def build(name: str) -> Any:
        if name not in made:
            kind, settings = DECODERS[name]
            config = getattr(transformers, f"{kind}Config")(**settings)
            head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
            config._attn_implementation = "eager"
            made[name] = stirred(getattr(transformers, f"{kind}{head}")(config))
        return made[name]

    return build


def stirred(model: Any) -> Any:
    """With every number moved, so that no gain is one and no bias zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture
def written(tmp_path: Path, foreign: Callable[[str], Any]) -> Callable[..., Path]:
    """The directory that transformers writes for a family."""

    def write(name: str, **how: Any) -> Path:
        path = tmp_path / "theirs"
        foreign(name).save_pretrained(path, **how)
        return path

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
def reload() -> Callable[[Path], Any]:
    """A directory as transformers reads it; anything it complains of is an error."""

    def read(path: Path, **how: Any) -> Any:
        auto = transformers.AutoModelForCausalLM
        with silence() as complaints:
            model, info = auto.from_pretrained(
                path, output_loading_info=True, attn_implementation="eager", **how
            )
        assert not complaints
        assert not any(info.values()), info
        return model.eval()

    return read
