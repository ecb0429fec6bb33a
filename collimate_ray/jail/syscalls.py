"""Numbers of the system calls that sandboxed programs may make, on the machines that the filter knows.

A call named here is allowed, unless ``seccomp.py`` has a rule for it; one that is not named is refused. So: think
before adding one. Must not decide anything else. Sources: Linux's ``arch/x86/entry/syscalls/syscall_64.tbl`` and
``include/uapi/asm-generic/unistd.h`` (aarch64 uses it), up to Linux 6.18.
"""

from __future__ import annotations

import os
from typing import Dict, Optional, Tuple

#: ``name x86_64 aarch64``; ``-`` where a machine lacks the call. From 424 on, numbers are the same everywhere.
_TEXT = """
# files
read 0 63; write 1 64; open 2 -; close 3 57; stat 4 -; fstat 5 80; lstat 6 -; poll 7 -; lseek 8 62; pread64 17 67;
pwrite64 18 68; readv 19 65; writev 20 66; access 21 -; select 23 -; pselect6 270 72; ppoll 271 73; pipe 22 -;
pipe2 293 59; dup 32 23; dup2 33 -; dup3 292 24; sendfile 40 71; fcntl 72 25; flock 73 32; fsync 74 82;
fdatasync 75 83; truncate 76 45; ftruncate 77 46; getdents 78 -; getdents64 217 61; getcwd 79 17; chdir 80 49;
fchdir 81 50; rename 82 -; renameat 264 38; renameat2 316 276; mkdir 83 -; mkdirat 258 34; rmdir 84 -; creat 85 -;
link 86 -; linkat 265 37; unlink 87 -; unlinkat 263 35; symlink 88 -; symlinkat 266 36; readlink 89 -;
readlinkat 267 78; chmod 90 -; fchmod 91 52; fchmodat 268 53; fchmodat2 452 452; chown 92 -; fchown 93 55;
lchown 94 -; fchownat 260 54; umask 95 166; utime 132 -; utimes 235 -; futimesat 261 -; utimensat 280 88;
statfs 137 43; fstatfs 138 44; newfstatat 262 79; statx 332 291; openat 257 56; openat2 437 437; faccessat 269 48;
faccessat2 439 439; preadv 295 69; pwritev 296 70; preadv2 327 286; pwritev2 328 287; fallocate 285 47;
fadvise64 221 223; readahead 187 213; sync_file_range 277 84; splice 275 76; copy_file_range 326 285;
close_range 436 436; ioctl 16 29; mknod 133 -; mknodat 259 33; setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7;
getxattr 191 8; lgetxattr 192 9; fgetxattr 193 10; listxattr 194 11; llistxattr 195 12; flistxattr 196 13;
removexattr 197 14; lremovexattr 198 15; fremovexattr 199 16; setxattrat 463 463; getxattrat 464 464;
listxattrat 465 465; removexattrat 466 466; inotify_init 253 -;
inotify_init1 294 26; inotify_add_watch 254 27; inotify_rm_watch 255 28; memfd_create 319 279;
# memory
mmap 9 222; mprotect 10 226; munmap 11 215; brk 12 214; mremap 25 216; msync 26 227; madvise 28 233; mlock 149 228;
mlock2 325 284; munlock 150 229; mlockall 151 230; munlockall 152 231; membarrier 324 283; mseal 462 462;
map_shadow_stack 453 453; pkey_mprotect 329 288; pkey_alloc 330 289; pkey_free 331 290; get_mempolicy 239 236;
# processes and threads
clone 56 220; clone3 435 435; fork 57 -; vfork 58 -; execve 59 221; execveat 322 281; exit 60 93; exit_group 231 94;
wait4 61 260; waitid 247 95; getpid 39 172; getppid 110 173; gettid 186 178; getpgrp 111 -; setpgid 109 154;
getpgid 121 155; setsid 112 157; getsid 124 156; set_tid_address 218 96; set_robust_list 273 99; rseq 334 293;
restart_syscall 219 128; arch_prctl 158 -; prctl 157 167; seccomp 317 277; landlock_create_ruleset 444 444;
landlock_add_rule 445 445; landlock_restrict_self 446 446; personality 135 92; futex 202 98; futex_waitv 449 449;
futex_wake 454 454; futex_wait 455 455; futex_requeue 456 456; sched_yield 24 124; sched_setparam 142 118;
sched_getparam 143 121; sched_setscheduler 144 119; sched_getscheduler 145 120; sched_get_priority_max 146 125;
sched_get_priority_min 147 126; sched_rr_get_interval 148 127; sched_setaffinity 203 122; sched_getaffinity 204 123;
sched_setattr 314 274; sched_getattr 315 275; getpriority 140 141; setpriority 141 140; ioprio_get 252 31;
ioprio_set 251 30; getrlimit 97 163; setrlimit 160 164; prlimit64 302 261; getrusage 98 165; times 100 153;
sysinfo 99 179; uname 63 160; getcpu 309 168; getrandom 318 278;
# identity
getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177; getresuid 118 148; getresgid 120 150;
getgroups 115 158; setuid 105 146; setgid 106 144; setreuid 113 145; setregid 114 143; setresuid 117 147;
setresgid 119 149; setgroups 116 159; setfsuid 122 151; setfsgid 123 152; capget 125 90; capset 126 91;
# signals, clocks, events
kill 62 129; tkill 200 130; tgkill 234 131; rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240; pidfd_open 434 434;
pidfd_send_signal 424 424; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigpending 127 136;
rt_sigtimedwait 128 137; rt_sigsuspend 130 133; sigaltstack 131 132; pause 34 -; alarm 37 -; getitimer 36 102;
setitimer 38 103; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113; clock_getres 229 114;
gettimeofday 96 169; time 201 -; timer_create 222 107; timer_settime 223 110; timer_gettime 224 108;
timer_getoverrun 225 109; timer_delete 226 111; timerfd_create 283 85; timerfd_settime 286 86;
timerfd_gettime 287 87; eventfd 284 -; eventfd2 290 19; signalfd 282 -; signalfd4 289 74; epoll_create 213 -;
epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; epoll_pwait2 441 441;
# sockets
socket 41 198; socketpair 53 199; bind 49 200; listen 50 201; accept 43 202; accept4 288 242; connect 42 203;
sendto 44 206; recvfrom 45 207; sendmsg 46 211; recvmsg 47 212; sendmmsg 307 269; recvmmsg 299 243; shutdown 48 210;
getsockname 51 204; getpeername 52 205; setsockopt 54 208; getsockopt 55 209;
"""


