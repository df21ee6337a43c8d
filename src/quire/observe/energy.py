"""Energy used, where the hardware counts it: RAPL for Intel and AMD packages and memory, NVML for NVIDIA GPUs.

Counters are read on demand; nothing runs in between. Where there is no counter, or this user may not read it,
energy is absent and `reasons` says why: it is never estimated. Meters count the whole device, whoever uses it.

Refuses to know: tokens, requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")

Reader = Callable[[], float]  # joules since some moment


class Energy:
    """All meters of this machine; joules count from when this was made."""

    def __init__(self, powercap: Path = POWERCAP, nvml: str = "libnvidia-ml.so.1"):
        self.reasons: list[str] = []
        self._meters: dict[str, Reader] = {}
        self._last: dict[str, float] = {}
        self._joules: dict[str, float] = {}
        self._wraps: dict[str, float] = {}
        self._find_rapl(powercap)
        self._find_gpus(nvml)
        for name, read in self._meters.items():
            self._last[name], self._joules[name] = read(), 0.0

    @property
    def available(self) -> bool:
        return bool(self._meters)

    def read(self) -> dict[str, float]:
        """Joules of each meter so far."""
        for name, read in self._meters.items():
            try:
                now = read()
            except OSError:
                continue  # the meter has gone; what it counted stays
            used = now - self._last[name]
            if used < 0:  # the counter went round
                used += self._wraps.get(name, 0.0)
            self._last[name] = now
            self._joules[name] += max(0.0, used)
        return self._joules

    def _find_rapl(self, powercap: Path) -> None:
        zones = sorted(powercap.glob("*rapl:*")) if powercap.is_dir() else []
        found = False
        for zone in zones:
            if zone.name.count(":") != 1:  # parts of a package, already in its sum
                continue
            counter = zone / "energy_uj"
            try:
                label = (zone / "name").read_text().strip()
                self._wraps[f"rapl:{label}"] = int((zone / "max_energy_range_uj").read_text()) / 1e6
                counter.read_text()
            except (OSError, ValueError) as error:
                self.reasons.append(f"{zone.name}: {error}")
                continue
            self._meters[f"rapl:{label}"] = lambda counter=counter: int(counter.read_text()) / 1e6  # type: ignore[misc]
            found = True
        if not zones:
            self.reasons.append("no RAPL counters (no powercap zones in sysfs)")
        elif not found:
            self.reasons.append("RAPL counters exist but cannot be read; root can")

    def _find_gpus(self, name: str) -> None:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            self.reasons.append("no NVIDIA driver library (NVML)")
            return
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            self.reasons.append("NVML is there but does not start")
            return
        for index in range(count.value):
            device = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            read = _gpu_reader(library, device)
            try:
                read()
            except OSError as error:
                self.reasons.append(f"gpu {index}: {error}")
            else:
                self._meters[f"nvml:gpu{index}"] = read


def _gpu_reader(library: ctypes.CDLL, device: ctypes.c_void_p) -> Reader:
    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if status := library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
            raise OSError(f"NVML does not count energy here (status {status})")
        return millijoules.value / 1000

    return read
