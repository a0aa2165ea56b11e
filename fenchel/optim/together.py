"""Several optimisers behind one: each moves its own parameters."""

from collections.abc import Mapping
from typing import Any

import torch


class Together:
    """Calls its members in order; its state is theirs, side by side."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members; setting ``lr`` in one of them works as usual."""
        return [group for member in self.members for group in member.param_groups]

    def step(self) -> None:
        """One step of every member."""
        for member in self.members:
            member.step()

    def zero_grad(self) -> None:
        """Forget every gradient."""
        for member in self.members:
            member.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """{"0": state of the first member, "1": ...}."""
        return {str(n): member.state_dict() for n, member in enumerate(self.members)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        if set(state) != {str(n) for n in range(len(self.members))}:
            raise ValueError(
                f"the saved state is of {len(state)} optimisers, here are {len(self.members)}."
            )
        for n, member in enumerate(self.members):
            member.load_state_dict(state[str(n)])
