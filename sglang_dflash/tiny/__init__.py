"""The bundled pair: a Qwen3-shaped target, its DFlash draft, and prompts that neither has seen."""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
