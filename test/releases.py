"""What differs between the releases of SGLang that are served: the one table of the tests.

The same files are tests of every release. Those that `RUNS` names run on one of the later ones.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.seam import release

OWN_STEP = release.has_own_scheduler_step()  # SGLang 0.5.13.post1
# Flags of a test's servers that this release does not have, or that are refused with it. A flag
# that has a value comes with it.
LACKS: dict[str, int] = (
    {}
    if OWN_STEP
    else {
        "--cuda-graph-max-bs": 1,
        "--speculative-dflash-draft-ahead": 1,
    }
)
FAMILY = "dspark" if OWN_STEP else "domino"  # of the server with pages of 16 tokens
RANKS = () if OWN_STEP else ("--tp", "2")  # of the same: there is no other with two
VERIFY_WIDTH = "auto" if OWN_STEP else "full"
PAST_END = 1 if OWN_STEP else 15  # accepted drafts behind an answer's end that may be counted
TIMED = ("draft", "verify", "commit") if OWN_STEP else ()  # parts of a step


def is_defect(answer: Any) -> bool:
    """Whether the reference fails at a request that is right, so that nothing can be compared.

    SGLang 0.5.23 draws from a row where all tokens are forbidden, one by a grammar and its end by
    `min_new_tokens`, and then its grammar fails.
    """
    failed = isinstance(answer, dict) and answer.get("status") == 500
    return not OWN_STEP and failed and "Grammar accept_token failed" in answer["error"]


def flags(*given: str) -> tuple[str, ...]:
    """The flags of these that this release has."""
    kept: list[str] = []
    rest = iter(given)
    for flag in rest:
        if flag in LACKS:
            for _ in range(LACKS[flag]):
                next(rest)
        else:
            kept.append(flag)
    return tuple(kept)


# On a later release, the tests of these files and folders run. Others step the spec-v1 scheduler of
# this package, look into its steps, or are of what is refused there.
RUNS = (
    "test/unit",
    "test/v0_5_23",
    "test/server/test_adapters_over_http.py",
    "test/server/test_api.py",
    "test/server/test_bad_requests.py",
    "test/server/test_differential.py",
    "test/server/test_ends.py",
    "test/server/test_features.py",
    "test/server/test_guard.py",
    "test/server/test_input_embeds.py",
    "test/server/test_new_weights.py",
    "test/server/test_nodes.py",
    "test/server/test_pictures.py",
    "test/server/test_replicas.py",
    "test/server/test_replicas_apart.py",
    "test/server/test_rules_for_all.py",
    "test/server/test_serving.py",
    "test/server/test_streamed_calls.py",
    "test/server/test_streamed_text.py",
    "test/server/test_watch.py",
)
# But not these, by the beginning of their ids.
LEFT_OUT = {
    "test/server/test_adapters_over_http.py::test_adapters_from_tensors": "SGLang takes no JSON",
    "test/server/test_differential.py::test_random_requests_crossed": "two servers of all flags",
    "test/server/test_differential.py::test_random_requests_of_latent_attention": "refused",
    "test/server/test_streamed_calls.py::test_streamed_calls[deepseekv4": "needs its tokenizer",
    "test/server/test_watch.py::test_steps_of_requests_that_are_retracted": "none are",
    "test/unit/test_bundled_pair.py": "steps the spec-v1 scheduler",
    "test/unit/test_core.py": "of the spec-v1 step",
    "test/unit/test_shims.py::test_murmur_hash32_equals": "the kernel is elsewhere",
}


def runs(nodeid: str) -> bool:
    """Whether a test, or a file or folder with tests, is one of the installed release."""
    if OWN_STEP:
        return not nodeid.startswith("test/v0_5_23")
    if nodeid.startswith(tuple(LEFT_OUT)):
        return False
    return any(nodeid.startswith(name) or name.startswith(nodeid) for name in RUNS)
