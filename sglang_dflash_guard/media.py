"""Pictures, videos and sounds that cannot be read are the client's error."""

from __future__ import annotations

import errno
import logging
from typing import Any

import torch
from fastapi import HTTPException

from sglang_dflash.errors import Refusal

logger = logging.getLogger(__name__)

ERRORS_OF_THE_SERVER = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}  # of an OSError


async def refuse_wrong_media(original: Any, manager: Any, obj: Any) -> Any:
    """AROUND `TokenizerManager._tokenize_one_request`, which reads the media of a request.

    SGLang answers with HTTP 500. Each decoder has errors of its own, so all are caught. The log
    keeps the traceback.
    """
    try:
        return await original(manager, obj)
    except (ValueError, HTTPException):  # an answer as it is
        raise
    except Exception as error:
        of_media = obj.contains_mm_input() and not _of_the_server(error)
        if not of_media:
            raise
        logger.warning("The media of the request %s cannot be read.", obj.rid, exc_info=True)
        why = str(error) or type(error).__name__
        raise Refusal(
            f"The media of this request cannot be read: {why}.",
            "Send media that this model takes, with a place for each in the prompt.",
        ) from error


def _of_the_server(error: BaseException | None) -> bool:
    """Whether memory, descriptors or the disk ran out. SGLang hides that behind other errors."""
    while error is not None:
        if isinstance(error, ERRORS_OF_THE_SERVER):
            return True
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            return True
        error = error.__cause__ or error.__context__
    return False
