"""Comparing greedy outputs: equal token for token, except at a step where the oracle itself hardly decides."""

import torch

TIE = 1e-3


class Comparison:
    def __init__(self, oracle):
        self._oracle = oracle
        self.compared = 0
        self.excused = []

    def follows(self, prompt, got, what):
        """Each token is the oracle's greedy choice after the prompt and the tokens before it, so that by induction
        the whole output is the oracle's; a token within TIE of the top is excused."""
        self.compared += 1
        with torch.inference_mode():
            logits = self._oracle(torch.tensor([[*prompt, *got[:-1]]])).logits[0, len(prompt) - 1 :]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(got)[:, None])[:, 0]
        for at, (top, mine) in enumerate(zip(best.tolist(), chosen.tolist(), strict=True)):
            if mine != top:
                self._excuse(what, at, top - mine)

    def equal(self, prompt, expected, got, what):
        """Outputs agree, or first differ where the oracle's two choices are closer than TIE."""
        self.compared += 1
        if got == expected:
            return
        at = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
        with torch.inference_mode():
            logits = self._oracle(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
        self._excuse(what, at, abs((logits[expected[at]] - logits[got[at]]).item()))

    def _excuse(self, what, at, gap):
        assert gap < TIE, f"{what}: token {at} is not the oracle's; the two choices are {gap:.4f} apart"
        self.excused.append((what, at, gap))

    def report(self):
        print(f"{self.compared} outputs compared, {len(self.excused)} near-ties excused: {self.excused}")
