"""When each round is due. Whole numbers only.

Round ``r`` exchanges fragment ``r mod P``. Every fragment is exchanged once in ``H = sync_every``
steps, evenly spread, as in streaming DiLoCo (arXiv 2501.18512).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """``sync_every`` steps (H) and the number of fragments that the partition gave (P <= H)."""

    sync_every: int
    fragments: int

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless ``1 <= fragments <= sync_every``."""
        if not 1 <= self.fragments <= self.sync_every:
            raise ValueError(
                f"fragments={self.fragments} is not between 1 and sync_every={self.sync_every}"
            )

    def fragment(self, round_: int) -> int:
        """The fragment that this round exchanges."""
        return round_ % self.fragments

    def version(self, round_: int) -> int:
        """The fragment's version once this round is committed; it starts at 0."""
        return round_ // self.fragments + 1

    def due_step(self, round_: int) -> int:
        """Steps from the start of the run to the moment this round is due."""
        turn, place = divmod(round_, self.fragments)
        return turn * self.sync_every + (place + 1) * self.sync_every // self.fragments

    def gap(self, round_: int) -> int:
        """Steps between the previous round and this one, at least 1; those of P rounds sum to H."""
        return self.due_step(round_) - (self.due_step(round_ - 1) if round_ else 0)
