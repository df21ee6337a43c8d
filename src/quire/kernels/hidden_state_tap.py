"""What a forward pass shall show besides its end: the residual stream behind chosen layers, for proposers.

Refuses to know: who looks, and what for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class HiddenStateTap:
    """Every forward pass it is given to fills it anew."""

    layers: tuple[int, ...]  # ascending
    states: list[torch.Tensor] = field(default_factory=list)  # behind each, of each row's last token: [rows, hidden]

    def beside(self, hidden: torch.Tensor) -> torch.Tensor:
        """All that is shown of a row, the last hidden state at the end: [rows, (layers + 1) hidden]. Once a pass."""
        states, self.states = self.states, []
        return torch.cat((*states, hidden), -1) if self.layers else hidden
