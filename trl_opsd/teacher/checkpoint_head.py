"""Reads the output head of a checkpoint, and runs it once, for a teacher behind a server.

L tokens of a row · V vocabulary size · H hidden width
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.http import warn_in_main
from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import backbone_of, layer_list
from trl_opsd.models.checks import place_of
from trl_opsd.models.probes import Probed, check_head
from trl_opsd.models.weights import as_saved
from trl_opsd.types import OutputHead

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that need no scale to be understood."""


class CheckpointHead:
    """The head of a causal language model that is not loaded."""

    def __init__(self, path: str, options: Mapping[str, Any] | None = None) -> None:
        # `options` are such as `revision`. Of a sharded checkpoint on the Hub only the index and the files with these
        # tensors are downloaded.
        options = options or {}
        self._path, self._files = path, _Tensors(path, place_of(options))
        # The architecture, built from the config without weights, shows which tensors of the checkpoint are needed.
        self.config = AutoConfig.from_pretrained(path, **options)
        trust = bool(options.get("trust_remote_code"))
        with loading(None), torch.device("meta"):
            self._model: CausalLM = AutoModelForCausalLM.from_config(self.config, trust_remote_code=trust).eval()
        self.vocabulary, self.width = OutputHead.of(self._model).weight.shape
        self.dtype = self._read(OutputHead.of(self._model).weight).dtype  # as stored

    def head(self, dtype: torch.dtype, device: torch.device) -> OutputHead:
        """The head, proved by [`~models.probes.check_head`] to reproduce the architecture's logits. Call it once."""
        layer = self._model.get_output_embeddings()
        for name, parameter in list(layer.named_parameters(recurse=False)):
            value = self._read(parameter).to(device, dtype, copy=True)  # a view would change when the file is rewritten
            setattr(layer, name, nn.Parameter(value, requires_grad=False))
        with _random_states(self._model, self.width, dtype, device):
            Probed(self._model, "teacher").prove(check_head)
        found = OutputHead.of(self._model)
        bias = None if found.bias is None else found.bias.detach()
        return replace(found, weight=found.weight.detach(), bias=bias)

    def _read(self, parameter: Tensor) -> Tensor:
        """The value of a parameter, under any of the names that it may have in a checkpoint."""
        own = [name for name, one in self._model.named_parameters(remove_duplicate=False) if one is parameter]
        layers = {id(module): name for name, module in self._model.named_modules()}
        head = layers[id(self._model.get_output_embeddings())]
        own.sort(key=lambda name: name.rpartition(".")[0] != head)  # transformers leaves a stored head untied
        saved = [name for one in own for name, _ in as_saved(self._model, one, parameter)]
        name = self._files.find([*saved, *own])
        found = self._files[name]
        if found.shape != parameter.shape or found.dtype not in _DTYPES:
            raise ValueError(
                f"{name!r} in the checkpoint {self._path!r} is {found.dtype} {list(found.shape)}, expected "
                f"floating-point numbers {list(parameter.shape)}: a teacher behind a server needs a checkpoint that "
                "matches its config and whose head is not quantised."
            )
        return found


_IN_MEMORY = 8_000_000_000
"""Bytes of a checkpoint that are kept in memory while it is run; of a larger one, layers are read as they are used."""


@torch.no_grad()
def predictions_of(path: str, options: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> Tensor | None:
    """[B, L, V], log-probabilities after each token of B rows of L, by the checkpoint, which is run once on the CPU.

    `None`, with a warning, where it is not on this machine or does not run here, as a quantised one may not.
    """
    given = {"dtype": "auto", "use_safetensors": True, **options, "local_files_only": True}
    try:
        with loading(None), TemporaryDirectory() as folder:
            given |= {"device_map": "auto", "max_memory": {"cpu": _IN_MEMORY}, "offload_folder": folder}
            model: CausalLM = AutoModelForCausalLM.from_pretrained(path, **given).eval()
            logits_BLV: Tensor = model(input_ids=torch.tensor(rows)).logits.cpu()  # an error where they have no values
    except Exception as error:
        warn_in_main(
            f"{path!r} does not run here ({error!r:.200}), so its server is not verified: another model or layer would "
            "go unnoticed. Download the whole checkpoint if it is not on this machine."
        )
        return None
    return logits_BLV.float().log_softmax(-1)


class _Tensors:
    """The tensors of a checkpoint by name, each loaded on access."""

    def __init__(self, path: str, place: Mapping[str, Any]) -> None:
        self._checkpoint, self._place = path, place
        index = self._file(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            self._file_of: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            return
        whole = self._file(SAFE_WEIGHTS_NAME)
        if whole is None:
            raise ValueError(
                f"The teacher {path!r} has neither {SAFE_WEIGHTS_NAME!r} nor {SAFE_WEIGHTS_INDEX_NAME!r}, needed to "
                "load the output head of a teacher behind a server: pass a safetensors checkpoint, as saved by "
                "`model.save_pretrained(folder)`."
            )
        with safe_open(whole, "pt") as tensors:
            self._file_of = dict.fromkeys(tensors.keys(), SAFE_WEIGHTS_NAME)

    def find(self, names: list[str]) -> str:
        """The first of these names that the checkpoint has, also after another prefix or without its first part."""
        # Prefixes differ between versions of transformers and between kinds of model.
        for name in (*names, *(name.partition(".")[2] for name in names)):
            close = [one for one in self._file_of if one == name] or [
                one for one in self._file_of if name and one.endswith(f".{name}")
            ]
            if len(close) == 1:
                return close[0]
        raise ValueError(
            f"The checkpoint {self._checkpoint!r} has no {' or '.join(map(repr, dict.fromkeys(names)))}, which a "
            f"teacher behind a server needs; it has {len(self._file_of)} others, such as "
            f"{next(iter(self._file_of), None)!r}."
        )

    def __getitem__(self, name: str) -> Tensor:
        file = cached_file(self._checkpoint, self._file_of[name], **self._place)
        with safe_open(file, "pt") as tensors:
            return tensors.get_tensor(name)

    def _file(self, name: str) -> str | None:
        found: str | None = cached_file(
            self._checkpoint, name, **self._place, _raise_exceptions_for_missing_entries=False
        )
        return found


class _OnlyStates(BaseModelOutputWithPast):
    """A backbone's output with hidden states only."""

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _random_states(model: CausalLM, width: int, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Replaces the forward of what holds the layers by random states, so that the head can run without layers."""
    layers = layer_list(model)
    holders = [one for one in model.modules() if one is not model and one is not layers and layers in one.modules()]
    replaced = list({id(one): one for one in (backbone_of(model), *holders)}.values())

    def forward(input_ids: Tensor, **_: Any) -> _OnlyStates:
        states_BLH = torch.randn(*input_ids.shape, width, generator=torch.Generator().manual_seed(0))
        return _OnlyStates(last_hidden_state=states_BLH.to(device, dtype))

    for one in replaced:  # some families call a module inside the backbone
        one.forward = forward
    try:
        yield
    finally:
        for one in replaced:
            del one.forward
