"""Builds an environment in which a real SGLang server runs on a CPU, apart from the project's own.

SGLang asks for a CUDA build of torch and for CUDA kernels. Its scheduler, radix cache, sampler and HTTP server need
neither; what they import without using it is stood in for. An environment that is there is kept.

    python tools/sglang_env.py .sglang
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"

# Kernels that attention and sampling in plain torch do not call.
SGL_KERNEL = '''"""Stands in for SGLang's CUDA kernels: any name can be imported, none can be called."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class Absent:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} has no kernel for a CPU here")


class Module(ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
sys.modules[__name__].__class__ = Module


def unpinned(make):
    """Adapters are kept in pinned memory, which only an accelerator has."""
    return lambda *args, pin_memory=False, **given: make(*args, **given)


import torch

for name in ("empty", "tensor", "zeros", "ones"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda self, *args: self
'''

STANDS_IN = {
    "sgl_kernel/__init__.py": SGL_KERNEL,
    "torchaudio/__init__.py": "",
    "torchvision/_meta_registrations.py": "",  # registers what only its compiled part defines, which needs CUDA
}
"""Files that are written over what is installed, by their paths in `site-packages`."""

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "DISABLE_AMX": "1"}
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--host", "127.0.0.1"),
)


def built(folder: Path) -> Path:
    """The Python of the environment, which is built unless it is there and as this script would build it."""
    folder = folder.resolve()
    python, mark = folder / "bin" / "python", folder / "built"
    files = [Path(__file__), *(REQUIREMENTS / f"{name}.txt" for name in ("torch", "sglang"))]
    state = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if mark.is_file() and mark.read_text() == state:
        return python
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise SystemExit(f"{folder} is there and is no environment of this script: name another folder.")
    shutil.rmtree(folder, ignore_errors=True)
    print(f"building {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True)
    install(python, "-r", REQUIREMENTS / "torch.txt")
    install(python, "--no-deps", "-r", REQUIREMENTS / "sglang.txt")
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, text in STANDS_IN.items():
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text(text)
    mark.write_text(state)
    return python


def install(python: Path, *what: object) -> None:
    """Installs into the environment, with the versions of the lock where none is named."""
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    subprocess.run([*map(str, (*pip, *what, "-c", REQUIREMENTS / "lock.txt"))], check=True)


def command(python: Path, model: str, *further: str) -> list[str]:
    """The command line of a server."""
    return [str(python), "-m", "sglang.launch_server", "--model-path", model, *FLAGS, *further]


if __name__ == "__main__":
    print(built(Path(sys.argv[1])))
