"""Reads the output head and the final norm of a checkpoint, for a teacher behind a server.

N tokens · V vocabulary size · H hidden width
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.peft import CausalLM
from trl_opsd.http.client import warn_in_main
from trl_opsd.models.backbone import backbone_of, hidden_states
from trl_opsd.models.checks import place_of
from trl_opsd.models.probes import HEAD, Probed
from trl_opsd.models.weights import as_saved
from trl_opsd.teacher.offloaded import layer_list
from trl_opsd.types import OutputHead

_LARGE = 1e3
"""Size of inputs that makes a norm's epsilon negligible."""
_AT_ONCE = 1 << 15
"""Numbers of a block: they fit a CPU cache, and torch starts no threads for so few."""
_EXACT = 1e-3
"""Tolerance of the root mean square of a float32 norm's normalised input, which is 1."""


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """A norm's affine map: it returns `unit * scale + bias`, where `unit` has a mean square of 1."""

    scale: Tensor
    """[H], float32 in host memory."""
    bias: Tensor
    """[H], likewise; 0 without one."""

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, width: int) -> FinalNorm | None:
        """Measures the map of a module from [N, H] to [N, H], whatever its weight means; `None` if it is no norm."""
        # The module has float32 weights in host memory.
        signs_H = torch.ones(width)
        signs_H[1::2] = -1  # mean 0, so that subtracting the mean changes nothing
        if width % 2:
            signs_H[-1] = 0
        one_H, other_H = module(_LARGE * torch.stack([signs_H, -signs_H]))
        # An affine map after a normalisation: opposite inputs give bias plus and minus scale.
        scale_H, bias_H = (one_H - other_H) / 2 * signs_H, (one_H + other_H) / 2
        if width % 2:
            scale_H[-1] = 0
        found = cls(scale_H * (signs_H.square().mean().sqrt()), bias_H)
        # A norm maps any input to unit mean square; another module does not.
        probe_NH = _LARGE * torch.randn(4, width, generator=torch.Generator().manual_seed(0))
        return found if ((found.rms(module(probe_NH)) - 1).abs() < _EXACT + 2 / width * (width % 2)).all() else None

    def rms(self, states_NH: Tensor) -> Tensor:
        """[N], the root mean square of the map's input: 1 for states of this norm, up to rounding."""
        # Channels with a scale of 0 add 0, but NaN if they are not finite, so that each number counts.
        read_H, width = self.scale != 0, len(self.scale)
        inverse_H = (1 / self.scale).masked_fill_(~read_H, 0.0)
        rows = max(1, _AT_ONCE // width)
        found = []
        for states_RH in states_NH.split(rows):
            units_RH = states_RH.to(torch.float32, copy=True).sub_(self.bias).mul_(inverse_H)
            found.append(torch.linalg.vector_norm(units_RH, dim=-1))
        return torch.cat(found) / read_H.sum().sqrt()


def find_last_norm(model: CausalLM) -> str | None:
    """The name of the module whose output is the last hidden state; `None` if none is, or it cannot be seen."""
    # The model is on the meta device, where layers may need values: they are replaced by ones that copy their input.
    layers = layer_list(model)
    last: dict[StorageWeakRef, str] = {}

    def note(name: str, found: Any) -> None:
        if isinstance(found, Tensor):
            last[_memory(found)] = name

    inside = {id(module) for module in layers.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside:
            module.register_forward_hook(lambda module, _, found, name=name: note(name, found))
    for wrap in (lambda hidden: hidden, lambda hidden: (hidden,)):  # some families' layers return tuples
        for layer in layers:
            layer.forward = lambda *given, wrap=wrap, **named: wrap(next(iter((*given, *named.values()))).clone())
        last.clear()
        try:
            # transformers knows fake tensors, but asks plain meta tensors for values.
            with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
                ids_BL = torch.zeros(1, 4, dtype=torch.long, device="meta")
                return last.get(_memory(hidden_states(model, ids_BL, torch.ones_like(ids_BL))))
        except Exception:  # a family that needs values
            continue
    return None


def _memory(tensor: Tensor) -> StorageWeakRef:
    """Identifies the storage that a tensor shares with its views."""
    return StorageWeakRef(tensor.untyped_storage())


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that need no scale to be understood."""


class CheckpointHead:
    """The head and the final norm of a causal language model that is not loaded."""

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
        self.norm = self._read_norm()  # None if the model ends with no known norm
        self.dtype = self._read(OutputHead.of(self._model).weight).dtype  # as stored

    def head(self, dtype: torch.dtype, device: torch.device) -> OutputHead:
        """The head, proved by [`~models.probes.HEAD`] to reproduce the architecture's logits. Call it once."""
        layer = self._model.get_output_embeddings()
        for name, parameter in list(layer.named_parameters(recurse=False)):
            value = self._read(parameter).to(device, dtype, copy=True)  # a view would change when the file is rewritten
            setattr(layer, name, nn.Parameter(value, requires_grad=False))
        with _random_states(self._model, self.width, dtype, device):
            Probed(self._model, "teacher").prove(HEAD)
        found = OutputHead.of(self._model)
        bias = None if found.bias is None else found.bias.detach()
        return replace(found, weight=found.weight.detach(), bias=bias)

    def _read_norm(self) -> FinalNorm | None:
        name = find_last_norm(self._model)
        if name is None:
            return None
        module = self._model.get_submodule(name)
        weights = {part: self._read(parameter).float() for part, parameter in module.named_parameters()}
        # Run in float32 on the CPU to measure its map: norms differ in what their weight means (Gemma adds 1).
        module.to(torch.float32).to_empty(device="cpu").load_state_dict(weights)
        return FinalNorm.of(module, self.width)

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


_READ_WHOLE = 2_000_000_000
"""Bytes of a checkpoint that is small enough to be run here once, on a few tokens."""


@torch.no_grad()
def predictions_of(path: str, options: Mapping[str, Any], ids: list[int]) -> Tensor | None:
    """[L - 1, V], log-probabilities of the tokens after the first of a row, by a small checkpoint in a folder here.

    `None` where it is elsewhere, large, or does not run here, as a quantised one may not.
    """
    files = [*Path(path).glob("*.safetensors")] if Path(path).is_dir() else []
    if not 0 < sum(file.stat().st_size for file in files) <= _READ_WHOLE:
        return None
    try:
        with loading(None):
            model: CausalLM = AutoModelForCausalLM.from_pretrained(path, **{"dtype": "auto", **options}).eval()
        logits_LV: Tensor = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    except Exception as error:
        warn_in_main(f"{path!r} does not run here ({error!r:.200}), so that its server is not compared with it.")
        return None
    return logits_LV.float().log_softmax(-1)


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
