# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: namespaces of network, processes and mounts with a boot ID of their
own, and between them a switch that loses, delays or drops what a test asks for. Needs root."""

import fcntl
import heapq
import os
import random
import selectors
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
#: The name of each host's device.
DEVICE = "syncbn0"
NETWORK = "10.77.0."  #: before the number of a host, from 1


def why_not() -> str:
    """What is missing for such hosts, if something is."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "unshare", "nsenter", "mount") if not shutil.which(name)]
    if missing:
        return f"needs the commands {', '.join(missing)}"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"may not make network namespaces: {error}"
    return ""


class Link:
    """Carries packets between the hosts. loss: the share that is lost, 1 for a cable that is cut.
    delay: in seconds."""

    def __init__(self, processes: list[subprocess.Popen]) -> None:
        self.loss, self.delay = 0.0, 0.0
        self._ended = False
        self._random = random.Random(1)
        self._devices = [self._connect(host, p.pid) for host, p in enumerate(processes)]
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _connect(self, host: int, process: int) -> int:
        name = f"sbn{os.getpid() % 10**6}{host}"
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)
        _run("ip", "link", "set", name, "netns", str(process), "name", DEVICE)
        inside = ("nsenter", "-t", str(process), "-n", "ip")
        _run(*inside, "addr", "add", f"{NETWORK}{host + 1}/24", "dev", DEVICE)
        for name in ("lo", DEVICE):
            _run(*inside, "link", "set", name, "up")
        return device

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        readable = selectors.DefaultSelector()  # any number of descriptors, unlike select()
        for device in self._devices:
            readable.register(device, selectors.EVENT_READ)
        while not self._ended:
            pause = min(0.2, max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2)
            for key, _ in readable.select(pause):
                device = key.fd
                packet = os.read(device, 65536)
                to = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # IPv4: the destination's end
                if 0 <= to < len(self._devices) and self._random.random() >= self.loss:
                    number += 1
                    due = time.monotonic() + self.delay
                    heapq.heappush(waiting, (due, number, self._devices[to], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                os.write(device, packet)

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        for device in self._devices:
            os.close(device)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def start_host(script: Path, host: int, ranks: str, folder: str, machine: int) -> subprocess.Popen:
    """Runs `script host ranks folder` on a host of its own, or, where hosts have the same machine,
    in a container of its own. It begins when the file `link` is there."""
    boot = Path(folder, f"boot{machine}")
    boot.write_text(f"00000000-0000-0000-0000-00000000000{machine}\n")
    shell = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
    inside = ["sh", "-c", shell, str(boot), sys.executable, str(script), str(host), ranks, folder]
    isolated = ["unshare", "--net", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
    return subprocess.Popen([*isolated, *inside])
