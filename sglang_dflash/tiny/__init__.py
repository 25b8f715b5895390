"""The bundled pair: a Qwen3-shaped target, its DFlash draft, and prompts that neither has seen."""

from pathlib import Path

from sglang_dflash.errors import Refusal

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"


def require_weights() -> None:
    """Raise a `Refusal` if the weights are missing: they are a distribution of their own."""
    if not all((model / "model.safetensors").exists() for model in (TARGET, DRAFT)):
        raise Refusal(
            "The weights of the bundled pair are not installed.",
            "Install sglang-dflash[demo], or run in a clone of the repository.",
        )
