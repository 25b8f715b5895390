"""How far apart the numbers of two exact fp32 computations may be. Tokens must always be equal.

Rounding depends on the CPU and on how many rows a product has. `test/unit/test_precision.py`
compares fp32 forwards of whole prompts and of 1, 4 and 16 positions with fp64, and keeps these
bounds at least ten times above the largest error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Of a logprob at temperature 1. Seen: 4.2e-5 against fp64, 6.0e-5 between two servers.
LOGPROB_BOUND = 1e-3
# Of a hidden state, whose size is up to 30. Seen: 1.4e-5 against fp64, 7.4e-6 between K or V of a
# small model that chunks of several sizes have written.
HIDDEN_STATE_BOUND = 1e-3


@dataclass(frozen=True)
class Bounds:
    logprob: float
    hidden_state: float

    def at(self, temperature: float) -> Bounds:
        """Sampling divides logits, and so their errors, by the temperature; greedy does not."""
        return replace(self, logprob=self.logprob / min(1.0, temperature or 1.0))


FP32_KV = Bounds(LOGPROB_BOUND, HIDDEN_STATE_BOUND)
# If KV is stored in fewer bits than fp32, the rounding error of a computation can move a value of K
# or V to the next one that can be stored: up to 12 % away in e4m3, and up to 25 % in e5m2.
ROUNDED_KV = Bounds(logprob=3e-2, hidden_state=0.3)  # chosen, not derived
# Of a logprob of the first token, between scales of FP8 KV that are powers of two. They round alike
# but for the smallest values.
SCALED_KV_LOGPROB = 0.1  # chosen, not derived
SCALED_KV_LARGEST = 0.3  # of the largest stored value, relative: the tokens differ; chosen, too
# Between the two largest logits of a bf16 target: four of their units, which are 0.125 at 16.
NEAR_TIE = 0.5  # chosen, not derived
