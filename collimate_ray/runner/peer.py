"""Calls between keeper and candidate: values cross plain, everything else stays where it is and is called there.

Both ends are the same class; what an end lets the other do is its ``ops``. The candidate's end offers its objects
whole; the keeper's end offers only what a test passed as an argument, and only to call it or step through it: no
attribute of the keeper's is ever readable from the candidate.
"""

from __future__ import annotations

import builtins
import operator
import threading
from typing import Any, Callable, Iterable

from collimate_ray.runner.channel import Channel, ConversationError, Garbled
from collimate_ray.values import STANDARD, ValueCrossingError, decode, dumps, encode

#: What may be asked of an object; the function runs where the object lives.
OBJECT_OPS: dict[str, Callable[..., Any]] = {
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "hash": hash,
    "bool": bool,
    "reversed": reversed,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "delattr": delattr,
    "isinstance": lambda item, value: isinstance(value, item),
    "int": int,
    "float": float,
    "enter": lambda item: item.__enter__(),
    "exit": lambda item, *args: item.__exit__(*args),
}
for _name in "eq ne lt le gt ge neg pos abs invert".split():
    OBJECT_OPS[_name] = getattr(operator, _name)


def _reflected(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda item, other: op(other, item)


for _name in "add sub mul truediv floordiv mod pow matmul and_ or_ xor".split():
    OBJECT_OPS[_name] = getattr(operator, _name)
    OBJECT_OPS["r" + _name] = _reflected(OBJECT_OPS[_name])

#: What a candidate may do with an argument that stayed with the keeper: what a container offers, and attributes of the
#: test's own classes.
ARGUMENT_OPS = {name: OBJECT_OPS[name] for name in ("iter", "next", "len", "bool", "getitem", "reversed")}

#: The module name of test code and prelude: their classes' instances may be read and written by the candidate.
TEST_MODULE = "tests"

#: Marks an exception that came from the other end.
FOREIGN = "collimate_foreign"

#: Most objects of one end that the other may hold: bounds a candidate that hands out handles without end.
MAX_OBJECTS = 100_000

#: Deepest nesting of calls back and forth.
MAX_NESTED = 200


class StandIn:
    """An object of the other end. It has no methods of its own: each use is a request.

    One that an operator made of an object and a plain value is *derived*: it has seen the test's value, so a plain
    value that it gives would be a verdict of its own making, and is refused.
    """

    __slots__ = ("_collimate_derived", "_collimate_id", "_collimate_peer")

    def __init__(self, peer: "Peer", number: int) -> None:
        object.__setattr__(self, "_collimate_peer", peer)
        object.__setattr__(self, "_collimate_id", number)
        object.__setattr__(self, "_collimate_derived", False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._collimate_peer.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._collimate_peer.operate("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._collimate_peer.operate("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._collimate_peer.operate("delattr", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is StandIn and self._collimate_peer.operate("isinstance", self, instance) is True

    def __exit__(self, *error: Any) -> Any:
        return self._collimate_peer.operate("exit", self, None, None, None)

    def __bool__(self) -> bool:
        _refuse_derived(self, "truth")
        return self._collimate_peer.operate("bool", self) is True

    def __eq__(self, other: object) -> Any:
        return self._compare("eq", other, False)

    def __ne__(self, other: object) -> Any:
        return self._compare("ne", other, True)

    def __hash__(self) -> int:
        _refuse_derived(self, "hash")
        return int(self._collimate_peer.operate("hash", self))

    def _compare(self, op: str, other: object, unlike: bool) -> Any:
        """Equality with a plain value is never the candidate's to say."""
        if type(other) is not StandIn:
            return unlike
        if other._collimate_id == self._collimate_id:
            return not unlike
        self._collimate_peer.count("object_equality")
        return self._collimate_peer.operate(op, self, other)


def _refuse_derived(item: StandIn, what: str) -> None:
    if item._collimate_derived:
        raise TypeError("%s of what an object and a plain value made" % what)


def _forward(op: str) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any) -> Any:
        if op not in ("setitem", "delitem", "enter"):
            _refuse_derived(self, op)
        if op in ("int", "float"):
            return self._collimate_peer.convert(op, self)
        return self._collimate_peer.operate(op, self, *args)

    return method


def _forward_judged(op: str) -> Callable[..., Any]:
    """An operator whose plain result, given to a plain operand, would be a verdict of the candidate's own.

    An order between an object and a plain value always is one.
    """

    def method(self: StandIn, *args: Any) -> Any:
        if op in ("lt", "le", "gt", "ge") and type(args[0]) is not StandIn:
            raise TypeError("order of an object and a plain value")
        result = self._collimate_peer.operate(op, self, *args)
        if all(type(side) is StandIn and not side._collimate_derived for side in (self, *args)):
            return result
        if type(result) is not StandIn:
            raise TypeError("%s of an object and a plain value gave a plain value" % op)
        object.__setattr__(result, "_collimate_derived", True)
        return result

    return method


for _name in "iter next len str repr int float reversed getitem setitem delitem enter".split():
    setattr(StandIn, "__%s__" % _name, _forward(_name))
for _name in OBJECT_OPS:
    _method = "__%s__" % _name.rstrip("_")
    if hasattr(operator, _method) or _name[1:] in OBJECT_OPS:  # the operators and their reflections
        if _method not in vars(StandIn):
            setattr(StandIn, _method, _forward_judged(_name))


class Peer:
    """One end of a conversation.

    Args:
        channel: Where messages go.
        ops: What the other end may ask of objects here.
        lookup: Finds a name that the other end calls or gets, or None where names are not offered.
    """

    def __init__(
        self, channel: Channel, ops: dict[str, Callable[..., Any]], lookup: Callable[[str], Any] | None = None
    ) -> None:
        self.channel = channel
        self.evidence: dict[str, int] = {}
        self._ops = ops
        self._lookup = lookup
        self._objects: dict[int, Any] = {}
        #: id of each of ``_objects`` -> its number, and the stand-ins by number: what was one object stays one
        self._numbers: dict[int, int] = {}
        self._stand_ins: dict[int, StandIn] = {}
        self._converted: dict[tuple[str, int], Any] = {}
        self.asked = 0
        self._nested = 0
        self._lock = threading.RLock()

    def count(self, kind: str) -> None:
        """Count a piece of evidence."""
        self.evidence[kind] = self.evidence.get(kind, 0) + 1

    # asking ---------------------------------------------------------------------------------------------------

    def call(self, target: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        """Call an object of the other end, or the name ``target`` there; arguments it mutates are updated here."""
        args = list(args)
        nodes = [self.encode(arg) for arg in args]
        if kwargs:
            nodes.append(self.encode(kwargs))
        answer = self.ask("call", self.encode(target), nodes, bool(kwargs))
        for place, node in answer.get("changed", ()):
            _update(args[place], self.decode(node))
        return self.decode(answer.get("a"))

    def operate(self, op: str, target: Any, *args: Any) -> Any:
        """Do one of ``OBJECT_OPS`` at the other end."""
        answer = self.ask(op, self.encode(target), [self.encode(arg) for arg in args])
        return self.decode(answer.get("a"))

    def convert(self, op: str, target: StandIn) -> Any:
        """Give an object as a number: always the one that it was the first time it was asked."""
        key = (op, target._collimate_id)
        if key not in self._converted:
            self._converted[key] = self.operate(op, target)
        return self._converted[key]

    def ask(self, op: str, target: Any, args: list[Any], kwargs: bool = False) -> dict[str, Any]:
        """Ask (all encoded) and give the answer; raise what it raised."""
        message = self.exchange(op, target, args, kwargs)
        if "x" in message:
            error = rebuilt(message["x"])
            if op != "next" and isinstance(error, (StopIteration, StopAsyncIteration)):
                error = RuntimeError("a call raised " + type(error).__name__)  # else it would end the caller's loop
            error.__dict__[FOREIGN] = True
            raise error
        return message

    def exchange(self, op: str, target: Any, args: list[Any], kwargs: bool = False) -> dict[str, Any]:
        """Send a request and serve the other end's own requests until its answer is there."""
        with self._lock:  # threads take turns; a nested call is of the same thread
            return self._exchange(op, target, args, kwargs)

    def _exchange(self, op: str, target: Any, args: list[Any], kwargs: bool) -> dict[str, Any]:
        self.asked += 1
        number = self.asked
        request: dict[str, Any] = {"q": number, "op": op, "on": target, "args": args}
        if kwargs:
            request["kw"] = True
        self.channel.send(request)
        while True:
            message = self.channel.recv()
            if type(message) is not dict:
                raise Garbled("not a message")
            if "q" in message:
                self.answer(message)
            elif message.get("re") == number:
                return message
            else:
                raise Garbled("an answer to no question")

    # answering ------------------------------------------------------------------------------------------------

    def answer(self, message: dict[str, Any]) -> None:
        """Serve one request of the other end; what it raises goes back as its answer."""
        self._nested += 1
        try:
            if self._nested > MAX_NESTED:
                raise RecursionError("calls nested too deep between test and candidate")
            reply = self._perform(message)
        except ConversationError:
            raise
        except BaseException as error:
            reply = {"x": described(error)}
        finally:
            self._nested -= 1
        reply["re"] = message.get("q")
        self.channel.send(reply)

    def _perform(self, message: dict[str, Any]) -> dict[str, Any]:
        op, nodes = message.get("op"), message.get("args", [])
        args = [self.decode(node) for node in nodes]
        target = self._target(message.get("on"), op)
        if op == "get":
            return {"a": self.encode(target)}
        if op != "call":
            return {"a": self.encode(self._operation(str(op), target, args)(target, *args))}
        kwargs = args.pop() if message.get("kw") else {}
        return {"a": self.encode(target(*args, **kwargs)), "changed": self._changed(args, nodes)}

    def _target(self, node: Any, op: Any) -> Any:
        """Find what a request is about: nothing, a name that is offered, or an object that was handed out here.

        Never a value that the other end made up: a builtin type that it names is not its to call here.
        """
        if node is None:
            return None
        if type(node) is str and self._lookup is not None and op in ("call", "get"):
            return self._lookup(node)
        if type(node) is dict and node.get("$") == "ref" and node["v"][1] == "yours":
            return self.decode(node)
        raise Garbled("a request about nothing that was handed out")

    def _operation(self, op: str, target: Any, args: list[Any]) -> Callable[..., Any]:
        if op in self._ops:
            return self._ops[op]
        if op in ("getattr", "setattr"):
            name = args[0] if args else None
            own = type(target).__module__ == TEST_MODULE and type(name) is str and not name.startswith("_")
            if own and len(args) == (1 if op == "getattr" else 2):
                return OBJECT_OPS[op]
            raise AttributeError("an argument of the test does not offer this attribute")
        raise TypeError("an argument of the test offers calls and what a container does")

    def _changed(self, args: list[Any], nodes: list[Any]) -> list[Any]:
        """Tell which arguments a call mutated in place."""
        found = []
        for place, arg in enumerate(args):
            if type(arg) in _MUTABLE:
                now = self.encode(arg)
                if dumps(now) != dumps(nodes[place]):
                    found.append([place, now])
        return found

    # values ---------------------------------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """Encode a value; an object of no plain kind stays here and its number crosses."""
        return encode(value, self._refer)

    def decode(self, node: Any) -> Any:
        """Decode a value; an object of the other end becomes a stand-in."""
        try:
            return decode(node, self._resolve)
        except ValueCrossingError as error:
            raise Garbled(str(error)) from None

    def _refer(self, item: Any) -> Any:
        if type(item) is StandIn:
            return [item._collimate_id, "yours"]
        if len(self._objects) >= MAX_OBJECTS:
            raise MemoryError("over 100,000 objects handed out")
        number = self._numbers.setdefault(id(item), len(self._objects) + 1)
        self._objects[number] = item  # kept, so that its id stays its own
        return [number, "mine"]

    def _resolve(self, body: Any) -> Any:
        number, whose = body
        if type(number) is not int:
            raise ValueCrossingError("not a handle")
        if whose != "mine":
            return self._objects[number]
        if len(self._stand_ins) >= MAX_OBJECTS:
            raise ValueCrossingError("over 100,000 handles")
        return self._stand_ins.setdefault(number, StandIn(self, number))


#: What a call can change in place and crosses as a value.
_MUTABLE = (list, dict, set, bytearray) + tuple(
    STANDARD[name][0] for name in ("deque", "Counter", "OrderedDict", "defaultdict")
)


def _update(target: Any, fresh: Any) -> None:
    """Bring an argument here to what the call there made of it."""
    if type(target) is not type(fresh):
        raise Garbled("an argument changed its type")
    if type(target) in (list, bytearray):
        target[:] = fresh
    elif type(target) in _MUTABLE:
        target.clear()
        (target.extend if hasattr(target, "extend") else target.update)(fresh)


def described(error: BaseException) -> list[str]:
    """Describe an exception: its nearest builtin type, its own type's name, its text if that is plain."""
    for cls in type(error).__mro__:
        if getattr(builtins, cls.__name__, None) is cls:
            args = error.args
            text = args[0] if args and type(args[0]) is str else ""
            return [cls.__name__, type(error).__name__, text[:2000]]
    return ["Exception", type(error).__name__, ""]


def rebuilt(description: Any) -> BaseException:
    """Make the exception that was described: a builtin one, whatever it was there."""
    if type(description) is not list or len(description) != 3 or any(type(part) is not str for part in description):
        raise Garbled("not an exception")
    cls = getattr(builtins, description[0], None)
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        raise Garbled("not an exception")
    try:
        return cls(description[2])
    except TypeError:  # UnicodeDecodeError and the like want more arguments
        return Exception(description[2])
