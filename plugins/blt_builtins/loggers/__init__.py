"""Loggers: they record a run in other places, e.g. in files or web services."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "logger",
            "csv",
            "blt_builtins.loggers.csv_log:CsvLog",
            "Every figure of every step and check, one per line of a CSV file.",
        ),
        Component(
            "logger",
            "tensorboard",
            "blt_builtins.loggers.tensorboard_log:TensorBoardLog",
            "Scalars and learned filters for TensorBoard; needs the extra 'tensorboard'.",
        ),
        Component(
            "logger",
            "wandb",
            "blt_builtins.loggers.wandb_log:WandbLog",
            "Figures, pictures and θ in Weights & Biases; needs the extra 'wandb'.",
        ),
        Component(
            "logger",
            "mlflow",
            "blt_builtins.loggers.mlflow_log:MlflowLog",
            "Figures, pictures and θ in MLflow; needs the extra 'mlflow'.",
        ),
    ]
