"""Everything that the author of a plugin imports, in one module.

    from bltoolbox.plugin import Component, Regularizer, hookimpl

``Component`` and ``hookimpl`` are available at once; everything else is loaded on first use, so that the module an
entry point names stays light and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bltoolbox.config.hooks import Component as Component
from bltoolbox.config.hooks import hookimpl as hookimpl

if TYPE_CHECKING:
    from bltoolbox.bilevel.blocks import BlockDraws as BlockDraws
    from bltoolbox.bilevel.composite import Composite as Composite
    from bltoolbox.bilevel.derivatives import Linearization as Linearization
    from bltoolbox.bilevel.derivatives import gradients_of as gradients_of
    from bltoolbox.bilevel.events import Listener as Listener
    from bltoolbox.bilevel.fusion import Fused as Fused
    from bltoolbox.bilevel.linear import ConjugateGradients as ConjugateGradients
    from bltoolbox.bilevel.linear import LinearMethod as LinearMethod
    from bltoolbox.bilevel.linear import System as System
    from bltoolbox.bilevel.linear import initial_residual as initial_residual
    from bltoolbox.bilevel.linear import solve_linear as solve_linear
    from bltoolbox.bilevel.linear import sweep as sweep
    from bltoolbox.bilevel.preconditioner import Preconditioner as Preconditioner
    from bltoolbox.bilevel.preconditioner import Preconditioning as Preconditioning
    from bltoolbox.bilevel.preconditioner import unavailable as unavailable
    from bltoolbox.bilevel.problem import Lower as Lower
    from bltoolbox.bilevel.problem import Upper as Upper
    from bltoolbox.bilevel.records import Accuracy as Accuracy
    from bltoolbox.bilevel.records import Ask as Ask
    from bltoolbox.bilevel.records import Batch as Batch
    from bltoolbox.bilevel.records import BiasLimit as BiasLimit
    from bltoolbox.bilevel.records import Bound as Bound
    from bltoolbox.bilevel.records import Constants as Constants
    from bltoolbox.bilevel.records import Counter as Counter
    from bltoolbox.bilevel.records import Effort as Effort
    from bltoolbox.bilevel.records import Estimate as Estimate
    from bltoolbox.bilevel.records import HypergradientResult as HypergradientResult
    from bltoolbox.bilevel.records import Rows as Rows
    from bltoolbox.bilevel.records import Scales as Scales
    from bltoolbox.bilevel.records import Solution as Solution
    from bltoolbox.bilevel.records import Status as Status
    from bltoolbox.bilevel.records import Step as Step
    from bltoolbox.bilevel.records import Steps as Steps
    from bltoolbox.bilevel.records import Theta as Theta
    from bltoolbox.bilevel.records import Value as Value
    from bltoolbox.bilevel.roles import HypergradientEstimator as HypergradientEstimator
    from bltoolbox.bilevel.roles import Logger as Logger
    from bltoolbox.bilevel.roles import LowerSolver as LowerSolver
    from bltoolbox.bilevel.roles import Oracle as Oracle
    from bltoolbox.bilevel.roles import Parametric as Parametric
    from bltoolbox.bilevel.roles import Problem as Problem
    from bltoolbox.bilevel.roles import Role as Role
    from bltoolbox.bilevel.roles import Sampler as Sampler
    from bltoolbox.bilevel.roles import SolverState as SolverState
    from bltoolbox.bilevel.roles import UpperOptimizer as UpperOptimizer
    from bltoolbox.bilevel.saddle import Blocks as Blocks
    from bltoolbox.bilevel.saddle import Saddle as Saddle
    from bltoolbox.bilevel.saddle import optimality as optimality
    from bltoolbox.bilevel.tasks import BoundTasks as BoundTasks
    from bltoolbox.bilevel.tasks import Tasks as Tasks
    from bltoolbox.bilevel.tasks import TensorTasks as TensorTasks
    from bltoolbox.bilevel.tensors import Constant as Constant
    from bltoolbox.bilevel.tensors import ConstantsByKey as ConstantsByKey
    from bltoolbox.bilevel.tensors import digest_of as digest_of
    from bltoolbox.bilevel.tensors import dot as dot
    from bltoolbox.bilevel.tensors import expand as expand
    from bltoolbox.bilevel.tensors import keyed_generator as keyed_generator
    from bltoolbox.bilevel.tensors import lasting as lasting
    from bltoolbox.bilevel.tensors import norm as norm
    from bltoolbox.bilevel.tensors import put as put
    from bltoolbox.bilevel.tensors import take as take
    from bltoolbox.bilevel.tensors import theta_norm as theta_norm
    from bltoolbox.config.cache import cache_folder as cache_folder
    from bltoolbox.config.reading import ARRAY_IMAGES as ARRAY_IMAGES
    from bltoolbox.config.reading import DOWNLOAD as DOWNLOAD
    from bltoolbox.config.reading import GENERATED as GENERATED
    from bltoolbox.config.reading import KERNEL as KERNEL
    from bltoolbox.config.reading import LOG as LOG
    from bltoolbox.config.reading import MASK as MASK
    from bltoolbox.config.reading import PIXELS as PIXELS
    from bltoolbox.config.reading import RECORDED as RECORDED
    from bltoolbox.config.reading import TABLE as TABLE
    from bltoolbox.config.reading import FileRefused as FileRefused
    from bltoolbox.config.reading import Limit as Limit
    from bltoolbox.config.reading import file_size as file_size
    from bltoolbox.config.reading import open_file as open_file
    from bltoolbox.config.reading import read_end as read_end
    from bltoolbox.config.reading import read_text as read_text
    from bltoolbox.errors import BltError as BltError
    from bltoolbox.errors import MissingError as MissingError
    from bltoolbox.errors import NumericalError as NumericalError
    from bltoolbox.restoration.forms import choose_form as choose_form
    from bltoolbox.restoration.layout import image_layout as image_layout
    from bltoolbox.restoration.layout import to_gray as to_gray
    from bltoolbox.restoration.model import Model as Model
    from bltoolbox.restoration.npy import map_array as map_array
    from bltoolbox.restoration.npy import read_array as read_array
    from bltoolbox.restoration.pictures.files import read_pixels as read_pixels
    from bltoolbox.restoration.pictures.images import SUFFIXES as SUFFIXES
    from bltoolbox.restoration.pictures.images import Header as Header
    from bltoolbox.restoration.pictures.images import ImageError as ImageError
    from bltoolbox.restoration.pictures.images import read_header as read_header
    from bltoolbox.restoration.pictures.images import read_image as read_image
    from bltoolbox.restoration.results import Check as Check
    from bltoolbox.restoration.results import RunResult as RunResult
    from bltoolbox.restoration.roles import Data as Data
    from bltoolbox.restoration.roles import DataTerm as DataTerm
    from bltoolbox.restoration.roles import Forward as Forward
    from bltoolbox.restoration.roles import Noise as Noise
    from bltoolbox.restoration.roles import Operator as Operator
    from bltoolbox.restoration.roles import Potentials as Potentials
    from bltoolbox.restoration.roles import Regularizer as Regularizer
    from bltoolbox.restoration.roles import Sample as Sample
    from bltoolbox.restoration.roles import UpperLoss as UpperLoss
    from bltoolbox.restoration.shown_parameters import shown_filters as shown_filters
    from bltoolbox.restoration.shown_parameters import shown_parameters as shown_parameters
    from bltoolbox.restoration.theta import join as join
    from bltoolbox.restoration.theta import split as split
    from bltoolbox.runs.files import append_to as append_to
    from bltoolbox.runs.files import make_folder as make_folder
    from bltoolbox.runs.files import open_regular as open_regular
    from bltoolbox.runs.files import write_text as write_text
    from bltoolbox.runs.locks import acquire as acquire
    from bltoolbox.runs.metric import Metric as Metric
    from bltoolbox.runs.settings import flatten as flatten
    from bltoolbox.training.experiment import Experiment as Experiment

#: Names by the module that defines them.
_HOME = {
    "bltoolbox.bilevel.blocks": ("BlockDraws",),
    "bltoolbox.bilevel.composite": ("Composite",),
    "bltoolbox.bilevel.derivatives": ("Linearization", "gradients_of"),
    "bltoolbox.bilevel.events": ("Listener",),
    "bltoolbox.bilevel.fusion": ("Fused",),
    "bltoolbox.bilevel.linear": (
        "ConjugateGradients",
        "LinearMethod",
        "System",
        "initial_residual",
        "solve_linear",
        "sweep",
    ),
    "bltoolbox.bilevel.preconditioner": ("Preconditioner", "Preconditioning", "unavailable"),
    "bltoolbox.bilevel.problem": ("Lower", "Upper"),
    "bltoolbox.bilevel.records": (
        "Accuracy",
        "Ask",
        "Batch",
        "BiasLimit",
        "Bound",
        "Constants",
        "Counter",
        "Effort",
        "Estimate",
        "HypergradientResult",
        "Rows",
        "Scales",
        "Solution",
        "Status",
        "Step",
        "Steps",
        "Theta",
        "Value",
    ),
    "bltoolbox.bilevel.roles": (
        "HypergradientEstimator",
        "Logger",
        "LowerSolver",
        "Oracle",
        "Parametric",
        "Problem",
        "Role",
        "Sampler",
        "SolverState",
        "UpperOptimizer",
    ),
    "bltoolbox.bilevel.saddle": ("Blocks", "Saddle", "optimality"),
    "bltoolbox.bilevel.tasks": ("BoundTasks", "Tasks", "TensorTasks"),
    "bltoolbox.bilevel.tensors": (
        "Constant",
        "ConstantsByKey",
        "digest_of",
        "dot",
        "expand",
        "keyed_generator",
        "lasting",
        "norm",
        "put",
        "take",
        "theta_norm",
    ),
    "bltoolbox.config.cache": ("cache_folder",),
    "bltoolbox.config.reading": (
        "ARRAY_IMAGES",
        "DOWNLOAD",
        "GENERATED",
        "FileRefused",
        "KERNEL",
        "LOG",
        "Limit",
        "MASK",
        "PIXELS",
        "RECORDED",
        "TABLE",
        "file_size",
        "open_file",
        "read_end",
        "read_text",
    ),
    "bltoolbox.errors": ("BltError", "MissingError", "NumericalError"),
    "bltoolbox.restoration.forms": ("choose_form",),
    "bltoolbox.restoration.layout": ("image_layout", "to_gray"),
    "bltoolbox.restoration.model": ("Model",),
    "bltoolbox.restoration.npy": ("map_array", "read_array"),
    "bltoolbox.restoration.pictures.files": ("read_pixels",),
    "bltoolbox.restoration.pictures.images": (
        "SUFFIXES",
        "Header",
        "ImageError",
        "read_header",
        "read_image",
    ),
    "bltoolbox.restoration.results": ("Check", "RunResult"),
    "bltoolbox.restoration.roles": (
        "Data",
        "DataTerm",
        "Forward",
        "Noise",
        "Operator",
        "Potentials",
        "Regularizer",
        "Sample",
        "UpperLoss",
    ),
    "bltoolbox.restoration.shown_parameters": ("shown_filters", "shown_parameters"),
    "bltoolbox.restoration.theta": ("join", "split"),
    "bltoolbox.runs.files": ("append_to", "make_folder", "open_regular", "write_text"),
    "bltoolbox.runs.locks": ("acquire",),
    "bltoolbox.runs.metric": ("Metric",),
    "bltoolbox.runs.settings": ("flatten",),
    "bltoolbox.training.experiment": ("Experiment",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = ["Component", "hookimpl", *sorted(_WHERE)]


# Hidden from type checkers, which would otherwise accept every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = _WHERE.get(name)
        if module is None:
            raise AttributeError(
                f"bltoolbox.plugin has no {name!r}; docs/plugin-api.md lists what it provides"
            )
        return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
