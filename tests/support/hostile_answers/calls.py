"""Raw system calls, past Python and the C library: none of them may get as far as its arguments."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

from .registry import reaches

LIBC = ctypes.CDLL(None, use_errno=True)
SIGCHLD = 17
# name: number on x86_64, number on aarch64, arguments. None: the machine has no such call.
PROCESSES = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220, SIGCHLD), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117, 16, 1), "kill": (62, 129, 1, 0),
    "tkill": (200, 130, 1, 0), "tgkill": (234, 131, 1, 1, 0), "rt_sigqueueinfo": (129, 138, 1, 0),
    "rt_tgsigqueueinfo": (297, 240, 1, 1), "process_vm_readv": (310, 270, 1), "process_vm_writev": (311, 271, 1),
    "pidfd_open": (434, 434, 1), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "kcmp": (312, 272, 1, 1),
    "process_madvise": (440, 440), "setsid": (112, 157), "setpgid": (109, 154), "wait4": (61, 260),
    "waitid": (247, 95), "set_tid_address": (218, 96), "setpriority": (141, 140), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "setitimer": (38, 103), "alarm": (37, None, 1),
    "timer_create": (222, 107), "personality": (135, 92, 0xFFFFFFFF), "fork of x32": (0x40000000 | 57, None),
}  # fmt: skip
POWERS = {
    "unshare": (272, 97, 0x10000000), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "chroot": (161, 51), "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282, 1), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_setup": (206, 0), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "setuid": (105, 146), "setgid": (106, 144), "setresuid": (117, 147),
    "setgroups": (116, 159), "capset": (126, 91), "prctl": (157, 167, 4, 1), "seccomp": (317, 277),
    "setrlimit": (160, 164, 0), "prlimit64 that sets": (302, 261, 0, 0, 1), "mlock": (149, 228), "mlockall": (151, 230),
    "iopl": (172, None, 3), "ioperm": (173, None), "modify_ldt": (154, None), "arch_prctl": (158, None),
    "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273), "sethostname": (170, 161),
    "swapon": (167, 224), "syslog": (103, 116, 3), "acct": (163, 89), "set_mempolicy": (238, 237),
    "landlock_create_ruleset": (444, 444), "membarrier": (324, 283), "unknown call": (1000, 1000),
}  # fmt: skip
FILES = {
    "creat": (85, None), "open for writing": (2, None, 0, 0o1), "openat for writing": (257, 56, -100, 0, 0o102),
    "openat2": (437, 437), "mkdirat": (258, 34), "mknodat": (259, 33), "linkat": (265, 37), "symlinkat": (266, 36),
    "unlinkat": (263, 35), "renameat2": (316, 276), "fchmodat": (268, 53), "fchownat": (260, 54), "truncate": (76, 45),
    "ftruncate": (77, 46, 3), "utimensat": (280, 88), "setxattr": (188, 5), "fallocate": (285, 47, 3),
    "sendfile": (40, 71, 3), "splice": (275, 76), "vmsplice": (278, 75), "copy_file_range": (326, 285),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "pipe2": (293, 59), "dup": (32, 23, 3),
    "dup3": (292, 24, 3, 9), "flock": (73, 32, 3), "fcntl that owns": (72, 25, 3, 8, 1),
    "ioctl to a terminal": (16, 29, 0, 0x5412),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "eventfd2": (290, 19), "signalfd4": (289, 74), "timerfd_create": (283, 85),
    "epoll_create1": (291, 20), "chdir": (80, 49), "umask": (95, 166), "msync": (26, 227), "sync": (162, 81),
}  # fmt: skip
MESSAGES = {
    **{f"socket {family}": (41, 198, family, 2) for family in (1, 2, 10, 16, 17, 38, 40, 44)},
    "socketpair": (53, 199, 1, 1), "connect": (42, 203), "bind": (49, 200), "sendto": (44, 206), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "shmget": (29, 194, 0, 4096, 0o1600), "shmat": (30, 196), "semget": (64, 190, 0, 1, 0o1600),
    "msgget": (68, 186, 0, 0o1600), "mq_open": (240, 180),
}  # fmt: skip


def not_refused(calls: dict[str, tuple]) -> list[str]:
    """The names of calls that were not stopped with EPERM before anything else."""
    column = ("x86_64", "aarch64").index(platform.machine())
    found = []
    for name, (*numbers, _) in ((name, (*call, 0)) for name, call in calls.items()):
        number, arguments = numbers[column], numbers[2:]
        if number is None:
            continue
        me = os.getpid()
        ctypes.set_errno(0)
        result = LIBC.syscall(*(ctypes.c_long(part) for part in (number, *arguments, *[0] * (6 - len(arguments)))))
        if os.getpid() != me:
            os._exit(0)
        if result != -1 or ctypes.get_errno() != errno.EPERM:
            found.append(name)
    return found


def told(calls: dict[str, tuple]) -> float:
    found = not_refused(calls)
    if found:
        raise AssertionError(", ".join(found))
    raise PermissionError("every one is refused")


@reaches(works_outside=False)
def raw_calls_for_processes(key):
    return told(PROCESSES)


@reaches(works_outside=False)
def raw_calls_for_power(key):
    return told(POWERS)


@reaches(works_outside=False)
def raw_calls_on_files(key):
    return told(FILES)


@reaches(works_outside=False)
def raw_calls_for_messages(key):
    return told(MESSAGES)


@reaches(works_outside=True)
def raw_calls_that_work_elsewhere(key):
    """The control of the others: with nothing in the way, these do succeed."""
    harmless = ("eventfd2", "pipe2", "memfd_create", "epoll_create1", "dup3", "umask")
    if len(not_refused({name: FILES[name] for name in harmless})) == len(harmless):
        return 1.0
    raise PermissionError("refused")
