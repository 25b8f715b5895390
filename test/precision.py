"""How far apart the numbers of two exact fp32 computations may be. Tokens must always be equal.

Rounding depends on the CPU and on how many rows a product has. `test/unit/test_precision.py`
compares fp32 forwards of whole prompts and of 1, 4 and 16 positions with fp64, and keeps these
bounds at least ten times above the largest error.
"""

from __future__ import annotations

# Of a logprob at temperature 1. Seen: 4.2e-5 against fp64, 6.0e-5 between two servers.
LOGPROB_BOUND = 1e-3
# The same, if KV is in FP8: rounding can move a value of K or V to the next value of FP8, which is
# 6 % (e4m3) or 12 % (e5m2) away. Seen: 6.2e-4 between two servers.
FP8_LOGPROB_BOUND = 3e-2
# Of a hidden state, whose size is up to 30. Seen: 1.4e-5 against fp64, 7.4e-6 between K or V of a
# small model that chunks of several sizes have written.
HIDDEN_STATE_BOUND = 1e-3


def logprob_bound(temperature: float) -> float:
    """Sampling divides logits, and so their errors, by the temperature; greedy does not."""
    return LOGPROB_BOUND / min(1.0, temperature or 1.0)
