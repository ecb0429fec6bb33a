"""Help texts of the commands: what is read and written, an example of each, exit codes. Nothing else."""

_EXIT_CODES = """\
exit codes:
  0    done
  1    some grades have no verdict (the note says why); "valid" is false: never train on them
  2    bad input or options; nothing was graded (or OUT could not be written to its end)
  3    no cluster, or it went away
  130  interrupted (Ctrl-C, SIGTERM); no process is left
"""

#: Of ``collimate-ray``.
MAIN = f"""\
Grades completions of code-writing models in sandboxes on a Ray cluster: completions and a
spec in, true rewards out.

examples:
  collimate-ray demo                        see it work, on this machine, in a minute
  collimate-ray grade groups.jsonl --out rewards.jsonl
  collimate-ray serve --socket /tmp/sandbox/serve.sock

{_EXIT_CODES}"""

#: Of ``collimate-ray grade``.
GRADE = f"""\
Grades every group of INPUT and writes one line a group to OUT.

INPUT (JSON lines, plain or gzip, '-' for standard input), one group a line:
  {{"id": "sum-1",
   "completions": ["```python\\ndef add(a, b):\\n    return a + b\\n```"],
   "spec": {{"kind": "unit_tests", "entry": "add",
            "tests": [{{"input": [1, 2], "expected": 3}}]}}}}
  "limits" (optional) win over the spec's: {{"time_s": 2, "memory_mib": 256}}
  "seed" (optional) is for all members of the group: 64 hex characters

A spec of each kind:
  {{"kind": "unit_tests", "entry": "add", "tests": [{{"input": [1, 2], "expected": 3}}]}}
  {{"kind": "stdin_stdout", "tests": [{{"stdin": "1 2\\n", "stdout": "3\\n"}}]}}
  {{"kind": "assert_tests", "entry": "add", "test_code": "assert add(1, 2) == 3"}}
  {{"kind": "property", "entry": "add", "k": 16,
   "reference": "def reference(a, b):\\n    return a + b",
   "generator": "def generate(rng):\\n    return [rng.randint(0, 9), rng.randint(0, 9)]"}}
  property: "reference" is source that defines reference(*args), "generator" is source that
  defines generate(rng), returning the list of arguments; rng is a random.Random made of the seed
  "scoring" (optional) defaults to "all": the reward is 1.0 only if every case passes; or
  "fraction", "points" (each test's own "points"), {{"first_n": N}}

OUT, one group a line in order of completion (join by id), members in the order of the
completions; an existing file is replaced once grading starts:
  {{"id": "sum-1", "rewards": [1.0], "valid": [true],
   "results": [{{"verdict": "passed", "passed": 1, "total": 1, ...}}]}}
  fields of a result: those of collimate_ray.GradeResult, see help(collimate_ray.GradeResult)
  results hold the expected values of hidden tests (cut at 200 characters): keep the file from
  the policy

--format humaneval: INPUT is HumanEval.jsonl(.gz), and --completions is 'reference' (the file's
own solutions) or a file of lines {{"task_id": "HumanEval/0", "completion": "..."}}. Lines of one
task form its group. A completion that does not define the entry point continues the prompt.

examples:
  collimate-ray grade groups.jsonl --out rewards.jsonl --nodes 3
  collimate-ray grade groups.jsonl.gz --out rewards.jsonl --address 10.0.0.5:6379 --json
  collimate-ray grade --format humaneval HumanEval.jsonl.gz --completions reference --out r.jsonl

{_EXIT_CODES}"""

#: Of ``collimate-ray demo``.
DEMO = f"""\
Starts a local Ray cluster and the sandbox daemon, grades a small task set that is shipped with
the package (right, partly right, wrong, crashing, looping and hostile completions), shows
verdicts and speed, and leaves nothing running.

Writes DIR/results.jsonl, one line a group, in the format of 'collimate-ray grade --help'.

examples:
  collimate-ray demo
  collimate-ray demo --nodes 2 --out /tmp/demo --json

{_EXIT_CODES}"""

#: Of ``collimate-ray serve``.
SERVE = f"""\
Runs the sandbox daemon of one node in the foreground, on a unix socket or on a loopback port.
Whoever can connect can run code in its sandboxes: the socket's directory is private (0700), a
port is open to every user of this machine.

SIGTERM drains: new work is refused, running work finishes, then it exits with 0. A second one,
or Ctrl-C at any time, ends it at once. The first line on standard error says where it listens;
with --json a JSON line on standard output says it too:
  {{"socket": "/tmp/sandbox/serve.sock", "pid": 4711}}

examples:
  collimate-ray serve --socket /tmp/sandbox/serve.sock
  collimate-ray serve --port 8080 --slots 8
  collimate-ray serve --socket /tmp/sandbox/serve.sock --require-tier landlock --templates DIR
  COLLIMATE_SERVE_SOCKET=/tmp/sandbox/serve.sock python train.py

{_EXIT_CODES}"""

DOCTOR = f"""\
Tries every tier of isolation, cgroups and each template on this machine, as 'collimate-ray serve'
does at its start, and tells what works, what is missing, and how to get it. Leaves nothing running.

Exits with 3 if no daemon would serve here without --allow-unsafe, or if a template is broken.

examples:
  collimate-ray doctor
  collimate-ray doctor --templates ./templates --json

{_EXIT_CODES}"""
