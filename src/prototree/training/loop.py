"""The training loop: epochs that resume, optimiser steps, learning rates, checkpoints at epoch boundaries.

A recipe is a plain function with two nested loops over `Loop.epochs` and `Loop.batches`. After every epoch the whole
state is written atomically. A run that is resumed goes through the same numbers as one never interrupted: augmentation
and order are functions of (seed, epoch, item), and the state of the random generator is in the checkpoint.
"""

import contextlib
import csv
import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from prototree.backbones.backbone import Backbone, FeatureExtractor, check_image_size
from prototree.backbones.geometry import Preprocessing
from prototree.backbones.inference import engine_for
from prototree.config import DEFAULT_IMAGE_SIZE, Common
from prototree.core.checkpoint import VERSION, read_state, write_state
from prototree.data.dataset import ImageData, Sample
from prototree.data.loader import ViewDataset, Views, stable_seed
from prototree.data.transforms import augmentation
from prototree.errors import CheckpointError, ShapeError, TrainError
from prototree.features.cache import FeatureCache, FeatureMaps, Inputs
from prototree.io import write_file
from prototree.progress import EpochLog, Observer, check_stopped
from prototree.training import distributed

CHECKPOINTS, STATE = "checkpoints", "state.json"
_WARM_UP_STEPS = 50  # in which a rate that will fall with a cosine rises, at the most a tenth of all


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share a learning rate."""

    parameters: list[nn.Parameter]
    lr: float
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Context:
    """What every recipe trains with: data, common settings, run directory, device, progress callbacks."""

    folder: Path
    data: ImageData
    config: Common
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    observer: Observer = field(default_factory=Observer)
    resume_key: str = ""  # what must be the same for a checkpoint to be resumed

    def silent(self) -> "Context":
        """Copy without progress reporting."""
        return replace(self, observer=Observer())

    def backbone(self, *, split: bool | int = False) -> Backbone:
        """Build the pretrained network that the settings name; split in backbone and last block if asked for."""
        config = self.config
        size, level, options = config.image_size or DEFAULT_IMAGE_SIZE, config.feature_level, config.backbone_options
        backbone = Backbone(
            config.backbone, config.weights, image_size=size, feature_level=level, options=options, split=split
        )
        resize = config.resize or size
        check_image_size(backbone.name, resize)
        backbone.preprocessing = replace(backbone.preprocessing, resize=resize)
        return backbone

    def features(self, backbone: Backbone) -> FeatureExtractor:
        """Put a fresh head on a backbone."""
        return FeatureExtractor(backbone, self.config.prototype_dim, self.config.head_hidden_dim)

    def views(
        self, views: Views, preprocessing: Preprocessing, samples: Sequence[Sample], augment: str = "", seed: int = 0
    ) -> ViewDataset:
        """Make a data set of views of samples, plain or augmented."""
        transform = augmentation(augment, preprocessing) if augment else None
        return ViewDataset(samples, views, preprocessing, transform=transform, seed=seed)

    @property
    def cache(self) -> FeatureCache:
        """The feature cache of this run."""
        n_images = len(self.data.train) + len(self.data.test)
        backend = engine_for(self.config.inference_backend, self.device, n_images)
        stage, tick = self.observer.stage, self.observer.caching
        return FeatureCache(self.folder, backend, workers=self.config.workers, stage=stage, tick=tick)


class Loop:
    """Epochs and optimiser steps of one module, from its checkpoint if there is one to resume."""

    def __init__(
        self,
        context: Context,
        name: str,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        n_epochs: int,
        *,
        adam_epsilon: float = 1e-8,
    ) -> None:
        self.context, self.n_epochs, self.epoch, self.batch = context, n_epochs, 0, 0
        self._folder = context.folder / CHECKPOINTS / name
        self._module = module
        module.to(context.device)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Adam as in the paper, with decoupled weight decay. Not the fused form: it takes numbers in the order in which
        # they lie in memory, and those of a checkpoint lie in another.
        self._optimizer = AdamW([{"params": group.parameters} for group in groups], eps=adam_epsilon)
        self._rows: list[EpochLog] = []
        self._loss = self._correct = self._images = self._seconds = 0.0
        self._n_batches = 1
        torch.manual_seed(stable_seed("train", context.config.seed))
        if (self._folder / STATE).exists():
            self._resume()

    def epochs(self) -> Iterator[int]:
        """Iterate over the epochs that are left; save a checkpoint after each."""
        while self.epoch < self.n_epochs:
            self._loss = self._correct = self._images = self._seconds = 0.0
            yield self.epoch
            if not self._images:
                raise TrainError("none of the training images can be read; run: prototree data check DATA --deep")
            self.epoch, self.batch = self.epoch + 1, 0
            self._log_epoch()
            self._save()

    def batches(self, batches: Iterable[Inputs], n_batches: int) -> Iterator[Inputs]:
        """Move the batches of an epoch to the device."""
        device, self._n_batches, self.batch, since = self.context.device, n_batches, 0, time.monotonic()
        for batch in batches:
            values = batch.values.to(device, non_blocking=True)
            if values.dim() == 4:
                values = values.contiguous(memory_format=torch.channels_last)
            yield Inputs(values, batch.labels.to(device), batch.entries.to(device))
            check_stopped()
            self.batch += 1
            self._seconds += time.monotonic() - since
            since = time.monotonic()

    def map_batches(self, maps: FeatureMaps) -> Iterator[Inputs]:
        """Iterate over an epoch of cached feature maps, shuffled."""
        size, seed = self.context.config.batch_size, self.context.config.seed
        return self.batches(maps.batches(size, epoch=self.epoch, seed=seed), math.ceil(len(maps.entries) / size))

    @property
    def progress(self) -> float:
        """The fraction of the whole training that is done."""
        return (self.epoch + self.batch / self._n_batches) / self.n_epochs

    def set_lr(self, groups: Sequence[ParamGroup], factor: float = 1.0) -> None:
        """Set learning rates and weight decay of the next step."""
        for group, settings in zip(groups, self._optimizer.param_groups, strict=True):
            settings["lr"], settings["weight_decay"] = factor * group.lr, group.weight_decay

    def cosine_lr(self) -> float:
        """The factor of a cosine schedule: it rises to 1 in the first steps and falls to 0 with the last."""
        epoch = self.epoch + self.batch / self._n_batches
        warm_up = min(_WARM_UP_STEPS / self._n_batches, self.n_epochs / 10)
        return min(1.0, (epoch + 0.01 * warm_up) / warm_up) * 0.5 * (1 + math.cos(math.pi * epoch / self.n_epochs))

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the forward pass in the precision that the settings name."""
        device, precision = self.context.device, self.context.config.precision
        auto = precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
        half = precision == "bfloat16" or auto
        with torch.autocast(device.type, torch.bfloat16 if half else None, enabled=half):
            try:
                yield
            except ShapeError as error:
                raise self._error(str(error)) from error

    def step(self, losses: Tensor, correct: Tensor) -> None:
        """Backpropagate the mean of the losses of a batch, over all processes, and update the parameters."""
        sums = torch.stack([losses.detach().sum(), correct.sum(), losses.new_tensor(float(len(losses)))])
        distributed.all_reduce_sum(sums)
        self._optimizer.zero_grad(set_to_none=True)
        # Each process's gradient is averaged over processes; this makes that the mean over the whole batch.
        (losses.sum() * (distributed.shard().world_size / sums[2].clamp_min(1))).backward()
        loss, n_correct, n_images = sums.tolist()
        if not math.isfinite(loss):
            raise self._error(f"the loss became {loss}")
        distributed.average_gradients(self._module.parameters())
        self._optimizer.step()
        self._loss, self._correct, self._images = self._loss + loss, self._correct + n_correct, self._images + n_images
        loss, accuracy, speed = self._averages()
        self.context.observer.batch(self.epoch, self.batch, self._n_batches, loss, accuracy, speed)

    def _averages(self) -> tuple[float, float, float]:
        """Loss, accuracy and images a second of this epoch so far."""
        images = max(self._images, 1)
        speed = self._images / self._seconds if self._seconds else 0.0
        return self._loss / images, self._correct / images, speed

    def _log_epoch(self) -> None:
        rates = " ".join(f"{group['lr']:.3g}" for group in self._optimizer.param_groups)
        row = EpochLog(self.epoch, *self._averages(), self._seconds, rates)
        self._rows.append(row)
        if distributed.is_main():
            self.context.observer.epoch(row, self.n_epochs)
            if self._folder.parent.name == CHECKPOINTS:  # not of the second tree, for calibration
                write_file(self.context.folder / "log.csv", _as_csv(self._rows))

    def _save(self) -> None:
        if distributed.is_main():
            header = {
                "kind": "training",
                "version": VERSION,
                "resume_key": self.context.resume_key,
                "epoch": self.epoch,
                "log": [asdict(row) for row in self._rows],
            }
            tensors = {f"model.{name}": tensor for name, tensor in self._module.state_dict().items()}
            for index, state in self._optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in state.items()}
            write_state(self._folder, STATE, header, tensors | {"rng": torch.get_rng_state()})
        distributed.barrier()

    def _resume(self) -> None:
        header, tensors = read_state(self._folder, STATE)
        check_resume_key(self._folder, str(header.get("resume_key")), self.context.resume_key)
        try:
            self._module.load_state_dict({k[6:]: t for k, t in tensors.items() if k.startswith("model.")})
            state: dict[int, dict[str, Tensor]] = {}
            for key, tensor in tensors.items():
                if key.startswith("optimizer."):
                    _, index, name = key.split(".")
                    state.setdefault(int(index), {})[name] = tensor
            for number, values in state.items():
                if values.keys() != {"step", "exp_avg", "exp_avg_sq"}:
                    raise KeyError(f"expected step and moments of Adam for parameter {number}, got {sorted(values)}")
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
            torch.set_rng_state(tensors["rng"])
            self.epoch = int(header["epoch"])
            self._rows = [EpochLog(**row) for row in header["log"]]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self._folder} is damaged ({error}); start again with --overwrite") from error

    def _error(self, reason: str) -> TrainError:
        sizes = [(float(p.detach().abs().max()), name) for name, p in self._module.named_parameters() if p.numel()]
        biggest = max(sizes, default=(0.0, "none"))
        rates = ", ".join(f"{group['lr']:.3g}" for group in self._optimizer.param_groups)
        return TrainError(
            f"training stopped in epoch {self.epoch + 1}, batch {self.batch + 1}: {reason}. Learning rates {rates}; "
            f"largest weight {biggest[0]:.3g} in {biggest[1]}; the last checkpoint is in {self._folder}. Lower the "
            "learning rates and resume"
        )


def check_resume_key(folder: Path, then: str, now: str) -> None:
    """Refuse to resume in a folder that was begun with other settings or data, and say which."""
    if then == now:
        return
    try:
        before, after = dict(json.loads(then)), dict(json.loads(now))
    except (TypeError, ValueError):
        before, after = {"settings": then[:200]}, {"settings": now[:200]}
    keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    changes = (f"{key} {before.get(key, 'not there')!r} then, {after.get(key, 'not there')!r} now" for key in keys)
    raise CheckpointError(
        f"{folder} was trained with other settings or data ({'; '.join(changes)}); use the same, or another folder"
    )


def _as_csv(rows: list[EpochLog]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in fields(EpochLog)])
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue().encode()
