"""A cache whose shapes never change: all S slots from the start, filled from the end.

    present_BS    True at the slots that hold a token; the model forbids the others

Priors are aligned to the end, where the newest query stands. So slots are filled from the end:
token n stands in slot S - 1 - n. A query at the last slot then sees every slot to its left, and
the n + 1 present ones put it at position n. A layer with a window of W keys has R = min(W, S)
slots and token n stands in slot R - 1 - n mod R: until all R are full they are the last R of the
S, and afterwards all of them are present, so one mask serves all layers. Where keys stand does
not matter to attention as long as their positions came in before (rotary, learned, none);
distances between slots mean nothing here.
"""

import torch
from torch import Tensor

from fenchel.generate.cache import KeyValueCache


class FixedCache:
    """All slots of every layer, filled from the end, at places that are numbers in memory."""

    def __init__(self, cache: KeyValueCache, *, batch: int) -> None:
        self.positions = S = cache.positions
        like = cache.layers[0].keys.read(0, 1)
        _, G, _, D = like.shape
        self.rooms = [
            S if layer.reach is None else min(S, layer.reach + 1) for layer in cache.layers
        ]
        # Zeros, since a slot that is absent still meets a weight of zero.
        self.keys = [like.new_zeros(batch, G, room, D) for room in self.rooms]
        self.values = [like.new_zeros(batch, G, room, D) for room in self.rooms]
        self.token = torch.zeros(1, dtype=torch.long, device=like.device)
        """The number n of the token that is read next."""
        self.places = {room: self.token + room - 1 for room in [*self.rooms, S]}
        self.present_BS = torch.zeros(batch, S, dtype=torch.bool, device=like.device)
        self.fill_B = torch.zeros(batch, dtype=torch.long, device=like.device)
        """How many slots before each sequence hold nothing."""
        self.length = S - 1
        """For the model the newest token stands at the last slot, whatever its number."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, G, 1, D) at the token's place and give back all slots."""
        place = self.places[self.rooms[layer]]
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        return keys, values

    def advance(self, positions: int) -> None:
        """The next token, and its places."""
        self.token.add_(positions)
        for room, place in self.places.items():
            place.copy_(room - 1 - self.token % room)

    def take(self, cache: KeyValueCache, fill_B: Tensor | None) -> None:
        """Hold what another cache has read; ``fill_B`` slots at its left are absent."""
        n, device = cache.length, self.token.device
        tokens = torch.arange(n, device=device)
        places = {room: room - 1 - tokens[-room:] % room for room in set(self.rooms)}
        for layer, (room, held) in enumerate(zip(self.rooms, cache.layers, strict=True)):
            end = n - held.gone
            last = min(room, end)
            at = places[room][-last:]
            self.keys[layer].index_copy_(2, at, held.keys.read(end - last, end))
            self.values[layer].index_copy_(2, at, held.values.read(end - last, end))
        tokens_S = self.length - torch.arange(self.positions, device=device)
        present_BS = (tokens_S < n).expand_as(self.present_BS)
        if fill_B is not None:
            present_BS = present_BS & (tokens_S >= fill_B.unsqueeze(-1))
        self.present_BS.copy_(present_BS)
        self.fill_B.copy_(torch.zeros_like(self.fill_B) if fill_B is None else fill_B)
        self.token.fill_(n)
        self.advance(0)
