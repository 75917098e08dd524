"""Trees of the published code: the same answers to the last digits, and no file that can do anything but be read."""

import io
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import PublishedTree, write_published
from torch import nn

from prototree.cli.predict import import_published as command
from prototree.errors import CheckpointError, ConfigError, DataError, ProtoTreeError, WeightsError
from prototree.integrations import published as module
from prototree.integrations.published import StubDict, import_published, read_pickle, read_published, read_tensor
from prototree.run import Run

NAMES = ["ant", "bee", "fly", "wasp"]
SIZE = 64


def imported(folder: Path, **options: Any) -> Any:
    return read_published(
        folder, classes=folder / "classes.txt", **{"backbone": "test_resnet", "image_size": SIZE, **options}
    )


@pytest.mark.parametrize("kontschieder", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (2, 1)])
def test_probabilities_are_those_of_the_published_tree(
    tmp_path: Path, kontschieder: bool, size: tuple[int, int]
) -> None:
    theirs = PublishedTree(kontschieder=kontschieder, size=size, log_probabilities=size == (2, 1)).eval()
    ours = imported(write_published(theirs, tmp_path / "saved", NAMES), dtype=torch.float64)
    images = torch.rand(5, 3, SIZE, SIZE, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs.double().probabilities(images)
    found = ours.predict(images).soft
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_run_is_made_that_can_be_worked_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_published(
        PublishedTree(), tmp_path / "saved", ["1 001.Red_Ant", "2 002.Bee", "3 003.Fly", "4 004.Wasp"]
    )
    command(folder, tmp_path / "run", folder / "classes.txt", "test_resnet", SIZE)
    assert "5 nodes, 4 classes" in capsys.readouterr().out
    tree = Run.open(tmp_path / "run").tree()
    assert tree.class_names == ("Red Ant", "Bee", "Fly", "Wasp")
    assert tree.preprocessing.interpolation == "bilinear"
    assert Run.open(tmp_path / "run").config.backbone == "test_resnet"
    with pytest.raises(ConfigError):
        import_published(folder, tmp_path / "run", classes=folder / "classes.txt", backbone="test_resnet")


def test_misfits_are_named(tmp_path: Path) -> None:
    folder = write_published(PublishedTree(), tmp_path / "saved", NAMES[:3])
    with pytest.raises(DataError):
        imported(folder)
    (folder / "classes.txt").write_text("\n".join(NAMES))
    with pytest.raises(WeightsError, match=r"tree\.pkl"):
        imported(folder, backbone="test_efficientnet")
    with pytest.raises(CheckpointError):
        read_published(tmp_path / "nowhere", classes=folder / "classes.txt")
    with pytest.raises(DataError):
        read_published(folder, classes=tmp_path / "none.txt")
    content = (folder / "tree.pkl").read_bytes()
    for share in (0.1, 0.5, 0.999):
        (folder / "tree.pkl").write_bytes(content[: int(share * len(content))])
        with pytest.raises(CheckpointError):
            imported(folder)


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def test_nothing_in_a_file_is_called(tmp_path: Path) -> None:
    mark, tree = tmp_path / "mark", PublishedTree()
    call = Calls(os.system, f"touch {mark}")
    tree.note = [call, Calls(eval, f"open({str(mark)!r}, 'w')"), Calls(open, str(mark), "w"), Calls(torch.load, "mark")]
    folder = write_published(tree, tmp_path / "saved", NAMES)
    assert imported(folder).topology.n_nodes == 5  # what hangs on the tree stays a stub
    (folder / "tree.pkl").write_bytes(pickle.dumps(call))
    with pytest.raises(CheckpointError):
        imported(folder)
    assert not mark.exists()


def tensor_of(storage: Any, offset: Any = 0, size: Any = (1,), stride: Any = (1,)) -> Calls:
    return Calls(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, {})


def read_back(folder: Path, value: Any) -> torch.Tensor:
    (folder / "one.pkl").write_bytes(pickle.dumps(value))
    return read_tensor(read_pickle(folder / "one.pkl"))


def test_stored_numbers_are_not_unpickled_a_second_time_and_keys_not_hashed(tmp_path: Path) -> None:
    mark, inner = tmp_path / "mark", io.BytesIO()
    torch.save(Calls(os.system, f"touch {mark}"), inner, _use_new_zipfile_serialization=False)
    start = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True})
    for stored in (inner.getvalue(), b"".join(map(pickle.dumps, start)) + SHARED_KEY):
        with pytest.raises(CheckpointError):
            read_back(tmp_path, tensor_of(Calls(torch.storage._load_from_bytes, stored)))
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (0, (1000,), (0,)), (2, (4,), (1,)), (0, (2, 2), (4, 1)), (-1, (1,), (1,)), (0, (2**62,), (1,)),
        (0, ("4",), (1,)), (0, (2, 2), (1,)),
    ],
)  # fmt: skip
def test_tensors_claim_no_more_than_is_there(tmp_path: Path, offset: int, size: Any, stride: Any) -> None:
    with pytest.raises(CheckpointError):
        read_back(tmp_path, tensor_of(torch.rand(4).storage(), offset, size, stride))


