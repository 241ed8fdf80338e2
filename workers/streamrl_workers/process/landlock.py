"""A process that cannot look into others of the same user, by Linux's Landlock: it needs no right, so it works in any pod.

In a domain of its own a process reads no memory and no environment but its own and that of what it has started, and sends signals
to nobody else (from Linux 6.12 on); a superuser that may watch all processes (CAP_PERFMON) reads environments still. Files and network stay as they are. Without Landlock (before 5.13, or elsewhere) nothing changes.
"""

import ctypes
import os
import sys

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""System calls; the same on every architecture."""
_CREATE_RULESET_VERSION = 1
_PR_SET_NO_NEW_PRIVS = 38
_MAKE_BLOCK_DEVICE = 1 << 11
"""A domain must restrict something: this is what programs do not do anyway."""
_SCOPE_SIGNAL = 1 << 1
_SCOPES_SINCE = 6
"""Version of the interface."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


def enter_own_domain() -> bool:
    """For this process and what it will start, for good; whether the system can. Not to be undone, also not by exec."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    if version < 1:
        return False
    rules = _Ruleset(files=_MAKE_BLOCK_DEVICE, scopes=_SCOPE_SIGNAL if version >= _SCOPES_SINCE else 0)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0)
    if ruleset < 0:
        return False
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    entered: bool = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return entered
