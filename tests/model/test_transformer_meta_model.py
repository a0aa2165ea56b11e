"""model/transformer.py: all of a model's shapes, without its numbers and without a compiler."""

import subprocess
import sys

from fenchel.model import ModelConfig, Transformer
from fenchel.model.transformer import meta_model

CONFIG = ModelConfig(vocabulary=9, context=4, width=8, heads=2)


def test_it_has_the_shapes_of_the_model() -> None:
    shapes = {name: p.shape for name, p in Transformer(CONFIG).state_dict().items()}
    found = meta_model(CONFIG)
    assert {name: p.shape for name, p in found.state_dict().items()} == shapes
    assert all(p.is_meta for p in found.parameters())


def test_it_needs_no_compiler() -> None:
    code = (
        "import sys\n"
        "from fenchel.model import ModelConfig\n"
        "from fenchel.model.transformer import meta_model\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "meta_model(ModelConfig(vocabulary=9, context=4, width=8, heads=2))\n"
        "print(before, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
