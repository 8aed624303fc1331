"""The rewards "code" and "code_share": forms of tests, and programs that try to win without passing them."""

import base64
import contextlib
import itertools
import json
import pickle
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.data.loading import load_rows
from actors.rewards import sandbox
from areal_bus.config.loader import load
from areal_bus.errors import ConfigError
from areal_code import scoring
from areal_code.plain_values import Other, decode, encode
from areal_code.row_tests import read_tests, unpacked
from areal_code.scoring import CodeOptions, configure, program_in, run_tests, same_output, score, score_share

CONFIGS = Path(__file__).parents[2] / "configs"
DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
needs_bubblewrap = pytest.mark.skipif(
    sandbox.find_level() != "bubblewrap", reason="bubblewrap is not installed, or namespaces are not allowed here"
)
HUMANEVAL = {
    "prompt": 'def helper(x):\n    return x + 1\n\n\ndef f(x: int) -> int:\n    """Adds two."""\n',
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate(1) == 3\n    assert candidate(helper(1)) == 4\n",
}
MBPP = {
    "test_list": ["assert f(1) == 3", "assert sorted(f([2])) == [2, 2]"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
MBPP_PLUS = {
    "entry_point": "f",
    "canonical_solution": "def f(t):\n    return t + (0,), 0.1 + 0.2\n",
    "assertion": "assert f((1, 2)) == ((1, 2, 0), 0.3)",
    "base_input": [[[1, 2]]],
    "plus_input": [[[]], [[3]]],
    "atol": 1e-4,
}
CALLS = {"input_output": json.dumps({"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]})}
STDIN: dict[str, Any] = {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "4.0"}]}
LIVECODEBENCH = {
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
    "starter_code": "class Solution:\n    def total(self, xs: List[int], y: int) -> int:\n        ",
}
CODECONTESTS = {
    "public_tests": {"input": ["1 2"], "output": ["3"]},
    "private_tests": {"input": [], "output": []},
    "generated_tests": {"input": ["5 5"], "output": ["10"]},
}
PLUS = """import numpy as np
def is_floats(x): return isinstance(x, float) or isinstance(x, np.ndarray)
def assertion(out, exp, atol):
    atol = 1e-6 if atol == 0 and is_floats(exp) else atol
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp
inputs = [[1], [2.5], [[3]]]
results = [2, 5.0000001, [3, 3]]
"""
LOOP = "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    "
MBPP_HUB = {"code": "", "test_imports": ["import math"], "test_list": ["assert f(1) == 2"],
            "test": f"{PLUS}{LOOP}assertion(f(*inp), exp, 0)\n"}  # fmt: skip
HUMANEVAL_PLUS = {"prompt": "def f(x):\n", "entry_point": "f",
                  "test": f"{PLUS}def check(candidate):\n  {LOOP}  assertion(candidate(*inp), exp, 0)\n"}  # fmt: skip
MANY_RIGHT = {  # Codeforces: any divisor
    "official_tests": [{"input": "6\n", "output": "2\n"}, {"input": "35\n", "output": "5\n"}],
    "input_mode": "stdio", "interaction_format": None,
    "generated_checker": "import sys\nn, _, out = (open(p).read() for p in sys.argv[1:])\n"
    "try: print(int(1 < int(out) < int(n) and int(n) % int(out) == 0))\nexcept ValueError: print(0)\n",
}  # fmt: skip
ADD = "print(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        (HUMANEVAL, "    return helper(x) + 1\n", "    return x\n"),
        (HUMANEVAL, "So:\n```python\ndef f(x):\n    return helper(x) + 1\n```\nYes.", "```\ndef f(x): return 3\n```"),
        (MBPP, "def f(x):\n    return x * 2 if isinstance(x, list) else x + 2", "def f(x):\n    return x"),
        (MBPP_PLUS, "def f(t):\n    return [*t, 0], 0.30001", "def f(t):\n    return t + (0,), 0.31"),
        (CALLS, "def f(a, b):\n    return a + b", "def f(a, b):\n    return str(a + b)"),
        (STDIN, f"```py\n{ADD}\n```", "print(3)"),
        (LIVECODEBENCH, "class Solution:\n    def total(self, xs, y): return sum(xs) + y", "def total(*xs): return 0"),
        (CODECONTESTS, ADD, "print(10)"),
        (MBPP_HUB, "def f(x): return x * 2", "def f(x): return 2"),
        (HUMANEVAL_PLUS, "    return 2 * x", "    return x"),
        (MANY_RIGHT, "n = int(input())\nprint(max(d for d in range(1, n) if n % d == 0))", "print(2)"),
        (MANY_RIGHT, "n = int(input())\nprint(min(d for d in range(2, n) if n % d == 0))", "print('1\\n1')"),
    ],
    ids=["continues", "fenced", "asserts", "reference", "calls", "stdin", "method", "contests", "mbpp", "plus",
         "checker", "checked"],
)  # fmt: skip
def test_each_form_of_tests_scores_a_right_and_a_wrong_program(row: dict[str, Any], right: str, wrong: str) -> None:
    assert score("", right, row).reward == 1.0
    assert score("", wrong, row).correct is False


BLOCKS = {
    "plain": "{}",
    "a text block before": "For\n```text\n1 2\n```\nit prints 3:\n```python\n{}\n```",
    "a bash block before": "```bash\npip install x\n```\n```\n{}\n```",
    "a json block before": '```json\n{{"a": 1}}\n```\n```python\n{}',
    "an output block behind": "```python\n{}\n```\nOutput:\n```\n3\n```",
    "an output block behind a block without a language": "```\n{}\n```\nOutput:\n```\n[3, 4]\n```",
    "an output block of Python behind": "```python\n{}\n```\nOutput:\n```python\n[3, 4]\n```",
    "an output block that assigns": "```\n{}\n```\nOutput:\n```\nx = 5\n```",
    "a session behind": "```python\n{}\n```\n```python\n>>> main()\n3\n```",
    "tildes": "~~~python\n{}\n~~~",
    "a longer fence": "````python\n{}\n````",
    "py3": "```py3\n{}\n```",
    "a version": "```Python 3.11\n{}\n```",
    "a title": '```python title="x"\n{}\n```',
    "attributes": "```{{.python .numberLines}}\n{}\n```",
    "indented": "1. So:\n   ```python\n   {}\n   ```\n",
    "a stray closing fence": "{}\n```",
    "a stray closing fence and prose": "{}\n```\nThis works because it adds.",
    "a stray fence before": "```\n\n```python\n{}\n```",
    "a fence in a line": "Here: ```python\n{}```",
    "prose behind a fence": "```python\n{}\n``` That is all.",
    "two blocks and one fence": "```text\n1 2\n```python\n{}\n```",
    "a draft in a thought": "<think>```python\nprint(9)\n```</think>\n{}",
    "a document in a longer fence": "````markdown\nSo:\n```python\n{}\n```\n````",
    "tags": "<answer>\n{}\n</answer>",
    "tags of HTML": '<pre><code class="python">\n{}\n</code></pre>',
    "tags in brackets": "[PYTHON]\n{}\n[/PYTHON]",
    "tags around a fence": "<answer>\n```python\n{}\n```\n</answer>",
    "tags in the lines of the program": "<pre><code class='language-python'>{}</code></pre>",
    "a block in a list": "- ```python\n  {}\n  ```",
    "a block in a quotation": "> ```python\n>\n> {}\n> ```",
    "lines of Windows": "```python\r\n{}\r\n```\r\n",
}


@pytest.mark.parametrize("form", BLOCKS.values(), ids=BLOCKS.keys())
def test_the_program_is_found_in_each_form_of_blocks(form: str) -> None:
    assert program_in(form.format(ADD)).strip() == ADD


@pytest.mark.parametrize(
    "completion",
    ["    return x + 2\n```", "    return x + 2\n```\nIt adds 2.", "```python\n    return x + 2\n```\n```\n5\n```",
     "```python\ndef f(x):\n    return x + 2\n```\nExample:\n```python\nprint(f(3))\n```"],
)  # fmt: skip
def test_the_program_that_continues_or_defines_the_function_is_found(completion: str) -> None:
    assert score("", completion, HUMANEVAL).reward == 1.0


@pytest.mark.parametrize("text", ["```", "~~~", "```python\n", "`", "~", "```\n", "<think>", "(", 'x = """'])
def test_a_program_is_looked_for_in_linear_time(text: str) -> None:
    began = time.process_time()
    program_in(text * (100_000 // len(text)))
    assert time.process_time() - began < 5.0  # a quadratic scan takes minutes


@pytest.mark.parametrize(
    ("output", "program", "right"),
    [
        ([3], "def f(a, b): return 3", True),
        ([3], "def f(a, b): return [3]", True),
        ([[1, 2]], "def f(a, b): return [1, 2]", True),
        ([3], "def f(a, b): return 4", False),
        ([3, 4], "def f(a, b): return 3", False),
        ([3, 4], "def f(a, b): return [3, 4]", True),
        ([3], "def f(a, b): return [[3]]", False),
    ],
)
def test_an_expected_result_may_stand_in_a_list_of_one(output: list[Any], program: str, right: bool) -> None:
    row = {"input_output": json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [output]})}
    assert score("", program, row).correct is right


def packed(tests: object) -> str:
    """Private tests as LiveCodeBench publishes them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def test_compressed_private_tests_are_read_without_unpickling(tmp_path: Path) -> None:
    tests = [{"input": f"{n} 2", "output": str(n + 2), "testtype": "stdin"} for n in range(3)] + [
        {"input": "x" * 70_000, "output": "0", "testtype": "stdin"}  # a frame of its own
    ]
    row = {"public_test_cases": json.dumps(tests[:1]), "private_test_cases": packed(tests[1:])}
    assert read_tests(row) == [scoring.StdinTest(test["input"], test["output"]) for test in tests]
    for protocol in range(2, 6):
        text = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests), protocol))).decode()
        assert json.loads(unpacked(text)) == tests

    class Hostile:
        def __reduce__(self) -> object:
            return Path.touch, (tmp_path / "hacked",)

    for hostile in (Hostile(), [json.dumps(tests), Hostile()], ["a", "b"], {"a": 1}, b"[]", 3):
        for protocol in range(6):
            text = base64.b64encode(zlib.compress(pickle.dumps(hostile, protocol))).decode()
            with pytest.raises(ValueError, match="compressed tests"):
                unpacked(text)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    "text", ["no base64!", "aGVsbG8=", packed([1])[:-8], base64.b64encode(zlib.compress(b"")).decode(), ""]
)
def test_compressed_tests_that_are_damaged_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"private_test_cases must be JSON|missing tests"):
        read_tests({"private_test_cases": text})


@given(st.binary(max_size=60))
def test_no_bytes_are_more_than_a_string_or_an_error(pickled: bytes) -> None:
    text = base64.b64encode(zlib.compress(pickled)).decode()
    with contextlib.suppress(ValueError):
        assert isinstance(unpacked(text), str)


@pytest.mark.slow
def test_inputs_that_are_too_much_for_the_reference_are_no_tests() -> None:
    reference = "def f(n):\n    while n > 9: pass\n    return list(range(10 ** 7)) if n == 9 else [0] * 10 ** (2 * n)\n"
    row = {
        "entry_point": "f",
        "canonical_solution": reference,
        "base_input": [[1], [99], [9]],
        "plus_input": [[8], [0]],
    }
    patient = CodeOptions(score_s=60.0)
    assert run_tests("def f(n): return [0] * 10 ** (2 * n)", row, patient) == [True, True]
    with pytest.raises(RuntimeError, match="its reference solution has no result"):
        run_tests(reference, {**row, "base_input": [[99]], "plus_input": []}, patient)


@pytest.mark.parametrize("wrong", ["[]", "[2.5] * 3", "(2.5,)", "float('nan')", "float('inf')", "'2.5'", "{}", "None"])
def test_an_answer_of_another_shape_is_not_close(wrong: str) -> None:
    """numpy repeats a number: np.allclose([], 2.5) is true."""
    row = {**MBPP_HUB, "test": f"{PLUS}assertion(f(2), 2.5, 0)\n"}
    assert run_tests("def f(x): return 2.5 + 1e-9", row) == [True]
    assert run_tests(f"def f(x): return {wrong}", row) == [False]


@pytest.mark.slow
def test_output_that_breaks_the_checker_is_wrong_and_a_broken_checker_an_error() -> None:
    patient = CodeOptions(score_s=20.0, test_s=1.0)
    files = "import sys\nn, right, out = (open(p).read() for p in sys.argv[1:])\n"
    for checker, printed, passed in [
        (f"{files}print(int(int(n) % int(out) == 0))", "abc", False),
        (f"{files}print(int(int(n) % int(out) == 0))", "3", True),
        (f"{files}print('seen', out)\nwhile out.strip() != right.strip(): pass\nprint(1)", "1", False),
        (f"{files}print('found', out, 'points:', 0.5, sep='\\n')", "1", False),
    ]:
        row = {"official_tests": [{"input": "6\n", "output": "2\n"}], "generated_checker": checker}
        assert run_tests(f"print({printed!r})", row, patient) == [passed], checker
    for checker in ("import nothing", f"{files}print('wrong: expected', right.strip(), 'found', out)", "while True: 1"):
        row = {"official_tests": [{"input": "6\n", "output": "2\n"}], "generated_checker": checker}
        with pytest.raises(RuntimeError, match="the checker of the row does not run"):
            run_tests("print(1)", row, patient)


def test_the_checker_ends_with_the_tests_of_the_completion() -> None:
    row = {"official_tests": [{"input": "", "output": "2"}] * 3, "generated_checker": "while True: 1"}
    assert run_tests("print(1)", row, CodeOptions(score_s=1.5, test_s=600.0)) == [False, False, False]


@pytest.mark.parametrize("name", ["14b", "32b", "deepcoder"])
def test_the_rows_that_a_config_asks_for_are_loaded_and_scored(name: str, tmp_path: Path) -> None:
    """The file that its comments describe: "tests" is JSON text, because it is the answer, too."""
    file = tmp_path / "deepcoder.jsonl"
    file.write_text(json.dumps({"problem": "Add.", "tests": json.dumps(STDIN["tests"])}) + "\n")
    (row,) = load_rows(load(CONFIGS / f"{name}.toml", [f"data.path={file}"], {}), tmp_path)
    assert score("", ADD, row).correct is True
    assert score("", "print(3)", row).correct is False


def test_the_share_counts_tests_and_a_whole_verdict_runs_none_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = list[bytes](), sandbox.run
    monkeypatch.setattr(
        sandbox, "run", lambda code, given, *how, **more: runs.append(given) or run(code, given, *how, **more)
    )
    assert score("", "print(4)", STDIN).correct is False
    assert runs == [b"1 2\n"]
    found = score_share("", "print(3)", STDIN)
    assert (found.reward, found.correct) == (0.5, False)
    assert score_share("", "def f(a, b):\n    return 3", CALLS).reward == 0.5


ATTACKS = {
    "an object that equals everything": "class E:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def f(a, b):\n    return E()",
    "a subclass of int": "class E(int):\n    def __eq__(self, other): return True\ndef f(a, b):\n    return E(9)",
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef f(a, b):\n    os._exit(0)",
    "prints pass": "import os\ndef f(a, b):\n    print('pass')\n    os.write(2, b'pass\\npass\\n')\n    return 0",
    "writes to all files": "import os\ndef f(a, b):\n    for n in range(3, 20):\n        try: os.write(n, b'pass\\n')\n"
    "        except OSError: pass\n    return 0",
    "patches the comparison": "import builtins\nbuiltins.all = lambda x: True\nbuiltins.bool = lambda x: True\n"
    "def f(a, b):\n    return 0",
    "patches the codec": "import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'encode'):\n"
    "        m.encode = lambda v: '3'\ndef f(a, b):\n    return 0",
    "overwrites its main": "import __main__\n__main__.limited = lambda *a: {'value': 'true'}\ndef f(a, b): return 0",
    "never returns": "def f(a, b):\n    while True: pass",
    "ignores its alarm": "from signal import *\nsignal(SIGALRM, SIG_IGN)\ndef f(a, b):\n    while True: pass",
    "answers without being asked": "import os\nfor n in range(3, 9):\n    try: os.write(n, b'{\"value\": \"1\"}\\n')\n"
    "    except OSError: pass\ndef f(a, b):\n    return 0",
    "a huge repr": "class R:\n    def __repr__(self): return 'x' * (1 << 30)\ndef f(a, b): return R()",
    "contains itself": "def f(a, b):\n    x = []\n    x.append({1: x})\n    return x",
    "is deep": "def f(a, b):\n    x = []\n    for _ in range(10 ** 5): x = [x]\n    return x",
    "reduces to a call": "class R:\n    def __reduce__(self): return print, ('pass',)\ndef f(a, b): return R()",
    "an int of 10 ** 9 bits": "def f(a, b): return 1 << 10 ** 9",
    "a string of 1 GB": "def f(a, b): return 'x' * (1 << 30)",
    "traces the server": "import sys\ndef trace(frame, event, argument):\n    while frame:\n"
    "        frame.f_locals.update(answer={'value': '1'}, broken={'value': '1'})\n        frame = frame.f_back\n"
    "    return trace\nsys.settrace(trace); sys.setprofile(trace)\ndef f(a, b): return 0",
    "finds the server's files": "import gc, io\ndef f(a, b):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, io.TextIOWrapper):\n            try: o.write('{\"value\": \"1\"}\\npass\\n'); o.flush()\n"
    "            except (OSError, ValueError): pass\n    return 0",
    "writes to files in /proc": "import os\ndef f(a, b):\n    for p in filter(str.isdecimal, os.listdir('/proc')):\n"
    "        for n in range(20):\n            try: open(f'/proc/{p}/fd/{n}', 'wb', 0).write(b'pass\\npass\\n')\n"
    "            except OSError: pass\n    return 0",
    "leaves an orphan that answers": "import os, time\ndef f(a, b):\n    if os.fork() == 0:\n        os.setsid()\n"
    "        while os.fork() == 0:\n            for n in range(3, 20):\n"
    "                try: os.write(n, b'{\"value\": \"1\"}\\n')\n                except OSError: pass\n"
    "            time.sleep(0.02)\n        os._exit(0)\n    return 0",
    "patches json": "import json\njson.dumps = lambda *a, **k: '{\"value\": \"1\"}'\ndef f(a, b): return 0",
    "recurses for ever": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(a, b): return f(a, b)",
    "stops itself": "import os\ndef f(a, b): os.kill(os.getpid(), 19)",
    "kills all": "import os\ndef f(a, b): os.kill(-1, 9)",
    "reads the tests": "import glob, os\ndef f(a, b):\n    text = ''.join(open(p, errors='ignore').read() for p in\n"
    "        glob.glob('/main.py') + glob.glob('/proc/*/cmdline'))\n    return 30516 + (str(30516 + 1) in text)",
}  # fmt: skip
ATTACKED = {"input_output": {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [30517, 40519]}}
QUICK = CodeOptions(test_s=1.0, score_s=6.0, memory_mib=256)


@pytest.mark.slow
@needs_bubblewrap
@pytest.mark.parametrize("program", ATTACKS.values(), ids=ATTACKS)
def test_a_program_wins_by_right_values_only(program: str) -> None:
    assert run_tests(program, ATTACKED, QUICK) == [False, False]
    assert score("", "def f(a, b):\n    return a + b", CALLS).reward == 1.0  # and the next one is scored as ever


@pytest.mark.slow
@needs_bubblewrap
def test_a_program_on_stdin_is_bounded() -> None:
    for program in ("print('x' * (1 << 30))", "import time\ntime.sleep(60)", "raise SystemExit(3)"):
        assert run_tests(program, STDIN, QUICK) == [False, False]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "", "answer": ""}, "missing tests .* it has answer, question"),
        ({"input_output": "{no json"}, "input_output must be JSON"),
        ({"input_output": {"inputs": [1], "outputs": []}}, "of the same length"),
        ({"tests": [{"input": "1"}]}, "tests with input and output"),
        ({"test_list": [], "test": " "}, "at least one assert"),
        ({"tests": [1], "interaction_format": "The judge guesses."}, "this row is interactive"),
        ({"tests": [1], "input_mode": "file"}, "or reads a file"),
        ({"public_tests": [1]}, "lists input and output"),
        ({"public_test_cases": [{"input": "1", "output": "1", "testtype": "functional"}]}, "name of the function"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_and_no_verdict(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_tests(row)


@pytest.mark.parametrize("row", [{**MBPP_PLUS, "canonical_solution": "def f(t): return t.none"},
                                 {**HUMANEVAL, "test": "def check(candidate) pass"},
                                 {**HUMANEVAL, "test": "def chek(candidate): pass"}])  # fmt: skip
def test_tests_that_do_not_run_are_an_error_and_no_verdict(row: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="the tests of the row do not run"):
        score("", "def f(x): return x", row)


def test_a_required_sandbox_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring.sandbox, "find_level", lambda: "rlimits")
    with pytest.raises(ConfigError, match='"required" needs bubblewrap'):
        configure(CodeOptions(sandbox="required"))


def test_the_weaker_sandbox_scores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring.sandbox, "find_level", lambda: "rlimits")
    assert score("", "def f(a, b):\n    return a + b", CALLS).reward == 1.0
    assert score("", ADD, STDIN).reward == 1.0


SAME = [
    *(("1 2 \n\n", "1 2"), ("1.0\n2", "1\n2.00"), ("1\n2", "1 2"), ("nan", "nan "), ("-1.2e-17", "0.0")),
    *(("0.3333333333", "0.33333333333333331"), ("0.30000000000000004", "0.3")),
]
OTHER = [
    *(("yes", "YES"), ("1 2", "1 2 3"), ("", "0"), ("nan", "inf"), ("1_0", "10"), ("١", "1"), ("2.718", "2.71828")),
    *(("3.0000001", "3"), ("1e400", "1.5"), ("-1.5", "1.5"), ("0.0000001", "0.0")),
]


@pytest.mark.parametrize(("printed", "expected"), SAME + OTHER)
def test_outputs_are_compared_by_words(printed: str, expected: str) -> None:
    assert same_output(printed, expected) is ((printed, expected) in SAME)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner), max_leaves=4)
VALUES = st.recursive(
    HASHABLE | st.complex_numbers(allow_nan=False) | st.sets(HASHABLE, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HASHABLE, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_plain_values_come_back_as_they_are(value: object) -> None:
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


def test_other_objects_are_true_and_equal_nothing() -> None:
    (found,) = decode(encode([object()]))
    assert isinstance(found, Other)
    assert found
    assert found not in (0, 1, True, None, "", [])


@pytest.mark.soak
@needs_bubblewrap
@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data holds the published files")
@pytest.mark.parametrize(("file", "n"), [("humaneval/HumanEval.jsonl", 164), ("mbppplus/test.jsonl", 399)])
def test_canonical_solutions_pass_and_those_of_other_rows_do_not(file: str, n: int) -> None:
    rows = [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]
    assert len(rows) == n
    options = CodeOptions(score_s=60.0, test_s=20.0)
    failed = {row["task_id"] for row in rows if not all(run_tests(row["canonical_solution"], row, options))}
    assert not failed
    for row, other in itertools.pairwise(rows[:4]):
        assert score("", other["canonical_solution"], row).reward == 0.0
