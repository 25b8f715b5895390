"""The class of the DFLASH worker, and where SGLang finds the draft's."""

from __future__ import annotations

from sglang_dflash.engine.v0_5_23.worker import DFlashWorker

MODELS = __package__
build_worker = DFlashWorker
