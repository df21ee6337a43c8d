"""Why a process ended, for the log."""

from __future__ import annotations

import signal


def exit_reason(code: int) -> str:
    """An exit code as `subprocess` gives it, in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = ", which the system sends when memory runs out" if -code == signal.SIGKILL else ""
    return f"exit code {code} ({name}{hint})"
