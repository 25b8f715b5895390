"""Speculative methods that are not served. Their checkpoints are refused by the method's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.formats import zlab
from sglang_dflash.errors import Refusal, shown

# Methods by a key that only their configs have, or by how such keys begin.
XPRESS = "XPress (a head refines the block in several passes)"
BY_KEY = {
    "hspec_": "H-Spec (mamba layers beside attention to the target's own KV)",
    "num_jacobi_passes": XPRESS,
    "xpress_": XPRESS,
}
OF_TWO = "dflash2", "lilicorr"  # formats that have the convolutions of DFlash 2
TARGET_KV = "DSpark on the target's KV (its blocks attend to the target's own KV)"


def other_method(raw: dict[str, Any], file: Path, found: str | None) -> Refusal | None:
    """The refusal of a config whose method is not served. None if it may be served.

    raw: the config. file: its name in the refusal. found: the format that matches, or None.
    """
    method: dict[str, Any] = raw.get("dflash_config") or {}
    keys = {key for fields in (raw, method) for key, value in fields.items() if value}
    architectures = " ".join(raw.get("architectures") or ())
    kind = raw.get("speculators_model_type") or ""
    projector = zlab.projector_type(raw) or "dflash"
    name = f"{architectures} {kind} {raw.get('model_type') or ''}".lower()

    def refused(other: str, algorithm: str | None = None) -> Refusal:
        fix = "Use a DFlash draft of this target."
        if algorithm is not None:
            fix = (
                f"Serve it with --speculative-algorithm {algorithm}, or use a DFlash draft of this "
                "target."
            )
        return Refusal(f"The file {file} describes {other}, which is another method.", fix)

    for key, method_name in BY_KEY.items():
        if any(one.startswith(key) for one in keys):
            return refused(f"a draft of {method_name}")
    if any(fields.get("conditioning_source") == "target_kv" for fields in (raw, method)):
        return refused(f"a draft of {TARGET_KV}")
    of_two = any(key.startswith(("selector_", "conv_")) for key in keys)
    if kind != "dflash2" and found not in OF_TWO and (of_two or "dflash2" in name):
        return refused("a DFlash 2 checkpoint of an unknown form")
    # The other formats also match drafts of DFlash, or have its fields.
    if found not in (None, "zlab", "dflash2", "speculators") or kind == "dspark":
        return None
    if "domino" in name:
        return refused("a Domino checkpoint of an unknown form")
    markov = any(key.startswith("markov_") or key == "enable_confidence_head" for key in keys)
    if "dspark" in name or markov:
        return refused("a DSpark checkpoint of an unknown form")
    if projector != "dflash":
        return refused(f"a checkpoint with projector_type {shown(projector)}")
    if "eagle3" in name:
        return refused("an EAGLE3 checkpoint (autoregressive drafts)", "EAGLE3")
    if "edsd" in name:
        return refused("an EDSD checkpoint (autoregressive drafts)")
    if "eagle" in name or "eagle_config" in keys:
        return refused("an EAGLE checkpoint (autoregressive drafts)", "EAGLE")
    if "mtp" in name or "nextn" in name:
        return refused("an MTP checkpoint (prediction layers of the target)", "NEXTN")
    return None
