"""The promises of SECURITY.md: no network, no pickle, no shell, no code of others unless it was asked for."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import pytest
import torch
from support import tiny

import trl_opsd
from trl_opsd import HFRollout

PACKAGE = Path(trl_opsd.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
DANGEROUS_CALLS = {
    *("torch.load", "torch.save", "numpy.load", "np.load", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load"),
    *("eval", "exec", "compile", "os.system", "os.popen"),
}


def dangers(source: str) -> set[str]:
    """Calls in a file that could run code it reads, start a shell, or listen on any interface."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names} & UNPICKLERS
            case ast.ImportFrom(module="pickle", names=[ast.alias(name="dumps")]):
                pass  # writes, and reads nothing
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module.partition(".")[0]} & UNPICKLERS
                found |= {f"{module}.{alias.name}" for alias in names} & DANGEROUS_CALLS
            case ast.Call(func=func, keywords=keywords):
                if not any(one.arg == "allow_pickle" and ast.unparse(one.value) == "False" for one in keywords):
                    found |= {ast.unparse(func)} & DANGEROUS_CALLS
                found |= {"shell=True" for one in keywords if one.arg == "shell"}
                found |= {"weights_only" for one in keywords if one.arg == "weights_only"}
            case ast.Constant(value="0.0.0.0" | "::"):
                found.add("any interface")
    return found


def test_no_file_unpickles_or_starts_a_shell():
    found = {file.relative_to(PACKAGE).as_posix(): dangers(file.read_text(encoding="utf-8")) for file in FILES}
    assert {name: calls for name, calls in found.items() if calls} == {}


def saved_as_pickle(model: torch.nn.Module, folder: Path) -> str:
    """A checkpoint whose weights are in `pytorch_model.bin`."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return str(folder)


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_pickled_weights_are_loaded_only_on_request(make_trainer, tmp_path, role):
    path = saved_as_pickle(tiny.qwen2(48, seed=1), tmp_path / "pickled")
    given, option = {
        "student": ({"model": path}, "model_init_kwargs"),
        "teacher": ({"teacher_model": path}, "teacher_model_init_kwargs"),
    }[role]
    with pytest.raises(OSError, match=r"model\.safetensors"):
        make_trainer(**given)
    trainer = make_trainer(**given, **{option: {"use_safetensors": False}})
    assert trainer.args.to_dict()[option] == {"use_safetensors": False}


class Sockets:
    """Refuses and records every attempt to use the network."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.attempts: list[str] = []
        for name in ("connect", "connect_ex", "sendto", "bind", "listen"):
            patched.setattr(socket.socket, name, self.refusing(name))
        patched.setattr(socket, "getaddrinfo", self.refusing("getaddrinfo"))

    def refusing(self, name):
        def refuse(*args, **kwargs):
            self.attempts.append(f"{name} {args[-1]}")
            raise OSError("there is no network")

        return refuse


STEPS = {"strategy": "steps", "steps": 1}


def test_a_training_does_not_use_the_network(make_trainer, tmp_path, monkeypatch):
    """From paths: student, teacher and tokenizers; train, evaluate, save, load the best model, resume."""
    tiny.save_pair(tmp_path)
    given = {"model": str(tmp_path / "student"), "teacher_model": str(tmp_path / "teacher"), "processing_class": None}
    given |= {"rollout": HFRollout(), "eval_dataset": tiny.rows(4), "max_completion_length": 4}
    given |= {f"{what}_{name}": value for what in ("eval", "save") for name, value in STEPS.items()}
    sockets = Sockets(monkeypatch)
    make_trainer(**given, max_steps=1, load_best_model_at_end=True).train()
    resumed = make_trainer(**given, max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    resumed.save_model(str(tmp_path / "final"))
    assert resumed.args.model_init_kwargs is None, "as it was given"
    assert sockets.attempts == []
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("127.0.0.1", 9))
    assert len(sockets.attempts) == 1, "so that an attempt would have been seen"
