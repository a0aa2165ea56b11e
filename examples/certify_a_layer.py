"""How far the output of a layer can move: at a point, everywhere in a ball, and what attains it.

    python examples/certify_a_layer.py

The layer is torch's own encoder layer, with attention, norms and an MLP. ``certify`` reads what its
forward pass computes: ``lower`` is attained by an input in the ball, ``upper`` is never exceeded.
"""

import torch
from torch import nn

from fenchel import certify, jacobian, spectral_norm


def main() -> tuple[float, float, float]:
    """The norm of the Jacobian at the input, and the two bounds over the ball."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(6, 16)  # six tokens
    at_a_point = spectral_norm(jacobian(layer, x))
    over_a_ball = certify(layer, x, radius=0.01)
    print(f"at the input       {at_a_point.lower:.3f} to {at_a_point.upper:.3f}")
    lower, upper = over_a_ball.lower, over_a_ball.upper
    print(f"within 0.01 of it  {lower:.3f} (attained) to {upper:.3f} (certified)")

    direction = torch.randn(6, 16)
    moved = x + 0.01 * direction / direction.norm()
    with torch.no_grad():
        ratio = (layer(moved) - layer(x)).norm() / (moved - x).norm()
    print(f"a random move      {ratio:.3f} times its length")
    assert ratio <= upper
    return float(at_a_point.lower), lower, upper


if __name__ == "__main__":
    main()
