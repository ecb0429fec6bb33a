"""Attacks by sockets: the network, the machine's services, the daemon itself, other sessions."""

import os
import socket
import struct

from .tools import OPEN, Verdict, any_open, attack, unix_connect

NETWORK = "network"
LOCAL = "unix sockets outside, the daemon's own among them"

_INET, _INET6 = socket.AF_INET, socket.AF_INET6


def _talk(port):
    with socket.socket(_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(("127.0.0.1", port))
        return sock.getpeername()


@attack(NETWORK, "rlimits")
def tcp(facts):
    return _talk(facts["port"])


@attack(NETWORK, "rlimits")
def tcp_listen(facts):
    with socket.socket(_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        return sock.getsockname()


@attack(NETWORK, "rlimits")
def tcp_of_ipv6(facts):
    return socket.socket(_INET6, socket.SOCK_STREAM).close() or "socket"


@attack(NETWORK, "rlimits")
def udp(facts):
    with socket.socket(_INET, socket.SOCK_DGRAM) as sock:
        return sock.sendto(b"x", ("127.0.0.1", facts["port"]))


@attack(NETWORK, "rlimits")
def tcp_by_multipath(facts):
    """Protocol 262: Landlock knows it only from a late version on."""
    return any_open([lambda: socket.socket(_INET, socket.SOCK_STREAM, 262), lambda: socket.socket(_INET, 5, 132)])


@attack(NETWORK)
def raw(facts):
    kinds = [(family, protocol) for family in (_INET, _INET6) for protocol in (1, 58, 255)]
    return any_open([lambda f=f, p=p: socket.socket(f, socket.SOCK_RAW, p) for f, p in kinds])


@attack(NETWORK)
def packet(facts):
    return any_open([lambda k=k: socket.socket(17, k, socket.htons(3)) for k in (socket.SOCK_RAW, socket.SOCK_DGRAM)])


@attack(NETWORK, "rlimits")
def netlink(facts):
    return any_open([lambda p=p: socket.socket(16, socket.SOCK_RAW, p).fileno() for p in (0, 2, 9, 12, 15, 16)])


@attack(NETWORK, "rlimits")
def other_families(facts):
    """VSOCK to the machine's host, ALG, BLUETOOTH, CAN, TIPC, RDS, KCM, QIPCRTR, XDP: what the kernel would load."""
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
    families = (40, 38, 31, 29, 30, 21, 41, 42, 44, 3, 9, 10, 24, 26, 33, 36, 39, 43)
    return any_open([lambda f=f, k=k: socket.socket(f, k).fileno() for f in families for k in kinds])


@attack(LOCAL, "rlimits")
def daemons_own(facts):
    """Whoever reaches it ends other sessions, and starts execs that nobody asked for."""
    return unix_connect(facts["socket"])


@attack(LOCAL, "rlimits")
def daemons_admin(facts):
    return unix_connect(facts["socket"] + ".d/admin.sock")


@attack(LOCAL, "rlimits")
def machines_by_path(facts):
    """As a container engine's is."""
    return unix_connect(facts["unix_path"])


@attack(LOCAL, "rlimits")
def machines_abstract(facts):
    return unix_connect("\0" + facts["unix_name"])


@attack(LOCAL, "rlimits")
def other_sessions_abstract(facts):
    return unix_connect("\0" + facts["victim_name"])


@attack(LOCAL, "rlimits")
def other_sessions_by_path(facts):
    return unix_connect(os.path.join(facts["victim_work"], "victims.sock"))


@attack(LOCAL, "rlimits")
def through_own_root(facts):
    return unix_connect("/proc/self/root" + facts["unix_path"])


@attack(LOCAL, "rlimits")
def datagrams(facts):
    """One of a pair may send to any other address."""
    near, _far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    addresses = ("\0" + facts["datagram_name"], facts["datagram_path"])
    return any_open([lambda a=a: near.sendto(b"x", a) for a in addresses])


@attack(LOCAL, "rlimits")
def reconnected_pair(facts):
    """A socket of a pair is connected, until it is told to connect elsewhere."""
    near, _far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return any_open([lambda a=a: near.connect(a) or a for a in (facts["datagram_path"], "\0" + facts["datagram_name"])])


@attack(LOCAL)
def false_sender(facts):
    """SCM_CREDENTIALS says who one is, not who another is."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    forged = struct.pack("3i", facts["ours"][0], os.getuid(), os.getgid())
    far.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, forged)])
    return Verdict(OPEN, repr(near.recvmsg(1, 64)))