def _parse(text: str) -> Dict[str, Tuple[Optional[int], Optional[int]]]:
    lines = " ".join(line for line in text.splitlines() if not line.startswith("#"))
    entries = [entry.split() for entry in lines.split(";") if entry.strip()]
    return {name: (_number(x86_64), _number(aarch64)) for name, x86_64, aarch64 in entries}


def _number(text: str) -> Optional[int]:
    return None if text == "-" else int(text)


#: name -> numbers on x86_64 and aarch64.
TABLE = _parse(_TEXT)
#: Last number of the kernel that the table was made from: what is newer is treated as this kernel would.
NEWEST = 469
#: Names of machines, as ``uname`` has them, in the order of the table's columns.
MACHINES = ("x86_64", "aarch64")
#: AUDIT_ARCH_ constants: what the kernel calls the convention that a system call came in by.
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: That of this machine; None: the filter does not know it.
ARCH = ARCHES.get(os.uname().machine)


def number(name: str, machine: str = "") -> Optional[int]:
    """Give a system call's number.

    Args:
        name: One of ``TABLE``.
        machine: One of ``MACHINES``; "": this one.

    Returns:
        None if the machine lacks the call, or is not known here.
    """
    machine = machine or os.uname().machine
    return TABLE[name][MACHINES.index(machine)] if machine in MACHINES else None
