"""Programs that draw the figures of steps: TensorBoard, Weights & Biases and MLflow.

Every backend gives them the same figures under the same names.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from primus_images.gpus.table import UnknownPeak
from primus_images.training.run.metrics import peak_of


class Tracker(Protocol):
    """Records the figures of steps."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step``."""

    def close(self) -> None:
        """End the record."""


class TensorBoard:
    """Event files in the folder ``tensorboard``."""

    def __init__(self, output: Path, _config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(output / "tensorboard"))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step``."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """End the record."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project ``primus``."""

    def __init__(self, output: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="primus", name=output.name, dir=str(output), config=dict(config)
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step``."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """End the record."""
        self._run.finish()


class MLflow:
    """A run of the experiment ``primus``."""

    def __init__(self, output: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment("primus")
        mlflow.start_run(run_name=output.name)
        mlflow.log_params(dict(config))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step``."""
        self._mlflow.log_metrics(dict(figures), step)

    def close(self) -> None:
        """End the record."""
        self._mlflow.end_run()


_KINDS: Mapping[str, Any] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
NAMES = tuple(_KINDS)


def trackers_of(names: list[str], output: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Return the trackers of these ``names``, for the run in ``output`` with this ``config``."""
    return [_KINDS[name](output, config) for name in names]


def peak_flops(gpu: str, units: int, precision: str) -> float | None:
    """Return the TFLOP/s of which MFU is a share; None without an MFU: on a CPU, a GPU that the
    table lacks, or a part of one.
    """
    with suppress(UnknownPeak):
        _, peak, _ = peak_of(gpu, units, precision)
        return peak
    return None


def shares_of_peak(rates: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """Return ``mfu_causal`` and ``mfu_non_causal`` of TFLOP/s by convention; nothing without a
    ``peak``.
    """
    if peak is None:
        return {}
    return {name.replace("tflops", "mfu"): rate / peak for name, rate in rates.items()}
