"""`python on_node.py NAMESPACE HOST COMMAND...` becomes the command in a network namespace, under a name of its own.

What `ip netns exec NAMESPACE unshare --uts` does, in a process that may be forked (see `helpers.zygote`).
"""

import ctypes
import os
import socket
import sys

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000  # linux/sched.h
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19  # linux/mount.h


def main() -> None:
    namespace, host, *command = sys.argv[1:]
    library = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    check(library.setns(descriptor, _CLONE_NEWNET))
    check(library.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
    check(library.mount(b"", b"/", b"none", ctypes.c_ulong(_MS_SLAVE | _MS_REC), None))
    hosts = f"/etc/netns/{namespace}/hosts".encode()
    check(library.mount(hosts, b"/etc/hosts", b"none", ctypes.c_ulong(_MS_BIND), None))
    socket.sethostname(host)
    os.execvp(command[0], command)


main()