def test_tensors_are_read_as_they_lie(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    for tensor in (whole, whole.T, whole[1:, 2:], nn.Parameter(whole), torch.tensor(7)):
        torch.testing.assert_close(read_back(tmp_path, tensor), tensor.data)


def test_a_file_changes_no_class_of_ours(tmp_path: Path) -> None:
    state = b"(N}Vupdate\nVother\nstb."  # as slots: it would be set on the class
    (tmp_path / "one.pkl").write_bytes(b"ccollections\nOrderedDict\n" + state)
    with pytest.raises(CheckpointError):
        read_pickle(tmp_path / "one.pkl")
    assert "update" not in vars(StubDict)
    (tmp_path / "two.pkl").write_bytes(b"ccollections\nOrderedDict\n.")
    assert read_pickle(tmp_path / "two.pkl") is not read_pickle(tmp_path / "two.pkl")


def test_claimed_bytes_take_no_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        for opcode in (pickle.BINBYTES8, pickle.BYTEARRAY8, pickle.BINUNICODE8, pickle.FRAME):
            (tmp_path / "one.pkl").write_bytes(b"\x80\x05" + opcode + struct.pack("<Q", 2**28) + b"a.")
            with pytest.raises(CheckpointError):
                read_pickle(tmp_path / "one.pkl")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


# Each is one of a thousand million million tuples that are all the same; its hash visits all of them.
SHARED_KEY = b"\x80\x04})" + b"2\x86" * 60 + b"Ns."
# A memo entry of number 2³² − 1 in a file of a few bytes; a frame, bytes and a string of terabytes; a persistent id;
# an extension; attributes set on a class; calls of things that are none.
HOSTILE = {
    "memo": b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"a.",
    "string": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.",
    "persistent": b"\x80\x04Pother\n.",
    "extension": b"\x80\x04\x82\x01.",
    "class": b"cos\nsystem\nN}Vname\nVother\ns\x86b.",
    "call of a number": b"I1\n(tR.",
    "cut": b"\x80\x04\x95",
    "buffer": b"\x80\x05\x97.",
    "prototype_dim": b"(" * 10000 + b"t" * 10000 + b".",
    "old style": b"(ios\nsystem\n.",
    "not a pickle": b"\x89PNG\r\n\x1a\n",
    "shared key": SHARED_KEY,
    "shared keys": b"\x80\x04}()" + b"2\x86" * 60 + b"Nu.",
    "shared key of a dictionary": b"\x80\x04()" + b"2\x86" * 60 + b"Nd.",
    "shared member": b"\x80\x04\x8f()" + b"2\x86" * 60 + b"\x90.",
    "shared member of a frozen set": b"\x80\x04()" + b"2\x86" * 60 + b"\x91.",
    "deep key": b"\x80\x04\x95" + struct.pack("<Q", 3 * 10**5 + 5) + b"})" + b"\x85" * (3 * 10**5) + b"Ns.",
}


# What would grow faster than its file.
GROWING = {
    "keys": b"\x80\x04}\x8b" + struct.pack("<i", 1000) + b"\x01" * 1000 + b"Ns.",
    "arguments": b"cos\nsystem\nq\x00(" + b"N" * 1000 + b"tq\x01" + b"h\x00h\x01R" * 9 + b".",
    "names": b"".join(b"cos\nn%d\n0" % number for number in range(2000)) + b"N.",
}


@pytest.mark.parametrize("name", [*HOSTILE, *GROWING])
def test_hostile_files_end_in_one_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "tree.pkl").write_bytes((HOSTILE | GROWING)[name])
    (tmp_path / "classes.txt").write_text("a\nb\n")
    with pytest.raises(CheckpointError, match=name if name in GROWING else r"tree\.pkl"):
        imported(tmp_path)


def broken_name(tree: PublishedTree) -> None:
    tree._net._modules["\ud800"] = nn.Identity()
    tree._net._modules["\ud800"].register_buffer("b", torch.zeros(1))


def many_levels(tree: PublishedTree) -> None:
    for _ in range(30):
        tree._net = nn.Sequential(tree._net)


def many_tensors(tree: PublishedTree) -> None:
    tree._net.extra = nn.Sequential(*(nn.Identity() for _ in range(20)))
    for layer in tree._net.extra:
        layer._buffers = {str(number): tree._net.conv1[0].weight for number in range(20)}


def add_on(n_inputs: int, n_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_inputs, n_outputs, 1, bias=False))


# How a tree is spoiled, and what the error says.
SPOILED: dict[str, tuple[Callable[[PublishedTree], object], str]] = {
    "cycle": (lambda tree: tree._root.r._modules.update(l=tree._root), "."),
    "no map": (lambda tree: tree._out_map.clear(), "."),
    "row": (lambda tree: tree._out_map.update(dict.fromkeys(tree._out_map, 70)), "."),
    "leaf": (lambda tree: tree._root.r._modules.update(l=nn.Identity()), "."),
    "nan": (lambda tree: tree._root.r.l._dist_params.data.fill_(torch.nan), "."),
    "head": (lambda tree: tree._modules.update(_add_on=add_on(3, 8)), "."),
    "depth": (lambda tree: tree._modules.update(_add_on=add_on(tree._net.num_features, 9)), "."),
    "no network": (lambda tree: tree._modules.pop("_net"), "."),
    "no prototypes": (lambda tree: tree._modules.pop("prototype_layer"), "."),
    "name": (broken_name, "a part"),
    "levels": (many_levels, "levels"),
    "repeated": (many_tensors, "tensors"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_trees_that_do_not_hold_together_are_refused(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, (spoil, token) = PublishedTree(), SPOILED[what]
    spoil(tree)
    folder = write_published(tree, tmp_path / "saved", NAMES)
    monkeypatch.setattr(module, "_MAX_LEVELS", 20)
    monkeypatch.setattr(module, "_MAX_TENSORS", 200)
    with pytest.raises(ProtoTreeError, match=token):
        imported(folder)
