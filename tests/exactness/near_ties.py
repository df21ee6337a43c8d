"""Comparing greedy outputs: equal token for token, except from a step where the oracle itself hardly decides."""

import torch

TIE = 1e-3


class Comparison:
    def __init__(self, oracle):
        self._oracle = oracle
        self.compared = 0
        self.excused = []

    def check(self, prompt, expected, got, what):
        """Outputs agree, or first differ where the oracle's top two logits are closer than TIE."""
        self.compared += 1
        if got == expected:
            return
        at = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
        with torch.inference_mode():
            logits = self._oracle(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
        top = logits.topk(2).values
        gap = (top[0] - top[1]).item()
        assert gap < TIE, f"{what}: token {at} is {got[at]}, expected {expected[at]}; the top two are {gap:.4f} apart"
        self.excused.append((what, at, gap))

    def report(self):
        print(f"{self.compared} outputs compared, {len(self.excused)} excused as near-ties: {self.excused}")
