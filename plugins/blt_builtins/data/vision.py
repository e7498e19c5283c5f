"""The only import of torchvision, made when a component needs it."""

from __future__ import annotations

import warnings
from typing import Any

from bltoolbox.plugin import MissingError


def torchvision_datasets(component: str) -> Any:
    """The module ``torchvision.datasets``, or an error that says why it is unavailable.

    A torchvision that was built for another torch fails with a RuntimeError or OSError, not with an ImportError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about optional parts
            import torchvision.datasets
    except ModuleNotFoundError as error:
        raise MissingError(
            f"{component}: torchvision is not installed ({error}); install it with: pip install torchvision"
        ) from error
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        import torch

        reason = str(error).partition("\n")[0]
        raise MissingError(
            f"{component}: torchvision does not work with torch {torch.__version__} ({reason}); install the two"
            " together, from one source: pip install --force-reinstall torch torchvision"
        ) from error
    return torchvision.datasets
