"""Coverage-guided fuzzing of what reads files from outside: `tree`, `csv`, `cub` and `cars`.

`python tests/faults/fuzz_readers.py csv -max_total_time=180`. A `ProtoTreeError` is what a damaged file should give;
anything else ends the search, and the input lies beside as `crash-…`. Needs `pip install atheris`; nothing else does.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
with atheris.instrument_imports(include=["prototree"]):
    from prototree import io
    from prototree.backbones.backbone import Backbone, FeatureExtractor
    from prototree.core import checkpoint
    from prototree.core.model import ProtoTree, PrototypeSource
    from prototree.core.topology import Topology
    from prototree.data.cub_cars import read_cars, read_cub
    from prototree.data.folder import read_manifest
    from prototree.errors import ProtoTreeError

Target = Callable[[bytes], object]
CUB = {
    "images.txt": "1 a/0.jpg\n2 b/1.jpg\n",
    "classes.txt": "1 001.A_bird\n2 002.B_bird\n",
    "image_class_labels.txt": "1 1\n2 2\n",
    "train_test_split.txt": "1 1\n2 0\n",
    "bounding_boxes.txt": "1 0.0 1.0 20.0 30.5\n2 1 2 3 4\n",
    "parts/parts.txt": "1 back\n2 left eye\n",
    "parts/part_locs.txt": "1 1 3.5 4.5 1\n1 2 0.0 0.0 0\n2 1 9 9 1\n",
}
SPLIT = b"\x1e"  # between the files of one input


def tree_json(folder: Path) -> tuple[Target, list[bytes]]:
    """With a right checksum whatever was changed: what is tried is the description, not the seal."""
    tree = ProtoTree(
        Topology.full(2), FeatureExtractor(Backbone("resnet18", None, image_size=32, feature_level=-3), 4), 3
    )
    source = PrototypeSource("a/b.jpg", 1, "box", (1, 2), (0.5, 1.0, 30.25, 31.0), 1e-5, (0.0, 1.0, 50.5, 60.0), True)
    tree.sources = (source,) * 3
    checkpoint.save(tree, folder)
    header, tensors = checkpoint.read_state(folder, checkpoint.TREE)

    def read(content: bytes) -> object:
        given = io.parse_json(content, "input")
        return checkpoint.rebuild(given, tensors, "input")

    return read, [json.dumps(header).encode()]


def manifest(folder: Path) -> tuple[Target, list[bytes]]:
    for name in ("0.jpg", "1.jpg", "2.jpg"):
        (folder / name).write_bytes(b"a photo")

    def read(content: bytes) -> object:
        (folder / "input.csv").write_bytes(content)
        return read_manifest(folder / "input.csv")

    rows = "path,label,split\n0.jpg,a,train\n1.jpg,b,test\n2.jpg,a 2,val\n"
    return read, [rows.encode(), rows.replace(",", "\t").encode(), b'"path";"label"\r\n0.jpg;"a ""b"""\r\n1.jpg;b\r\n']


def cub(folder: Path) -> tuple[Target, list[bytes]]:
    for name in ("images", "parts"):
        (folder / name).mkdir()

    def read(content: bytes) -> object:
        pieces = content.split(SPLIT) + [b""] * len(CUB)
        for name, piece in zip(CUB, pieces, strict=False):
            (folder / name).write_bytes(piece)
        return read_cub(folder)

    return read, [SPLIT.join(text.encode() for text in CUB.values())]


def cars(folder: Path) -> tuple[Target, list[bytes]]:
    from scipy.io import savemat

    fields = ("relative_im_path", "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test")
    kind = [(name, "O") for name in fields]
    rows = np.array([("car_ims/1.jpg", 1, 2, 30, 40, 1, 0), ("car_ims/2.jpg", 1, 2, 30, 40, 2, 1)], dtype=kind)
    content = {"class_names": np.array(["one", "two"], dtype=object), "annotations": rows}
    savemat(folder / "cars_annos.mat", content)
    seed = (folder / "cars_annos.mat").read_bytes()

    def read(content: bytes) -> object:
        (folder / "cars_annos.mat").write_bytes(content)
        return read_cars(folder)

    return read, [seed]


READERS = {"tree": tree_json, "csv": manifest, "cub": cub, "cars": cars}


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        place, corpus = Path(folder, "place"), Path(folder, "corpus")
        place.mkdir()
        corpus.mkdir()
        target, seeds = READERS[sys.argv.pop(1)](place)
        for number, seed in enumerate(seeds):
            target(seed)  # a right file is read
            (corpus / str(number)).write_bytes(seed)

        def one(content: bytes) -> None:
            with contextlib.suppress(ProtoTreeError):
                target(content)

        atheris.Setup([*sys.argv, str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
