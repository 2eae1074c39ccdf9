"""Asks for packages that options need, before a model is loaded; transformers asks after, or when a training begins."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from transformers import Trainer
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_liger_kernel_available

from trl_opsd.config import OPSDConfig
from trl_opsd.options.values import one_of

_NOT_LISTED = ("azure_ml", "flyte", "kubeflow")
"""Loggers whose presence transformers does not say."""


def check_packages(args: OPSDConfig, train_dataset: Any, optimizers: tuple[Any, Any]) -> None:
    """Refuses options whose packages are not installed."""
    present = get_available_reporting_integrations() if args.report_to else []
    for name in args.report_to or ():
        one_of("none", "all", *INTEGRATION_TO_CALLBACK).check("report_to", name)
        if name not in (*present, *_NOT_LISTED, "none", "all"):
            raise ValueError(
                f"`report_to={name!r}`: its package is not installed or is switched off: install or remove it."
            )
    if args.report and not find_spec("vl_convert"):
        raise ValueError("`report=True`: `pip install vl-convert-python`, which draws the curves, or remove it.")
    if train_dataset is None:
        return
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError("`use_liger_kernel=True`: `pip install liger-kernel`, or remove it.")
    of_the_launch = args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}
    if optimizers[0] is None and "optimizer" not in of_the_launch:
        _check_optimizer(args)


def _check_optimizer(args: OPSDConfig) -> None:
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:
        if "pass a" in str(error):  # it needs the model, and so is there
            return
        given = f" with `optim_args={args.optim_args!r}`" if args.optim_args else ""
        raise ValueError(f"`optim={args.optim.value!r}`{given} cannot be used: {error}") from error
