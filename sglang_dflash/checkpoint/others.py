"""Speculative methods that are not DFlash: refused by name, with what to use instead."""

from __future__ import annotations

from typing import Any


def other_method(raw: dict[str, Any]) -> str | None:
    """One sentence on what the checkpoint is and what to use; None for what may be DFlash."""
    section = raw.get("dflash_config")
    method: dict[str, Any] = section if isinstance(section, dict) else {}
    keys = raw.keys() | method.keys()
    architectures = " ".join(map(str, raw.get("architectures") or ()))
    kind = str(raw.get("speculators_model_type", ""))
    projector = method.get("projector_type", raw.get("projector_type", "dflash"))
    name = f"{architectures} {kind} {raw.get('model_type', '')}".lower()
    if "dflash2" in name or any(key.startswith(("selector_", "conv_")) for key in keys):
        return (
            "This is a DFlash 2 checkpoint (candidate selector and convolutions), another method: "
            "use a DFlash draft of this target."
        )
    if projector == "domino" or "domino" in name:
        return (
            "This is a Domino checkpoint (DFlash with a causal correction head), another method: "
            "use a DFlash draft of this target."
        )
    markov = any(key.startswith("markov_") or key == "enable_confidence_head" for key in keys)
    if projector == "dspark" or "dspark" in name or markov:
        return (
            "This is a DSpark checkpoint (DFlash with a Markov head), another method: use a DFlash "
            "draft of this target."
        )
    if projector != "dflash":
        return f"This checkpoint has projector_type {projector!r}, which is not DFlash."
    if "eagle" in name or "eagle_config" in keys:
        return (
            "This is an EAGLE3 checkpoint (autoregressive drafts): serve it with "
            "--speculative-algorithm EAGLE3, or use a DFlash draft of this target."
            if "eagle3" in name
            else "This is an EAGLE checkpoint (autoregressive drafts): serve it with "
            "--speculative-algorithm EAGLE, or use a DFlash draft of this target."
        )
    if "mtp" in name or "nextn" in name:
        return (
            "This is an MTP checkpoint (prediction layers of the target): serve it with "
            "--speculative-algorithm NEXTN, or use a DFlash draft of this target."
        )
    return None
