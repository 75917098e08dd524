"""The loop around any training: epochs and batches, several processes, and never losing work.

After every epoch, every few minutes and on a signal, the whole state is written atomically. A run that is continued
from it goes through the same numbers as one never interrupted: chance is a function of (seed, epoch, item), and
what else the loop remembers is in the state.
"""

import csv
import inspect
import io
import logging
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from prototree.core.checkpoint import VERSION, read_state, write_state
from prototree.errors import CheckpointError, ShapeError, TrainError
from prototree.features.batches import Batches
from prototree.features.cache import Inputs
from prototree.files import write_file
from prototree.progress import EpochLog, Observer
from prototree.training import distributed
from prototree.training.identity import expect_same
from prototree.training.signals import Interrupted, asked_to_stop

log = logging.getLogger(__name__)

STATE = "state.json"
# Whether other processes get the first one's buffers before each step; torch has renamed it.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate."""

    parameters: list[nn.Parameter]
    rate: float
    weight_decay: float = 0.0


class Objective(nn.Module):
    """What is learned: a module whose output on a batch of inputs is scored. Everything it holds is saved."""

    def groups(self, epoch: int) -> list[Group]:
        """The parameters with their rates in this epoch; the same parameters in every epoch."""
        raise NotImplementedError

    def pace(self, epoch: int, share: float) -> float:
        """What the rates are multiplied with when this share of an epoch is done."""
        return 1.0

    def start_epoch(self, epoch: int, *, is_continued: bool) -> None:
        """Called before an epoch, and again when one is continued in its middle."""

    def loss(self, outputs: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The loss of each image, and whether each was classified rightly."""
        raise NotImplementedError

    def after_batch(self, inputs: Inputs) -> None:
        """Called after the optimiser's step."""

    def end_epoch(self, epoch: int) -> None:
        """Called after the last batch of an epoch."""


@dataclass(frozen=True)
class Options:
    """How a loop runs; none of it changes what is learned but for the precision and Adam's ε."""

    folder: Path | None = None  # where state and log are kept; None: nowhere
    identity: str = ""  # what must be the same for a state to be continued
    resume: bool = False
    checkpoint_minutes: float = 10.0
    seed: int = 0
    epsilon: float = 1e-8  # of Adam
    autocast: torch.dtype | None = None
    channels_last: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class _Totals:
    """Sums over the epoch so far."""

    loss: float = 0.0
    hits: float = 0.0
    images: float = 0.0
    seconds: float = 0.0


class Loop:
    """Trains an objective for some epochs, from the saved state if there is one to resume."""

    def __init__(
        self, objective: Objective, batches: Batches, n_epochs: int, options: Options, observer: Observer | None = None
    ) -> None:
        self.objective = objective
        self._batches, self._n_epochs, self._options = batches, n_epochs, options
        self._observer = observer or Observer()
        self._epoch, self._batch, self._totals = 0, 0, _Totals()
        self._rows: list[EpochLog] = []
        self._saved_at = self._since = time.monotonic()  # since: when the batch before was done
        # Adam as in the paper; where there is weight decay, apart from the gradient's moments. Not the fused form: it
        # takes numbers in the order in which they lie in memory, and those of a state that was read lie in another.
        groups = [{"params": group.parameters} for group in objective.groups(0)]
        self._optimiser = torch.optim.AdamW(groups, eps=options.epsilon)
        torch.manual_seed(options.seed)
        if options.folder is not None and options.resume and (options.folder / STATE).exists():
            self._restore(options.folder)

    def run(self) -> list[EpochLog]:
        """All epochs that are left. Returns the log of the whole training."""
        with asked_to_stop() as stop:
            while self._epoch < self._n_epochs:
                self._run_epoch(stop)
                self._save()
                if distributed.any_process(stop.is_set()):
                    raise Interrupted
        return self._rows

    def _run_epoch(self, stop: threading.Event) -> None:
        epoch, objective = self._epoch, self.objective
        if self._batch == 0:
            self._totals = _Totals()
        objective.train()
        objective.start_epoch(epoch, is_continued=self._batch > 0)
        groups = objective.groups(epoch)
        model = self._distribute()
        self._since = time.monotonic()
        for inputs in self._batches.epoch(epoch, self._batch):
            pace = objective.pace(epoch, self._batch / self._batches.n_batches)
            for group, settings in zip(groups, self._optimiser.param_groups, strict=True):
                settings["lr"], settings["weight_decay"] = pace * group.rate, group.weight_decay
            self._step(model, inputs)
            self._batch += 1
            if self._batch < self._batches.n_batches:
                self._between_batches(stop)
            self._since = time.monotonic()
        if not self._totals.images:
            raise TrainError(
                "none of the training photos can be read; look at them with: prototree data check DATA --deep"
            )
        objective.end_epoch(epoch)
        self._epoch, self._batch = epoch + 1, 0
        self._note_epoch()

    def _step(self, model: nn.Module, inputs: Inputs) -> None:
        objective = self.objective
        inputs = self._to_device(inputs)
        self._optimiser.zero_grad(set_to_none=True)
        with torch.autocast(
            self._options.device.type, self._options.autocast, enabled=self._options.autocast is not None
        ):
            try:
                losses, hits = objective.loss(model(inputs.values), inputs)
            except ShapeError as error:
                raise self._diagnosis(str(error)) from error
        sums = torch.stack([losses.detach().sum(), hits.sum(), losses.new_tensor(float(len(losses)))])
        distributed.sum_over(sums)
        # Each process's mean gradient is averaged over processes; this makes that the mean over the whole batch.
        (losses.sum() * (distributed.shard().world_size / sums[2].clamp_min(1))).backward()
        loss_sum, n_hits, n_images = sums.tolist()
        if not loss_sum - loss_sum == 0:  # neither NaN nor infinite
            raise self._diagnosis(f"the loss became {loss_sum}")
        self._optimiser.step()
        objective.after_batch(inputs)
        t = self._totals
        seconds = t.seconds + time.monotonic() - self._since
        self._totals = t = _Totals(t.loss + loss_sum, t.hits + n_hits, t.images + n_images, seconds)
        images = max(t.images, 1)
        self._observer.batch(
            self._epoch, self._batch, self._batches.n_batches, t.loss / images, t.hits / images, t.images / t.seconds
        )

    def _to_device(self, inputs: Inputs) -> Inputs:
        device = self._options.device
        values = inputs.values.to(device, non_blocking=True)
        if self._options.channels_last and values.dim() == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        return Inputs(values, inputs.labels.to(device), inputs.entries.to(device))

    def _between_batches(self, stop: threading.Event) -> None:
        stopped = distributed.any_process(stop.is_set())
        due = time.monotonic() - self._saved_at > 60 * self._options.checkpoint_minutes
        if stopped or distributed.any_process(due):
            self._save()
        if stopped:
            raise Interrupted

    def _distribute(self) -> nn.Module:
        if distributed.shard().world_size == 1:
            return self.objective
        device = self._options.device
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        # Anew in each epoch: which parameters are frozen may have changed.
        return DistributedDataParallel(
            self.objective, device_ids=[device.index] if device.type == "cuda" else None, **options
        )

    def _note_epoch(self) -> None:
        t, images = self._totals, max(self._totals.images, 1)
        rates = " ".join(f"{group['lr']:.3g}" for group in self._optimiser.param_groups)
        speed = t.images / t.seconds if t.seconds else 0.0
        row = EpochLog(self._epoch, t.loss / images, t.hits / images, speed, t.seconds, rates)
        self._rows.append(row)
        if distributed.is_first():
            self._observer.epoch(row, self._n_epochs)
            if self._options.folder is not None:
                self._options.folder.parent.mkdir(parents=True, exist_ok=True)
                write_file(self._options.folder.parent / "log.csv", _as_csv(self._rows))

    def _save(self) -> None:
        folder = self._options.folder
        self._saved_at = time.monotonic()
        if folder is None:
            return
        if distributed.is_first():
            header = {
                "kind": "training",
                "version": VERSION,
                "identity": self._options.identity,
                "epoch": self._epoch,
                "batch": self._batch,
                "totals": asdict(self._totals),
                "log": [asdict(row) for row in self._rows],
            }
            tensors = {f"model.{name}": tensor for name, tensor in self.objective.state_dict().items()}
            for index, state in self._optimiser.state_dict()["state"].items():
                tensors |= {f"optimiser.{index}.{name}": tensor for name, tensor in state.items()}
            write_state(folder, STATE, header, tensors | {"rng": torch.get_rng_state()})
        distributed.wait_for_all()

    def _restore(self, folder: Path) -> None:
        header, tensors = read_state(folder, STATE)
        expect_same(folder, str(header.get("identity")), self._options.identity)
        try:
            self.objective.load_state_dict({k[6:]: t for k, t in tensors.items() if k.startswith("model.")})
            state: dict[int, dict[str, Tensor]] = {}
            for key, tensor in tensors.items():
                if key.startswith("optimiser."):
                    _, index, name = key.split(".")
                    state.setdefault(int(index), {})[name] = tensor
            self._optimiser.load_state_dict({**self._optimiser.state_dict(), "state": state})
            torch.set_rng_state(tensors["rng"])
            self._epoch, self._batch = int(header["epoch"]), int(header["batch"])
            self._totals = _Totals(**header["totals"])
            self._rows = [EpochLog(**row) for row in header["log"]]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder} is damaged ({error}); start again with --overwrite") from error

    def _diagnosis(self, what: str) -> TrainError:
        biggest = max(
            ((float(p.detach().abs().max()), name) for name, p in self.objective.named_parameters() if p.numel()),
            default=(0.0, "none"),
        )
        rates = ", ".join(f"{group['lr']:.3g}" for group in self._optimiser.param_groups)
        kept = f"the last good state is in {self._options.folder}" if self._options.folder else "no state was kept"
        return TrainError(
            f"training stopped in epoch {self._epoch + 1}, batch {self._batch + 1}: {what}. Learning rates {rates}; "
            f"largest weight {biggest[0]:.3g} in {biggest[1]}; {kept}. Lower the learning rates and resume"
        )


def _as_csv(rows: list[EpochLog]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in fields(EpochLog)])
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue().encode()
