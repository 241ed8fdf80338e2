"""A process that cannot look into others of the same user, by Linux's Landlock: it needs no right, so it works in any pod.

In a domain of its own a process reads no memory and no environment but its own and that of what it has started, and sends signals
to nobody else (from Linux 6.12 on); a superuser that may watch all processes (CAP_PERFMON) reads environments still. Files and network
stay as they are. Without Landlock, or with its first version (Linux 5.13 to 5.18, where a domain renames no file into another
directory), nothing changes.
"""

import ctypes
import os
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls; the same on every architecture."""
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_REFER = 1 << 13
"""To link and rename across directories: no domain may that unless it is said. A domain must restrict something, so it is this, and allowed."""
_SCOPE_SIGNAL = 1 << 1
REFER_SINCE, SIGNALS_SINCE = 2, 6
"""Versions of the interface."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def interface_version() -> int:
    """Of this system's Landlock; below 1: there is none."""
    if sys.platform != "linux":
        return 0
    version: int = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    return version


def enter_own_domain() -> None:
    """For this process and what it will start, for good; not to be undone, also not by exec."""
    version = interface_version()
    if version < REFER_SINCE:
        return
    libc = ctypes.CDLL(None)
    rules = _Ruleset(files=_REFER, scopes=_SCOPE_SIGNAL if version >= SIGNALS_SINCE else 0)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0)
    if ruleset < 0:
        return
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    everywhere = _PathBeneath(allowed=_REFER, parent=root)
    if libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(everywhere), 0) == 0:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(root)
    os.close(ruleset)
