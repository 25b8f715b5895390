"""The bundled pair: a Qwen3-shaped target and its DFlash draft, with the recipe that made them."""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
