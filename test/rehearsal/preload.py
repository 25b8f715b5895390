"""What every process of the rehearsal begins with: SGLang, imported on a pretended device."""

from __future__ import annotations

from test.rehearsal import device

device.pretend()

from test import inprocess

assert inprocess
