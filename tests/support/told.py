"""What a module logs, whoever has configured logging before in this process."""

from types import ModuleType

import pytest
import structlog
from structlog.testing import LogCapture


class Told:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType):
        self._capture = LogCapture()
        monkeypatch.setattr(module, "_log", structlog.wrap_logger(structlog.PrintLogger(), processors=[self._capture]))

    def __str__(self) -> str:
        return "\n".join(str(dict(entry)) for entry in self._capture.entries)
