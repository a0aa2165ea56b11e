"""Cross-entropy of the next token.

    loss = - sum over targets of  sum_v y_v log softmax(z)_v
    y    = (1 - a) onehot(target) + a / V           label smoothing a

It is the Fenchel-Young loss of the Softmax choice. This is the definition, for logits that are at
hand; a step of training computes the same from the stream in parts (readout.py). The sum and
not the mean is returned: a step adds the sums of its parts and divides once by the number of
targets, so that parts of unequal size weigh by their tokens.
"""

from torch import Tensor
from torch.nn.functional import cross_entropy


def total_loss(logits_BTV: Tensor, targets_BT: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Sum over all targets, in nats: (B, T, V), (B, T) -> ()."""
    return cross_entropy(
        logits_BTV.flatten(0, -2).float(),
        targets_BT.flatten(),
        reduction="sum",
        label_smoothing=smoothing,
    )
