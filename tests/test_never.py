"""Things that kvq never does, wherever they might stand: unpickle, run a checkpoint's code, start a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvq

PACKAGE = Path(kvq.__file__).parent
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "subprocess",
    "pty",
    "runpy",
    "code",
}
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.hub.load", "torch.jit.load",
    "np.load", "numpy.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
}  # fmt: skip
PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn", "torch.serialization.")


def forbidden(path: Path) -> Iterator[str]:
    """A sentence for each thing in a file that kvq must not do."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
        for name in modules:
            if name.split(".")[0] in MODULES:
                yield f"{path.name}:{getattr(node, 'lineno', 0)} imports {name}"
        if isinstance(node, ast.Call):
            yield from (f"{path.name}:{node.lineno} {found}" for found in _forbidden_call(node))


def _forbidden_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in CALLS or name.startswith(PREFIXES):
        yield f"calls {name}"
    if name == "yaml.load" and not any("PlainLoader" in ast.unparse(argument) for argument in node.args):
        yield "calls yaml.load without the plain loader"
    for keyword in node.keywords:
        value = ast.unparse(keyword.value)
        if keyword.arg in ("trust_remote_code", "shell", "allow_pickle") and value != "False":
            yield f"says {keyword.arg}={value}"
        if keyword.arg is None and "trust_remote_code" in value:
            yield f"says **{value}"


def test_kvq_never_does() -> None:
    assert [line for path in sorted(PACKAGE.rglob("*.py")) for line in forbidden(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import subprocess", "torch.load(x)", "eval(x)", "os.system('ls')",
        "AutoConfig.from_pretrained(x, trust_remote_code=True)", "f(trust_remote_code=flag)", "f(shell=True)",
        "np.load(x, allow_pickle=True)", "yaml.load(x, yaml.Loader)", "os.execvp('sh', [])",
        "f(**{'trust_remote_code': True})", "import dill.source",
    ],
)  # fmt: skip
def test_a_planted_line_is_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.py"
    path.write_text(f"def late() -> None:\n    {line}\n")
    assert len(list(forbidden(path))) >= 1
