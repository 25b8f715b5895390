"""What a forked server has imported: SGLang, as its processes need it.

It loads no plugin, which the server's own process does.
"""

from __future__ import annotations

from sglang import launch_server
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import detokenizer_manager, scheduler
from sglang.srt.models import registry

assert launch_server, (http_server, detokenizer_manager, scheduler, registry)
